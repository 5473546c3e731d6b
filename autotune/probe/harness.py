"""The probe: a few real optimizer steps of transformers' Trainer, measured by phase.

The probe measures the time and memory of the full run's work: loader, forward, backward, clipping,
optimizer, logging. An optimizer step of the probe has one or two micro batches, or up to four when
a study confirms its best configurations. `problem.performance` computes the step time of the full
run from the times of these micro batches. A failed probe raises an exception, and `worker` decides
its outcome.
"""

import copy
import itertools
import math
import operator
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from autotune.core.micro_profile import MicroBatchProfile, Part
from autotune.core.objective import Objective
from autotune.core.parallelism import BUILT_AS_SHARDS, FSDP2
from autotune.core.probe_types import (
    KernelTimes,
    Measurement,
    MicroBatch,
    Phase,
    ProbeRequest,
    Rung,
    SkewedRouting,
)
from autotune.core.rollout_types import TRANSFORMERS
from autotune.core.units import gib
from autotune.probe.accounting import (
    free_paged_state,
    logical_params,
    optimizer_gib,
    paged_state_gib,
    parameter_gib,
    tensor_gib,
    trained_parameters,
    whole_shape,
)
from autotune.probe.kernels import kernel_times, list_kernels, run_profiled
from autotune.probe.meters import Meter
from autotune.probe.micro_profiler import parts_of, profile_of, ranges, record_events
from autotune.probe.model_settings import model_settings
from autotune.probe.rank import Rank
from autotune.probe.recorder import MAX_WARMUP_ROUNDS, Recorder, compiled_graphs
from autotune.probe.resident import ResidentModel, attach, clean, module_names
from autotune.probe.schedule import NEW_LENGTHS, NEW_LENGTHS_S
from autotune.probe.skewed_routing import hottest_load, routers, skew_routing
from autotune.trainer import images, rows, varlen
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.graphs import is_capturing
from autotune.trainer.labels import label_loss
from autotune.trainer.lean_trainer import (
    LeanTrainer,
    compile_layers,
    shard_outline,
    sharing_arguments,
    training_arguments,
)
from autotune.trainer.model_builder import (
    compute_in_tiles,
    decoder_layers,
    is_outline,
    language_model,
    require_input_gradients,
    set_checkpointing,
    set_lora_kernels,
)
from autotune.trainer.patches import choose_attention
from autotune.trainer.settings import chunk_tokens
from autotune.trainer.sharded_nf4 import shard_4_bit_layers

RECORDED_LOSSES = 8
LOADER_S = 0.3
# A probe saves a checkpoint that is larger than this without the optimizer state.
LARGEST_CHECKPOINT_GIB = 4.0
# The most graphs that a probe may compile for one function. This number is also torch's default for
# a fresh process.
RECOMPILE_LIMIT = 8
# The number of pairs of micro batches that a probe times: one with even routing, one with skewed
# routing.
SKEWED_PAIRS = 3
# Approximate number of distinct rows; a probe that needs more rows repeats them.
DIFFERENT_ROWS = 64
# If the host issues a micro batch in less than this share of the micro batch's time, the host has
# hardly waited for space in the device's queue.
QUEUE_SHARE = 0.3
ONE_ROW_TIMES = 3  # timed micro batches of one row; the first is slow, because its shape is new
# The micro batches that this process has trained on, as (precision, number of rows, row length).
# cuDNN, for example, makes an execution plan for each of these shapes.
_SEEN_LENGTHS: set[tuple[str, int, int]] = set()

Tensors = dict[str, torch.Tensor]  # a row: its token ids, labels and, if packed, positions


class BadLoss(Exception):
    """The loss was not finite or was exactly 0."""


class WrongPrecision(Exception):
    """Autocast was on although the precision excludes it, or off although it is needed."""


def random_rows(
    kind: MicroBatch,
    vocab_size: int,
    generator: torch.Generator,
    *,
    packing: bool,
    masked: bool = False,
    trained_share: float = 1.0,
) -> list[Tensors]:
    """The rows of a micro batch with the row lengths of `kind`, with random tokens.

    Rows are laid out (packed, padded, masked) as in the full run. The tokens are not all equal,
    because a card at its power limit may multiply equal numbers faster.
    """

    def example(length: int) -> torch.Tensor:
        return rows.mask_prompt(
            torch.randint(0, vocab_size, (length,), generator=generator), trained_share
        )

    examples = [[example(length) for length in lengths] for lengths in kind.rows]
    batch = rows.collate(examples, [kind.length], packing, masked=masked)
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def random_image_rows(
    kind: MicroBatch,
    config: Any,
    generator: torch.Generator,
    *,
    masked: bool = False,
    trained_share: float = 1.0,
) -> list[Tensors]:
    """The rows of a micro batch with the row lengths of `kind`, with random tokens and images.

    `config` is the configuration of the model.
    """
    examples = [
        [images.random_example(lengths[0], pictures, config, generator, trained_share)]
        for lengths, pictures in zip(kind.rows, kind.images, strict=True)
    ]
    batch = images.add_token_types(
        rows.collate(examples, [kind.length], packing=False, masked=masked), config
    )

    text = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    each = [
        images.random_values(pictures, config.model_type, generator) for pictures in kind.images
    ]
    return [words | values for words, values in zip(text, each, strict=True)]


def _lengths(request: ProbeRequest) -> set[tuple[str, int, int]]:
    config = request.config
    return {(config.precision, config.micro_batch_size, kind.length) for kind in request.kinds}


class _StepEndCallback(TrainerCallback):
    """Reports each step's end to the recorder, which decides when to stop the Trainer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder.end_step():
            control.should_training_stop = True


class _TrainBeginCallback(TrainerCallback):
    """Reports that the Trainer has distributed the model among the ranks and begins to train."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()


class RecordingMixin:
    """A mixin for Trainers that reports the phases of a training step to a recorder."""

    recorder: Recorder
    train_dataset: Any

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        """Return a sampler that keeps the rows in the order of the schedule."""
        return SequentialSampler(self.train_dataset)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the time to create a step's batches."""
        begin = self.recorder.meter.mark()
        batches = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.recorder.fetches.append((begin, self.recorder.meter.mark()))
        return batches

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Record a micro batch."""
        self.recorder.begin_micro_batch()
        step = super().training_step  # type: ignore[misc]
        loss: torch.Tensor = step(model, inputs, *args, **kwargs)
        self.recorder.end_micro_batch()
        self.recorder.losses.append(loss)
        return loss

    def train_unrecorded(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Train on a micro batch without recording it, after all measurements.

        CUDA graphs are not used, because the micro batch may be profiled.
        """
        self.cuda_graphs = False
        super().training_step(model, inputs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Mark the end of an evaluated micro batch."""
        result = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        self.recorder.evaluation_ends.append(self.recorder.meter.mark())
        return result

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Record that the backward pass begins."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if model.training:
            self.recorder.enter(Phase.BACKWARD, timed=not is_capturing())
        return loss


class ProbeTrainer(RecordingMixin, LeanTrainer):
    """The exported script's Trainer with a recorder."""


class Probe:
    """One running probe, which can report its memory and its phase even after a failure."""

    micro_profile: MicroBatchProfile | None = None  # the detailed profile, if `trace` is given
    trace: str | None = None  # the file for the profile's Chrome trace
    # The untrained reference model of DPO or KTO, if it is a copy of the base.
    _reference: nn.Module | None = None

    def __init__(
        self,
        request: ProbeRequest,
        resident: ResidentModel,
        meter: Meter,
        emit: Callable[[Phase], None],
        scratch: str | None = None,
        rank: Rank | None = None,
        trace: str | None = None,
    ) -> None:
        """Prepare a probe of `request` on the base model that the worker keeps (`resident`).

        `emit` reports the start of a phase to the parent. `scratch` is a directory for temporary
        files. If the request is for several GPUs, `rank` has already joined the process group. With
        `trace`, the probe ends with a detailed profile of a micro batch, and writes a Chrome trace
        to the file `trace`.
        """
        self.request = request
        self.resident = resident
        self.meter = meter
        self.scratch = scratch
        self.base = resident.base
        self.rank = rank
        self.trace = trace

        largest = rank.largest if rank and request.has_real_ranks else None
        planned = _lengths(request) <= _SEEN_LENGTHS
        if largest is not None:  # the first rank may also have probed on one GPU
            planned = not largest(float(not planned))
        self.recorder = Recorder(
            meter, request, emit, self._state_gib, planned=planned, largest=largest
        )

        self.model: nn.Module = resident.base
        self.trainer: Any = None
        self.managed_gib = 0.0
        self.limit_gib = 0.0
        self.context_gib: float | None = None
        # The loss that replaces the model's own loss, or None.
        self._loss: Callable[..., torch.Tensor] | None = None
        self._new_length_s: float | None = None
        self._host_micro_s: float | None = None
        self._skewed: SkewedRouting | None = None
        self._has_random_weights = False
        self._evaluation_s: float | None = None
        self._checkpoint_s: float | None = None
        self._merge_s: float | None = None

        self._hooks: list[Any] = []
        # `module_names` is called now, because FSDP2 will replace the model's class by a class of
        # another Python module.
        self._module_names = module_names(self.base)
        self._names = dict(self._module_names)

    def run(self) -> Measurement:
        """Train, and measure times and memory.

        Raises the errors of training, NotSteady, BadLoss and WrongPrecision.
        """
        self._prepare()
        with tempfile.TemporaryDirectory(
            prefix="autotune-", dir=self.scratch, ignore_cleanup_errors=True
        ) as scratch:
            self.trainer = self._make_trainer(scratch)
            self._shard_outline()
            self.meter.reset_peak()
            self.recorder.begin(Phase.FIRST_STEP)
            self.trainer.train()
            self.meter.synchronize()
            self.meter.return_freed(self._state_gib())
            self.recorder.record_peak()
            self.recorder.check_steady()

            losses = self._check_losses()
            if self._tries_new_lengths():
                self._new_length_s = self._time_new_lengths()
            self._host_micro_s = self._time_host()
            if self._merges():
                self._merge_s = self._time_merge()
            if self._tries_skewed_routing():
                self._skewed = self._time_skewed_routing()
            if self.request.evaluate and not self.request.objective.generates:
                self._evaluate_and_save()
            measurement = self._measurement(losses)

            if self._profiles_kernels():
                measurement = replace(measurement, kernels=self._profile(measurement))
            if self.trace is not None:
                self.recorder.begin(Phase.PROFILE)
                self.micro_profile = self._profile_parts(measurement, self.trace)
        return measurement

    def _check_losses(self) -> list[float]:
        """The recorded losses.

        Raises BadLoss if a loss is unusable, unless the rank is simulated.
        """
        losses = [float(loss) for loss in self.recorder.losses]
        # GRPO's loss may be 0: the advantages of a prompt's completions add up to 0.
        may_be_zero = self.request.objective.generates
        usable = all(math.isfinite(loss) and (loss or may_be_zero) for loss in losses)
        if not usable and not self.request.simulates_rank:
            raise BadLoss(f"the loss went {', '.join(f'{loss:.4g}' for loss in losses[:8])}")
        return losses

    def _tries_new_lengths(self) -> bool:
        """Whether to time micro batches of lengths that are new to this process.

        Real ranks time no new lengths, because the number of timed lengths depends on the times,
        which differ from rank to rank.
        """
        request = self.request
        if request.has_real_ranks or request.objective.generates:
            return False
        return request.plans_by_length and request.new_lengths

    def _tries_skewed_routing(self) -> bool:
        """Whether to time skewed routing: only in confirming probes of random weights on one GPU.

        Trained routers already load the experts unevenly, and sharded routers cannot be scaled in
        place.
        """
        request = self.request
        is_confirmed = request.rung is Rung.CONFIRM and request.depth is None
        is_plain = request.weights is None and request.config.num_gpus == 1
        return is_confirmed and is_plain and bool(routers(self.base))

    def _profiles_kernels(self) -> bool:
        """Whether to profile kernels: only on request, and only for a truncated model on a GPU."""
        request = self.request
        if not request.profile or request.depth is None:
            return False
        on_gpu: bool = self.meter.torch_device.type == "cuda"
        return on_gpu

    def run_once(self) -> None:
        """Train on a micro batch of each length, so that the code for each length is compiled.

        Raises the errors of training.
        """
        schedule = self.recorder.schedule
        self._prepare()
        with tempfile.TemporaryDirectory(
            prefix="autotune-", dir=self.scratch, ignore_cleanup_errors=True
        ) as scratch:
            num_steps = len(schedule.lead) + (len(schedule.round) if schedule.uneven else 0)
            self.trainer = self._make_trainer(scratch, num_steps)
            self._shard_outline()
            self.recorder.begin(Phase.FIRST_STEP)
            self.trainer.train()
            self.meter.synchronize()

    def _shard_outline(self) -> None:
        """Shard a model that was built without memory, and give its shards random weights."""
        if self.request.parallelism.strategy not in BUILT_AS_SHARDS or not is_outline(self.model):
            return
        # Losses with random weights mean nothing, and must not be compared with losses with real
        # weights.
        self._has_random_weights = self.request.weights is not None
        in_host = self.request.config.offload
        shard_outline(self.trainer, torch.device("cpu") if in_host else self.meter.torch_device)

    def _prepare(self) -> None:
        """Limit the memory, and prepare checkpointing, adapters, loss and compilation."""
        request, meter, config = self.request, self.meter, self.request.config
        self.context_gib = meter.context_gib()
        meter.hold_memory(config.allocator)
        self.limit_gib = meter.cap(request.memory_gib, request.headroom, 0.0)

        # TRL lets torch choose the attention kernel freely, so probes with TRL's trainer do so too.
        any_length = config.padding == "longest" and request.trainer == "transformers"
        choose_attention(cudnn=not (any_length or request.shares_vllm), flash=request.flash)

        settings = model_settings(config, request.text_type, request.objective, request.vision)
        set_checkpointing(self.base, settings)
        how = request.seed, request.objective, request.vision
        self.model = attach(self.resident, config, meter.torch_device, *how)

        if request.parallelism.strategy in FSDP2 and config.quantization == "nf4":
            shard_4_bit_layers(self.model, meter.torch_device)
        if settings.tiled:
            compute_in_tiles(self.base)
        self.resident.joined = set_lora_kernels(self.base, settings)
        self._reserve_paged_state()

        # TRL computes its loss in chunks by itself.
        if config.loss == "chunked" and request.trainer == "transformers":
            in_head = request.parallelism.strategy == "zero3"
            self._loss = chunked_loss(self.base, in_head=in_head)
        if request.objective is Objective.CLASSIFICATION:
            self._loss = label_loss
        if request.objective.has_reference and config.method == "full":
            self._reference = copy.deepcopy(self.base).requires_grad_(False).eval()
        if config.compile == "per_layer":
            self._compile()
        self._add_hooks()

    def _reserve_paged_state(self) -> None:
        """Lower the memory limit by the managed memory that a paged optimizer will use.

        Raises OutOfMemoryError if the model does not fit into the lowered limit.
        """
        request, meter = self.request, self.meter
        if request.config.optimizer.startswith("paged_") and meter.torch_device.type == "cuda":
            self.managed_gib = paged_state_gib(self.model)
        if not self.managed_gib:
            return
        self.limit_gib = meter.cap(request.memory_gib, request.headroom, self.managed_gib)
        if meter.reserved_gib() > self.limit_gib:
            raise torch.OutOfMemoryError(
                f"paged optimizer state needs {self.managed_gib:.2f} GiB beside the model"
            )

    def _compile(self) -> None:
        """Compile each layer as the exported script does, and reuse the code of earlier probes.

        The first layer's input is made to require gradients, as the inputs of all other layers do.
        Otherwise the first layer would need a compiled graph of its own.
        """
        if self.request.config.method == "lora":
            require_input_gradients(self.base)
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = RECOMPILE_LIMIT + compiled_graphs()
        dynamo.accumulated_recompile_limit = dynamo.recompile_limit
        dynamo.fail_on_recompile_limit_hit = True
        compile_layers(decoder_layers(self.model), self.request.config.activation_budget)

    def _begin_training(self) -> None:
        """Begin the measurement after the Trainer has distributed the model among the ranks."""
        assert self.rank is not None
        self.rank.adopt(self.trainer.model_wrapped, self.recorder.end_micro_batch)
        self.resident.model_gib = parameter_gib(self.base) - self.resident.adapters_gib()
        self.resident.base_gib = self.resident.model_gib
        self.meter.release()
        self.meter.rebase(self._state_gib())

    def _add_hooks(self) -> None:
        """Add hooks at both ends of the decoder layers.

        The hooks check autocast, and divide a step into segments, each with its own memory peak.
        The segments of the forward pass are layers and head; the segments of the backward pass are
        head, layers and inputs.
        """
        embedding, request = self.base.get_input_embeddings(), self.request

        def begin_at(tensor: torch.Tensor, name: str) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.recorder.enter_segment(name))

        def end_layers(hidden: torch.Tensor) -> None:
            self.recorder.enter_segment("forward_head")
            begin_at(hidden, "backward_layers")

        # Usually, the call of the output head marks the end of the layers. But TRL never calls the
        # head, and a classification head has a different name in each model family. In both cases,
        # the output of the base model marks the end of the layers.
        if request.trainer == "trl" or request.objective.num_labels is not None:
            layers_end = self.base.base_model.register_forward_hook(
                lambda module, inputs, outputs: end_layers(outputs.last_hidden_state)
            )
        else:
            layers_end = self.base.get_output_embeddings().register_forward_pre_hook(
                lambda module, inputs: end_layers(inputs[0])
            )

        self._hooks = [
            embedding.register_forward_pre_hook(self._check_autocast),
            embedding.register_forward_hook(
                lambda module, inputs, outputs: begin_at(outputs, "backward_inputs")
            ),
            layers_end,
            *self._image_hooks(begin_at),
        ]

    def _image_hooks(self, begin_at: Callable[[torch.Tensor, str], None]) -> list[Any]:
        """Hooks between the vision tower and the language model.

        The hooks separate the tower's memory peaks from the language model's peaks. The tower's
        peaks do not depend on the number of decoder layers.
        """
        if not self.request.has_images:
            return []

        def begin_layers(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            self.recorder.enter_segment("forward_layers")
            begin_at(named["inputs_embeds"], "backward_images")

        return [self.base.get_decoder().register_forward_pre_hook(begin_layers, with_kwargs=True)]

    def _check_autocast(self, *_: Any) -> None:
        """Raise WrongPrecision if autocast is on without need, or off although it is needed.

        An earlier probe of this process may have left autocast in the wrong state.
        """
        # FSDP2 and DeepSpeed cast the weights of a sharded model themselves, without autocast.
        shards = self.request.parallelism.shards
        wanted = self.request.config.precision in ("bf16_mixed", "fp16_mixed") and not shards
        if torch.is_autocast_enabled(self.meter.torch_device.type) is not wanted:
            raise WrongPrecision(
                f"autocast is {'off' if wanted else 'on'} with {self.request.config.precision}"
            )

    # --- memory

    def _state_gib(self) -> float:
        """The size of all live tensors between two steps."""
        return self._weights_gib() + self.resident.adapters_gib() + optimizer_gib(self.trainer)[0]

    def _weights_gib(self) -> float:
        """The GiB of all weights: base model, copies for joint matrix products, reference model."""
        joined = self.resident.joined
        joined_gib = 0.0 if joined is None else gib(joined.extra_bytes())
        reference_gib = 0.0 if self._reference is None else parameter_gib(self._reference)
        return self.resident.model_gib + joined_gib + reference_gib

    def memory_terms(self) -> dict[str, float]:
        """The GiB of allocated memory by use, such as weights, gradients and activations.

        Allocated memory that is not a weight, an adapter, a gradient or optimizer state counts as
        logits and activations. A formula gives the size of the logits.
        """
        gradients = (parameter.grad for parameter in trained_parameters(self.model))
        terms = {
            "weights": self._weights_gib(),
            "adapters": self.resident.adapters_gib(),
            "gradients": sum(
                tensor_gib(gradient) for gradient in gradients if gradient is not None
            ),
            "optimizer": optimizer_gib(self.trainer)[0],
        }

        if self.request.config.offload:
            terms = dict.fromkeys(terms, 0.0)
        rest = max(self.meter.allocated_gib() - sum(terms.values()), 0.0)
        logits = min(self._logits_gib(), rest)
        return terms | {"logits": logits, "activations": rest - logits}

    def _logits_gib(self) -> float:
        """The GiB of the logits and their fp32 copy, which transformers' causal-LM loss holds.

        The logits have the compute dtype. Both tensors exist in the backward pass. In a forward
        pass, both tensors are assumed to exist if the allocated memory exceeds the model plus both
        tensors.
        """
        config, phase = self.request.config, self.recorder.phase
        if self.request.objective is not Objective.SFT:
            # The objective has no logits over the vocabulary, or TRL computes them for a few rows
            # at a time.
            return 0.0

        element_bytes = 4 if config.precision == "fp32" else 2
        tokens = config.micro_batch_size * self.request.longest.length
        tokens = chunk_tokens(tokens) if config.loss == "chunked" else tokens
        logits = gib(tokens * self.base.config.get_text_config().vocab_size * (element_bytes + 4))
        has_more = self.meter.allocated_gib() > self.resident.model_gib + logits
        return logits if phase is Phase.BACKWARD or (phase is Phase.FORWARD and has_more) else 0.0

    # --- the Trainer

    def _make_trainer(self, scratch: str, num_steps: int | None = None) -> Any:
        """The Trainer for `num_steps` steps, by default for the most that a probe may take."""
        request, config = self.request, self.request.config
        schedule = self.recorder.schedule
        if not num_steps:
            warmup = len(schedule.round) * (MAX_WARMUP_ROUNDS + 2)
            num_steps = len(schedule.lead) + warmup + request.max_timed_steps

        on_cpu = self.meter.torch_device.type == "cpu"
        settings = training_arguments(config, accumulation=request.micro_steps, on_cpu=on_cpu)
        settings |= sharing_arguments(config, decoder_layers(self.model))
        settings |= {
            "output_dir": scratch,
            "max_steps": num_steps,
            "per_device_eval_batch_size": config.micro_batch_size,
            "save_strategy": "no",
            "disable_tqdm": True,
            # `set_checkpointing` has already set up checkpointing, for every k-th layer.
            "gradient_checkpointing": False,
            "prediction_loss_only": True,
            "seed": request.seed,
        }

        order = [index for step in range(num_steps) for index in schedule.micro_batches(step)]
        train = self._rows(order, request.seed)
        held_out = self._rows(list(schedule.evaluation), request.seed + 1)

        trainer: Any
        if request.objective.generates:
            trainer = self._rollout_trainer(settings, train)
        elif request.trainer == "trl":
            from autotune.probe.trl_trainer import trl_trainer

            settings |= {"max_length": config.seq_len}
            if config.padding == "max_length":
                settings |= {"pad_to_multiple_of": config.seq_len}
            trainer = trl_trainer(
                RecordingMixin,
                self.model,
                settings,
                train,
                held_out,
                request.objective,
                self._reference,
            )
        else:
            trainer = ProbeTrainer(
                model=self.model,
                args=TrainingArguments(**settings),
                data_collator=self._join_rows(),
                train_dataset=train,
                eval_dataset=held_out,
                compute_loss_func=self._loss,
                optimizer_in_backward=config.optimizer_in_backward,
                cuda_graphs=config.cuda_graphs == "micro_batch",
                joined=self.resident.joined,
            )

        trainer.add_callback(_StepEndCallback(self.recorder))
        if request.parallelism.num_gpus > 1:
            trainer.add_callback(_TrainBeginCallback(self._begin_training))
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.recorder = self.recorder
        return trainer

    def _rollout_trainer(self, settings: dict[str, Any], rows: list[Tensors]) -> Any:
        """TRL's trainer for GRPO on completions that are already given."""
        from autotune.probe.rollout_trainer import rollout_trainer

        generation = self.request.generation
        return rollout_trainer(
            RecordingMixin,
            self.model,
            settings,
            rows,
            with_engine=generation is None or generation.engine.kind != TRANSFORMERS,
            sleeps=generation is not None and generation.engine.sleeps,
            reference=generation is not None and generation.has_reference,
            packed=self.request.config.packing,
        )

    def _merges(self) -> bool:
        """Whether the run merges adapters into the weights to give them to an engine."""
        return self.request.objective.generates and self.request.config.method == "lora"

    def _time_merge(self) -> float:
        """The seconds to merge the adapters into the weights, and to undo this."""
        peft_model: Any = self.model
        before = self.meter.mark()
        peft_model.merge_adapter()
        peft_model.unmerge_adapter()
        after = self.meter.mark()
        self.meter.synchronize()
        return self.meter.seconds(before, after)

    def _join_rows(self) -> Callable[[list[Tensors]], dict[str, Any]] | None:
        """The data collator, or None if the Trainer's default collator can stack the rows."""
        if self.request.has_images:
            return images.join_rows
        return varlen.join_rows if self.request.config.packed_attention == varlen.VARLEN else None

    def _rows(self, order: list[int], seed: int) -> list[Tensors]:
        """The rows of all micro batches: for each kind in `order`, one micro batch for each rank.

        For each kind, only a few different micro batches are made, and they are used repeatedly.
        """
        request, kinds = self.request, self.request.kinds
        num_ranks = request.parallelism.num_gpus
        generator = torch.Generator().manual_seed(seed)
        num_different = math.ceil(DIFFERENT_ROWS / (len(kinds) * request.config.micro_batch_size))

        made: dict[tuple[int, int], list[Tensors]] = {}
        seen = Counter[int]()
        in_order = []
        for index in (index for index in order for _ in range(num_ranks)):
            key = index, seen[index] % num_different
            if key not in made:
                made[key] = self._random_rows(kinds[index], generator)
            in_order += made[key]
            seen[index] += 1
        return in_order

    def _random_rows(self, kind: MicroBatch, generator: torch.Generator) -> list[Tensors]:
        config = self.request.config
        if kind.images:
            return random_image_rows(
                kind,
                self.base.config,
                generator,
                masked=config.padding == "masked",
                trained_share=self.request.trained_share,
            )
        made = random_rows(
            kind,
            self.base.config.get_text_config().vocab_size,
            generator,
            packing=config.packing,
            masked=config.padding == "masked",
            trained_share=self.request.trained_share,
        )

        if self.request.objective is not Objective.CLASSIFICATION:
            return made
        labels = torch.randint(0, self.base.config.num_labels, (len(made),), generator=generator)
        return [row | {"labels": label} for row, label in zip(made, labels, strict=True)]

    def _time_new_lengths(self) -> float | None:
        """The extra seconds of a micro batch whose length is new to this process.

        The result is the median over a few lengths, or None if there is no new length. cuDNN's
        attention makes an execution plan for each new length. The new lengths are a little shorter
        than the most frequent kind of micro batch, whose time without a new plan is known. cuDNN
        chooses its kernels by the largest number in `trainer.patches.ALIGNMENTS` that divides the
        length. The first plan for each of these numbers also builds kernels, which takes seconds.
        All new lengths are odd, so they share one number, and its kernels are built only once.
        """
        request, meter = self.request, self.meter
        timed = [kind for kind in request.kinds if kind.share]
        frequent = max(timed, key=lambda kind: kind.share)
        times = self.recorder.times()  # `times.kinds` is empty if all micro batches are of one kind
        if times.kinds:
            known_s = times.kinds[timed.index(frequent)][1]
        else:
            known_s = statistics.fmean(times.micro_batches)

        _SEEN_LENGTHS.update(_lengths(request))
        precision, size = request.config.precision, request.config.micro_batch_size
        shortest = max((images.count_tokens(row) + 1 for row in frequent.images), default=1)
        odd = (length for length in range(frequent.length - 1, shortest, -1) if length % 2)
        new = (length for length in odd if (precision, size, length) not in _SEEN_LENGTHS)

        generator = torch.Generator().manual_seed(request.seed)
        more: list[float] = []
        begin = meter.mark()
        for length in itertools.islice(new, NEW_LENGTHS):
            _SEEN_LENGTHS.add((precision, size, length))
            kind = replace(
                frequent, rows=tuple((min(row[0], length),) for row in frequent.rows), length=length
            )
            batch = self._random_batch(kind, generator)
            before = meter.mark()
            self._train_on(batch)
            after = meter.mark()
            meter.synchronize()
            more.append(meter.seconds(before, after) - known_s * length / frequent.length)
            if meter.seconds(begin, after) > NEW_LENGTHS_S:
                break
        return max(statistics.median(more), 0.0) if more else None

    def _time_skewed_routing(self) -> SkewedRouting | None:
        """Time the most frequent kind of micro batch with even and skewed routing, alternately.

        The result is None if memory runs out, so that the measurement of the steps is kept.
        """
        timed = [kind for kind in self.request.kinds if kind.share]
        frequent = max(timed, key=lambda kind: kind.share)
        batch = self._random_batch(frequent, torch.Generator().manual_seed(self.request.seed))

        def seconds() -> float:
            before = self.meter.mark()
            self._train_on(batch)
            after = self.meter.mark()
            self.meter.synchronize()
            return self.meter.seconds(before, after)

        ratios = []
        try:
            for _ in range(SKEWED_PAIRS):
                even_s = seconds()
                with skew_routing(self.base):
                    ratios.append(seconds() / even_s)
        except torch.OutOfMemoryError:
            self.trainer.optimizer.zero_grad()
            return None
        hottest = min(hottest_load(len(one.weight), one.top_k) for one in routers(self.base))
        return SkewedRouting(hottest=hottest, ratio=statistics.median(ratios))

    def _time_host(self) -> float | None:
        """The seconds that the host needs to issue a micro batch if it never waits, or None.

        If a micro batch has many operations, they fill the device's queue. The host then waits for
        the device, and the measured time is too long. A micro batch of one row has the same number
        of operations, but the device finishes them sooner, so the host need not wait. So if the
        host may have waited in a truncated model, micro batches of one row are timed too.
        """
        request, config = self.request, self.request.config
        seconds = self.recorder.host_micro_s()
        if seconds is None or request.depth is None or request.has_real_ranks:
            return seconds
        # Compiled code and CUDA graphs have too few operations to fill the queue, and a micro batch
        # of one row would have to be compiled or captured first.
        takes_one_shape = config.compile != "none" or config.cuda_graphs != "none"
        micro_s = min(self.recorder.times().micro_batches)
        if takes_one_shape or config.micro_batch_size == 1 or seconds < QUEUE_SHARE * micro_s:
            return seconds

        frequent = max(request.kinds, key=lambda kind: kind.share)
        one_row = replace(frequent, rows=frequent.rows[:1], images=frequent.images[:1])
        batch = self._random_batch(one_row, torch.Generator().manual_seed(request.seed))
        for _ in range(ONE_ROW_TIMES):
            self.meter.synchronize()
            began = time.perf_counter()
            self.trainer.train_unrecorded(self.model, batch)
            seconds = min(seconds, time.perf_counter() - began)
            self.trainer.optimizer.zero_grad()
        return seconds

    def _random_batch(self, kind: MicroBatch, generator: torch.Generator) -> Tensors:
        """A micro batch with the row lengths of `kind`, joined by the Trainer's collator."""
        rows = self._random_rows(kind, generator)
        if self.request.trainer == "trl":
            from autotune.probe.trl_trainer import examples_of

            rows = list(examples_of(rows, self.request.objective))
        batch: Tensors = self.trainer.data_collator(rows)
        return batch

    def _train_on(self, batch: Tensors) -> None:
        self.trainer.train_unrecorded(self.model, batch)
        self.trainer.optimizer.zero_grad()

    def _evaluate_and_save(self) -> None:
        """Evaluate a micro batch of each kind, and save the adapters as the full run does.

        A checkpoint larger than LARGEST_CHECKPOINT_GIB is saved without its optimizer state. A
        probe of full fine-tuning saves no checkpoint.
        """
        recorder, meter = self.recorder, self.meter

        recorder.begin(Phase.EVALUATE)
        self.trainer.evaluate()
        recorder.record_peak()
        meter.synchronize()
        shares = [self.request.kinds[index].share for index in recorder.schedule.evaluation[1:]]
        seconds = [meter.seconds(*marks) for marks in pairwise(recorder.evaluation_ends)]
        self._evaluation_s = sum(map(operator.mul, shares, seconds)) / sum(shares)
        if self.request.config.method != "lora":
            return

        recorder.begin(Phase.SAVE)
        if self._state_gib() - self.resident.model_gib > LARGEST_CHECKPOINT_GIB:
            self.trainer.save_model()
            return

        began = time.perf_counter()
        self.trainer._save_checkpoint(self.model, None)
        self._checkpoint_s = time.perf_counter() - began

    def _profile(self, measurement: Measurement) -> KernelTimes | None:
        """The kernel times of a micro batch of about mean length. The kernels are also printed.

        The micro batch is the last of its step, so that the gradients of the step's earlier micro
        batches exist. The recorder does not record this micro batch.
        """
        (*before, last), micro_s, _ = self._mean_step(measurement)
        for inputs in before:
            self.trainer.train_unrecorded(self.model, inputs)
        self.meter.synchronize()
        kernels = run_profiled(lambda: self.trainer.train_unrecorded(self.model, last))
        print("\n".join(list_kernels(kernels)), flush=True)
        return kernel_times(kernels, micro_s)

    def _mean_step(self, measurement: Measurement) -> tuple[list[Tensors], float, MicroBatch]:
        """A step's micro batches, and the time and kind of the step's last micro batch.

        The last micro batch has about the mean length of the run's micro batches.
        """
        schedule, kinds, each = self.recorder.schedule, self.request.kinds, self.request.micro_steps
        timed = sorted({index for step in schedule.round for index in step})
        mean = schedule.mean([kinds[index].length for step in schedule.round for index in step])

        # `place` is the index of the step whose last micro batch is nearest the mean length.
        lasts = [step[-1] for step in schedule.round]
        place = min(range(len(lasts)), key=lambda place: abs(kinds[lasts[place]].length - mean))
        # `by_kind` is empty if all timed micro batches are of one kind.
        by_kind = dict(zip(timed, measurement.kind_s, strict=False))
        if by_kind:
            micro_s = by_kind[lasts[place]][1]
        else:
            micro_s = statistics.median(measurement.micro_step_s)

        micro_batches = iter(self.trainer.get_train_dataloader())
        skipped = itertools.islice(micro_batches, each * (len(schedule.lead) + place), None)
        batches = self.trainer.get_batch_samples(skipped, each, self.meter.torch_device)[0]
        return batches, micro_s, kinds[lasts[place]]

    def _profile_parts(self, measurement: Measurement, trace: str) -> MicroBatchProfile | None:
        """Profile a micro batch of mean length, then an optimizer step.

        The profile divides the time by class of kernel and by part of the model, such as the MLPs.
        """
        batches, micro_s, kind = self._mean_step(measurement)
        for inputs in batches[:-1]:
            self.trainer.train_unrecorded(self.model, inputs)
        self.meter.keep_freed()  # keep freed memory, as in the timed steps

        layers = decoder_layers(self.model)
        decoder = language_model(self.base)
        with ranges(parts_of(self.base, decoder, layers)):
            events, profiled_s = record_events(
                lambda: self.trainer.train_unrecorded(self.model, batches[-1]),
                self._optimizer_step,
                self.meter,
                trace,
            )

        config = self.request.config
        return profile_of(
            events,
            on_gpu=self.meter.torch_device.type == "cuda",
            compiled=config.compile == "per_layer",
            trained=Part.ADAPTERS if config.method == "lora" else Part.OTHER,
            rows=config.micro_batch_size,
            length=kind.length,
            micro_s=micro_s,
            profiled_s=profiled_s,
            loader_rows_per_s=self._loader_rows_per_s(),
        )

    def _optimizer_step(self) -> None:
        """Clip gradients, step the optimizer and clear gradients, like the Trainer in each step."""
        self.recorder.phase = Phase.PROFILE  # the profiled micro batch has set it to BACKWARD
        trainer = self.trainer
        most = trainer.args.max_grad_norm
        if most:
            trainer.accelerator.clip_grad_norm_(self.model.parameters(), most)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    def _loader_rows_per_s(self) -> float:
        """The rows per second of the loader without training, measured for LOADER_S seconds."""
        micro_batches = iter(self.trainer.get_train_dataloader())
        next(micro_batches)  # starts the loader's worker processes
        began = time.perf_counter()
        within = itertools.takewhile(
            lambda _: time.perf_counter() - began < LOADER_S, micro_batches
        )
        number = sum(1 for _ in within)
        return number * self.request.config.micro_batch_size / (time.perf_counter() - began)

    # --- the result

    def _measurement(self, losses: list[float]) -> Measurement:
        recorder, meter = self.recorder, self.meter
        times = recorder.times()
        trained = trained_parameters(self.model)
        state, managed = optimizer_gib(self.trainer)
        weights, adapters = self._weights_gib(), self.resident.adapters_gib()
        in_host = 0.0
        gradients = self._gradients_gib(trained)
        if self.request.config.offload:
            in_host = (adapters or weights) + state
            weights = adapters = gradients = state = 0.0

        # Each of these phases lasts for several steps, so neither is a phase of one step.
        no_phases = (Phase.FIRST_STEP, Phase.STEADY)
        return Measurement(
            step_s=times.steps,
            micro_step_s=times.micro_batches,
            rest_s=times.rests,
            micro_steps=self.request.micro_steps,
            phase_s={
                phase: seconds
                for phase, seconds in times.phases.items()
                if phase is not Phase.STEADY
            },
            phase_peak_gib={
                phase: peak for phase, peak in recorder.peaks.items() if phase not in no_phases
            },
            segment_peak_gib={
                name: peak for name, peak in recorder.segments.items() if name not in no_phases
            },
            kind_s=times.kinds,
            warm_s=recorder.warm_s(times),
            host_micro_s=self._host_micro_s,
            host_waits=recorder.host_waits(),
            new_length_s=self._new_length_s,
            skewed=self._skewed,
            evaluation_s=self._evaluation_s,
            checkpoint_s=self._checkpoint_s,
            phase_reserved_gib={
                phase: peak
                for phase, peak in recorder.reserved_peaks.items()
                if self.request.objective.generates and phase not in no_phases
            },
            between_gib=tuple(recorder.between),
            merge_s=self._merge_s,
            row_length=self.request.longest.length,
            model_gib=weights,
            adapters_gib=adapters,
            gradients_gib=gradients,
            optimizer_gib=state,
            in_host_gib=in_host,
            peak_allocated_gib=max(recorder.peaks.values()),
            peak_reserved_gib=recorder.reserved,
            limit_gib=self.limit_gib,
            context_gib=self.context_gib,
            managed_gib=managed if meter.torch_device.type == "cuda" else 0.0,
            alloc_retries=meter.alloc_retries() - recorder.early_retries,
            loss_first=losses[0],
            loss_last=losses[-1],
            losses=() if self._has_random_weights else tuple(losses[:RECORDED_LOSSES]),
            trainable_params=sum(math.prod(whole_shape(parameter)) for parameter in trained),
            total_params=logical_params(self.model),
        )

    def _gradients_gib(self, trained: list[nn.Parameter]) -> float:
        """The GiB of the gradients that exist at the same time."""
        if self.request.config.sharding in ("zero2", "zero3"):
            # DeepSpeed holds this rank's shard of the gradients in separate tensors, not in
            # `parameter.grad`.
            whole = sum(gib(math.prod(whole_shape(one)) * one.element_size()) for one in trained)
            return whole / self.request.parallelism.num_gpus
        sizes = map(tensor_gib, trained)
        return max(sizes) if self.request.config.optimizer_in_backward else sum(sizes)

    def close(self) -> None:
        """Release the Trainer and its objects in accelerate, and restore the model."""
        from accelerate.state import AcceleratorState, GradientState

        for hook in (*self._hooks, *getattr(self.trainer, "step_hooks", ())):
            hook.remove()
        self._module_names.update(self._names)
        vars(self.model).pop("train", None)  # LeanTrainer has replaced this method
        self._reference = None

        if self.trainer is not None:
            self.trainer.callback_handler.callbacks.clear()
            self.trainer.optimizer = None
            self.trainer.lr_scheduler = None
            self.trainer.accelerator.free_memory()
            self.trainer = None
            free_paged_state()

        if optim := sys.modules.get("bitsandbytes.optim"):
            # For 8-bit optimizers the Trainer registers the embedding in this singleton, which
            # would keep the embedding alive.
            optim.GlobalOptimManager.get_instance().initialize()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clean(self.resident)
