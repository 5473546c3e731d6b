"""What a study asks of probes."""

from dataclasses import replace
from typing import Any

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from tests.helpers.sessions import space, subject_of

H200, A100, T4 = map(resolve_device, ("h200", "a100", "t4"))
CARRIED = SpeedTransfer(products=0.5, bytes=0.5, error=0.1)
PADDED = Workload(
    examples=1000, lengths=Lengths.of([100, 200, 400, 1000], "counted"), global_batch=32
)


def asked(task: Task, **knobs: Any) -> Any:
    return task.request(
        TrainConfig(**knobs), device="cuda:0", memory_gib=80.0, headroom=0.05, seed=3
    )


def test_a_probe_trains_on_the_share_that_the_examples_train_on() -> None:
    lengths = Lengths.of([100, 200], "counted", 0.4321)
    assert asked(subject_of(workload=Workload(lengths=lengths))).trained_share == 0.43
    assert (
        asked(
            subject_of(workload=replace(PADDED, lengths=replace(lengths, trained_share=0.001)))
        ).trained_share
        == 0.01
    )
    assert asked(subject_of(workload=PADDED)).trained_share == 1.0


def test_a_request_has_the_micro_batches_of_the_run() -> None:
    task = subject_of(workload=PADDED)
    plain = asked(task, micro_batch_size=8, seq_len=1024)
    assert (plain.micro_steps, plain.min_timed_micros, plain.seed, plain.headroom) == (
        2,
        2,
        3,
        0.05,
    )
    assert plain.micro_batches == task.workload.micro_batches(plain.config) != ()
    assert asked(task, micro_batch_size=32, seq_len=1024).micro_steps == 1
    assert (
        not plain.profile
        and asked(replace(task, measured_on=H200, carried=CARRIED), seq_len=1024).profile
    )
    assert (
        asked(replace(task, trainer="trl"), micro_batch_size=8, seq_len=1024).micro_batches
        == plain.micro_batches
    )


def test_probes_of_one_trainer_say_nothing_of_the_other() -> None:
    task = subject_of()
    keys = {
        task.model_key,
        replace(task, trainer="trl").model_key,
        replace(task, model=resolve_model("gpt2")).model_key,
    }
    assert len(keys) == 3 and task.model_key == task.model.digest


def test_the_baseline_comes_with_all_smaller_micro_batches() -> None:
    sizes = (32, 1, 4, 2, 8)
    begun = subject_of(space(micro_batch_size=sizes, seq_len=(256,), lora_rank=(8, 16))).baselines
    assert [config.micro_batch_size for config in begun] == [8, 4, 2, 1] and {
        config.lora_rank for config in begun
    } == {16}
    assert {config.method for config in begun} == {"lora"}
    full = subject_of(space(method=("full",), micro_batch_size=sizes, seq_len=(256,))).baselines
    assert {config.method for config in full} == {"full"}
