"""Reads the rollouts of a GRPO run from a file of TRL or Axolotl."""

from dataclasses import replace
from importlib import metadata

from autotune.core.rollout_types import COLOCATED, SERVER, TRANSFORMERS, Engine
from autotune.planning.foreign_file import File, Refused, table
from autotune.problem.rollouts import Rollouts
from autotune.report.values.check import SWIFT

PROMPT_TOKENS = 512  # the longest prompt, if nothing says it; older versions of TRL cut it off here
# ms-swift moves these terms of memory to the host during a rollout.
OFFLOADS = {"offload_model": ("weights", "adapters"), "offload_optimizer": ("optimizer",)}
# TRL 1.9 computes probabilities from whole logits, and TRL 1.16 in tiles.
IN_TILES = (1, 16)
# Defaults of TRL 1.16
GENERATIONS, COMPLETION_TOKENS, SHARE = 8, 512, 0.3
# Defaults of older versions of TRL
OLDER_COMPLETION_TOKENS, OLDER_BETA = 256, 0.04


def older_key(file: File) -> str:
    """Return a key that only older versions of TRL read, or "" if the file has none."""
    return next(filter(file.has, table("older_rollouts")), "")


def with_rollout_keys(file: File) -> File:
    """Return a file of Axolotl with the keys of its mapping `trl` at the top level."""
    return replace(file, values=file.values | file.mapping("trl").values)


def rollouts_of(
    file: File, tool: str, micro_batch: int, accumulation: int, num_gpus: int | None
) -> Rollouts:
    """Return the rollouts of a GRPO run.

    Raises Refused if TRL would refuse the numbers of completions.
    """
    older = older_key(file)
    is_swift = file.has(SWIFT)
    file.note(bool(older) and not is_swift, "older_rollouts", key=older)
    file.note(is_swift, "swift")
    prompt = file.whole("max_prompt_length", default=PROMPT_TOKENS)
    file.note(not file.has("max_prompt_length"), "assumed_prompts", tokens=prompt)
    completion = file.whole(
        "max_completion_length", default=OLDER_COMPLETION_TOKENS if older else COMPLETION_TOKENS
    )

    sequences = _sequences(file, micro_batch, accumulation, num_gpus or 1)
    beta = file.number("beta", default=OLDER_BETA if older else 0.0, least=0)
    steps = file.whole("num_iterations", default=1) * (sequences // micro_batch)
    corrects = file.flag("vllm_importance_sampling_correction", default=not older)
    engine = _engine(file, older)
    uses_vllm = engine.kind != TRANSFORMERS
    return Rollouts(
        prompt_tokens=prompt,
        completion_tokens=completion,
        sequences=sequences,
        num_generations=file.whole("num_generations", default=GENERATIONS),
        has_reference=beta > 0,
        scores=bool(older) or accumulation % steps != 0 or (uses_vllm and corrects) or beta > 0,
        whole_logits=_holds_logits(file, tool, older),
        offloads=tuple(
            term for key, terms in OFFLOADS.items() for term in (terms if file.flag(key) else ())
        ),
        engine=engine,
    )


def _holds_logits(file: File, tool: str, older: str) -> bool | None:
    """Return whether the run holds the logits of a whole micro batch, or None if unknown."""
    # Liger's loss, which versions before 1.16 have under both keys, computes them in tiles.
    if file.flag("use_liger_loss") or file.flag("use_liger_kernel"):
        return False
    # ms-swift, and TRL 1.8, which Axolotl has, compute the probabilities from whole logits.
    if older or tool == "axolotl":
        return True
    try:
        installed = tuple(int(part) for part in metadata.version("trl").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        file.note(True, "logits_by_version")
        return None
    return installed < IN_TILES


def _sequences(file: File, micro_batch: int, accumulation: int, num_gpus: int) -> int:
    """Return the number of completions that each GPU generates at once."""
    generations = file.whole("num_generations", default=GENERATIONS)
    if generations < 2:
        raise Refused(
            "num_generations",
            "GRPO compares the completions to a prompt, so it needs two or more",
            "write 2 or more",
        )
    steps = file.whole("steps_per_generation", default=accumulation)
    total = file.whole("generation_batch_size", default=micro_batch * num_gpus * steps)
    if file.has("generation_batch_size") and file.has("steps_per_generation"):
        raise Refused(
            "generation_batch_size", "TRL does not take steps_per_generation too", "remove one"
        )
    if total % generations or total % (micro_batch * num_gpus):
        raise Refused(
            "num_generations",
            f"a generation has {total} completions, which is not a multiple of {generations}, or "
            f"not of the {micro_batch * num_gpus} completions of a micro batch",
            "change the batch size, gradient_accumulation_steps or num_generations",
        )
    return total // num_gpus


def _engine(file: File, older: str) -> Engine:
    """Return the engine that generates the completions."""
    if not file.flag("use_vllm"):
        return Engine(kind=TRANSFORMERS)
    at_server = file.has("vllm_server_host", "vllm_server_base_url")
    mode = file.text("vllm_mode", default="server" if older or at_server else "colocate")
    if mode not in ("server", "colocate"):
        raise Refused("vllm_mode", f"colocate or server is needed, not {mode!r}", "write colocate")
    if mode == "server":
        file.note(True, "vllm_server")
        return Engine(kind=SERVER)
    share = file.number("vllm_gpu_memory_utilization", default=SHARE, least=0.01, most=1)
    return Engine(
        kind=COLOCATED,
        share=share,
        sleeps=file.flag("vllm_enable_sleep_mode"),
        # By default, vLLM's limit is the model's context, see `adapt_to_model`.
        max_tokens=file.whole("vllm_max_model_length", "vllm_max_model_len", default=0, least=0),
        num_gpus=file.whole("vllm_tensor_parallel_size", default=1),
    )
