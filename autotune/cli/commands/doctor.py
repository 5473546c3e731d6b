"""`autotune doctor`: checks whether this machine can run a study, and names remedies."""

import shutil
from pathlib import Path

from autotune.cli.commands.calibrate import facts
from autotune.cli.options import Json, Storage
from autotune.cli.terminal import print_answer_json, print_note
from autotune.core.errors import AutotuneError, EnvironmentProblem, TooManyFailures
from autotune.core.installed import INSTALL, is_installed
from autotune.core.units import fmt_gib, gib
from autotune.report.values.commands import Check
from autotune.study.storage.location import storage_url

NEEDED = ("transformers", "peft", "accelerate", "optuna")
OPTIONAL = (
    *("bitsandbytes", "trl", "liger-kernel", "deepspeed", "optuna-dashboard", "flash-attn"),
    # Kernels of layers other than attention
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm"),
)


def doctor(storage: Storage = None, json_: Json = False) -> None:
    """Print the result of every check. Raises EnvironmentProblem if a necessary part is missing."""
    checks = [*_packages(), *_gpus(), *_torch(), *_disk(), _storage(storage), *_calibration()]

    if json_:
        print_answer_json(checks)
    else:
        for check in checks:
            mark = {True: "ok", False: "MISSING", None: "--"}[check.ok]
            print(f"{mark:>7}  {check.name:<22} {check.found}")
            if check.remedy:
                print(f"{'':>9}-> {check.remedy}")

    missing = [check.name for check in checks if check.ok is False]
    if missing:
        raise EnvironmentProblem(
            f"this machine lacks: {', '.join(missing)}", remedy="see the lines marked MISSING"
        )


def _packages() -> list[Check]:
    """Check the versions of the packages that a study needs or can use."""
    from importlib import metadata

    checks = []
    for name in (*NEEDED, *OPTIONAL):
        is_needed = name in NEEDED
        try:
            checks.append(Check(name=name, ok=True, found=metadata.version(name)))
        except metadata.PackageNotFoundError:
            remedy = INSTALL if is_needed else None
            checks.append(
                Check(
                    name=name, ok=False if is_needed else None, found="not installed", remedy=remedy
                )
            )
    return checks


def _gpus() -> list[Check]:
    """Check the NVIDIA GPUs, or report that there is none."""
    from autotune.core.nvml import list_gpus

    cards = list_gpus()
    if not cards:
        remedy = "without a GPU, try --gpu cpu --model demo-3m; with a GPU, install NVIDIA's driver"
        return [Check(name="NVIDIA GPU", ok=None, found="none (NVML finds no GPU)", remedy=remedy)]

    checks = []
    for card in cards:
        holders = ", ".join(
            f"{one.name or '?'} pid {one.pid} {fmt_gib(one.used_gib)}" for one in card.processes
        )
        memory = f"{fmt_gib(card.memory_gib - card.used_gib)} of {fmt_gib(card.memory_gib)} free"
        text = f"{card.name}, {memory}"
        text += f", driver {card.driver}" + (f", held by {holders}" if holders else "")
        checks.append(Check(name=f"GPU {card.index}", ok=True, found=text))
    return checks


def _torch() -> list[Check]:
    """Check torch by training a tiny model in a worker."""
    if not is_installed("torch"):
        return [Check(name="torch", ok=False, found="not installed", remedy=INSTALL)]

    from autotune.core.nvml import list_gpus
    from autotune.probe.supervisor import check_worker

    on_gpu = bool(list_gpus())
    try:
        fingerprint, nf4_problem = check_worker("cuda" if on_gpu else "cpu")
    except (EnvironmentProblem, TooManyFailures) as error:
        where = "on the GPU" if on_gpu else "here"
        remedy = "install a build of torch that this machine and its driver can run"
        return [
            Check(name="torch", ok=False, found=f"does not train {where}: {error}", remedy=remedy)
        ]

    checks = [
        Check(
            name="torch",
            ok=True,
            found=f"{fingerprint.packages['torch']}, CUDA {fingerprint.cuda or 'none'}",
        )
    ]
    if on_gpu:
        bf16 = fingerprint.has_bf16
        checks += [
            Check(name="torch sees the GPU", ok=True, found="yes, a tiny model was trained"),
            Check(name="bf16", ok=bf16 or None, found="yes" if bf16 else "no: fp16 will be used"),
            Check(
                name="bitsandbytes on GPU",
                ok=None if nf4_problem else True,
                found=nf4_problem or "a tiny model with nf4 weights was trained",
            ),
        ]
    return checks


def _disk() -> list[Check]:
    free = gib(shutil.disk_usage(Path.cwd()).free)
    return [Check(name="disk", ok=free > 0.5, found=f"{fmt_gib(free)} free here")]


def _calibration() -> list[Check]:
    """Report this machine's calibration and its slow parts.

    A missing calibration or a slow part is not an error.
    """
    from autotune.catalog import resolve_device
    from autotune.planning.slow_parts import slow_parts
    from autotune.problem.target import data_sheet, kept_calibration, present_card

    card = present_card()
    device = data_sheet(card) if card else resolve_device("cpu")
    calibration = kept_calibration(device, print_note)
    if calibration is None:
        command = "autotune calibrate" + ("" if card else " --gpu cpu")
        remedy = f"`{command}` measures this machine in about 30 s, for later estimates"
        checks = [Check(name="calibration", ok=None, found="none", remedy=remedy)]
    else:
        checks = [
            Check(name=f"calibrated {name}", ok=True, found=text)
            for name, text in facts(calibration).items()
        ]

    slow = [
        Check(name=f"slow: {one.limit.part}", ok=None, found=str(one))
        for one in slow_parts(calibration, device)
    ]
    return [*checks, *slow]


def _storage(storage: str | None) -> Check:
    if not is_installed("sqlalchemy"):
        return Check(name="storage", ok=False, found="needs sqlalchemy", remedy=INSTALL)

    from autotune.study.storage.database import public_url
    from autotune.study.storage.probe_store import ProbeStore

    try:
        url = storage_url(storage)
        ProbeStore(url).close()
    except AutotuneError as error:
        return Check(name="storage", ok=False, found=str(error), remedy=error.remedy)
    return Check(name="storage", ok=True, found=f"{public_url(url)} can be opened")
