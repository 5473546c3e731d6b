"""Measure whole studies from the start of the process: one of a 7B model, and some with empty
compiler caches.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import (
    STUDY_OPTIONS,
    Mode,
    Rows,
    finish,
    largest,
    measured,
    run_program,
    run_study,
    save,
    scratch,
    table,
    timed_trials,
    use_empty_compile_cache,
    worker,
)

from autotune.api import load_study
from autotune.catalog import resolve_model
from autotune.core.machine import num_cores
from autotune.core.probe_types import (
    Evidence,
    Measurement,
    Outcome,
    ProbeRequest,
    ProbeResult,
    Rung,
)
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import parse_duration
from autotune.probe.compile_ahead import CompileAhead, num_helpers
from autotune.probe.supervisor import WorkerProber
from autotune.study.storage.probe_store import ProbeStore

# --- whole

PHASES = ("load", "first_step", "steady", "evaluate", "save", "cleanup", "total")


def run_whole(args: argparse.Namespace) -> None:
    """Measure a whole `autotune run` on a 7B model, from the start of the process to the exported
    files.

    The command runs in a folder of its own. The stored results then give the number of judged
    configurations, the number of full-depth probes that ran out of memory, and the seconds of each
    rung and each phase.
    """
    folder = args.keep or scratch()
    folder.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{folder.absolute()}/autotune.db"
    name = f"{args.gpu}-{args.model}"
    options = ["--gpu", args.gpu, "--model", args.model, "--budget", args.budget]
    begin = time.monotonic()
    result = run_study(folder, *options, "--study", name, "--out", name, "--storage", url)
    wall = time.monotonic() - begin

    study = load_study(name, url)
    probes = [row.result for row in ProbeStore(url).probes_of_study(name)]
    rows = phases_of([probe for probe in probes if probe.seconds])
    full_depth_ooms = sum(
        probe.outcome is Outcome.OOM and probe.evidence is Evidence.MEASURED and probe.depth is None
        for probe in probes
    )
    finish(
        args,
        study.record.fingerprint,
        rows,
        ["rung", "depth", "compiled", "probes", *PHASES],
        wall_seconds=wall,
        configs_judged=result["trials"]["judged"],
        full_depth_ooms=full_depth_ooms,
        speedup=result["speedup"],
        trials=result["trials"],
        seconds_beside_probes=wall - summarize_whole(rows)["probing_seconds"],
        tokens_per_second=result["winner"]["performance"]["tokens_per_second"],
        exported=sorted(path.name for path in (folder / name / "export").iterdir()),
    )


def phases_of(probes: list[ProbeResult]) -> list[dict[str, Any]]:
    """Return a row for each kind of probe, with the mean seconds of each phase."""
    by_kind: dict[tuple[str, int | None, bool], list[ProbeResult]] = defaultdict(list)
    for probe in probes:
        by_kind[probe.rung.value, probe.depth, probe.config.compile != "none"].append(probe)
    rows: list[dict[str, Any]] = []
    for (rung, depth, compiled), of_kind in by_kind.items():
        row: dict[str, Any] = {
            "rung": rung,
            "depth": depth,
            "compiled": compiled,
            "probes": len(of_kind),
        }
        rows.append(
            row
            | {
                phase: sum(p.seconds.get(phase, 0.0) for p in of_kind) / len(of_kind)
                for phase in PHASES
            }
        )
    return rows


def summarize_whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"probing_seconds": sum(row["probes"] * row["total"] for row in rows)}


# --- cold

GOAL, LARGE_GOAL = 0.98, 0.95  # of the long study's best speed
LARGE = "llama-3.1-70b"
AROUND_S = 30.0  # that a study takes beside its budget, at most
BESIDE_S = 50.0
REPEATS = 3
CARDS = ("h100", "h200")
COLD_COLUMNS = [
    "card",
    "model",
    "stage",
    "judged",
    "best",
    "seconds_to_goal",
    "compile_wait_share",
    "compiled_ahead",
]
COLUMNS_BESIDE = [
    "card",
    "config",
    "micro_s",
    "beside_micro_s",
    "micro_change",
    "peak_change",
    "alone_change",
]


def run_cold(args: argparse.Namespace) -> None:
    """Measure a study whose compiler caches are empty, with and without processes that compile
    ahead.

    `ahead` and `never` run `autotune run` with empty caches of Inductor and Triton, with compiling
    ahead and without it. `long` is a longer study with the caches that `ahead` left: its best speed
    is the goal. The seconds to the goal count from the start of the process until the end of the
    first trial within 2 % of it, or 5 % with the large model. A configuration has the speed of the
    long study if that tried it. A study judged the configurations that it ended within its budget,
    without refused and repeated trials. The share of waiting is the worker's time of compilation,
    divided by the time of all its probes.

    `beside` probes a few configurations of few layers alone, and then while other processes compile
    beside it. It reports the largest relative change of the time of a micro batch and of the
    allocated peak. `alone_change_max` is the change between two probes alone.

    Each row names its GPU and model, so one result can hold rows of several (`--rows`). A stage
    that would not end within `--seconds` is left to the next call.
    """
    rows, began = Rows.of(args), time.monotonic()
    device, caches = "cpu" if args.gpu == "cpu" else "cuda", dict[str, str]()
    with worker(device) as prober:
        fingerprint = prober.fingerprint
    for stage in args.stages:
        budget = args.long_budget if stage == "long" else args.budget
        lasts_s = BESIDE_S if stage == "beside" else parse_duration(budget) + AROUND_S
        row_of = {"stage": stage, "card": fingerprint.device, "model": args.model}
        known = rows.has(**row_of)
        if known or time.monotonic() - began + lasts_s > args.seconds:
            print(
                f"{stage}: {'known already' if known else 'left to the next call, with --rows'}",
                flush=True,
            )
            continue
        if stage == "long" and caches:
            os.environ.update(caches)  # the caches that `ahead` filled
        else:
            use_empty_compile_cache()
        if stage == "ahead":
            caches = {
                name: os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            }
        found = beside(args, device) if stage == "beside" else [cold_study(args, stage, budget)]
        for row in found:
            rows.add(row_of | {"fingerprint": to_data(fingerprint), **row})
        print(f"{stage}: done after {time.monotonic() - began:.0f} s", flush=True)
        save(args, fingerprint, rows.all)
    table(shown(rows.all), COLD_COLUMNS)
    table([row for row in rows.all if row["stage"] == "beside"], COLUMNS_BESIDE)
    print(args.mode.summarize(rows.all))


def cold_study(args: argparse.Namespace, stage: str, budget: str) -> dict[str, Any]:
    """A row with the trials of one study: the second at which each ended, its configuration and its
    speed.
    """
    ahead = "never" if stage == "never" else "always" if args.gpu == "cpu" else "auto"
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as folder:
        url = f"sqlite:///{folder}/autotune.db"
        options = [
            "--gpu",
            args.gpu,
            "--model",
            args.model,
            "--budget",
            budget,
            "--set",
            f"compile_ahead={ahead}",
        ]
        options += ["--study", "cold", "--out", f"{folder}/cold", "--storage", url, *args.options]
        began = time.time()
        found = run_study(Path(folder), *options)
        wall_s = time.time() - began
        task = load_study("cold", url).record.task
        with closing(ProbeStore(url)) as store:
            stored = store.probes_of_study("cold")
        logs = [
            log.read_text(errors="replace")
            for log in Path(folder, "cold", "logs").glob("ahead-*.log")
        ]
    probes = [
        row.result for row in stored if row.result.seconds and row.result.rung is not Rung.CONFIRM
    ]
    return {
        "budget_s": parse_duration(budget),
        "wall_s": wall_s,
        "trials": timed_trials(stored, task, began),
        "compile_s": sum(probe.seconds.get("compile", 0.0) for probe in probes),
        "turn_s": sum(probe.seconds.get("turn", 0.0) for probe in probes),
        "probe_s": sum(probe.seconds["total"] for probe in probes),
        "compiled_ahead": sum(log.count("compiled ahead in") for log in logs),
        "winner_tokens_per_s": found["winner"]["performance"]["tokens_per_second"],
    }


def beside(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Return a row for each configuration: probed alone, alone again, and while others compile
    beside it.
    """
    cores = num_cores()
    with worker(device) as prober:
        requests = [
            few_layers(args, prober, *one) for one in ((1, "none"), (4, "none"), (4, "per_layer"))
        ]

        # Load and compile everything once, then probe alone.
        for one in requests:
            measured(prober, one)
        alone = [[measured(prober, one) for one in requests] for _ in range(2 * REPEATS)]

        # Probe while other processes compile.
        prober.ahead = CompileAhead(device, prober.logs, max(num_helpers(cores), 1), cores)
        with closing(prober.ahead) as ahead:
            last = requests[-1]
            wanted = {
                str(rank): replace(last, config=replace(last.config, lora_rank=rank))
                for rank in range(24, 64, 4)
            }
            ahead.compile_next(wanted)
            while ahead.is_running and not ahead.claimed_keys():
                time.sleep(0.1)
                ahead.compile_next(wanted)  # notices a process that has ended
            busy: list[list[Measurement]] = []
            for _ in range(REPEATS):
                busy.append([measured(prober, one) for one in requests])
                if not ahead.claimed_keys() - ahead.compile_seconds().keys():
                    raise SystemExit("no process compiled beside the probes")

    rows: list[dict[str, Any]] = []
    for place, one in enumerate(requests):
        first, again, others = (
            [each[place] for each in group] for group in (alone[:REPEATS], alone[REPEATS:], busy)
        )
        micro_s, again_s, beside_s = (
            statistics.median(map(micro, group)) for group in (first, again, others)
        )
        peak, beside_peak = (
            max(each.peak_allocated_gib for each in group) for group in ([*first, *again], others)
        )
        base_s = (micro_s + again_s) / 2
        row = {"config": one.config.label(), "micro_s": base_s, "beside_micro_s": beside_s}
        row |= {"micro_change": beside_s / base_s - 1, "peak_change": beside_peak / peak - 1}
        limit_change = others[0].limit_gib - first[0].limit_gib
        rows.append(row | {"alone_change": again_s / micro_s - 1, "limit_change_gib": limit_change})
    return rows


def few_layers(
    args: argparse.Namespace, prober: WorkerProber, size: int, compile: str
) -> ProbeRequest:
    """Return a probe of a few layers of the model."""
    on_cpu = prober.device == "cpu"
    knobs: dict[str, Any] = {"precision": "fp32", "seq_len": 64} if on_cpu else {"seq_len": 1024}
    return ProbeRequest(
        config=TrainConfig(micro_batch_size=size, compile=compile, checkpointing="none", **knobs),
        model=dict(resolve_model(args.model).config),
        device=prober.device,
        memory_gib=8.0 if on_cpu else prober.memory_gib,
        depth=2 if on_cpu else 8,
        min_timed_s=0.7,
    )


def micro(measurement: Measurement) -> float:
    return statistics.fmean(measurement.micro_step_s)


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of studies, with the columns that follow from them."""
    found = []
    for row in rows:
        if row["stage"] != "beside":
            best = max((trial["tokens_per_s"] or 0.0 for trial in row["trials"]), default=None)
            more = {
                "judged": judged(row),
                "best": best,
                "compile_wait_share": row["compile_s"] / row["probe_s"],
            }
            found.append(row | more | {"seconds_to_goal": seconds_to_goal(row, rows)})
    return found


def judged(row: Mapping[str, Any]) -> int:
    """Return the number of configurations that a study judged within its budget, from the start of
    its process.
    """
    return len({trial["config"] for trial in row["trials"] if trial["end_s"] <= row["budget_s"]})


def seconds_to_goal(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds until a study judged a configuration within 2 % or 5 % of the best, if it
    did.

    It is also None without a long study of the same model on the same GPU.
    """
    same = [one for one in rows if (one["card"], one["model"]) == (row["card"], row["model"])]
    long = next((one for one in same if one["stage"] == "long"), None)
    if long is None:
        return None
    # Take the first result of a configuration. It comes from a few layers, and most configurations
    # have no other.
    speeds = {trial["config"]: trial["tokens_per_s"] or 0.0 for trial in reversed(long["trials"])}
    goal = (LARGE_GOAL if row["model"] == LARGE else GOAL) * max(speeds.values())
    ends = [
        trial["end_s"]
        for trial in row["trials"]
        if trial["tokens_per_s"] and speeds.get(trial["config"], trial["tokens_per_s"]) >= goal
    ]
    return min(ends, default=None)


def summarize_cold(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """With compiling ahead: the seconds on each card, the fewest judged, the largest share; and the
    largest changes.
    """
    studies = shown(rows)
    large = [row for row in studies if row["model"] == LARGE and row["stage"] == "ahead"]
    ahead, never = (
        [row for row in studies if row["model"] != LARGE and row["stage"] == stage]
        for stage in ("ahead", "never")
    )
    seconds = {
        f"{card}_seconds_to_2_percent": next(
            (row["seconds_to_goal"] for row in ahead if card in row["card"].lower()), None
        )
        for card in CARDS
    }
    apart = [row for row in rows if row["stage"] == "beside"]
    return seconds | {
        "judged_in_120_s": min(
            (row["judged"] for row in ahead if row["budget_s"] == 120), default=None
        ),
        "judged_in_120_s_without": min(
            (row["judged"] for row in never if row["budget_s"] == 120), default=None
        ),
        "large_seconds_to_5_percent": largest(large, "seconds_to_goal"),
        "compile_wait_share": largest(ahead, "compile_wait_share"),
        "compile_wait_share_without": largest(never, "compile_wait_share"),
        "probe_change_max": max(
            filter(None, (largest(apart, "micro_change"), largest(apart, "peak_change"))),
            default=None,
        ),
        "alone_change_max": largest(apart, "alone_change"),
    }


MODES = {
    "whole": Mode(
        run=run_whole,
        result="study_7b",
        summarize=summarize_whole,
        options={"--gpu": "h200", "--model": "mistral-7b", "--budget": "4m55s", "--keep": None},
    ),
    "cold": Mode(
        run=run_cold,
        result="cold_study",
        summarize=summarize_cold,
        options=STUDY_OPTIONS
        | {
            "--model": "mistral-7b",
            "--budget": "120s",
            "--long-budget": "240s",
            "--stages": {"nargs": "*", "default": ["ahead", "long", "beside", "never"]},
            "--seconds": {
                "default": 470.0,
                "help": "begin no stage that would end after this time",
            },
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
