"""Measure a study whose compiler caches are empty, with and without processes that compile ahead.

`ahead` and `never` run `autotune run` with empty caches of Inductor and Triton, with compiling ahead and without it.
`long` is a longer study with the caches that `ahead` left: its best speed is the goal. The seconds to it count from the
start of the process until the end of the first trial whose speed is within 2 % of that, or 5 % with the large model: a
configuration's speed is that of the long study where that tried it. A study judged what it ended within its budget,
refused and repeated trials left out. The share of waiting is the time in which the worker compiled, of the time of all
its probes.

`beside` probes a few configurations of few layers alone, and while other processes compile beside it, with the largest
relative change of the time of a micro batch and of the allocated peak. Before, they are probed alone twice: the change
without anybody beside them is `alone_change_max`.

A row names its card and model, so that rows of several are one result (`--earlier`). A stage that would not end within
`--limit-s` is left to the next call.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common import Rows, largest, run_study, save, table, use_empty_compile_cache

from autotune.api import load_study
from autotune.catalog import resolve_model
from autotune.core.machine import num_cores
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest, Rung
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import parse_duration
from autotune.probe.compile_ahead import CompileAhead, num_helpers
from autotune.probe.supervisor import WorkerProber
from autotune.study.storage.probe_store import ProbeStore

GOAL, LARGE_GOAL = 0.98, 0.95  # of the long study's best speed
LARGE = "llama-3.1-70b"
AROUND_S = 30.0  # that a study takes beside its budget, at most
BESIDE_S = 50.0
REPEATS = 3
CARDS = ("h100", "h200")
COLUMNS = ["card", "model", "stage", "judged", "best", "seconds_to_goal", "compile_wait_share", "compiled_ahead"]
COLUMNS_BESIDE = ["card", "config", "micro_s", "beside_micro_s", "micro_change", "peak_change", "alone_change"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--long-budget", default="240s")
    parser.add_argument("--stages", nargs="*", default=["ahead", "long", "beside", "never"])
    parser.add_argument("--limit-s", type=float, default=470.0, help="begin no stage that would end after this time")
    parser.add_argument("--earlier", type=Path, help="cold_study.jsonl of an earlier call")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="more options of `autotune run`")
    args = parser.parse_args()
    rows, began = Rows("cold_study", args.out, args.earlier), time.monotonic()
    device, caches = "cpu" if args.gpu == "cpu" else "cuda", dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as logs, WorkerProber(device, Path(logs)) as prober:
        fingerprint = prober.fingerprint
    for stage in args.stages:
        budget = args.long_budget if stage == "long" else args.budget
        lasts_s = BESIDE_S if stage == "beside" else parse_duration(budget) + AROUND_S
        row_of = {"stage": stage, "card": fingerprint.device, "model": args.model}
        known = rows.has(**row_of)
        if known or time.monotonic() - began + lasts_s > args.limit_s:
            print(f"{stage}: {'known already' if known else 'left to the next call, with --earlier'}", flush=True)
            continue
        if stage == "long" and caches:
            os.environ.update(caches)  # those that `ahead` filled
        else:
            use_empty_compile_cache()
        if stage == "ahead":
            caches = {name: os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        measured = beside(args, device) if stage == "beside" else [study(args, stage, budget)]
        for row in measured:
            rows.add(row_of | {"fingerprint": to_data(fingerprint), **row})
        print(f"{stage}: done after {time.monotonic() - began:.0f} s", flush=True)
        save("cold_study", fingerprint, summarize(rows.all), rows.all, args.out)
    table(shown(rows.all), COLUMNS)
    table([row for row in rows.all if row["stage"] == "beside"], COLUMNS_BESIDE)
    print(summarize(rows.all))


def study(args: argparse.Namespace, stage: str, budget: str) -> dict[str, Any]:
    """A row with the trials of one study: the second at which each ended, its configuration and its speed."""
    ahead = "never" if stage == "never" else "always" if args.gpu == "cpu" else "auto"
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as folder:
        url = f"sqlite:///{folder}/autotune.db"
        options = ["--gpu", args.gpu, "--model", args.model, "--budget", budget, "--compile-ahead", ahead]
        options += ["--study", "cold", "--out", f"{folder}/cold", "--storage", url, *args.options]
        began = time.time()
        found = run_study(Path(folder), *options)
        wall_s = time.time() - began
        task = load_study("cold", url).record.task
        with closing(ProbeStore(url)) as store:
            stored = store.of_study("cold")
        logs = [log.read_text(errors="replace") for log in Path(folder, "cold", "logs").glob("ahead-*.log")]
    ends: dict[int | None, float] = {}
    trials: list[dict[str, Any]] = []
    for row in stored:
        result = row.result
        if result.started_at is not None and result.seconds:
            start = datetime.fromisoformat(result.started_at).timestamp() - began
            ends[row.trial] = start + result.seconds["total"]
        if row.trial is not None and result.depth is None and result.outcome is not Outcome.REFUSED:
            end = ends.get(row.trial, ends.get(None) if row.trial == 0 else None)  # the first may be tried before
            speed = task.tokens_per_s(result) if result.outcome in (Outcome.OK, Outcome.SLOW) else None
            trials.append(
                {"end_s": end, "config": result.config.label(), "tokens_per_s": speed, "outcome": result.outcome}
            )
    probes = [row.result for row in stored if row.result.seconds and row.result.rung is not Rung.CONFIRM]
    return {
        "budget_s": parse_duration(budget),
        "wall_s": wall_s,
        "trials": [trial for trial in trials if trial["end_s"] is not None],
        "compile_s": sum(probe.seconds.get("compile", 0.0) for probe in probes),
        "turn_s": sum(probe.seconds.get("turn", 0.0) for probe in probes),
        "probe_s": sum(probe.seconds["total"] for probe in probes),
        "compiled_ahead": sum(log.count("compiled ahead in") for log in logs),
        "winner_tokens_per_s": found["winner"]["performance"]["tokens_per_second"],
    }


def beside(args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """A row for each configuration: probed alone, alone again, and while others compile beside it."""
    rows: list[dict[str, Any]] = []
    cores = num_cores()
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as folder, WorkerProber(device, Path(folder)) as prober:
        requests = [
            request(args, prober, size, compile) for size, compile in ((1, "none"), (4, "none"), (4, "per_layer"))
        ]
        for one in requests:  # what is loaded and compiled once
            probed(prober, one)
        alone = [[probed(prober, one) for one in requests] for _ in range(2 * REPEATS)]
        prober.ahead = CompileAhead(device, prober.logs, max(num_helpers(cores), 1), cores)
        with closing(prober.ahead) as ahead:
            other = requests[-1]
            wanted = {
                str(rank): replace(other, config=replace(other.config, lora_rank=rank)) for rank in range(24, 64, 4)
            }
            ahead.want(wanted)
            while ahead.is_running and not ahead.claimed():
                time.sleep(0.1)
                ahead.want(wanted)  # which sees that one has ended
            busy: list[list[Measurement]] = []
            for _ in range(REPEATS):
                busy.append([probed(prober, one) for one in requests])
                if not ahead.claimed() - ahead.compiled().keys():
                    raise SystemExit("nothing was compiled beside the probes")
    for place, one in enumerate(requests):
        first, again, others = ([each[place] for each in group] for group in (alone[:REPEATS], alone[REPEATS:], busy))
        micro_s, again_s, beside_s = (statistics.median(map(micro, group)) for group in (first, again, others))
        peak, beside_peak = (max(each.peak_allocated_gib for each in group) for group in ([*first, *again], others))
        limit, beside_limit = first[0].limit_gib, others[0].limit_gib
        base_s = (micro_s + again_s) / 2
        row = {"config": one.config.label(), "micro_s": base_s, "beside_micro_s": beside_s}
        row |= {"micro_change": beside_s / base_s - 1, "peak_change": beside_peak / peak - 1}
        rows.append(row | {"alone_change": again_s / micro_s - 1, "limit_change_gib": beside_limit - limit})
    return rows


def request(args: argparse.Namespace, prober: WorkerProber, size: int, compile: str) -> ProbeRequest:
    """A few layers of the model."""
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


def probed(prober: WorkerProber, asked: ProbeRequest) -> Measurement:
    """What a probe measured. Raises SystemExit where it failed."""
    result = prober.probe(asked, prober.logs / "probe.log")
    if result.measurement is None or result.outcome is not Outcome.OK:
        raise SystemExit(f"{asked.config.label()}: {result.reason}")
    return result.measurement


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of studies, with what follows from them."""
    found = []
    for row in rows:
        if row["stage"] != "beside":
            best = max((trial["tokens_per_s"] or 0.0 for trial in row["trials"]), default=None)
            more = {"judged": judged(row), "best": best, "compile_wait_share": row["compile_s"] / row["probe_s"]}
            found.append(row | more | {"seconds_to_goal": seconds_to_goal(row, rows)})
    return found


def judged(row: Mapping[str, Any]) -> int:
    """How many configurations a study judged within its budget, from the start of its process."""
    return len({trial["config"] for trial in row["trials"] if trial["end_s"] <= row["budget_s"]})


def seconds_to_goal(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Seconds until a study had judged a configuration within 2 % or 5 % of the best; None if it never did.

    Also None where no long study of the same model ran on the same card.
    """
    same = [one for one in rows if (one["card"], one["model"]) == (row["card"], row["model"])]
    long = next((one for one in same if one["stage"] == "long"), None)
    if long is None:
        return None
    # The first result of a configuration is that of a few layers, as most have no other.
    speeds = {trial["config"]: trial["tokens_per_s"] or 0.0 for trial in reversed(long["trials"])}
    goal = (LARGE_GOAL if row["model"] == LARGE else GOAL) * max(speeds.values())
    ends = [
        trial["end_s"]
        for trial in row["trials"]
        if trial["tokens_per_s"] and speeds.get(trial["config"], trial["tokens_per_s"]) >= goal
    ]
    return min(ends, default=None)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """With compiling ahead: the seconds on each card, the fewest judged, the largest share; and the largest changes."""
    studies = shown(rows)
    large = [row for row in studies if row["model"] == LARGE and row["stage"] == "ahead"]
    ahead, never = (
        [row for row in studies if row["model"] != LARGE and row["stage"] == stage] for stage in ("ahead", "never")
    )
    seconds = {
        f"{card}_seconds_to_2_percent": next(
            (row["seconds_to_goal"] for row in ahead if card in row["card"].lower()), None
        )
        for card in CARDS
    }
    apart = [row for row in rows if row["stage"] == "beside"]
    return seconds | {
        "judged_in_120_s": min((row["judged"] for row in ahead if row["budget_s"] == 120), default=None),
        "judged_in_120_s_without": min((row["judged"] for row in never if row["budget_s"] == 120), default=None),
        "large_seconds_to_5_percent": largest(large, "seconds_to_goal"),
        "compile_wait_share": largest(ahead, "compile_wait_share"),
        "compile_wait_share_without": largest(never, "compile_wait_share"),
        "probe_change_max": max(
            filter(None, (largest(apart, "micro_change"), largest(apart, "peak_change"))), default=None
        ),
        "alone_change_max": largest(apart, "alone_change"),
    }


if __name__ == "__main__":
    main()
