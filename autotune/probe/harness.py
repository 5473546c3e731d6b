"""The probe itself: a few real optimizer steps through transformers.Trainer, with its phases timed and weighed.

What is measured is what the full run executes: loader, forward, backward, clipping, optimizer, logging. An optimizer
step of the probe takes one or two micro batches (up to four when confirming); the full run's step is composed from them
in `objective.step_time_s`. Nothing here decides what an outcome means: failures leave as exceptions.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from autotune.core.probe_types import Measurement, Phase, ProbeRequest
from autotune.core.units import gib
from autotune.probe.accounting import logical_params, optimizer_gib, tensor_gib
from autotune.probe.meters import Meter
from autotune.probe.model_settings import model_settings
from autotune.probe.recorder import MAX_WARMUP_STEPS, Recorder, compiled_graphs
from autotune.probe.resident import ResidentModel, attach, module_names
from autotune.probe.runtime.chunked_loss import CHUNK_TOKENS, chunked_loss
from autotune.probe.runtime.lean_trainer import LeanTrainer, compile_layers, training_arguments
from autotune.probe.runtime.model_builder import decoder_layers, set_checkpointing

KEPT_LOSSES = 8
RECOMPILE_LIMIT = 8  # graphs a probe may compile of one function: torch's own default in a fresh process


class BadLoss(Exception):
    """The loss was not finite, or exactly 0."""


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """`num_rows` rows of `seq_len` random tokens, without attention mask.

    They are full, or hold examples of these lengths and padding at their end, of which nothing is to be predicted: a
    card at its power limit may multiply tokens that are all alike faster. Packed, positions that begin anew keep
    examples apart, and nothing is to be predicted across their seams.
    """

    def __init__(
        self,
        num_rows: int,
        seq_len: int,
        vocab_size: int,
        seed: int,
        rows: tuple[tuple[int, ...], ...] = (),
        *,
        packing: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, vocab_size, (min(num_rows, 64), seq_len), generator=generator)
        self._rows = [{"input_ids": row, "labels": row} for row in self.tokens]
        self._num_rows = num_rows
        for index, row in enumerate(self._rows if rows else ()):
            examples = rows[index % len(rows)]
            used = sum(examples)
            row["input_ids"][used:] = 0  # as the exported script pads
            positions = torch.cat([torch.arange(length) for length in (*examples, seq_len - used)])
            row["labels"] = row["labels"].masked_fill((positions == 0) | (torch.arange(seq_len) >= used), -100)
            if packing:
                row["position_ids"] = positions

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._rows[index % len(self._rows)]


class _Seams(TrainerCallback):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder.end_step():
            control.should_training_stop = True


class WrongPrecision(Exception):
    """Autocast was on or off against the request: the numbers would be another configuration's."""


class Recorded:
    """A Trainer with a recorder at the seams of its training step: to be mixed in before it."""

    recorder: Recorder
    train_dataset: Any

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        """In order: packed rows are of several kinds, and come so that any few of them stand for all."""
        return SequentialSampler(self.train_dataset)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.begin_fetch()
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.recorder.end_fetch()
        return found

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.recorder.begin_micro_batch()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.recorder.end_micro_batch()
        self.recorder.losses.append(loss)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if model.training:
            self.recorder.enter(Phase.BACKWARD)
        return loss


class ProbeTrainer(Recorded, LeanTrainer):
    """The exported script's Trainer with a recorder."""


class Probe:
    """One probe in progress. After a failure it still says what held memory (`held_gib`) and where it was."""

    def __init__(
        self,
        request: ProbeRequest,
        resident: ResidentModel,
        meter: Meter,
        emit: Callable[[Phase], None],
        lost_gib: float,
        scratch: str | None = None,
    ) -> None:
        """`lost_gib` is managed memory that earlier probes of this process left behind; `scratch` a place for files."""
        self.request, self.resident, self.meter, self.lost_gib = request, resident, meter, lost_gib
        self.scratch = scratch
        self.base = resident.base
        self.recorder = Recorder(meter, request, emit, self._state_gib)
        self.recorder.phase = Phase.LOAD
        self.model: nn.Module = resident.base
        self.trainer: Any = None
        self.model_gib = resident.model_gib
        self.managed_gib = 0.0
        self._loss: Callable[..., torch.Tensor] | None = None  # None leaves it to the model
        self._hooks: list[Any] = []
        self._names = dict(module_names(self.base))
        self.limit_gib = 0.0
        self.context_gib = 0.0

    def run(self) -> Measurement:
        """Train, time and weigh. Raises what training raises, NotSteady and BadLoss."""
        request, meter, config = self.request, self.meter, self.request.config
        self.context_gib = meter.context_gib()
        self.limit_gib = meter.cap(request.memory_gib, request.headroom, self.lost_gib)
        set_checkpointing(self.base, model_settings(config))
        self.model = attach(self.resident, config, meter.torch_device, request.seed)
        self.managed_gib = self._paged_state_gib()
        if self.managed_gib:
            self.limit_gib = meter.cap(request.memory_gib, request.headroom, self.managed_gib + self.lost_gib)
            if meter.reserved_gib() > self.limit_gib:
                raise torch.OutOfMemoryError(f"paged optimizer state needs {self.managed_gib:.2f} GiB beside the model")
        if config.loss == "chunked" and request.trainer == "transformers":  # TRL does so by itself
            self._loss = chunked_loss(self.base)
        if config.compile == "per_layer":
            self._compile()
        self._watch()
        with tempfile.TemporaryDirectory(prefix="autotune-", dir=self.scratch) as scratch:
            self.trainer = self._make_trainer(scratch)
            meter.reset_peak()
            self.recorder.phase = Phase.FIRST_STEP
            self.recorder.emit(Phase.FIRST_STEP)
            self.trainer.train()
            meter.synchronize()
            self.recorder.weigh()
            self.recorder.check_steady()
            losses = [float(loss) for loss in self.recorder.losses]
            if not all(math.isfinite(loss) and loss != 0.0 for loss in losses):
                raise BadLoss(f"the loss went {', '.join(f'{loss:.4g}' for loss in losses[:8])}")
            if request.evaluate:
                self._evaluate_and_save(scratch)
        return self._measurement(losses)

    def _compile(self) -> None:
        """Each layer by itself, as the exported script does. What earlier probes compiled stays, and serves again.

        The first layer's input requires gradients like all others': else that layer alone would be compiled anew.
        """
        if self.request.config.method == "lora":
            self.base.enable_input_require_grads()
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = RECOMPILE_LIMIT + compiled_graphs()
        dynamo.accumulated_recompile_limit = dynamo.recompile_limit
        dynamo.fail_on_recompile_limit_hit = True
        compile_layers(decoder_layers(self.model))

    def _watch(self) -> None:
        """Hooks at both ends of the layers: they check autocast and part the backward pass in head, layers, inputs."""
        embedding, head = self.base.get_input_embeddings(), self.base.get_output_embeddings()

        def part(tensor: torch.Tensor, name: str) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.recorder.enter_segment(name))

        if self.request.trainer == "trl":  # it takes the head's weights, and never calls it
            ends = self.base.base_model.register_forward_hook(
                lambda module, given, made: part(made.last_hidden_state, "backward_layers")
            )
        else:
            ends = head.register_forward_pre_hook(lambda module, given: part(given[0], "backward_layers"))
        self._hooks = [
            embedding.register_forward_pre_hook(self._check_autocast),
            embedding.register_forward_hook(lambda module, given, made: part(made, "backward_inputs")),
            ends,
        ]

    def _check_autocast(self, *_: Any) -> None:
        """Autocast is in force by the request, never by what ran before in this process."""
        wanted = self.request.config.precision in ("bf16_mixed", "fp16_mixed")
        if torch.is_autocast_enabled(self.meter.torch_device.type) is not wanted:
            raise WrongPrecision(f"autocast is {'off' if wanted else 'on'} with {self.request.config.precision}")

    def _state_gib(self) -> float:
        """What is alive between two steps."""
        return self.model_gib + self._adapters_gib() + optimizer_gib(self.trainer)[0]

    def _adapters_gib(self) -> float:
        return self.resident.adapters_gib()

    def held_gib(self) -> dict[str, float]:
        """What is allocated now, by cause; `activations` is what the others leave, logits within it by formula."""
        allocated = self.meter.allocated_gib()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        terms = {
            "weights": self.model_gib,
            "adapters": self._adapters_gib(),
            "gradients": sum(tensor_gib(parameter.grad) for parameter in trained if parameter.grad is not None),
            "optimizer": optimizer_gib(self.trainer)[0],
        }
        left = max(allocated - sum(terms.values()), 0.0)
        in_model = self.recorder.phase in (Phase.FORWARD, Phase.BACKWARD)
        logits = min(self._logits_gib(), left) if in_model and self._head_reached() else 0.0
        return terms | {"logits": logits, "activations": left - logits}

    def _head_reached(self) -> bool:
        """In the backward pass, or in a forward pass that already keeps more than the layers' inputs."""
        return self.recorder.phase is Phase.BACKWARD or self.meter.allocated_gib() > self.model_gib + self._logits_gib()

    def _logits_gib(self) -> float:
        """Logits in the compute dtype and their fp32 copy, as transformers' causal-LM loss holds them."""
        config = self.request.config
        compute = 4 if config.precision == "fp32" else 2
        tokens = min(config.tokens, CHUNK_TOKENS) if config.loss == "chunked" else config.tokens
        return gib(tokens * self.base.config.vocab_size * (compute + 4))

    def _paged_state_gib(self) -> float:
        """State that a paged optimizer will keep in managed memory: two 8-bit moments of each larger parameter."""
        if not self.request.config.optimizer.startswith("paged_") or self.meter.torch_device.type != "cuda":
            return 0.0
        # bitsandbytes pages the state of parameters from 1e5 elements on (Optimizer2State.get_state_buffer).
        return gib(2 * sum(p.numel() for p in self.model.parameters() if p.requires_grad and p.numel() >= 1e5))

    def _make_trainer(self, scratch: str) -> Any:
        request, config = self.request, self.request.config
        num_steps = MAX_WARMUP_STEPS + request.max_timed_steps + 1
        settings: dict[str, Any] = training_arguments(
            micro_batch_size=config.micro_batch_size,
            accumulation=request.micro_steps,
            optimizer=config.optimizer,
            precision=config.precision,
            kernels=config.kernels,
            loader_workers=config.loader_workers,
            learning_rate=config.learning_rate,
            on_cpu=self.meter.torch_device.type == "cpu",
        )
        settings |= {
            "output_dir": scratch,
            "max_steps": num_steps,
            "per_device_eval_batch_size": config.micro_batch_size,
            "save_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": False,  # it is on already, for each k-th layer
            "prediction_loss_only": True,
            "seed": request.seed,
        }
        num_rows = num_steps * request.micro_steps * config.micro_batch_size
        sizes, vocab_size = (num_rows, config.micro_batch_size), self.base.config.vocab_size
        train, held_out = (
            RandomRows(size, config.seq_len, vocab_size, request.seed + index, request.rows, packing=config.packing)
            for index, size in enumerate(sizes)
        )
        common: dict[str, Any] = {"model": self.model, "callbacks": [_Seams(self.recorder)]}
        trainer: Any
        if request.trainer == "trl":
            from autotune.probe import trl_trainer

            trainer = type("TrlProbeTrainer", (Recorded, trl_trainer.SFTTrainer), {})(
                **common,
                args=trl_trainer.config(config.seq_len, **settings),
                train_dataset=trl_trainer.rows(train.tokens, len(train)),
                eval_dataset=trl_trainer.rows(held_out.tokens, len(held_out)),
                processing_class=trl_trainer.tokenizer(),
            )
        else:
            trainer = ProbeTrainer(
                **common,
                args=TrainingArguments(**settings),
                train_dataset=train,
                eval_dataset=held_out,
                compute_loss_func=self._loss,
            )
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.recorder = self.recorder
        return trainer

    def _evaluate_and_save(self, scratch: str) -> None:
        """One evaluation batch and one adapter save."""
        assert self.trainer is not None
        self.recorder.phase = Phase.EVALUATE
        self.recorder.emit(Phase.EVALUATE)
        self.trainer.evaluate()
        self.recorder.weigh()
        if self.request.config.method == "lora":
            self.recorder.phase = Phase.SAVE
            self.recorder.emit(Phase.SAVE)
            self.trainer.save_model(f"{scratch}/adapter")

    def _measurement(self, losses: list[float]) -> Measurement:
        recorder, meter = self.recorder, self.meter
        steps, micros, rests, phases = recorder.times()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        on_device, paged = optimizer_gib(self.trainer)
        bookkeeping = (Phase.FIRST_STEP, Phase.STEADY)
        peaks: dict[Phase, float] = {phase: peak for phase, peak in recorder.peaks.items() if phase not in bookkeeping}
        return Measurement(
            step_s=tuple(steps),
            micro_step_s=tuple(micros),
            rest_s=tuple(rests),
            micro_steps=self.request.micro_steps,
            phase_s={phase: seconds for phase, seconds in phases.items() if phase is not Phase.STEADY},
            phase_peak_gib=peaks,
            segment_peak_gib={name: peak for name, peak in recorder.segments.items() if name not in bookkeeping},
            host_micro_s=recorder.host_micro_s(),
            model_gib=self.model_gib,
            adapters_gib=self._adapters_gib(),
            gradients_gib=sum(map(tensor_gib, trained)),
            optimizer_gib=on_device,
            peak_allocated_gib=max(recorder.peaks.values()),
            peak_reserved_gib=recorder.reserved,
            limit_gib=self.limit_gib,
            context_gib=self.context_gib,
            managed_gib=paged if meter.torch_device.type == "cuda" else 0.0,
            alloc_retries=meter.alloc_retries(),
            loss_first=losses[0],
            loss_last=losses[-1],
            losses=tuple(losses[:KEPT_LOSSES]),
            trainable_params=sum(parameter.numel() for parameter in trained),
            total_params=logical_params(self.model),
        )

    def close(self) -> None:
        """Let go of the Trainer and what accelerate keeps of it. The model is put right by `model.clean`."""
        from accelerate.state import AcceleratorState, GradientState

        for hook in self._hooks:
            hook.remove()
        module_names(self.base).update(self._names)
        vars(self.model).pop("train", None)  # LeanTrainer's
        if self.trainer is not None:
            self.trainer.callback_handler.callbacks.clear()
            self.trainer.optimizer = self.trainer.lr_scheduler = None
            self.trainer.accelerator.free_memory()
            self.trainer = None
        if optim := sys.modules.get("bitsandbytes.optim"):
            # The Trainer registers the embedding there for 8-bit optimizers, which would keep it alive for good.
            optim.GlobalOptimManager.get_instance().initialize()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
