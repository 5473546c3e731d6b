"""Events of a profile are divided by part, stage and class, on a GPU by its kernels and on a CPU by
its operators.
"""

from typing import Any

import pytest

from autotune.core.micro_profile import KernelClass, MicroBatchProfile, Part, Stage
from autotune.probe.micro_profiler import (
    IN_BACKWARD,
    PREFIX,
    Event,
    host_places,
    placed_work,
    profile_of,
)

MAIN, AUTOGRAD = 1, 2


def host(name: str, start: float, end: float, thread: int = MAIN, **more: Any) -> Event:
    return Event(name=name, start_s=start, end_s=end, thread=thread, **more)


def a_range(part: str, start: float, end: float, thread: int = MAIN) -> Event:
    return host(PREFIX + part, start, end, thread, is_range=True)


def kernel(name: str, start: float, end: float, linked: int = 0) -> Event:
    return Event(name=name, start_s=start, end_s=end, on_device=True, linked=linked)


# A forward pass of an MLP with an adapter and of the head, its backward pass in another thread,
# which computes the MLP again first, and a step of the optimizer. A number is that of the operator
# that issued a kernel.
HOST = [
    a_range("MLP", 0.0, 2.0),
    host("aten::linear", 0.0, 0.9, ident=1, sequence=4),
    host("aten::mm", 0.1, 0.8, ident=2, sequence=5),
    a_range("adapters", 1.0, 1.9),
    host("aten::mm", 1.1, 1.8, ident=3, sequence=6),
    host("cudaLaunchKernel", 1.2, 1.3, linked=3),  # an event of the runtime, which is no operator
    host("aten::mm", 2.1, 2.8, ident=4, sequence=7),
    host(f"{IN_BACKWARD}MmBackward0", 3.0, 4.0, AUTOGRAD, ident=5, sequence=7, forward_thread=MAIN),
    host("aten::mm", 3.1, 3.9, AUTOGRAD, ident=6),
    host(f"{IN_BACKWARD}MmBackward0", 4.0, 5.0, AUTOGRAD, ident=7, sequence=6, forward_thread=MAIN),
    a_range("MLP", 4.1, 4.5, AUTOGRAD),
    host("aten::mm", 4.2, 4.4, AUTOGRAD, ident=8, sequence=0),
    host("aten::mm", 4.6, 4.9, AUTOGRAD, ident=9),
    host(
        f"{IN_BACKWARD}MmBackward0", 5.0, 6.0, AUTOGRAD, ident=10, sequence=5, forward_thread=MAIN
    ),
    host("aten::mm", 5.1, 5.9, AUTOGRAD, ident=11),
    host(f"{IN_BACKWARD}torch::autograd::AccumulateGrad", 6.0, 6.5, AUTOGRAD, ident=12),
    host("aten::add_", 6.1, 6.4, AUTOGRAD, ident=13),
    a_range("optimizer", 7.0, 8.0),
    host("aten::_fused_adamw_", 7.1, 7.9, ident=14),
]
KERNELS = [
    kernel("nvjet_tst_1", 1.0, 2.0, 2),
    kernel("nvjet_tst_2", 2.0, 2.5, 3),
    kernel("nvjet_tst_3", 3.0, 5.0, 4),
    kernel("nvjet_tst_3", 5.0, 9.0, 6),
    kernel("nvjet_tst_1", 9.0, 10.0, 8),
    kernel("triton_poi_fused_add_mul_0", 10.0, 10.25),  # which nothing issued
    kernel("nvjet_tst_2", 11.0, 12.0, 9),
    kernel("nvjet_tst_1", 11.5, 13.5, 11),  # beside the one before
    kernel("void at::native::vectorized_elementwise_kernel<4, add>", 14.0, 14.5, 13),
    kernel(f"{PREFIX}MLP", 1.0, 2.5),  # a range as the GPU's timeline repeats it
    kernel("void at::native::vectorized_elementwise_kernel<4, lerp>", 15.0, 16.0, 14),
]
ABOUT: dict[str, Any] = {
    "rows": 2,
    "length": 64,
    "micro_s": 16.0,
    "profiled_s": 20.0,
    "loader_rows_per_s": 100.0,
}


def profiled(events: list[Event], **changes: Any) -> MicroBatchProfile:
    settings: dict[str, Any] = {"on_gpu": True, "compiled": False, "trained": Part.ADAPTERS} | ABOUT
    found = profile_of(events, **settings | changes)
    assert found is not None
    return found


def test_kernels_go_with_the_part_whose_operators_issued_them() -> None:
    found = profiled(HOST + KERNELS)
    assert {(one.part, one.stage, one.kind): one.seconds for one in found.work} == {
        (Part.HEAD, Stage.BACKWARD, KernelClass.PRODUCTS): 4.0,
        (Part.HEAD, Stage.FORWARD, KernelClass.PRODUCTS): 2.0,
        (Part.MLP, Stage.BACKWARD, KernelClass.PRODUCTS): 2.0,
        (Part.MLP, Stage.FORWARD, KernelClass.PRODUCTS): 1.0,
        (Part.MLP, Stage.RECOMPUTED, KernelClass.PRODUCTS): 1.0,
        (Part.ADAPTERS, Stage.BACKWARD, KernelClass.PRODUCTS): 1.0,
        (Part.ADAPTERS, Stage.FORWARD, KernelClass.PRODUCTS): 0.5,
        (Part.ADAPTERS, Stage.BACKWARD, KernelClass.FUSED): 0.5,
        (Part.OTHER, Stage.RECOMPUTED, KernelClass.FUSED): 0.25,
        (Part.OPTIMIZER, Stage.OPTIMIZER, KernelClass.OPTIMIZER): 1.0,
    }
    # A moment in which two kernels ran counts once, and the optimizer step is no part of the micro
    # batch.
    assert found.busy_s == 1.5 + 2.0 + 4.0 + 1.0 + 0.25 + 2.5 + 0.5
    assert (found.optimizer_s, found.idle_s, found.num_kernels) == (1.0, 16.0 - found.busy_s, 9)
    longest = found.longest[0]
    assert (longest.name, longest.seconds, longest.count) == ("nvjet_tst_3", 6.0, 2)
    (fused,) = (one for one in found.longest if one.fuses)
    assert fused.fuses == ("add", "mul")
    many = [kernel(f"nvjet_tst_{number}", number, number + 1.0) for number in range(20)]
    assert len(profiled(HOST + many).longest) == 15


def test_in_compiled_layers_only_attention_is_known_inside() -> None:
    events = [
        a_range("", 0.0, 2.0),
        host("CompiledFunction", 0.1, 1.9, ident=1, sequence=4),
        host(
            f"{IN_BACKWARD}CompiledFunctionBackward",
            3.0,
            4.0,
            AUTOGRAD,
            ident=2,
            sequence=4,
            forward_thread=MAIN,
        ),
        host("cudaStreamSynchronize", 3.6, 3.7, ident=2),  # whose number is the driver's own
        kernel("triton_red_fused_add_mean_1", 1.0, 2.0, 1),
        kernel("flash_fwd_kernel", 2.0, 4.0, 1),
        kernel("nvjet_tst_1", 5.0, 8.0, 2),
    ]
    found = profiled(events, compiled=True)
    assert {(one.part, one.stage): one.seconds for one in found.work} == {
        (None, Stage.BACKWARD): 3.0,
        (Part.ATTENTION, Stage.FORWARD): 2.0,
        (None, Stage.FORWARD): 1.0,
    }


def test_on_a_cpu_operators_count_without_those_that_they_call() -> None:
    found = profiled(HOST, on_gpu=False)
    own = {(one.part, one.stage): one.seconds for one in found.work}
    assert own[Part.MLP, Stage.FORWARD] == pytest.approx(0.9)  # aten::linear and the product in it
    assert own[Part.ADAPTERS, Stage.FORWARD] == pytest.approx(0.7)
    assert sum(one.seconds for one in found.micro_work) == pytest.approx(found.busy_s)
    # All that operators took, but for the range in the backward pass that is none, of which an
    # operator took half.
    assert found.busy_s == pytest.approx(0.9 + 0.7 + 0.7 + 1.0 + 0.8 + 1.0 + 0.5)


def test_an_operator_that_ends_as_the_next_begins_is_not_around_it() -> None:
    events = [a_range("MLP", 0.0, 1.0), host("aten::mm", 1.0, 2.0, ident=1)]
    assert [one.place.part for one in host_places(events, None, Part.OTHER)] == [
        Part.MLP,
        Part.HEAD,
    ]


def test_a_gpu_whose_kernels_cannot_be_seen_has_no_profile() -> None:
    assert profile_of(HOST, on_gpu=True, compiled=False, trained=Part.OTHER, **ABOUT) is None
    assert placed_work(HOST, None, Part.OTHER)[0].event.name == "aten::linear"
