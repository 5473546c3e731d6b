"""Checks of the rollouts of a GRPO run: whether vLLM starts, and how much its cache holds."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.rollout_types import COLOCATED
from autotune.core.units import fmt_gib, gib
from autotune.planning.foreign_file import Refused, table
from autotune.prediction.rollout_memory import (
    cache_bytes,
    cached_tokens,
    engine_weights_gib,
    needed_share,
)
from autotune.problem.length_distribution import Lengths
from autotune.report.values.check import ForeignConfig

SLEEP_KEY = "vllm_enable_sleep_mode"
SHARE_KEY, LENGTH_KEY = "vllm_gpu_memory_utilization", "vllm_max_model_length"
STEP = 0.05  # proposed shares are multiples of this number


def with_prompts(run: ForeignConfig, lengths: Lengths) -> ForeignConfig:
    """Return the run with the longest prompt of `lengths`, unless these lengths are assumed."""
    rollouts = run.rollouts
    if rollouts is None or lengths.source == "assumed":
        return run
    assumed = table("notes")["assumed_prompts"].format(tokens=rollouts.prompt_tokens)
    rollouts = replace(rollouts, prompt_tokens=lengths.longest)
    return replace(
        run,
        rollouts=rollouts,
        config=replace(run.config, seq_len=rollouts.longest),
        notes=tuple(note for note in run.notes if note != assumed),
    )


def rounded_share(share: float | None) -> float | None:
    """Return the next multiple of STEP that is not smaller, or None for None or more than 0.95."""
    if share is None or share > 1 - STEP:
        return None
    return round(STEP * math.ceil(share / STEP - 1e-9), 2)


def refuse_engine(model: ModelSpec, run: ForeignConfig, card_gib: float) -> None:
    """Raise Refused if vLLM surely refuses to start.

    Its sequences are longer than the model's context, or its cache does not hold one sequence.
    """
    rollouts = run.rollouts
    if rollouts is None or rollouts.engine.kind != COLOCATED:
        return
    engine = rollouts.engine
    context = _longest_context(model)
    if context is not None and engine.max_tokens > context:
        raise Refused(
            LENGTH_KEY,
            f"vLLM refuses to start: {engine.max_tokens:,} tokens are more than the model's "
            f"context of {context:,}",
            f"write {LENGTH_KEY}: {context}",
        )

    cached = cached_tokens(model, run.config, rollouts, card_gib)
    if cached is None or cached[1] >= engine.max_tokens:
        return

    weights, _ = engine_weights_gib(model, run.config, rollouts) or (0.0, 0.0)
    one = gib(cache_bytes(model)[0] * engine.max_tokens) / engine.num_gpus
    shortest = needed_share(model, run.config, rollouts, card_gib, rollouts.longest)
    remedy = "take a larger GPU, a 4-bit base, or vllm_mode: server"
    if share := rounded_share(shortest):
        length = f"{LENGTH_KEY}: {rollouts.longest}"
        larger = f"{SHARE_KEY}: {share:g}" if share > engine.share else ""
        remedy = "write " + " and ".join(filter(None, (length, larger)))
    raise Refused(
        SHARE_KEY,
        f"vLLM refuses to start: its weights take {fmt_gib(weights)}, and the cache of one "
        f"sequence of {engine.max_tokens:,} tokens {fmt_gib(one)}, but its share is "
        f"{fmt_gib(engine.share * card_gib)}",
        remedy,
    )


def _longest_context(model: ModelSpec) -> int | None:
    """Return the context that vLLM derives from a config, or None if a RoPE factor changes it."""
    text = model.config.get("text_config")
    configs = [model.config, text] if isinstance(text, dict) else [model.config]
    for config in configs:
        for key in ("rope_scaling", "rope_parameters"):
            if '"factor"' in json.dumps(config.get(key)):
                return None
    return model.max_seq_len


def engine_edits(model: ModelSpec, run: ForeignConfig, card_gib: float) -> list[dict[str, Any]]:
    """Return changes of a colocated vLLM that save memory, each alone, the fastest run first.

    A smaller share is proposed if the cache then still holds all completions of a generation, or
    else a quarter of them.
    """
    rollouts = run.rollouts
    if rollouts is None or rollouts.engine.kind != COLOCATED:
        return []
    engine = rollouts.engine
    tokens = rollouts.sequences * rollouts.longest * engine.num_gpus
    wanted = (tokens, max(tokens / 4, rollouts.longest))
    shares = [
        rounded_share(needed_share(model, run.config, rollouts, card_gib, each)) for each in wanted
    ]
    smaller = next((share for share in shares if share and share < engine.share), None)
    edits: list[dict[str, Any]] = [] if smaller is None else [{SHARE_KEY: smaller}]
    return edits if engine.sleeps else [*edits, {SLEEP_KEY: True}]


def engine_notes(model: ModelSpec, run: ForeignConfig, card_gib: float) -> Iterator[str]:
    """Yield a sentence if vLLM may cut completions off, or may generate them in turns."""
    rollouts = run.rollouts
    if rollouts is None or rollouts.engine.kind != COLOCATED:
        return
    total = rollouts.prompt_tokens + rollouts.completion_tokens
    if rollouts.longest < total:
        yield table("notes")["cut_by_vllm"].format(tokens=rollouts.longest, total=total)
    cached = cached_tokens(model, run.config, rollouts, card_gib)
    needed = rollouts.sequences * rollouts.longest * rollouts.engine.num_gpus
    if cached is not None and cached[0] < needed:
        tokens = max(0, round(cached[0], -3))
        yield table("notes")["short_cache"].format(tokens=int(tokens), needed=needed)
