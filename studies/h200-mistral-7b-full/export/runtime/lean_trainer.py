# -*- coding: utf-8 -*-
"""A Trainer that does not traverse all modules of the model in every micro batch."""

import functools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
from accelerate import ParallelismConfig
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from .dealing import balance_rows
from .graphs import MicroBatchGraphs
from .joined_lora import JoinedLayers
from .model_builder import materialize
from .settings import LIGER_KERNELS, deepspeed_settings
from .zero_shards import partition

# The Trainer's name for the number of tokens that the losses of a step are divided by
NUM_ITEMS = "num_items_in_batch"


def training_arguments(settings: Any, *, accumulation: int, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of TrainingArguments that affect speed and memory.

    The probe and the full run share these arguments. `settings` are the RunSettings of a script, or
    the configuration of a probe, whose fields have the same names.
    """
    return {
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "optim": settings.optimizer,
        "bf16": settings.precision == "bf16_mixed",
        "fp16": settings.precision == "fp16_mixed",
        "use_cpu": on_cpu,
        "learning_rate": settings.learning_rate,
        # If the optimizer steps in the backward pass, the norm of all gradients is known too late
        # to clip them.
        "max_grad_norm": 0.0 if settings.optimizer_in_backward else 1.0,
        "logging_steps": 10,
        # Short runs show a loss, too. Probes never time their first step.
        "logging_first_step": True,
        # The Trainer's filter would hide a loss that is NaN, and would wait for the device in every
        # micro batch.
        "logging_nan_inf_filter": False,
        "report_to": [],
        "dataloader_drop_last": True,
        "dataloader_num_workers": settings.loader_workers,
        "dataloader_pin_memory": not on_cpu,
        "use_liger_kernel": settings.kernels == "liger",
        "liger_kernel_config": LIGER_KERNELS,
    }


def sharing_arguments(
    settings: Any, layers: list[nn.Module], *, first_rank_loads: bool = False
) -> dict[str, Any]:
    """Return the arguments of TrainingArguments for a training on several ranks.

    For `settings`, see `training_arguments`. `layers` are the decoder layers, and FSDP2 shards each
    of them as a unit. With `first_rank_loads`, the first rank of a host has the weights, and sends
    the other ranks their shards.
    """
    if settings.sharding == "none":
        return {}

    # The Trainer's default for a model with adapters is to search for unused parameters in every
    # step.
    if settings.sharding == "ddp":
        return {"ddp_find_unused_parameters": False}

    if settings.sharding.startswith("zero"):
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
        return {"deepspeed": deepspeed_settings(int(settings.sharding[-1]), max(sizes))}

    gradients = {"sync_each_batch": settings.sync_each_batch}
    return _copies(settings) | {
        "accelerator_config": {"gradient_accumulation_kwargs": gradients},
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": settings.sharding == "fsdp2",
            "cpu_offload": settings.offload,
            "cpu_ram_efficient_loading": first_rank_loads,
            "transformer_layer_cls_to_wrap": sorted({type(layer).__name__ for layer in layers}),
        },
    }


def _copies(settings: Any) -> dict[str, Any]:
    """Return the argument of TrainingArguments that splits the ranks into groups.

    The ranks of each group together hold one whole model in shards. If all ranks are one group, no
    argument is needed.
    """
    if settings.copies == 1:
        return {}
    shards = settings.num_gpus // settings.copies
    config = ParallelismConfig(dp_replicate_size=settings.copies, dp_shard_size=shards)
    return {"parallelism_config": config}


def shard_outline(trainer: Trainer, device: torch.device) -> None:
    """Shard a model that no device can hold whole, and allocate this rank's shard of each matrix.

    Under FSDP2, accelerate would shard the model when the training begins, but it identifies
    weights by their addresses, and weights without memory have no address. accelerate and DeepSpeed
    later leave this model unchanged, because it is already sharded.
    """
    if trainer.is_deepspeed_enabled:
        partition(trainer.model, device)
        return
    trainer.model = fsdp2_prepare_model(trainer.accelerator, trainer.model)
    materialize(trainer.model, device)


class _ReleaseFirstBuckets(TrainerCallback):
    """Waits after the first step under DDP until NCCL has released the buckets of gradients.

    DDP makes new buckets in the second step. NCCL holds the old buckets for up to a tenth of a
    second after they were reduced. In short steps, the old and the new buckets would therefore
    exist at the same time, which costs a second copy of all gradients. The second copy was observed
    on two H100s.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.proxy(trainer)
        self._is_first = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = self._is_first
        self._is_first = False
        uses_ddp = isinstance(self._trainer.model_wrapped, DistributedDataParallel)
        if is_first and uses_ddp and dist.get_backend() == "nccl":
            dist.group.WORLD._wait_for_pending_works()


class _BalancedSampler(Sampler[int]):
    """Draws the rows of each step like accelerate's sampler, and then arranges them with `order`.

    `order` gets the lengths of a step's rows, and returns the rows' indices in the new order. An
    incomplete step at the end of an epoch keeps its random order.
    """

    def __init__(
        self, lengths: list[int], step_rows: int, order: Callable[[list[int]], list[int]]
    ) -> None:
        self._sampler = SeedableRandomSampler(lengths)
        self._lengths = lengths
        self._step_rows = step_rows
        self._order = order

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        drawn = list(self._sampler)
        for begin in range(0, len(drawn), self._step_rows):
            step = drawn[begin : begin + self._step_rows]
            if len(step) == self._step_rows:
                order = self._order([self._lengths[row] for row in step])
                step = [step[index] for index in order]
            yield from step

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number seeds the order of the rows.

        A resumed run thus draws the same rows.
        """
        self._sampler.set_epoch(epoch)


class LeanTrainer(Trainer):
    """A Trainer that traverses all modules only to switch between training and evaluation.

    This Trainer also does not count FLOPs, so `total_flos` stays 0. On a 7B model with adapters,
    traversing all modules and counting FLOPs would each take the host milliseconds in each micro
    batch. With a small micro batch, the device would idle meanwhile.

    `row_lengths` are the numbers of tokens of the rows to train on. With `row_lengths`, rows of
    similar length share a micro batch. With `dealt`, rows are grouped only with rows of the same
    optimizer step. For `optimizer_in_backward`, see `step_in_backward`; for `cuda_graphs`, see
    `graphs`. `joined` are layers with joined adapters, which copy the adapters' weights again after
    each step of the optimizer (see `joined_lora`).
    """

    def __init__(
        self,
        *args: Any,
        row_lengths: list[int] | None = None,
        dealt: bool = False,
        optimizer_in_backward: bool = False,
        cuda_graphs: bool = False,
        joined: JoinedLayers | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.row_lengths = row_lengths
        self.dealt = dealt
        self.optimizer_in_backward = optimizer_in_backward
        self.step_hooks: list[Any] = []
        self.cuda_graphs = cuda_graphs
        self.graphs: MicroBatchGraphs | None = None
        self.joined = joined
        self.add_callback(_ReleaseFirstBuckets(self))
        visit_modules_on_change(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return the Trainer's optimizer.

        With `optimizer_in_backward`, this optimizer steps in the backward pass.
        """
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if self.optimizer_in_backward and not self.step_hooks:
            if self.args.gradient_accumulation_steps > 1:
                raise ValueError(
                    "the optimizer can step in the backward pass only if a step has one micro batch"
                )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.step_hooks = step_in_backward(optimizer, partial(kind, **options))
        if self.joined is not None:
            self.joined.watch(optimizer)
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a micro batch with the Trainer's own code, or with a CUDA graph of that code."""
        if not self.cuda_graphs:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch, **kwargs)
            return loss

        if self.graphs is None:
            step = super().training_step

            def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
                items = {NUM_ITEMS: batch.get(NUM_ITEMS)}
                rows = {name: tensor for name, tensor in batch.items() if name != NUM_ITEMS}
                made: torch.Tensor = step(model, rows, **items)
                return made

            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.graphs = MicroBatchGraphs(run, trained)

        # A graph replays no Python code, so the copies of the adapters are refreshed here.
        if self.joined is not None:
            self.joined.follow()
        items = {} if num_items_in_batch is None else {NUM_ITEMS: num_items_in_batch}
        return self.graphs.run(self._prepare_inputs(inputs) | items)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss. A loss in the head gets the labels before the model runs."""
        expect = getattr(self.compute_loss_func, "expect", None)
        if expect is not None:
            expect(inputs["labels"], kwargs.get(NUM_ITEMS))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sampler of the rows. If `row_lengths` is given, it groups rows by length."""
        if self.row_lengths is None:
            return super()._get_train_sampler(*args, **kwargs)
        size = self.args.train_batch_size
        ranks = self.args.world_size
        step_rows = size * self.args.gradient_accumulation_steps * ranks
        if self.dealt:
            order = partial(balance_rows, size=size, ranks=ranks)
            return _BalancedSampler(self.row_lengths, step_rows, order)
        return LengthGroupedSampler(step_rows, lengths=self.row_lengths)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Load all held-out examples. Only the training drops an incomplete last batch."""
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False
        loader = super().get_eval_dataloader(*args, **kwargs)
        self.args.dataloader_drop_last = drop_last
        return loader

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate without compilation, because compiling takes longer than most evaluations."""
        compiled = {module: module._compiled_call_impl for module in self.model.modules()}
        run_layers_eagerly(list(compiled))
        metrics = super().evaluate(*args, **kwargs)
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0 FLOPs, because counting them would visit every parameter."""
        return 0


def step_in_backward(optimizer: torch.optim.Optimizer, make: Any) -> list[Any]:
    """Update each parameter as soon as its gradient exists, and free the gradient.

    So only few gradients exist at a time. `make` makes an optimizer for each parameter, and all
    these optimizers share the state of `optimizer`. `optimizer` keeps the learning rates, and is
    saved and loaded as before, but its own `step` does nothing. Returns the hooks.
    """

    def step(parameter: nn.Parameter, own: torch.optim.Optimizer, group: int) -> None:
        # The state is set in each step, because loading a checkpoint replaces `optimizer.state`.
        own.state = optimizer.state
        own.param_groups[0]["lr"] = optimizer.param_groups[group]["lr"]
        own.step()
        parameter.grad = None

    hooks = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            own = make([group | {"params": [parameter]}])
            hook = partial(step, own=own, group=number)
            hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)
    return hooks


def visit_modules_on_change(model: nn.Module) -> None:
    """Make `model.train()` return at once if the model is already in the wanted mode."""
    model.train()

    # `train` refers to the model only weakly, because a model that refers to itself would stay in
    # memory after its last use.
    reference = weakref.ref(model)
    set_mode = type(model).train

    def train(mode: bool = True) -> Any:
        model = reference()
        if model is None or model.training is mode:
            return model
        return set_mode(model, mode)

    model.train = train


def compile_layers(layers: list[nn.Module], activation_budget: float = 1.0) -> None:
    """Compile each decoder layer separately when it first runs, for the shapes of its inputs.

    With a budget below 1, a layer keeps at most this fraction of its activations for the backward
    pass. torch's partitioner chooses the tensors to recompute: large tensors that take few
    operations.
    """
    # The graphs of our own autograd functions (joined adapters, products in 8 bits) contain
    # everything that these functions compute, so their code may be cached on disk. This setting is
    # part of the cache's key, so it must be the same for all layers.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # By default, Dynamo splits the graph of a layer under DDP, so that gradients can be sent before
    # the layer's backward pass ends. The backward passes of other layers hide this communication
    # too, and a layer in parts takes longer to compile.
    torch._dynamo.config.optimize_ddp = False
    backend = "inductor" if activation_budget == 1.0 else _budgeted_inductor(activation_budget)
    for layer in layers:
        layer.compile(dynamic=False, backend=backend)


def budget_options(activation_budget: float) -> dict[str, Any]:
    """Return torch's settings that make the partitioner keep this fraction of the activations.

    Without `is_non_builtin_to_include`, the partitioner treats operations from outside torch, for
    example joined adapters, as cheap element-wise operations.
    """
    return {"activation_memory_budget": activation_budget, "is_non_builtin_to_include": True}


# Each budget has its own backend, because Dynamo distinguishes the compiled code of different
# budgets only by the backend.
@functools.cache
def _budgeted_inductor(activation_budget: float) -> Callable[..., Any]:
    """Return an Inductor backend for layers that keep this fraction of their activations."""
    from torch._dynamo import lookup_backend

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(**budget_options(activation_budget)):
            return lookup_backend("inductor")(graph, inputs)

    return compile_graph


def run_layers_eagerly(layers: list[nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        layer._compiled_call_impl = None
