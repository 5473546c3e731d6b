"""Computes the memory and work of one training step on the meta device, without GPU or weights.

Model, adapters, checkpointing, loss and optimizer are the same as in a real probe, a short run that
measures a configuration. Some memory is not allocated on the meta device, such as the workspaces of
CUDA's kernels. For each kernel that needs such memory, a formula adds the bytes. No formula depends
on the model family.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from autotune.core.objective import Objective
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import DryCount, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig, digest_of
from autotune.core.units import MIB, gib
from autotune.dry.compiled import compile_for_count
from autotune.dry.expert_parallel import divide_experts, expert_parameters
from autotune.dry.flex import FLEX_ATTENTION
from autotune.dry.meta_device import simulate_cuda
from autotune.dry.segments import FixedSegments, reserve
from autotune.dry.storage_counter import StorageCounter, blocks
from autotune.probe.accounting import logical_params, trained_parameters
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import truncate
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.labels import label_loss
from autotune.trainer.model_builder import (
    base_dtype,
    build,
    compute_in_tiles,
    config_of,
    decoder_layers,
    require_input_gradients,
    set_checkpointing,
    set_lora_kernels,
    trainable_model,
)
from autotune.trainer.settings import ModelSettings

META = torch.device("meta")
# bytes: the workspaces of cuBLAS and cuBLASLt, which take 32 MiB each on Hopper, and less on older
# GPUs
WORKSPACE = 64 * MIB
# bytes: the workspace of a second CUDA stream, on which `trainer.joined_lora` computes the
# gradients of adapters
SIDE_WORKSPACE = WORKSPACE // 2
NF4_BLOCK = 64  # bitsandbytes stores one scale for each block of this number of weights
NESTED_BLOCK = 256  # bitsandbytes stores one nested scale for each block of this number of scales
SIXTEEN_BITS = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}


def dry_probe(request: ProbeRequest, other: OtherTrainer = USUAL) -> DryCount:
    """Compute the memory and work of one training step of a model with `request.depth` layers.

    autotune's trainer computes the step, or the trainer `other`. Raises the same errors as
    building and training the model.
    """
    config = request.config
    if config.num_gpus > 1:
        raise ValueError("a dry probe cannot compute the memory of training on several GPUs")
    if config.quantization == "int8" and config.compile != "none":
        raise ValueError("the memory of compiled layers with an int8 base is not known")

    rows = request.objective.rows_per_example * config.micro_batch_size
    padded = config.padding == "masked" and rows > 1
    # FlexAttention skips the scores between packed examples. The request does not contain the
    # lengths of these examples, so each row counts as one example.
    packed = config.packing and config.attention != FLEX_ATTENTION

    with ExitStack() as stack:
        stack.enter_context(simulate_cuda(packed=packed, padded=padded))
        if request.trainer == "trl":
            from autotune.dry.preference import replace_fp16, simulate_trl

            stack.enter_context(simulate_trl(padded=padded))
            request = replace(request, config=replace_fp16(config))
        workspace = WORKSPACE + SIDE_WORKSPACE if config.widens_base else WORKSPACE
        step = CountedStep(request, META, cuda_workspace, other)
        count = step.count(workspace)
        if step.compiles:
            # While torch compiles, it allocates a few KiB, which would count as memory of a layer
            # if the other of two depths had them not. Compiled code takes a moment to run again.
            count = CountedStep(request, META, cuda_workspace, other).count(workspace)
        return count


def _key_of_layers(request: ProbeRequest, other: OtherTrainer) -> str:
    """Return a digest of all that decides the compiled code of a layer and the shape of its inputs.

    Models of another depth have the same layers.
    """
    same = replace(request, depth=None, micro_steps=1, config=TrainConfig())
    config = request.config.as_dict() | {"optimizer": None}
    return digest_of([to_data(same), config, to_data(other)])


class CountedStep:
    """The training step of a request; its memory is computed from tensor sizes, not measured."""

    def __init__(
        self,
        request: ProbeRequest,
        device: torch.device,
        workspace: Callable[[Any, tuple[Any, ...]], int],
        other: OtherTrainer = USUAL,
    ) -> None:
        """Build the model; `workspace` returns the bytes that an operation's kernel allocates."""
        self._request = request
        self._config = request.config
        self._device = device
        self._other = other
        self._outputs: Any = None  # the model's outputs, if the trainer holds them
        self._segment = ""
        self._segments: dict[str, int] = {}

        settings = model_settings(request.config, request.text_type, request.objective)
        shape = config_of(request.model)
        if request.depth is not None:
            truncate(shape, request.depth)
        quantized = partial(quantized_linear, unpacks_to_input=other.unpacks_to_input)
        self._base = build(shape, settings, device, quantized if device == META else None)
        if request.experts is not None:
            divide_experts(self._base, request.experts)

        self._counter = StorageCounter(device, workspace)
        self._counter.hold_module(self._base)
        self._model_bytes = self._counter.live
        self._prepare_training(settings)
        self._loss = self._choose_loss()
        self.compiles = False  # whether torch compiles layers in the first step
        if self._config.compile == "per_layer":
            if self._config.method == "lora":
                # The inputs of all layers but the first require gradients. As in a real probe, also
                # make the first layer's input require gradients, so that all layers compile alike.
                require_input_gradients(self._base)
            self.compiles = compile_for_count(
                decoder_layers(self._model),
                self._config.activation_budget,
                _key_of_layers(request, other),
            )

        self._trl_step = None
        if request.trainer == "trl":
            from autotune.dry.preference import DryTrlStep

            self._trl_step = DryTrlStep(request, self._base, self._model)
            if self._trl_step.reference is not None:
                self._counter.hold_module(self._trl_step.reference)
                self._model_bytes = self._counter.live
        self._model.train()

    def _prepare_training(self, settings: ModelSettings) -> None:
        """Add checkpointing and adapters to the base model, as `settings` say."""
        set_checkpointing(self._base, settings)
        self._model = trainable_model(self._base, settings, self._device)
        if not settings.adapters_in_fp32:
            _give_dtype(trained_parameters(self._model), base_dtype(settings))
        if settings.tiled:
            compute_in_tiles(self._base)

        before = self._counter.live
        self._joined = set_lora_kernels(self._base, settings)
        if self._joined is not None:
            self._counter.hold(self._joined.tensors())
            self._model_bytes += self._counter.live - before

    def _choose_loss(self) -> Callable[..., torch.Tensor] | None:
        """The loss function that replaces the model's own, or None."""
        if self._request.objective is Objective.CLASSIFICATION:
            return label_loss
        if self._config.loss == "chunked" and self._request.trainer == "transformers":
            return chunked_loss(self._base)
        return None if self._other.upcasts_logits else _loss_of_logits

    def count(self, workspace: int = 0) -> DryCount:
        """Compute the memory and work of a step on the longest micro batch.

        The memory includes all tensors that are alive in a real run. Among them are the optimizer's
        state and, if a step has several micro batches, the gradients of an earlier micro batch. If
        the request has 0 micro steps, the micro batch is evaluated instead. `workspace` bytes are
        added to every peak.
        """
        counter = self._counter
        trained = trained_parameters(self._model)
        counter.hold_module(self._model)
        built = counter.live
        evaluates = self._request.micro_steps == 0
        of_model = counter.take_requests()

        with counter:
            steps, gradients, state = self._make_state(trained)
            self._divide_step()
            if self._joined is not None:
                self._joined.follow()
            if evaluates:
                self._model.eval()
            counter.begin()
            of_state = counter.take_requests()

            # Trainer fetches all micro batches of a step at once, so all their inputs are in
            # memory.
            batches = [self._batch() for _ in range(max(self._request.micro_steps, 1))]
            self._enter("evaluate" if evaluates else "forward")
            with torch.no_grad() if evaluates else nullcontext():
                loss = self._forward(batches[-1])
            if not evaluates:
                self._enter("backward")
                loss.backward()
            del loss

            # The reported work is the work of one micro batch, without the optimizer's step.
            flops = dict(counter.flops)
            moved_bytes = dict(counter.moved)
            operations = counter.operations

            if not evaluates:
                self._enter("optimizer")
            if not (evaluates or self._config.optimizer_in_backward):
                nn.utils.clip_grad_norm_(trained, 1.0)
                steps[0]()
            self._outputs = None
            self._forget_gradients()
            self._enter("")
            of_step = counter.take_requests()

        segments = {name: gib(peak + workspace) for name, peak in self._segments.items()}
        count = DryCount(
            model_gib=gib(self._model_bytes),
            adapters_gib=gib(built - self._model_bytes),
            gradients_gib=gib(gradients),
            optimizer_gib=gib(state),
            segment_peak_gib=segments,
            peak_allocated_gib=max(segments.values()),
            trainable_params=sum(parameter.numel() for parameter in trained),
            total_params=logical_params(self._model),
            flops=flops,
            moved_bytes=moved_bytes,
            operations=operations,
            expert_gradients_gib=gib(self._expert_bytes(trained)),
        )
        if self._config.allocator != "fixed" or evaluates:
            return count
        return _with_segments(count, reserve(of_model, of_state, of_step, workspace))

    def _make_state(self, trained: list[nn.Parameter]) -> tuple[list[Callable[[], None]], int, int]:
        """Make the gradients and the optimizer's state.

        Return the optimizer's steps (one, or one for each parameter if it steps in the backward
        pass), and the bytes of the gradients and of the state.
        """
        counter = self._counter
        in_backward = self._config.optimizer_in_backward
        built = counter.live
        # An optimizer makes its state in its first step.
        groups = [[parameter] for parameter in trained] if in_backward else [trained]
        steps = [make_optimizer(self._config, self._model, group) for group in groups]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        gradients = counter.live - built
        for step in steps:
            step()
        state = counter.live - built - gradients

        if self._request.micro_steps < 2:
            self._forget_gradients()
        if in_backward:
            gradients = max(parameter.nbytes for parameter in trained)
            for parameter, step in zip(trained, steps, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(_step_and_free, step))
        return steps, gradients, state

    def _expert_bytes(self, trained: Sequence[nn.Parameter]) -> int:
        """Return the bytes of the trained parameters that belong to this GPU's experts."""
        if self._request.experts is None:
            return 0
        held = expert_parameters(self._model)
        return sum(parameter.nbytes for parameter in trained if id(parameter) in held)

    def _forget_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _enter(self, segment: str) -> None:
        peak = self._counter.take_peak()
        if self._segment:
            self._segments[self._segment] = max(self._segments.get(self._segment, 0), peak)
        self._segment = segment

    def _divide_step(self) -> None:
        """Add hooks that divide the step into segments, each with its own memory peak."""

        def begin_at(tensor: torch.Tensor, name: str) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter(name))

        head = "forward_head" if self._request.micro_steps else "evaluate_head"

        def end_layers(hidden: torch.Tensor) -> None:
            self._enter(head)
            begin_at(hidden, "backward_layers")

        embedding = self._base.get_input_embeddings()
        embedding.register_forward_hook(
            lambda module, inputs, outputs: begin_at(outputs, "backward_inputs")
        )

        # Usually, the call of the head marks the end of the layers. But TRL never calls the head,
        # and a classification head has a different name in each model family. In both cases, the
        # output of the base model marks the end of the layers.
        if self._trl_step is not None or self._request.objective.num_labels is not None:
            self._base.base_model.register_forward_hook(
                lambda module, inputs, outputs: end_layers(outputs.last_hidden_state)
            )
        else:
            output_head = self._base.get_output_embeddings()
            if output_head is None:
                raise ValueError(
                    f"transformers' {type(self._base).__name__} does not say which layer is its "
                    "output head (get_output_embeddings)"
                )
            output_head.register_forward_pre_hook(lambda module, inputs: end_layers(inputs[0]))

    def _batch(self) -> dict[str, torch.Tensor]:
        if self._trl_step is not None:
            return self._trl_step.batch()
        config = self._config
        rows, length = config.micro_batch_size, self._request.longest.length
        names = ["input_ids", "labels"]
        if config.has_mask:
            names.append("position_ids" if config.packing else "attention_mask")
        batch = {
            name: torch.zeros(rows, length, dtype=torch.long, device=self._device) for name in names
        }
        if self._request.objective is Objective.CLASSIFICATION:
            batch["labels"] = torch.zeros(rows, dtype=torch.long, device=self._device)
        return batch

    def _forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro batch, as Trainer and accelerate compute it."""
        if self._trl_step is not None:
            return self._trl_step.loss(batch)

        items = torch.ones((), dtype=torch.long, device=self._device)
        labels = batch.pop("labels") if self._loss is not None else None
        dtype = SIXTEEN_BITS.get(self._config.precision) if self._other.autocast else None
        with torch.autocast(self._device.type, dtype=dtype) if dtype else nullcontext():
            outputs = self._model(**batch, num_items_in_batch=items)
        if dtype:
            outputs = convert_to_fp32(outputs)

        self._outputs = outputs if self._other.keeps_logits else None
        if self._loss is not None:
            return self._loss(outputs, labels, num_items_in_batch=items)
        loss: torch.Tensor = outputs["loss"]
        return loss


def _with_segments(count: DryCount, segments: FixedSegments) -> DryCount:
    """Add the memory of segments that cannot grow to a count."""
    return replace(
        count, reserved_gib=gib(segments.reserved), occupied_gib=gib(segments.peak_occupied)
    )


def _loss_of_logits(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the mean loss, computed in the logits' dtype instead of transformers' 32 bits."""
    loss: torch.Tensor = nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels.flatten()
    )
    return loss


def _give_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Give new adapters the base model's dtype, which PEFT does itself on every other device."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


# --- replacements for code that needs a GPU


def quantized_linear(
    shape: tuple[int, int, bool], settings: ModelSettings, *, unpacks_to_input: bool = False
) -> nn.Module:
    """A quantised linear layer of bitsandbytes, whose weight has no values.

    With `unpacks_to_input`, a 4-bit layer multiplies in the dtype of its input.
    """
    if settings.quantization == "nf4":
        layer = _linear_4bit(shape, settings)
        layer.compute_type_is_set = not unpacks_to_input
    else:
        layer = _linear_8bit(shape)
    _, fan_out, bias = shape
    if bias:
        layer.bias = nn.Parameter(
            torch.empty(fan_out, dtype=base_dtype(settings), device=META), requires_grad=False
        )
    return layer


def _linear_8bit(shape: tuple[int, int, bool]) -> nn.Module:
    """An 8-bit linear layer that skips the search for outliers, because its weight has no values.

    `_quantize_workspace` adds the memory that the search takes.
    """
    import bitsandbytes as bnb

    fan_in, fan_out, bias = shape
    layer: nn.Module = bnb.nn.Linear8bitLt(
        fan_in, fan_out, bias, has_fp16_weights=False, threshold=0.0, device="meta"
    )

    weight = torch.empty(fan_out, fan_in, dtype=torch.int8, device=META)
    scales = torch.empty(fan_out, dtype=torch.float32, device=META)
    layer.weight = bnb.nn.Int8Params(
        weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scales
    )
    return layer


def _linear_4bit(shape: tuple[int, int, bool], settings: ModelSettings) -> nn.Module:
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    fan_in, fan_out, bias = shape
    dtype = base_dtype(settings)
    size = fan_in * fan_out

    def empty(number: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(number, dtype=kind, device=META)

    scales = math.ceil(size / NF4_BLOCK)
    # The scales may be quantized too, with scales of their own.
    nested: dict[str, Any] = {}
    if settings.double_quant:
        scale = QuantState(
            empty(math.ceil(scales / NESTED_BLOCK), torch.float32),
            code=empty(256, torch.float32),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        nested = {"offset": torch.empty((), device=META), "state2": scale}

    state = QuantState(
        empty(scales, torch.uint8 if settings.double_quant else torch.float32),
        shape=torch.Size((fan_out, fan_in)),
        code=empty(16, torch.float32),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        **nested,
    )

    layer: nn.Module = bnb.nn.Linear4bit(
        fan_in, fan_out, bias, compute_dtype=dtype, device="meta", quant_type="nf4"
    )
    layer.weight = bnb.nn.Params4bit(
        torch.empty((size + 1) // 2, 1, dtype=torch.uint8, device=META),
        requires_grad=False,
        quant_state=state,
        quant_type="nf4",
        compress_statistics=settings.double_quant,
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = state
    return layer


def cuda_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operation's CUDA kernel allocates for its own use while the kernel runs."""
    if not hasattr(func, "overloadpacket"):
        return 0
    workspace = _WORKSPACES.get(func.overloadpacket.__name__)
    return 0 if workspace is None else workspace(*args)


def _softmax_backward(gradient: torch.Tensor, output: torch.Tensor, *_: Any) -> int:
    """The bytes of a temporary tensor, gradient times output (ATen/native/cuda/SoftMax.cu)."""
    return blocks(output.numel() * max(gradient.element_size(), output.element_size()))


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any) -> int:
    """The bytes of two 32-bit temporary tensors: the padded query gradients, and the row sums.

    With fewer key heads than query heads, the kernel also allocates gradients of keys and values
    for each query head.
    """
    rows, heads, length, size = query.shape
    padded = 4 * rows * heads * (-(-length // 128) * 128)
    expanded = 0 if heads == key.shape[1] else 2 * blocks(query.element_size() * query.numel())
    return blocks(padded * (-(-size // 32) * 32)) + blocks(padded) + expanded


def _efficient_backward(gradient: torch.Tensor, query: torch.Tensor, *_: Any) -> int:
    """The bytes of 32-bit query gradients and row sums (mem_eff_attention/kernel_backward.h)."""
    rows, heads, length, size = query.shape
    return blocks(4 * rows * heads * length * size) + blocks(4 * rows * heads * length)


def _flex(query: torch.Tensor, *_: Any) -> int:
    """The bytes of one 32-bit number for each query: its largest score."""
    rows, heads, length, _ = query.shape
    return blocks(4 * rows * heads * length)


def _flex_backward(gradient: torch.Tensor, *_: Any) -> int:
    """The bytes of two temporary 32-bit numbers for each query."""
    rows, heads, length, _ = gradient.shape
    return 2 * blocks(4 * rows * heads * length)


def _unpack_workspace(
    inputs: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], *_: Any
) -> int:
    """The bytes of the weight, unpacked to the dtype of the inputs.

    If the inputs have only a few matrix rows, bitsandbytes multiplies by the packed weight
    directly, which needs no such memory.
    """
    return blocks(inputs.element_size() * math.prod(shape))


def _unpack_experts_workspace(rows: torch.Tensor, *arguments: Any) -> int:
    """The bytes of the weights of all experts, unpacked to the dtype of the rows."""
    shape = arguments[-2]
    return blocks(rows.element_size() * math.prod(shape))


def _quantize_workspace(inputs: torch.Tensor, *_: Any) -> int:
    """The bytes of the inputs' absolute values, and of one outlier flag for each input value.

    See bitsandbytes/backends/cuda/ops.py.
    """
    return blocks(inputs.nbytes) + blocks(inputs.numel())


def _scaled_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    row_scales: Any,
    column_scales: Any,
    bias: Any,
    dtype: torch.dtype,
) -> int:
    """The bytes of the 32-bit product, plus an fp16 copy of it if the output is not fp16."""
    size = inputs.numel() // inputs.shape[-1] * weight.shape[0]
    return blocks(4 * size) + (0 if dtype is torch.float16 else blocks(2 * size))


_WORKSPACES: dict[str, Callable[..., int]] = {
    "_softmax_backward_data": _softmax_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "flex_attention": _flex,
    "flex_attention_backward": _flex_backward,
    "gemm_4bit": _unpack_workspace,
    "packed_adapted_product": _unpack_experts_workspace,
    "int8_vectorwise_quant": _quantize_workspace,
    "int8_scaled_mm": _scaled_product,
}


def make_optimizer(
    config: TrainConfig, model: nn.Module, trained: list[nn.Parameter]
) -> Callable[[], None]:
    """A function that runs a step of the configured optimizer on the `trained` parameters.

    The first call allocates the optimizer's state. Each call allocates the temporary tensors that
    the step needs.
    """
    name = config.optimizer
    if name == "adamw_torch":
        return partial(_step, torch.optim.AdamW(trained, foreach=True))
    if name == "adafactor":
        from transformers import Adafactor

        return partial(
            _step, Adafactor(trained, scale_parameter=False, relative_step=False, lr=1e-4)
        )
    state: list[torch.Tensor] = []

    # The other optimizers update parameters in place, so only their state takes memory.
    def step() -> None:
        if state:
            return
        embeddings = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        for parameter in trained:
            state.extend(_moments(name, parameter, in_32_bits=id(parameter) in embeddings))

    return step


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _step_and_free(step: Callable[[], None], parameter: nn.Parameter) -> None:
    """Run the optimizer's step, then free the gradient, as in `lean_trainer.step_in_backward`."""
    step()
    parameter.grad = None


def _moments(
    optimizer: str, parameter: nn.Parameter, *, in_32_bits: bool
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a parameter's optimizer state that are on the device."""
    if optimizer == "adamw_torch_fused":
        yield from (torch.zeros_like(parameter) for _ in range(2))
        yield torch.zeros((), device=parameter.device)  # holds the number of steps
        return

    count = 1 if optimizer == "lion_8bit" else 2
    in_32_bits |= parameter.numel() < 4096  # bitsandbytes' min_8bit_size
    if not (optimizer.startswith("paged_") and parameter.numel() >= 1e5):
        dtype = torch.float32 if in_32_bits else torch.uint8
        yield from (torch.zeros_like(parameter, dtype=dtype) for _ in range(count))
    if not in_32_bits:
        yield from (
            torch.zeros(math.ceil(parameter.numel() / 256), device=parameter.device)
            for _ in range(count)
        )
