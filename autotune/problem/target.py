"""Target: the device to tune for, and the GPU of this machine that probes for it.

A larger GPU can probe for a smaller device. The probe may use only the memory that the device has,
so the probe runs out of memory if and only if the same run would run out of memory on the device.
The device's speed is projected from the probe's speed. Features of the device that the larger GPU
lacks cannot be tried.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, match_device, resolve_device
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.machine import processor_name
from autotune.core.text import kebab_case, printable
from autotune.core.units import fmt_gib
from autotune.problem.calibration import HERE, Calibration, kept_path, read_calibration

# The GPU memory of other processes, such as a display server, is ignored if it is at most this
# number of GiB.
IGNORED_GIB = 0.5
# The share of the host's memory that a run on the CPU may use. Other processes need the rest.
HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device to tune for, and the device that probes for it.

    `card` is the GPU of this machine that probes, or None for a CPU. `measured_on` is the data
    sheet of `card`, or None if `card` is the same product as `device`.
    """

    device: DeviceSpec
    card: nvml.GpuInfo | None = None
    measured_on: DeviceSpec | None = None

    @property
    def cap_gib(self) -> float | None:
        """The GiB of the device to tune for, or None if the device itself runs the probes."""
        return None if self.measured_on is None else self.device.usable_gib

    @property
    def held_by_others_gib(self) -> float:
        """The GiB of this machine's GPU that other processes hold.

        The result is 0 for a CPU, and if other processes hold at most `IGNORED_GIB`.
        """
        if self.card is not None and self.card.used_gib > IGNORED_GIB:
            return self.card.used_gib
        return 0.0

    def other_processes(self) -> str:
        """Describe the processes that hold memory of this machine's GPU."""
        processes = [
            f"{process.name or '?'} (pid {process.pid}, {fmt_gib(process.used_gib)})"
            for process in (self.card.processes if self.card else ())
            if (process.used_gib or 0) > IGNORED_GIB
        ]
        return ", ".join(processes) or "no process is named"

    def memory_cap_gib(
        self, total_gib: float, *, asked_gib: float | None = None, may_exceed: bool = False
    ) -> float:
        """Return the GiB that a run may use of this machine's device, which has `total_gib`.

        `asked_gib` is the limit that the user chose. If `may_exceed` is true, this limit may exceed
        the available memory, because the study probes only a few of the model's layers.

        Raises:
            EnvironmentProblem: if this machine's GPU has less free memory than the device to tune
                for.
            UsageError: if the user's limit is above the available memory.
        """
        held_gib = self.held_by_others_gib
        if self.card is None:
            available = round(total_gib * HOST_SHARE, 1)
        else:
            available = round(total_gib - held_gib, 2)

        cap = available if self.cap_gib is None else round(self.cap_gib, 2)
        if cap > available:
            raise EnvironmentProblem(
                f"{self.device.name} has {fmt_gib(cap)}, but only {fmt_gib(available)} are "
                "free here",
                remedy="stop the processes that use the GPU's memory, or run on another GPU",
            )

        if asked_gib is not None and asked_gib > cap and not may_exceed:
            raise UsageError(
                f"--memory-gib {asked_gib:g} is more than the available {fmt_gib(cap)}",
                remedy="give less, leave it out,"
                " or probe only a few layers of the model (--shallow-only)",
            )
        return cap if asked_gib is None else asked_gib


def device_cap_gib(device: DeviceSpec, asked_gib: float | None = None) -> float:
    """Return the GiB that a run may use of an idle device, according to the data sheet.

    `asked_gib` is the user's limit, which can only lower the result. Raises UsageError if the
    memory is unknown.
    """
    known = [size for size in (asked_gib, device.usable_gib) if size is not None]

    if not known or device.kind == "cpu":
        if device.kind == "cpu":
            raise UsageError(
                f"no plan can be made for {device.name}: its memory is the host's",
                remedy="name a GPU",
            )
        raise UsageError(
            f"no plan can be made for {device.name}: its memory is not known",
            remedy="name a GPU, or give --memory-gib",
        )
    return min(known)


def present_card() -> nvml.GpuInfo | None:
    """Return the GPU of this machine that runs probes, or None if the machine has no GPU."""
    visible = nvml.first_visible()
    return next((card for card in nvml.list_gpus() if visible in (card.index, card.uuid)), None)


def data_sheet(card: nvml.GpuInfo) -> DeviceSpec:
    """Return the catalogue's data sheet of a GPU of this machine.

    If the catalogue does not have the GPU, the rates in the data sheet are unknown.
    """
    return match_device(card.name, card.memory_gib) or DeviceSpec(
        name=kebab_case(card.name),
        vendor="nvidia",
        compute_capability=card.compute_capability,
        memory_gib=card.memory_gib,
        memory_source="NVML",
        source="NVML",
    )


def is_product(card: nvml.GpuInfo, device: DeviceSpec) -> bool:
    """Return whether a GPU of this machine is the product `device`.

    The GPU's name is compared with the names in the user's own card file, if it describes the
    device. Otherwise, the GPU's name is compared with the names in the catalogue.
    """
    names = [name.casefold() for name in device.nvml_names]
    is_own = (
        device.given is not None
        and card.name.casefold() in names
        and device.has_memory(card.memory_gib)
    )
    return is_own or data_sheet(card).name == device.name


def kept_calibration(
    device: DeviceSpec, say: Callable[[str], None] = lambda text: None
) -> Calibration | None:
    """Return this user's calibration of a device.

    The result is None if the user has no calibration of the device, or if the device is not in this
    machine. `say` gets a warning about an unusable calibration.
    """
    path = kept_path(device.name)
    if not path.is_file():
        return None

    if device.kind != "cpu":
        card = present_card()
        if card is None or not is_product(card, device):
            return None
    try:
        calibration = replace(read_calibration(path), place=HERE)
    except UsageError as error:
        say(f"warning: {error}; the file is not used (`autotune calibrate` makes a new one)")
        return None

    # If several machines share a home directory, the cached calibration may be of another machine.
    if calibration.processor != processor_name():
        of_another = f"it was made on a machine with {printable(calibration.processor)}"
        say(
            f"warning: the cached calibration is not used: {of_another}"
            " (`autotune calibrate` makes a new one)"
        )
        return None
    return calibration


def find_target(name: str) -> Target:
    """Return the target of this name: the CPU or GPU of this machine, or a smaller device.

    Raises UsageError for an unknown device, and EnvironmentProblem if this machine cannot probe
    for it.
    """
    wanted = None if name.strip().lower() == "auto" else resolve_device(name)
    if wanted is not None and wanted.kind == "cpu":
        return Target(device=wanted)

    card = present_card()
    if card is None:
        if wanted:
            instead = f"estimate with `autotune plan --gpu {shlex.quote(wanted.option)}`"
        else:
            instead = "run on a machine that has one"
        raise EnvironmentProblem(
            f"{wanted.name if wanted else 'an NVIDIA GPU'} was asked for,"
            " but there is no NVIDIA GPU here to probe on",
            remedy=f"{instead}, or try the tool on the processor: --gpu cpu --model demo-3m",
        )

    if wanted is not None and is_product(card, wanted):
        return Target(device=wanted, card=card)

    present = data_sheet(card)
    if wanted is None:
        return Target(device=present, card=card)
    lack = _lack(wanted, present, card)

    if lack is not None or not (wanted.has_rates and present.has_rates):
        if lack is None:
            reason = ", and the speeds of one of the two are not known"
        else:
            reason = f", which cannot stand in for it: {lack}"
        raise EnvironmentProblem(
            f"{wanted.name} was asked for, but the GPU here is {card.name} ({present.name}, "
            f"{fmt_gib(card.memory_gib)}){reason}",
            remedy=f"give --gpu {present.name} (or auto), run where there is {wanted.name}, or"
            f" estimate with `autotune plan --gpu {shlex.quote(wanted.option)}`; a few layers can"
            f" be probed here too: --gpu {present.name}"
            f" --memory-gib {wanted.memory_gib or 0:.0f} --shallow-only",
        )
    return Target(device=wanted, card=card, measured_on=present)


def _lack(wanted: DeviceSpec, present: DeviceSpec, card: nvml.GpuInfo) -> str | None:
    """Return the reason why this machine's GPU cannot probe for a device, or None if it can."""
    if wanted.usable_gib is None:
        return f"the memory of {wanted.name} is not known"
    if wanted.vendor != present.vendor:
        return f"{wanted.vendor} has other kernels"
    if wanted.usable_gib > card.memory_gib:
        return f"it would need {fmt_gib(wanted.usable_gib)}"
    if wanted.supports_bf16 and not present.supports_bf16:
        return "it has no bf16"
    return None
