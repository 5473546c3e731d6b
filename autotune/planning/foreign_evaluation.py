"""Reads the settings of evaluations between training steps from another tool's file.

After each evaluation batch, transformers' Trainer frees the logits, unless it computes metrics.
This module follows the sources of transformers 5.23, TRL 1.16, Axolotl 0.19 and LLaMA-Factory
0.9.5.
"""

from typing import Any

from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.export.keys import default_of, key_of
from autotune.planning.foreign_file import MAX_COUNT, File
from autotune.prediction.estimate import Evaluation
from autotune.report.values.check import SWIFT, TRANSFORMERS

_OFF: tuple[Any, ...] = (None, False, "", "no", "none", "false", "No", "NO")


def evaluation_of(
    file: File, tool: str, config: TrainConfig, objective: Objective
) -> Evaluation | None:
    """Return the settings of a run's evaluations, or None if the run does not evaluate."""
    evaluates = {
        "trl": _trl_evaluates,
        "axolotl": _axolotl_evaluates,
        "llamafactory": _llamafactory_evaluates,
    }
    if not evaluates[tool](file):
        return None

    for key in ("predict_with_generate", "do_causal_lm_eval", "do_bench_eval", "compute_metrics"):
        file.note(file.has(key), "evaluated_more", key=key)
    return Evaluation(
        rows=_rows(file, tool, config),
        loss=config.loss if objective is not Objective.SFT else _loss(file, tool, config),
        kept_tokens=_kept_examples(file) * config.seq_len,
        # ms-swift computes no logits of tokens without a label (`use_logits_to_keep`).
        answers_only=file.has(SWIFT) and objective is Objective.SFT,
    )


def held_out(file: File, tool: str) -> float:
    """Return the number of examples that the tool splits off for evaluations.

    A number below 1 is their share. The tool splits them off even if the run never evaluates.
    """
    key = key_of(tool, "eval_share")
    return float(file.number(key, default=0, least=0)) if tool != "trl" else 0.0


def _strategy(file: File) -> bool:
    """Return whether an evaluation strategy is set.

    The value false means no strategy, because YAML reads an unquoted `no` as false.
    """
    return file.get("eval_strategy", "evaluation_strategy")[1] not in _OFF


def _trl_evaluates(file: File) -> bool:
    # TRL's command loads the test split only if an evaluation strategy is set. do_eval has no
    # effect.
    return _strategy(file)


def _llamafactory_evaluates(file: File) -> bool:
    # With do_eval, LLaMA-Factory evaluates once, after the last step.
    return (held_out(file, "llamafactory") > 0 or file.has("eval_dataset")) and (
        _strategy(file) or file.flag("do_eval")
    )


def _axolotl_evaluates(file: File) -> bool:
    if not held_out(file, "axolotl") and not file.has("test_datasets"):
        return False
    epochs = file.number(key_of("axolotl", "epochs"), default=default_of("axolotl", "epochs"))
    per_epoch = file.number("evals_per_epoch", default=0, least=0)
    return _strategy(file) or file.has("eval_steps") or per_epoch * epochs > 1


def _rows(file: File, tool: str, config: TrainConfig) -> int | None:
    """Return the number of examples in an evaluation batch.

    Returns None if evaluation batches have the same size as the training's micro batches.
    """
    # If rows are packed, Axolotl evaluates with the training's micro batch size.
    if tool == "axolotl" and config.packing and file.flag("eval_sample_packing", default=True):
        return None
    default = default_of(tool, "eval_batch")
    return file.whole(key_of(tool, "eval_batch"), default=default or 0, least=0) or None


def _loss(file: File, tool: str, config: TrainConfig) -> str:
    """Return the kind of loss that evaluation batches use, as a value of the knob `loss`.

    Liger's fused loss avoids storing the logits in training, but not in evaluations. Cut Cross
    Entropy and TRL avoid storing them in both.
    """
    own = tool == "trl" and not file.has(TRANSFORMERS, SWIFT)
    fused = own or (file.flag("cut_cross_entropy", default=True) and _has_cut(file))
    return config.loss if fused else "full"


def _has_cut(file: File) -> bool:
    return "cut_cross_entropy" in " ".join(file.names("plugins")).lower()


def _kept_examples(file: File) -> int:
    """Return the number of examples whose predictions stay on the GPU until the evaluation ends.

    Returns 0 if the run keeps no predictions on the GPU, or if the number is unknown.
    """
    if not file.flag("compute_accuracy") or file.has("eval_accumulation_steps"):
        return 0
    share = held_out(file, "llamafactory")
    samples = file.whole("max_samples", default=0, least=0, most=MAX_COUNT)
    known = int(share) if share >= 1 else int(share * samples)
    file.note(not known, "kept_predictions")
    return known
