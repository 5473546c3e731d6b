"""Compiles decoder layers for a dry probe: plans which activations to keep, but makes no kernels.

AOTAutograd splits a layer's graph into a forward and a backward graph, as it does for Inductor. The
split decides which activations the layer keeps for its backward pass. The result of an element-wise
operation takes no memory if Inductor would compute the result inside the kernels that read it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from autotune.dry.storage_counter import (
    FALLBACKS,
    GROUPED_PRODUCT,
    UNPACKED_PRODUCT,
    StorageCounter,
    num_bytes,
)
from autotune.trainer.lean_trainer import budget_options

REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "var_mean", "prod"}
# Inductor computes these operations inside the kernels that read their results, as it does with
# element-wise operations: casts, and gathers of rows.
INLINED = {"convert_element_type", "_to_copy", "index"}
# The largest number of graphs that torch may compile for one function. A model has a few kinds of
# layers, and each kind is compiled for a few input shapes.
GRAPHS = 64


class _Compiled:
    """The key of the layers whose compiled code torch keeps, or None if there is none."""

    key: str | None = None


def compile_for_count(
    layers: list[nn.Module], activation_budget: float = 1.0, key: str | None = None
) -> bool:
    """Compile each layer separately at its first run.

    Compiled code of earlier layers is discarded, unless they had the same `key`, which identifies
    all that decides a layer's code. Returns whether it was discarded. `activation_budget` has the
    same meaning as in `trainer.lean_trainer.compile_layers`.
    """
    is_new = key is None or key != _Compiled.key
    if is_new:
        torch._dynamo.reset()
        _Compiled.key = key
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = GRAPHS
    dynamo.accumulated_recompile_limit = GRAPHS
    dynamo.fail_on_recompile_limit_hit = True

    # Keep attention as one operation in the graph, because `meta_device` replaces this operation by
    # the operators of CUDA's attention kernels.
    torch.compiler.allow_in_graph(functional.scaled_dot_product_attention)
    for layer in layers:
        layer.compile(dynamic=False, backend=_backend(activation_budget))
    return is_new


def _compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    interpreter = _FusedInterpreter(graph)

    def run(arguments: list[Any]) -> Any:
        StorageCounter.fused = True
        try:
            # `boxed_run` frees each argument after the last use of the argument.
            outputs = interpreter.boxed_run(arguments)
        finally:
            StorageCounter.fused = False
        interpreter.env.clear()
        return outputs

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@functools.cache
def _backend(activation_budget: float) -> Callable[..., Any]:
    def partition(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(**budget_options(activation_budget)):
            return min_cut_rematerialization_partition(*args, **kwargs)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=_compile_graph,
        bw_compiler=_compile_graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return backend


class _FusedInterpreter(fx.Interpreter):
    """Runs a graph, and counts no memory for the values that Inductor would never store.

    An unstored value is computed again at each use, so its inputs stay alive until its last use.
    Each kernel that Inductor would generate reads each stored input once, and writes only the
    outputs that other kernels read.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        nodes = list(graph.graph.nodes)
        self._inside = {node for node in nodes if _is_elementwise(node) and not _is_stored(node)}
        self._generated = {node for node in nodes if _is_generated(node)}

        # Each stored value is read once, by the first generated kernel that needs it.
        self._first_read: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._generated}
        read = set[fx.Node]()
        for node in nodes:
            if node in self._generated:
                sources = [_view_source(source) for source in node.all_input_nodes]
                self._first_read[node] = [
                    source for source in dict.fromkeys(sources) if source not in self._inside | read
                ]
                read.update(sources)

        # The inputs of an unstored value stay alive until the last use of that value. The tensor
        # behind a view stays alive until the last use of the view.
        place = {node: index for index, node in enumerate(nodes)}
        last: dict[fx.Node, int] = {}
        for node in reversed(nodes):
            uses = (
                last[user] if user in self._inside or _is_view(user) else place[user]
                for user in node.users
            )
            last[node] = max(uses, default=place[node])
        self._set_last_uses(nodes, last)

    def _set_last_uses(self, nodes: list[fx.Node], last: dict[fx.Node, int]) -> None:
        """Tell the base class which values to free after each node."""
        self.user_to_last_uses: dict[fx.Node, list[fx.Node]] = {}
        for node, index in last.items():
            if node.op == "output":
                continue
            self.user_to_last_uses.setdefault(nodes[index], []).append(node)

    def run_node(self, n: fx.Node) -> Any:
        before = StorageCounter.fusing
        StorageCounter.fusing = n in self._inside
        try:
            made = super().run_node(n)
        finally:
            StorageCounter.fusing = before
        if n in self._generated:
            self._count_kernel(n, made)
        return made

    def _count_kernel(self, node: fx.Node, made: Any) -> None:
        """Add the bytes that a generated kernel reads and writes to every active counter."""
        stored = node not in self._inside
        read = sum(
            num_bytes(self.env[source]) for source in self._first_read[node] if source in self.env
        )
        moved = read + num_bytes(made) if stored else read
        for mode in _get_current_dispatch_mode_stack():  # AOTAutograd may add its own mode
            if isinstance(mode, StorageCounter):
                mode.add_fused(moved, int(stored))


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket.__name__ in INLINED


def _is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates the operation's kernel.

    Libraries provide the kernels of matrix products, and views have no kernels.
    """
    target: Any = node.target
    is_operation = node.op == "call_function" and isinstance(target, torch._ops.OpOverload)
    if not is_operation or target.is_view or target.overloadpacket in flop_registry:
        return False
    return target.overloadpacket.__name__ not in (UNPACKED_PRODUCT, GROUPED_PRODUCT, *FALLBACKS)


def _view_source(node: fx.Node) -> fx.Node:
    """The node whose memory a view shares, or the node itself if it is not a view."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_stored(node: fx.Node) -> bool:
    """Whether Inductor must store the value for an operation that Inductor cannot fuse.

    Inductor fuses element-wise operations and reductions. An operation that uses a view of the
    value uses the value too.
    """
    return any(
        _is_stored(user) if _is_view(user) else not (_is_elementwise(user) or _is_reduction(user))
        for user in node.users
    )


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def _is_reduction(node: fx.Node) -> bool:
    target: Any = node.target
    return (
        isinstance(target, torch._ops.OpOverload) and target.overloadpacket.__name__ in REDUCTIONS
    )
