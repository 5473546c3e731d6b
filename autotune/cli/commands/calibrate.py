"""`autotune calibrate`: measure this machine once, so that estimates need fewer assumptions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Gpu, Json
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import print_json, print_note
from autotune.core.errors import Cancelled, Interrupted
from autotune.core.files import write_atomic
from autotune.core.text import printable, short_path
from autotune.core.units import DASH, fmt_count, fmt_gib

if TYPE_CHECKING:
    from autotune.problem.calibration import Calibration


def calibrate(
    gpu: Gpu = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the calibration to this file.")
    ] = None,
    share: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a file that you can share: it has no private data."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Measure this machine's device and host, keep the result and print it.

    Raises:
        UsageError: the named device is unknown, is not in this machine, or cannot be shared.
        EnvironmentProblem: this machine has no GPU, or the device cannot be measured.
        StorageError: the result cannot be written.
        Interrupted: stopped by a signal; nothing is kept.
    """
    from autotune.api import calibrate as measure
    from autotune.core.serialization import to_data
    from autotune.planning.slow_parts import slow_parts
    from autotune.problem.calibration import kept_path, write_calibration
    from autotune.problem.target import find_target

    device = find_target(gpu or "auto").device
    with stop_on_signals() as stop:
        try:
            calibration = measure(gpu or "auto", progress=print_note, should_stop=stop)
        except Cancelled:
            raise Interrupted(
                "stopped; nothing was kept", exit_code=128 + (stop.signal or 2)
            ) from None

    if out is not None:
        write_calibration(calibration, out)
    if share is not None:
        from autotune.planning.submission import calibration_submission

        write_atomic(share, calibration_submission(calibration).text)
    if json_:
        print_json(to_data(calibration))
        return

    for name, text in facts(calibration).items():
        print(f"{name:>10}  {text}")
    for slow in slow_parts(calibration, device):
        print(f"{'slow':>10}  {slow.limit.part}: {slow}")

    place = f"kept in {short_path(kept_path(calibration.device))}"
    if calibration.measures_gpu:
        print(f"{place}: estimates for {calibration.device} on this machine will use this file")
    else:
        print(f"{place}: give this file with `--calibration` to estimate GPUs in this host")


def facts(calibration: "Calibration") -> dict[str, str]:
    """Return {name of the measured part: text} for the measurements."""
    rates = calibration.rates
    products = (
        f"{name} " + ", ".join(f"{fmt_count(rate)} ({side:,})" for side, rate in by_side.items())
        for name, by_side in rates.products.items()
    )

    reference = calibration.reference
    training = f"{reference:.2f} times as fast as predicted from these rates" if reference else DASH
    issued = f"{fmt_count(calibration.layer_ms)} ms to issue a layer's kernels"
    link = (
        ""
        if rates.link_gb_s is None
        else f", {fmt_count(rates.link_gb_s)} GB/s to and from the host"
    )
    disk = (
        "" if calibration.disk_mb_s is None else f", disk {fmt_count(calibration.disk_mb_s)} MB/s"
    )

    links = [
        f"{one.num_gpus}: {fmt_count(one.gather_gb_s)} all-gather, {fmt_count(one.scatter_gb_s)} "
        f"reduce-scatter, {fmt_count(one.reduce_gb_s)} all-reduce"
        for one in calibration.collectives
    ]
    collectives = {"GPUs": f"GB/s by number of GPUs: {'; '.join(links)}"} if links else {}

    return collectives | {
        "device": f"{calibration.device} ({printable(calibration.fingerprint.device)}), "
        f"{calibration.label}",
        "products": f"TFLOP/s (side of the square matrices): {'; '.join(products)}",
        "copies": f"{fmt_count(rates.copy_gb_s)} GB/s within its memory{link}",
        "host": f"{issued}, {fmt_count(rates.launch_us)} microseconds for a small kernel",
        "training": training,
        "machine": f"{calibration.cores:g} x {printable(calibration.processor)}, "
        f"{fmt_gib(calibration.memory_gib)}{disk}",
    }
