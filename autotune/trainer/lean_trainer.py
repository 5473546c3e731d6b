"""transformers' Trainer without the work that it does on every module of a model for every micro batch."""

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

from .dealing import by_length
from .graphs import MicroBatchGraphs
from .joined_lora import Joined
from .model_builder import materialize
from .settings import LIGER_KERNELS, deepspeed_settings

NUM_ITEMS = "num_items_in_batch"  # the tokens that the losses of a step are divided by, as Trainer calls them


def training_arguments(settings: Any, *, accumulation: int, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments that speed and memory depend on, in the probe and in the full run.

    `settings` are the RunSettings of a script, or the configuration of a probe, which has the same names.
    """
    return {
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "optim": settings.optimizer,
        "bf16": settings.precision == "bf16_mixed",
        "fp16": settings.precision == "fp16_mixed",
        "use_cpu": on_cpu,
        "learning_rate": settings.learning_rate,
        "max_grad_norm": 0.0 if settings.optimizer_in_backward else 1.0,  # the norm of all is known at the end alone
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # it would hide a bad loss, and wait for the device at every micro batch
        "report_to": [],
        "dataloader_drop_last": True,
        "dataloader_num_workers": settings.loader_workers,
        "dataloader_pin_memory": not on_cpu,
        "use_liger_kernel": settings.kernels == "liger",
        "liger_kernel_config": LIGER_KERNELS,
    }


def sharing_arguments(settings: Any, layers: list[nn.Module], *, from_one: bool = False) -> dict[str, Any]:
    """More keyword arguments of TrainingArguments, by the way in which ranks share out a training.

    `settings` are as of `training_arguments`, `layers` the decoder layers, each of which FSDP2 shards as a unit. With
    `from_one` the first rank of a host has the weights, and sends the others their shards.
    """
    if settings.sharding == "none":
        return {}
    if settings.sharding == "ddp":  # with adapters Trainer's default is to look for unused parameters at every step
        return {"ddp_find_unused_parameters": False}
    if settings.sharding.startswith("zero"):
        largest = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
        return {"deepspeed": deepspeed_settings(int(settings.sharding[-1]), largest)}
    return _copies(settings) | {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": settings.sync_each_batch}},
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": settings.sharding == "fsdp2",
            "cpu_offload": settings.offload,
            "cpu_ram_efficient_loading": from_one,
            "transformer_layer_cls_to_wrap": sorted({type(layer).__name__ for layer in layers}),
        },
    }


def _copies(settings: Any) -> dict[str, Any]:
    """The ranks as several groups, each of which holds all shards; nothing where they are one."""
    if settings.copies == 1:
        return {}
    shards = settings.num_gpus // settings.copies
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=settings.copies, dp_shard_size=shards)}


def shard_outline(trainer: Trainer, device: torch.device) -> None:
    """Share out a model that no device holds as a whole: its matrices get memory as shards.

    accelerate would share it out as the training begins, and leaves alone what is shared out already. It tells weights
    by their addresses, which those without memory do not have.
    """
    trainer.model = fsdp2_prepare_model(trainer.accelerator, trainer.model)
    materialize(trainer.model, device)


class _FreeFirstBuckets(TrainerCallback):
    """Waits, after the first step under DDP, until NCCL has let go of the buckets of gradients.

    DDP makes them anew in the second step. NCCL holds what it has reduced for up to a tenth of a second longer, so
    that short steps would keep both for good: as much as all gradients. Two H100s showed it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.proxy(trainer)
        self._waits = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ends_first, self._waits = self._waits, False
        shared = isinstance(self._trainer.model_wrapped, DistributedDataParallel)
        if ends_first and shared and dist.get_backend() == "nccl":
            dist.group.WORLD._wait_for_pending_works()


class _Dealt(Sampler[int]):
    """The rows as accelerate draws them, those of each step in the order in which `deal` puts rows of their lengths.

    Fewer rows than a step has, at the end of a pass, stay in the order in which they were drawn.
    """

    def __init__(self, lengths: list[int], step_rows: int, deal: Callable[[list[int]], list[int]]) -> None:
        self._drawn = SeedableRandomSampler(lengths)
        self._lengths, self._step_rows, self._deal = lengths, step_rows, deal

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        drawn = list(self._drawn)
        for begin in range(0, len(drawn), self._step_rows):
            step = drawn[begin : begin + self._step_rows]
            is_whole = len(step) == self._step_rows
            yield from (step[place] for place in self._deal([self._lengths[row] for row in step])) if is_whole else step

    def set_epoch(self, epoch: int) -> None:
        """Draw as in this pass: a run that goes on begins in the middle of one."""
        self._drawn.set_epoch(epoch)


class LeanTrainer(Trainer):
    """A Trainer that visits the modules only when the mode changes, and counts no FLOPs (`total_flos` stays 0).

    On a 7B model with adapters each of these takes the host milliseconds a micro batch, in which a device with a small
    micro batch idles.

    `row_lengths`, the tokens of each row to train on, put rows of nearly the same length into a micro batch: those of
    many steps, or with `dealt` those of each step alone. With `optimizer_in_backward` see `step_in_backward`, with
    `cuda_graphs` see `graphs`. Layers that are `joined` learn of the optimizer's steps.
    """

    def __init__(
        self,
        *args: Any,
        row_lengths: list[int] | None = None,
        dealt: bool = False,
        optimizer_in_backward: bool = False,
        cuda_graphs: bool = False,
        joined: Joined | None = None,
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
        self.add_callback(_FreeFirstBuckets(self))
        visit_modules_on_change(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, which steps in the backward pass if that was asked for."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if self.optimizer_in_backward and not self.step_hooks:
            if self.args.gradient_accumulation_steps > 1:
                raise ValueError("the optimizer can step in the backward pass if a step has one micro batch alone")
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.step_hooks = step_in_backward(optimizer, partial(kind, **options))
        if self.joined is not None:
            self.joined.watch(optimizer)
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """A micro batch, as the Trainer computes it or by a CUDA graph of that."""
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
        items = {} if num_items_in_batch is None else {NUM_ITEMS: num_items_in_batch}
        return self.graphs.run(self._prepare_inputs(inputs) | items)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The sampler by length where that was asked for, else the Trainer's own choice."""
        if self.row_lengths is None:
            return super()._get_train_sampler(*args, **kwargs)
        size, ranks = self.args.train_batch_size, self.args.world_size
        step_rows = size * self.args.gradient_accumulation_steps * ranks
        if self.dealt:
            return _Dealt(self.row_lengths, step_rows, partial(by_length, size=size, ranks=ranks))
        return LengthGroupedSampler(step_rows, lengths=self.row_lengths)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """All examples that are held out: a last batch that is not full is dropped in training alone."""
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        loader = super().get_eval_dataloader(*args, **kwargs)
        self.args.dataloader_drop_last = drop_last
        return loader

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with layers that are not compiled: to compile them for it takes longer than most evaluations."""
        compiled = {module: module._compiled_call_impl for module in self.model.modules()}
        run_layers_eagerly(list(compiled))
        metrics = super().evaluate(*args, **kwargs)
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: counting them visits every parameter."""
        return 0


def step_in_backward(optimizer: torch.optim.Optimizer, make: Any) -> list[Any]:
    """Take the step of each parameter as soon as its gradient is there, and free the gradient: few exist at a time.

    An optimizer that `make` makes does so for each parameter. All share the state of `optimizer`, which keeps the
    learning rates, saves and loads as before, and whose own step does nothing. Returns the hooks.
    """

    def step(parameter: nn.Parameter, own: torch.optim.Optimizer, group: int) -> None:
        own.state = optimizer.state  # loading a checkpoint replaces it
        own.param_groups[0]["lr"] = optimizer.param_groups[group]["lr"]
        own.step()
        parameter.grad = None

    hooks = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            own = make([group | {"params": [parameter]}])
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(step, own=own, group=number)))
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)
    return hooks


def visit_modules_on_change(model: nn.Module) -> None:
    """Make `model.train()` do nothing where the model is in that mode already."""
    model.train()
    # A model that refers to itself would stay in memory after its last use.
    reference = weakref.ref(model)
    set_mode = type(model).train

    def train(mode: bool = True) -> Any:
        model = reference()
        if model is None or model.training is mode:
            return model
        return set_mode(model, mode)

    model.train = train


def compile_layers(layers: list[nn.Module], activation_budget: float = 1.0) -> None:
    """Compile each decoder layer by itself when it first runs, for the shapes that it then sees.

    With a budget below 1 a layer keeps up to that share of what it would keep for the backward pass: torch's
    partitioner has it compute again what takes the fewest operations for its size.
    """
    # The graphs of our own functions (joined adapters, products in 8 bits) say all that they compute: their code may be
    # kept on disk. This setting is part of the key there, and so the same for all layers.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    backend = "inductor" if activation_budget == 1.0 else _inductor_within(activation_budget)
    for layer in layers:
        layer.compile(dynamic=False, backend=backend)


def within_budget(activation_budget: float) -> dict[str, Any]:
    """Values of torch's configuration with which its partitioner keeps a share of the activations.

    It would take operations that are not torch's own, as those of joined adapters, for as cheap as element-wise ones.
    """
    return {"activation_memory_budget": activation_budget, "is_non_builtin_to_include": True}


@functools.cache  # Dynamo tells compiled code of several budgets apart by their backends
def _inductor_within(activation_budget: float) -> Callable[..., Any]:
    """Inductor, for layers that keep a share of their activations."""
    from torch._dynamo import lookup_backend

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(**within_budget(activation_budget)):
            return lookup_backend("inductor")(graph, inputs)

    return compile_graph


def run_layers_eagerly(layers: list[nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        layer._compiled_call_impl = None
