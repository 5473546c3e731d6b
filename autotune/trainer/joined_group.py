"""Finds linear layers with adapters that share an input, and lets them compute together.

`joined_lora` computes the products of groups with a base in 16 bits, and `joined_fp8` the products
of groups with a base in 8-bit floats.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .float8 import Float8Linear

# Each entry has a part of a decoder layer, and the part's linear layers with the same input, in the
# order of their calls.
GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("qkv_proj",)),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("gate_up_proj",)),
    ("mlp", ("down_proj",)),
)
ADAPTER = "default"  # the name that PEFT gives to a model's only adapter
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class Group(ABC):
    """PEFT linear layers that share an input of K values and have N outputs in total.

    `rank` (r) is the rank of one adapter, and R is the sum of the members' ranks. A subclass holds
    `a` (R x K), a copy of all A in the dtype of the base, and `b`, a copy of all sB.
    """

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, part: nn.Module, members: list[Any], others: list[Any]) -> None:
        """Let the members compute together.

        `part` is the module that calls all members. `part` also calls `others`, linear layers with
        the same input and without adapters.
        """
        self.members = members
        self.kind = type(members[0])
        self.down = [module.lora_A[ADAPTER].weight for module in members]
        self.up = [module.lora_B[ADAPTER].weight for module in members]
        self.biases = [module.base_layer.bias for module in members]
        self.rank = len(self.down[0])
        self.scale = float(members[0].scaling[ADAPTER])
        self.sizes = [module.out_features for module in members]
        self._replaced: list[tuple[nn.Module, type]] = []
        self._store()

        if len(members) == 1:
            self._replace(members[0], _lone_class)
            return
        self._replace(part, _part_class)
        for place, module in (*enumerate(members), *((None, module) for module in others)):
            self._replace(module, _member_class)
            module.place = place

    @abstractmethod
    def _store(self) -> None:
        """Allocate the tensors of the group."""

    def _replace(self, module: nn.Module, make: Callable[[type], type]) -> None:
        self._replaced.append((module, type(module)))
        module.__class__ = make(type(module))
        module.__dict__["joined"] = self

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the group: `a`, `b` and the matrices of the base."""

    @abstractmethod
    def extra_bytes(self) -> int:
        """Return the bytes that the group takes in addition to the weights of the base."""

    @abstractmethod
    def places(self) -> list[torch.Tensor]:
        """Return the parts of `b` that hold sB of each member."""

    @abstractmethod
    def refresh(self) -> None:
        """Update other copies of A and sB, after A was copied into `a`, and sB into `b`."""

    @abstractmethod
    def multiply(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs (M x size) of each member, without bias, for inputs (M x K)."""

    def outputs_of(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs (... x size) of each member for inputs (... x K)."""
        if self.members[0].disable_adapters or self.members[0].merged:
            return [self.kind.forward(module, inputs) for module in self.members]

        made = self.multiply(inputs.reshape(-1, inputs.shape[-1]))
        shaped = [one.reshape(*inputs.shape[:-1], one.shape[-1]) for one in made]
        return [
            one if bias is None else one + bias
            for one, bias in zip(shaped, self.biases, strict=True)
        ]

    def undo(self) -> None:
        """Restore the members' own computation."""
        for replaced, kind in self._replaced:
            replaced.__class__ = kind
            replaced.__dict__.pop("joined")
            replaced.__dict__.pop("place", None)


def find_groups(layer: nn.Module) -> Iterator[tuple[nn.Module, list[Any], list[Any]]]:
    """Yield each group of a decoder layer: `part`, `members` and `others` (see `Group`)."""
    for name, names in GROUPS:
        part: Any = getattr(layer, name, None)
        found = [module for name in names if (module := getattr(part, name, None)) is not None]
        members = [module for module in found if _is_plain(module)]
        kinds = {
            (
                len(one.lora_A[ADAPTER].weight),
                one.scaling[ADAPTER],
                one.in_features,
                type(one.base_layer),
            )
            for one in members
        }
        if len(kinds) == 1:
            yield part, members, [module for module in found if module not in members]
        else:
            yield from ((part, [module], []) for module in members)


def _is_plain(module: Any) -> bool:
    """Return whether this is a linear layer with one plain LoRA adapter.

    A plain adapter has no bias, no dropout and no variant such as DoRA. Its base is frozen, and is
    stored in 16 or more bits or in 8-bit floats.
    """
    from peft.tuners.lora import Linear

    if type(module) is not Linear or type(module.base_layer) not in (nn.Linear, Float8Linear):
        return False
    is_only = (
        list(module.lora_A) == [ADAPTER]
        and not module.lora_variant
        and module.lora_B[ADAPTER].bias is None
    )
    has_no_dropout = isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    base = module.base_layer
    weight = base.weight_fp8 if isinstance(base, Float8Linear) else base.weight
    return is_only and has_no_dropout and not weight.requires_grad and weight.is_floating_point()


def spans(sizes: list[int]) -> list[slice]:
    """Return consecutive slices that have these sizes."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class _GroupInput:
    """Replaces a group's input tensor, and holds that tensor and the outputs of the members."""

    def __init__(self, inputs: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        # Attention and MLPs read only this attribute of their input.
        self.shape = inputs.shape
        self.inputs = inputs
        self.outputs = outputs


# Each kind of module has one subclass, so that compiled code of one layer serves all layers. If
# each module got its own `forward`, each module would be compiled again.


@functools.cache
def _part_class(kind: Any) -> Any:
    class Part(kind):
        """Attention or an MLP that computes the group `joined` before its own forward pass."""

        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            group_input = _GroupInput(hidden_states, self.joined.outputs_of(hidden_states))
            return super().forward(group_input, *args, **kwargs)

    return Part


@functools.cache
def _member_class(kind: Any) -> Any:
    class Member(kind):
        """A linear layer with a group's input.

        `place` is the layer's index in the group, or None if the layer has no adapter.
        """

        def forward(self, inputs: "_GroupInput | torch.Tensor") -> Any:
            if isinstance(inputs, _GroupInput):
                if self.place is not None:
                    return inputs.outputs[self.place]
                inputs = inputs.inputs
            return super().forward(inputs)

    return Member


@functools.cache
def _lone_class(kind: Any) -> Any:
    class Lone(kind):
        """The only member of a group: a linear layer with an adapter."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.joined.outputs_of(inputs)[0]

    return Lone


@contextmanager
def run_beside(device: torch.device, run_narrow: Callable[[], None]) -> Iterator[None]:
    """Run the low-rank products on a side stream during the block; on a CPU, after the block."""
    if device.type != "cuda":
        yield
        run_narrow()
        return

    main = torch.cuda.current_stream(device)
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    side = _side_streams[device]
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            run_narrow()
        yield
    finally:  # also after a failure, because the side stream must not write to freed memory
        main.wait_stream(side)
