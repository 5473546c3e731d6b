"""Write `autotune/dry/shipped_counts.json.gz`: the answers of dry probes to default plans of the
catalogue's models, and to the shipped suites.

    python benchmarks/shipped_counts.py

Each model of the file is planned for each card of the catalogue, with the default search space and
those of LoRA, QLoRA and full fine-tuning. `--add NAME...` counts these models and the suites alone,
and adds their answers; `--add` without a name counts the suites. Plans of other models are counted
when they are asked for. No GPU is needed. Answers stay in the user's cache, so an interrupted run
continues. The answers of the present file count only with `--missing`, which suits changes that
give some plans new keys.
"""

import argparse
import gzip
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import ROOT, command, now

from autotune.catalog import ModelSpec, list_devices, resolve_device, resolve_model
from autotune.catalog.fast_kernels import counted_packages
from autotune.core.errors import UsageError
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import to_data
from autotune.dry.prober import DRY_VERSION, DryAnswer, DryProber, key_of, library_versions
from autotune.planning import counted_memory
from autotune.planning.device_estimate import limit_of
from autotune.planning.named_estimates import estimate_named_configs
from autotune.planning.plan import plan_setup, planned_setup
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import StudySpec, make_spec, shipped_suites

SPACES = ("default", "lora", "qlora", "full")
DIGITS = 6  # of each number
OF_THIS_MACHINE = ("took longer than", "the counting process ended", "installed")  # a refusal
FILE = ROOT / "autotune" / "dry" / "shipped_counts.json.gz"


class Recorder(DryProber):
    """Remembers all answers by the keys of shipped ones."""

    def __init__(self, *, shipped: bool = False) -> None:
        super().__init__(shipped=shipped)
        self.answers: dict[str, DryAnswer] = {}

    def count(self, request: ProbeRequest, other: OtherTrainer = USUAL) -> DryAnswer:
        key = key_of(request, other=other)
        if key not in self.answers:
            self.answers[key] = self._in_bf16(request, other) or super().count(request, other)
            refused = self.answers[key].refused or ""
            if any(reason in refused for reason in OF_THIS_MACHINE):
                raise SystemExit(f"{refused}: {request}")
        return self.answers[key]

    def _in_bf16(self, request: ProbeRequest, other: OtherTrainer) -> DryAnswer | None:
        """The answer in bf16 where fp16 has the same: the product of experts alone has kernels of
        its own.
        """
        if request.config.precision != "fp16_mixed":
            return None
        answer = self.count(
            replace(request, config=replace(request.config, precision="bf16_mixed")), other
        )
        work = answer.count.flops if answer.count is not None else ()
        return None if any("grouped_mm" in name for name in work) else answer


def shipped() -> dict[str, Any]:
    """Return the content of the file."""
    data: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return data


def count_plans(
    models: Sequence[ModelSpec],
    path: Path,
    kept: dict[str, Any] | None = None,
    *,
    shipped: bool = False,
) -> None:
    """Write the answers to the suites and to all plans of these models, after each GPU again,
    beside the kept content of the file.

    Progress is printed.
    """
    started, spaces = time.monotonic(), [SearchSpace.load(name) for name in SPACES]
    names = sorted({model.name for model in models}.union(kept["models"] if kept else ()))
    # bf16 first: most people have it
    devices = sorted(list_devices(), key=lambda device: device.usual_precision)
    with Recorder(shipped=shipped) as recorder:
        counted_memory._prober = lambda: recorder
        for suite_path in shipped_suites().values():
            suite = make_spec(suite_path, {})
            estimate_named_configs(suite, device=resolve_device(suite.gpu), counted=True)
        for number, device in enumerate(devices, 1):
            for model, space in itertools.product(models, spaces):
                spec = StudySpec(model=model.name, gpu=device.name, space=space)
                with suppress(UsageError):
                    plan_setup(planned_setup(spec, device), limit_of(spec, device), counted=True)
            answers = {key: rounded(to_data(answer)) for key, answer in recorder.answers.items()}
            size = write(names, (kept["answers"] if kept else {}) | answers, path)
            seconds = time.monotonic() - started
            done = (
                f"{number:>2} of {len(devices)}, {seconds:>5.0f} s: {len(recorder.answers)} answers"
            )
            print(f"{done}, {size / 1000:.0f} kB, {device.name}", flush=True)


def rounded(value: Any) -> Any:
    """Return the data of an answer, with numbers of DIGITS digits and without empty values."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items() if item is not None}
    if isinstance(value, float | int):
        return type(value)(float(f"{value:.{DIGITS}g}"))
    return value


def write(models: Sequence[str], answers: dict[str, Any], path: Path) -> int:
    """Write the file; the same answers give the same bytes but for the date. Returns how many."""
    data = {
        "command": command(),
        "date": now(),
        "dry_version": DRY_VERSION,
        "versions": library_versions(),
        "models": list(models),
        "answers": {key: answers[key] for key in sorted(answers)},
    }
    return path.write_bytes(
        gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    )


def main() -> None:
    if packages := counted_packages():
        raise SystemExit(f"shipped counts are without fast kernels: uninstall {packages}")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument(
        "--add",
        nargs="*",
        metavar="NAME",
        help="count these models and the suites alone, and keep the other answers",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="count only the plans for which the file has no answer yet",
    )
    args = parser.parse_args()
    kept = shipped()
    count_plans(
        [resolve_model(name) for name in (kept["models"] if args.add is None else args.add)],
        args.out,
        None if args.add is None else kept,
        shipped=args.missing,
    )


if __name__ == "__main__":
    main()
