"""What the host has, also within the limits of a container, and a disk on which nothing is left."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core import machine
from autotune.core.machine import (
    disk_mb_s,
    host_memory_gib,
    multiplies_bf16,
    num_cores,
    processor_name,
)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("900000000 100000", None),
        ("50000 x", None),
        ("", None),
    ],
)
def test_a_container_may_have_a_share_of_the_processors(
    tmp_path: Path, quota: str, cores: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_only_processors_of_this_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", {0: {1, 5, 7}, 1: {1}}.__getitem__)
    assert num_cores(tmp_path) == 3.0


def test_a_container_may_have_a_part_of_the_memory(tmp_path: Path) -> None:
    whole = host_memory_gib(tmp_path)
    assert whole > 0.2
    for limit, expected in (("max", whole), (str(2**27), 0.125), (str(2**60), whole)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert host_memory_gib(tmp_path) == expected


def test_the_processor_has_a_name() -> None:
    assert processor_name() and processor_name().isprintable()


def test_writing_to_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "WRITTEN_BYTES", 2 * machine.CHUNK_BYTES)
    speed = disk_mb_s(tmp_path)
    assert speed is not None and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_written_the_disk_is_unknown(tmp_path: Path) -> None:
    assert disk_mb_s(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD EPYC: 9654 \nmodel name\t: another\n",
            "AMD EPYC: 9654",
        ),
        ("Model Name: Neoverse\n", "Neoverse"),
        ("processor\t: 0\n", "CPU"),  # some kernels name none
    ],
)
def test_the_processor_is_called_as_the_kernel_calls_it(
    tmp_path: Path, text: str, name: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert processor_name(cpuinfo) == name


@pytest.mark.parametrize(
    ("line", "bf16"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512vl avx512dq", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw", False),
        ("flags\t\t: fpu avx2 fma bf16c", False),
        ("flags\t\t: fpu avx2 avx_ne_convert", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("Features\t: fp asimd", False),
        ("processor\t: 0", False),
    ],
)
def test_a_processor_multiplies_bf16_by_the_features_it_names(
    tmp_path: Path, line: str, bf16: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert multiplies_bf16(cpuinfo) is bf16


@pytest.mark.parametrize(
    ("clock_s", "written", "speed"),
    [
        ((10.0, 10.5, 11.0, 12.0), [1000, 2000], 0.001),  # two kilobytes in two seconds
        ((10.0, 10.5, 12.9, 15.0), [1000, 2000], 0.0004),
        # after three seconds no more is begun: one of them in four
        ((10.0, 10.5, 13.0, 14.0), [1000], 0.00025),
    ],
)
def test_the_speed_of_a_disk_is_of_what_has_reached_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock_s: tuple[float, ...],
    written: list[int],
    speed: float,
) -> None:
    reached: list[int] = []
    monkeypatch.setattr(machine, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(machine, "WRITTEN_BYTES", 2000)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=iter(clock_s).__next__))
    monkeypatch.setattr(
        machine.os, "fdatasync", lambda file: reached.append(os.fstat(file).st_size)
    )
    assert disk_mb_s(tmp_path) == pytest.approx(speed) and reached == written


def test_a_quick_disk_takes_256_mib_that_cannot_be_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[bytes] = []
    file = SimpleNamespace(write=chunks.append, flush=lambda: None, fileno=lambda: 0)
    monkeypatch.setattr(machine, "TemporaryFile", lambda dir: nullcontext(file))
    monkeypatch.setattr(machine.os, "fdatasync", lambda handle: None)
    monkeypatch.setattr(
        machine, "time", SimpleNamespace(perf_counter=iter([0.0] * 33 + [0.5]).__next__)
    )
    assert disk_mb_s(tmp_path) == pytest.approx(2 * 268.435456)
    assert [len(chunk) for chunk in chunks] == [8 * 2**20] * 32 and len(set(chunks[0][:4096])) > 200


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_bytes(b"model name\t: AMD \xff 9\n")
    assert processor_name(cpuinfo) == "AMD \ufffd 9"
