"""NVML without a driver gives nothing, and with one (played by a fake) gives what it reads and None
for the rest.
"""

import os
from types import SimpleNamespace

import pynvml
import pytest

from autotune.core import nvml
from autotune.core.nvml import THROTTLE_REASONS, Nvml, first_visible, list_gpus, visible
from autotune.core.probe_types import Telemetry
from autotune.core.units import GIB

pytestmark = pytest.mark.usefixtures("no_variable")


@pytest.fixture
def no_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_driver(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml, "has_driver", lambda: True)
    monkeypatch.setattr(pynvml, "nvmlInit", missing)


@pytest.fixture
def driver(monkeypatch):
    """Two cards; handles are their indices. What is set to None is not supported."""

    def unsupported(*args, **kwargs):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def by_index(index):
        if index not in (0, 1):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(uuid):
        if uuid not in ("GPU-0", "GPU-1"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid[-1])

    used = [(1, 90, 9), (2, 20, 9), (2, 40, 9), (3, 5, 9)]  # process, percent, seconds
    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None),
    ]
    started = []
    monkeypatch.setattr(nvml, "has_driver", lambda: True)

    def after_init(call):
        def checked(*args, **kwargs):
            if not started:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            return call(*args, **kwargs)

        return checked

    calls = {
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetMemoryInfo": lambda handle, version: SimpleNamespace(
            total=140 * GIB, used=(handle + (version != pynvml.nvmlMemory_v2)) * GIB
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: processes,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=87),
        "nvmlDeviceGetProcessUtilization": lambda handle, since_us: [
            SimpleNamespace(pid=pid, smUtil=share)
            for pid, share, at_us in [*used, (4, 99, 1), (5, 4_000_000, 9)]
            if at_us * 10**6 > since_us
        ],
        "nvmlDeviceGetPowerUsage": lambda handle: 650_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 12_000,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0,
        "nvmlDeviceGetTemperature": lambda handle, sensor: {pynvml.NVML_TEMPERATURE_GPU: 55}[
            sensor
        ],
        "nvmlDeviceGetClockInfo": lambda handle, clock: {
            pynvml.NVML_CLOCK_SM: 1980,
            pynvml.NVML_CLOCK_MEM: 3201,
        }[clock],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, since: {
            (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC): 10 + handle,
            (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC): 500,
            (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC): 900,
        }[kind, since],
    }

    def install(**changes):
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: started.append(True))
        for name, call in (calls | changes).items():
            monkeypatch.setattr(pynvml, name, after_init(call or unsupported))

    install()
    return install


def test_without_a_driver_there_is_nothing(no_driver):
    assert list_gpus() == []
    assert Nvml.open() is None
    assert Nvml.open(0) is None
    assert Nvml.open("GPU-0") is None


def test_cards(driver):
    cards = list_gpus()
    assert [(card.index, card.uuid, card.used_gib) for card in cards] == [
        (0, "GPU-0", 0.0),
        (1, "GPU-1", 1.0),
    ]
    assert (cards[0].name, cards[0].memory_gib, cards[0].compute_capability) == (
        "NVIDIA H200",
        140.0,
        "9.0",
    )
    assert cards[0].driver == "580.1"
    mine, other = cards[0].processes
    assert (mine.pid, mine.used_gib) == (os.getpid(), 3.0)
    assert mine.name
    # no such process here, and the driver does not tell
    assert (other.name, other.used_gib) == (None, None)


def test_a_card_that_cannot_be_opened_is_left_out(driver):
    def only_the_second(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    driver(nvmlDeviceGetHandleByIndex=only_the_second)
    assert [card.index for card in list_gpus()] == [1]


@pytest.mark.parametrize("card", [1, "GPU-1", "1"])
def test_a_card_is_opened_by_index_or_uuid_with_or_without_its_prefix(driver, card):
    assert Nvml.open(card).info().uuid == "GPU-1"


@pytest.mark.parametrize("card", [7, "GPU-7", "", "MIG-1"])
def test_a_card_that_is_not_there(driver, card):
    assert Nvml.open(card) is None


def test_an_index_is_only_passed_on(driver):
    assert (Nvml.open(1).info().index, Nvml.open(1).info(7).index) == (0, 7)


def test_memory_by_process(driver):
    assert Nvml.open(0).used_by_process_gib(os.getpid()) == 3.0
    assert Nvml.open(0).used_by_process_gib(1) is None


def test_memory_of_the_card(driver):
    assert [Nvml.open(card).used_gib() for card in (0, 1)] == [0.0, 1.0]


def test_a_card_without_memory_of_its_own_has_the_hosts(driver, monkeypatch):
    """nvidia-smi prints 'Not Supported' for the memory of a GB10, which shares the host's."""
    host = SimpleNamespace(total=121 * GIB, available=100 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: host)
    driver(nvmlDeviceGetMemoryInfo=None)
    card = Nvml.open(0).info()
    assert (card.memory_gib, card.used_gib) == (121.0, 21.0)


def test_the_use_by_others_is_the_mean_of_each_process(driver):
    assert Nvml.open(0).use_by_others(5.0, {1, 77}) == pytest.approx(0.3 + 0.05)
    assert Nvml.open(0).use_by_others(5.0, {1, 2, 3}) == 0
    # A container hides its own processes behind other numbers.
    assert Nvml.open(0).use_by_others(5.0, {4, 77}) is None
    # On a real card, a step of 1.6 s beside a busy process had no sample of its own.
    assert Nvml.open(0).use_by_others(5.0, {os.getpid()}) == pytest.approx(0.9 + 0.3 + 0.05)
    driver(nvmlDeviceGetProcessUtilization=None)
    assert Nvml.open(0).use_by_others(5.0, {1}) is None


def test_errors_since_the_driver_was_loaded(driver):
    assert Nvml.open(1).uncorrected_errors() == 11
    driver(nvmlDeviceGetTotalEccErrors=None)
    assert Nvml.open(1).uncorrected_errors() is None


def test_sensors(driver):
    sample = Nvml.open(0).sample()
    assert (sample.utilization, sample.power_w, sample.energy_j) == (0.87, 650.5, 12.0)
    assert (sample.temperature_c, sample.sm_clock_mhz, sample.throttle_reasons) == (55, 1980, ())


def test_what_a_driver_does_not_report_is_none(driver):
    names = [
        "UtilizationRates",
        "PowerUsage",
        "TotalEnergyConsumption",
        "CurrentClocksEventReasons",
        "Temperature",
    ]
    names += ["ClockInfo", "CudaComputeCapability", "ComputeRunningProcesses"]
    driver(**{f"nvmlDeviceGet{name}": None for name in names}, nvmlSystemGetDriverVersion=None)
    sample, info = Nvml.open(0).sample(), Nvml.open(0).info()
    assert sample == Telemetry()
    assert (info.driver, info.compute_capability, info.processes) == (None, None, ())
    assert Nvml.open(0).used_by_process_gib(os.getpid()) is None


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2, ()),  # clocks set by the application
        (0x4, ("power cap",)),
        (0x8, ("hardware slow-down",)),
        (0x20, ("software thermal",)),
        (0x48, ("hardware slow-down", "hardware thermal")),
        (0x84, ("power cap", "hardware power brake")),
        (0xFFFF, tuple(THROTTLE_REASONS.values())),
    ],
)
def test_throttle_reasons(driver, bits, reasons):
    driver(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: bits)
    assert Nvml.open(0).sample().throttle_reasons == reasons


def test_the_bits_are_those_of_nvml():
    assert {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slow-down",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hardware power brake",
    } == THROTTLE_REASONS


@pytest.mark.parametrize(
    ("variable", "card"),
    [(None, 0), ("0", 0), ("3", 3), (" 2 , 1", 2), ("GPU-abc,1", "GPU-abc"), ("", ""), (",1", ""),
     ("-1", "-1"),
     ("²", "²")],
)  # fmt: skip
def test_the_first_visible_card(monkeypatch, variable, card):
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert first_visible() == card


def test_the_first_visible_card_is_opened(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert Nvml.open().info().uuid == "GPU-1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Nvml.open() is None


@pytest.mark.parametrize(
    ("variable", "cards"),
    [(None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("GPU-1, 0", ["GPU-1", 0]), ("0,-1", [0])],
)
def test_the_visible_cards(driver, monkeypatch, variable, cards):
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible() == cards
