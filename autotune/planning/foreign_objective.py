"""Reads the objective of another tool's run, and the knobs that depend on it."""

from typing import Any

from autotune.core.objective import NOT_OFFERED, Objective
from autotune.export.keys import default_of, key_of
from autotune.planning.foreign_file import File, Refused, quote, table
from autotune.report.values.check import SWIFT

WHOLE_LOGITS = "whole_logits"  # the note about a loss that holds the logits of a micro batch
WITH_LOGITS = {"llamafactory": "LLaMA-Factory", "axolotl": "Axolotl's TRL 1.8"}
REMEDY = (
    "pass the file of a supported run: for sft, dpo, kto, grpo or reward, with LoRA or full "
    "fine-tuning, of a checkpoint that is not quantised"
)


def objective_of(file: File, tool: str) -> Objective:
    """Return the objective of a tool's file. Raises Refused if it is unknown or unsupported."""
    readers = {
        "trl": _trl_objective,
        "axolotl": _axolotl_objective,
        "llamafactory": _llamafactory_objective,
    }
    return readers[tool](file)


def _trl_objective(file: File) -> Objective:
    """Return the objective that the user gave, or else the objective that the file's keys imply.

    Some keys belong to only one of TRL's trainers, and each trainer has one objective.
    """
    losses = file.names("loss_type")
    known_losses = table("objective_losses")
    if file.has("objective"):
        objective = Objective(file.text("objective"))
        known = known_losses.get(objective, [])
        if not set(losses) <= set(known):
            raise _unknown_loss(objective, losses, known)
        return objective

    # The key `loss_type`, if set, determines TRL's trainer.
    for name, known in known_losses.items():
        if losses and set(losses) <= set(known):
            return Objective(name)
    if losses and file.has(*table("objective_keys")["grpo"]):
        raise _unknown_loss(Objective.GRPO, losses, known_losses["grpo"])
    if losses:
        raise Refused(
            "loss_type",
            f"no supported trainer of TRL has the loss {quote(', '.join(losses))}",
            REMEDY,
        )

    # Without `loss_type`, a key that belongs to only one trainer determines it.
    for name, keys in table("objective_keys").items():
        if file.has(*keys):
            return Objective(name)
    for key in ("beta", "max_prompt_length"):
        if file.has(key):
            reason = (
                "the file does not say if the objective is dpo, kto or another; only TRL's command "
                "says it"
            )
            raise Refused(key, reason, "give --objective dpo, kto or reward")
    return Objective.SFT


def _unknown_loss(objective: Objective, losses: tuple[str, ...], known: list[str]) -> Refused:
    unknown = ", ".join(loss for loss in losses if loss not in known)
    return Refused(
        "loss_type",
        f"TRL's trainer for {objective.upper()} has no loss {quote(unknown)}",
        f"write one of {', '.join(known)}; or remove the key for this check if only a newer "
        "version has the loss"
        if known
        else "remove the key",
    )


def _axolotl_objective(file: File) -> Objective:
    name = file.text("rl") if file.has("rl") else ""
    if file.flag("reward_model"):
        return Objective.REWARD
    return _known_objective("rl", name, table("rl")) if name else Objective.SFT


def _llamafactory_objective(file: File) -> Objective:
    objective = _known_objective("stage", file.text("stage", default="sft"), table("stages"))
    loss = file.text("pref_loss", default="sigmoid")
    if objective is Objective.DPO and loss in ("orpo", "simpo"):
        raise Refused("pref_loss", f"no probe trains for {loss}", REMEDY)
    return objective


def _known_objective(key: str, name: str, known: dict[str, str]) -> Objective:
    if name not in known:
        why = NOT_OFFERED.get(name, "no probe trains for it")
        raise Refused(
            key,
            f"{quote(name)} is none of the objectives {', '.join(sorted(known))}: {why}",
            REMEDY,
        )
    return Objective(known[name])


def objective_knobs(
    file: File, tool: str, objective: Objective, *, packing: bool
) -> dict[str, Any]:
    """Return the knobs that an objective other than SFT sets.

    Adds notes on differences between the tool's trainer and the estimate.
    """
    if packing:
        key = key_of(tool, "packing")
        raise Refused(key, f"sequences of {objective} are not packed", "switch it off")

    # KTO compares the answers of a micro batch, except with the loss apo_zero_unpaired. TRL and
    # Axolotl refuse a single answer; the other tools train on it.
    checks = tool != "llamafactory" and not file.has(SWIFT)
    compares = checks and file.names("loss_type") != ("apo_zero_unpaired",)
    if objective is Objective.KTO and compares and whole_number(file, tool, "micro_batch_size") < 2:
        key = key_of(tool, "micro_batch_size")
        raise Refused(
            key,
            "for KTO, TRL compares the answers within a micro batch, so it needs at least two",
            "write 2 or more",
        )

    own_trainer = tool == "axolotl" or file.has(SWIFT)
    full_logits = tool == "llamafactory" or (own_trainer and objective is not Objective.REWARD)
    if objective is Objective.GRPO:
        return {"loss": "chunked", "packing": False}
    if full_logits and objective is Objective.REWARD:
        file.note(True, "value_head")
    elif full_logits:
        file.note(
            True,
            WHOLE_LOGITS,
            tool=SWIFT if file.has(SWIFT) else WITH_LOGITS[tool],
        )

    for key in table("other_references"):
        file.note(file.has(key), "other_reference", key=key)
    file.note(file.flag("precompute_ref_log_probs"), "precomputed")
    return {"loss": "chunked", "packing": False}


def whole_number(file: File, tool: str, knob: str) -> int:
    """Return the integer that the file has for a knob under the tool's key, or the default."""
    return file.whole(key_of(tool, knob), default=default_of(tool, knob))
