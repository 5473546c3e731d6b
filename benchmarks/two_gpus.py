"""Measure cold studies on two GPUs: against one GPU with the same budget, and full fine-tuning."""

import argparse
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from bench import (
    RANKS,
    STUDY_OPTIONS,
    Mode,
    Rows,
    fingerprint_of,
    finish,
    run_program,
    run_study,
    save,
    scratch,
    set_options,
    timed_trials,
    use_empty_compile_cache,
)

from autotune.api import load_study
from autotune.core.probe_types import Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.core.units import parse_duration
from autotune.study.storage.probe_store import ProbeStore

# For each study: the options of `autotune run`, beside `--gpu`, `--budget` and `--study`.
LORA = ["--model", "mistral-7b"]
FULL = ["--model", "llama-3.1-8b", "--space", "full"]
STUDIES = {
    "two": [*LORA, "--gpus", str(RANKS)],
    "one": [*LORA, "--gpus", "1"],
    "full8b": [*FULL, "--gpus", str(RANKS)],
}
TINY = ["--model", "demo-3m"]  # for a trial run on a CPU
BESIDE_S = 25.0  # that a study takes beside its budget, at most
COLUMNS = ["study", "config", "tokens_per_s", "confirmed", "first_compiled_s", "num_trials"]


def run_studies(args: argparse.Namespace) -> None:
    """Run cold studies, and compare the winner of two GPUs with the winner of one GPU.

    Each study has empty caches of Inductor and Triton. `two` and `one` tune LoRA on Mistral-7B with
    the same budget; `scaling` is the speed of the winner of two GPUs divided by the speed of the
    winner of one. `confirmed` says whether both winners were measured again with all their layers,
    on real ranks. `first_compiled_s` are the seconds from the start of the process until the end of
    the first trial on two GPUs with compiled layers. `full8b` tunes full fine-tuning of Llama 3.1
    8B with fp32 masters: its speed is `full8b_tokens_per_s`, of both GPUs together.

    Rows are stored at once. A study that would not end within `--seconds` is left to the next call.
    """
    rows, began = Rows.of(args), time.monotonic()
    lasts_s = parse_duration(args.budget) + BESIDE_S
    for name in args.only:
        if rows.has(study=name):
            continue
        if time.monotonic() - began + lasts_s > args.seconds:
            print(f"{name}: left to the next call, with --rows", flush=True)
            continue
        use_empty_compile_cache()
        rows.add({"study": name, **study_row(args, STUDIES[name])})
        print(f"{name}: done after {time.monotonic() - began:.0f} s", flush=True)
        save(args, rows.fingerprint, rows.plain)
    finish(args, rows.fingerprint, rows.plain, COLUMNS)


def study_row(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Run one study in a folder of its own, and return its winner and its trials."""
    pins: Mapping[str, Any] = {}
    if args.gpu == "cpu":
        options = [*TINY, *options[-2:], "--trials", "4", "--tokens-per-example", "64"]
        pins = {"compile_ahead": "always"}
    folder = scratch()
    url = f"sqlite:///{folder}/autotune.db"
    began = time.time()
    found = run_study(
        folder,
        *("--gpu", args.gpu, "--budget", args.budget, *options, *set_options(pins)),
        *("--study", "cold", "--out", "cold", "--storage", url, *args.options),
    )
    wall_s = time.time() - began
    record = load_study("cold", url).record
    with closing(ProbeStore(url)) as store:
        stored = store.probes_of_study("cold")

    winner = TrainConfig(**found["winner"]["config"])
    trials = timed_trials(stored, record.task, began)
    compiled = [trial["end_s"] for trial in trials if " compiled" in trial["config"]]
    confirmations = [
        row.result
        for row in stored
        if row.result.rung is Rung.CONFIRM
        and row.result.config == winner
        and row.result.outcome is Outcome.OK
    ]
    return {
        "gpus": winner.num_gpus,
        "config": winner.label(),
        "budget_s": parse_duration(args.budget),
        "wall_s": wall_s,
        "tokens_per_s": found["winner"]["performance"]["tokens_per_second"],
        "evidence": found["winner"]["evidence"],
        "confirmed": bool(confirmations),
        "num_confirmations": len(confirmations),
        "precision": winner.precision,
        "peak_gib": found["winner"]["memory"]["peak_reserved_gib"],
        "first_compiled_s": min(compiled, default=None),
        "num_trials": len(trials),
        "too_short_for": list(record.too_short_for),
        "caveats": found["caveats"],
        "trials": trials,
        "fingerprint": fingerprint_of(found),
    }


def summarize_studies(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_name = {row["study"]: row for row in rows}
    two, one, full = (by_name.get(name, {}) for name in ("two", "one", "full8b"))
    return {
        "scaling": two["tokens_per_s"] / one["tokens_per_s"] if two and one else None,
        "confirmed": two["confirmed"] and one["confirmed"] if two and one else None,
        "first_compiled_s": two.get("first_compiled_s"),
        "two_tokens_per_s": two.get("tokens_per_s"),
        "one_tokens_per_s": one.get("tokens_per_s"),
        "full8b_tokens_per_s": full.get("tokens_per_s"),
        "full8b_confirmed": full.get("confirmed"),
    }


MODES = {
    "": Mode(
        run=run_studies,
        result="two_gpus",
        summarize=summarize_studies,
        options=STUDY_OPTIONS
        | {
            "--budget": "150s",
            "--only": {
                "nargs": "*",
                "choices": list(STUDIES),
                "default": list(STUDIES),
                "help": "studies to run",
            },
            "--seconds": {"default": 545.0, "help": "begin no study that would end after this"},
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
