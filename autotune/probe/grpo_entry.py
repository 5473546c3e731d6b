"""Runs TRL's GRPOTrainer on a folder with a model, and logs the seconds and memory of each phase.

`python -m autotune.probe.grpo_entry FILE.json` trains in the current folder, which holds `model/`
and `data/train.jsonl` of `synthetic_model`. The file has these keys:

- `arguments`: the arguments of GRPOConfig. `lora`: the arguments of PEFT's
  LoraConfig, or null.
- `mean_tokens`: the mean of the completions' lengths. The model ends a completion at each token
  with the same probability. 0 means that every completion has the largest length.
- `longest_steps`: the numbers of steps in which every completion has the largest length.

The last line of output is JSON: the phases of each step, and the lengths of the completions.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from autotune.core.probe_types import Phase
from autotune.core.process import die_with_parent
from autotune.probe.meters import open_meter
from autotune.probe.phase_log import PhaseLog
from autotune.probe.rollout_trainer import RolloutPhases
from autotune.trainer.packed_completions import trainer_class

STEPS = "steps.jsonl"  # the file in the current folder that gets a line of JSON after each step
SAMPLED_ROWS = 4096  # rows of the head whose spread stands for all rows
END = 0  # the token that ends a completion; its row in the head is 0


class RunLog(PhaseLog):
    """The phases of TRL's trainer."""

    def begin_rollout(self, *, returns_memory: bool) -> None:
        """Begin a generation.

        With `returns_memory`, the allocator returns its unused memory first. TRL does so a moment
        later, before it wakes the engine.
        """
        if returns_memory:
            self.meter.synchronize()
            self.meter.return_unused()
        self.enter(Phase.ROLLOUT)

    def end_step(self) -> None:
        """End an optimizer step. The rest of the phase belongs to the next step."""
        self.enter(self.phase)
        self.step += 1


class Logged(RolloutPhases):
    """A mixin for TRL's trainer that logs its phases."""

    recorder: RunLog

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Log a micro batch."""
        self.recorder.enter(Phase.FORWARD)
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.recorder.enter(Phase.OPTIMIZER)
        return loss

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Log that the backward pass begins."""
        loss = super().compute_loss(model, *args, **kwargs)  # type: ignore[misc]
        if model.training:
            self.recorder.enter(Phase.BACKWARD)
        return loss


class _Steps(TrainerCallback):
    """Sets the lengths of each step's completions, and writes a line after each step."""

    def __init__(self, log: RunLog, ends: Callable[[bool], None], longest: list[int]) -> None:
        self._log = log
        self._ends = ends
        self._longest = longest

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._ends(self._log.step in self._longest)

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self._log.end_step()
        if not state.is_local_process_zero:
            return
        with Path(STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(step_row(self._log, self._log.step - 1)) + "\n")


def step_row(log: PhaseLog, step: int) -> dict[str, Any]:
    """The seconds and the memory peak of each phase of a step."""
    spans = [span for span in log.spans if span.step == step and span.phase is not Phase.LOAD]
    phases = dict.fromkeys(span.phase.value for span in spans)
    return {
        "step": step,
        "seconds": {
            name: sum(span.seconds for span in spans if span.phase == name) for name in phases
        },
        "peak_gib": {
            name: max(span.peak_gib for span in spans if span.phase == name) for name in phases
        },
    }


def main() -> None:
    """Train according to the file, and print the phases."""
    die_with_parent()
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began = time.perf_counter()
    # Only the first of several ranks logs the memory of its GPU.
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    log = RunLog(open_meter("cuda" if torch.cuda.is_available() and is_first else "cpu"))
    lengths: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append([len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    arguments = {"output_dir": "out", "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    log.enter(Phase.LOAD)
    base = trainer_class(GRPOTrainer, wanted["arguments"])
    trainer: Any = type("LoggedTrainer", (Logged, base), {})(
        model="model",
        args=GRPOConfig(**(arguments | wanted["arguments"])),
        reward_funcs=reward,
        train_dataset=load_dataset("json", data_files="data/train.jsonl", split="train"),
        peft_config=LoraConfig(**wanted["lora"]) if wanted["lora"] else None,
    )
    trainer.recorder = log
    trainer.returns_memory = trainer.use_vllm and trainer.args.vllm_enable_sleep_mode
    if trainer.use_vllm:
        log_engine(trainer, log)
    ends = length_setter(trainer, wanted["mean_tokens"])
    trainer.add_callback(_Steps(log, ends, wanted.get("longest_steps", [])))
    started = time.perf_counter()
    trainer.train()
    log.enter(None)
    if is_first:
        _print(log, started - began, lengths)
    if trainer.use_vllm:
        # vLLM's end could print more lines, or hang.
        os._exit(0)


def _print(log: RunLog, start_s: float, lengths: list[list[int]]) -> None:
    """Print the result as the last line of output."""
    print(
        json.dumps(
            {
                "start_s": start_s,
                "load_gib": log.peaks_gib()[Phase.LOAD],
                "steps": [step_row(log, step) for step in range(log.step)],
                "lengths": lengths,
            }
        ),
        flush=True,
    )


def log_engine(trainer: Any, log: PhaseLog) -> None:
    """Log the phases of TRL's vLLM: sleep, wake-up, transfer of weights, generation."""

    def logged(owner: Any, name: str, phase: Phase) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with log.inside(phase):
                return original(*args, **kwargs)

        setattr(owner, name, call)

    engine = trainer.vllm_generation
    if engine.mode == "colocate":
        logged(engine.llm, "generate", Phase.ROLLOUT)
        logged(engine.llm, "sleep", Phase.SLEEP)
        logged(engine.llm, "wake_up", Phase.WAKE)
    logged(engine, "sync_weights", Phase.TRANSFER)


def length_setter(trainer: Any, mean_tokens: float) -> Callable[[bool], None]:
    """A function that makes the completions of the next steps end by chance, or never.

    The head's row of the end token must be 0. Its bias is the logarithm of its probability times
    the sum of the other tokens' weights, which are log-normal with random weights.
    """
    head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight
    vocab_size, hidden = head.shape
    spread = hidden * float(head[1:SAMPLED_ROWS].float().var()) / 2
    bias = math.log(vocab_size / max(mean_tokens, 1.0)) + spread
    never = mean_tokens == 0
    given = trainer.args.generation_kwargs or {}

    def use_vllm(longest: bool) -> None:
        by_chance = {"logit_bias": {END: bias}}
        more = {"ignore_eos": True} if longest or never else by_chance
        trainer.vllm_generation.generation_kwargs = given | more

    def use_transformers(longest: bool) -> None:
        config = trainer.generation_config
        all_tokens = longest or never
        config.min_new_tokens = config.max_new_tokens if all_tokens else None
        config.sequence_bias = None if all_tokens else {(END,): bias}

    return use_vllm if trainer.use_vllm else use_transformers


if __name__ == "__main__":
    main()
