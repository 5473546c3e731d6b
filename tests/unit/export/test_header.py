"""What heads of exported files say, and the values that several exporters take from a recipe."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.train_config import TrainConfig
from autotune.export import header
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_options import RunOptions
from autotune.problem.workload import Workload
from autotune.study.summary import Recipe
from tests.helpers.factories import FINGERPRINT
from tests.unit.export.test_script import recipe


def timed(num_steps: int = 313, **changes: Any) -> Recipe:
    """Steps of 2 s, 16,000 useful tokens a second; 20 of 130 GiB; 1 h, or 0.5 to 2 h, for $3."""
    made = recipe(TrainConfig(micro_batch_size=4), **changes)
    winner = made.winner
    cost = replace(
        winner.cost,
        num_steps=num_steps,
        full_run_hours=1.0,
        interval_hours=(0.5, 2.0),
        full_run_usd=3.0,
    )
    speed = replace(winner.performance, step_time_s=2.0, tokens_per_second=16_000.0)
    measurement = replace(winner.measurement, peak_reserved_gib=20.0, limit_gib=130.0)
    return replace(
        made, winner=replace(winner, cost=cost, performance=speed, measurement=measurement)
    )


def test_the_summary_of_a_recipe() -> None:
    made = replace(
        timed(), fingerprint=replace(FINGERPRINT, packages={"torch": "2.13.0", "peft": "0.21.2"})
    )
    assert header.summary_lines(made) == [
        f"autotune study {made.study}: mistralai/Mistral-7B-v0.3 on h200-sxm",
        f"Configuration: {made.config.label()}, 8 micro batches a step",
        "Expect (measured): 2.0 s a step, 16,000 useful tokens/s, peak 20.0 GiB of 130.0 GiB",
        "Full run: 10,000 examples, 1 epoch, 313 steps: 1 h (30 min to 2 h), $3.00",
        "Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0",
        f"Fingerprint {made.fingerprint.digest}: python 3.12.3, peft 0.21.2, torch 2.13.0",
    ]
    bare = replace(made, fingerprint=replace(made.fingerprint, driver=None, cuda=None))
    assert header.summary_lines(bare)[4] == "Probed with transformers on NVIDIA H200"


def test_how_many_of_the_tokens_are_trained_on_is_said_where_not_all_are() -> None:
    """A quarter of 16,000."""
    lengths = Lengths.of([1024], "counted", 0.25)
    part = timed(workload=Workload(examples=10_000, lengths=lengths))
    assert (
        header.trained_tokens_text(part) == " (4,000 of them trained on)"
        and header.trained_tokens_text(timed()) == ""
    )
    assert (
        "16,000 useful tokens/s (4,000 of them trained on), peak" in header.summary_lines(part)[2]
    )


def test_a_study_of_a_processor_runs_on_it_and_one_of_a_gpu_on_the_first() -> None:
    gpu, cpu = timed(), timed(device=resolve_device("cpu"))
    assert (header.on_cpu(gpu), header.on_cpu(cpu)) == (False, True)
    assert header.environment(cpu) == "CUDA_VISIBLE_DEVICES="
    first = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0"
    assert header.environment(gpu) == f"{first} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize(
    ("num_steps", "warmup"), [(1, 0), (16, 0), (17, 1), (100, 3), (313, 9), (10_000, 300)]
)
def test_three_percent_of_the_steps_warm_up(num_steps: int, warmup: int) -> None:
    assert header.warmup_steps(timed(num_steps)) == warmup


def test_a_run_saves_every_half_hour_and_evaluates_as_often() -> None:
    long = timed(5000)
    assert (header.save_steps(long), header.eval_steps(long)) == (900, 900)
    assert (header.save_steps(timed(313)), header.eval_steps(timed(313))) == (313, 313)
    asked = replace(long, run_options=RunOptions(save_steps=100, eval_steps=50))
    assert (header.save_steps(asked), header.eval_steps(asked)) == (100, 50)


@pytest.mark.parametrize(
    ("name", "weights", "source", "published"),
    [
        ("org/name", None, "org/name", True),
        ("demo-3m", None, "demo-3m", False),
        ("demo-3m", "/weights", "/weights", True),
        ("org/name", "/weights", "/weights", True),
    ],
)
def test_where_weights_come_from(
    name: str, weights: str | None, source: str, published: bool
) -> None:
    made = timed()
    made = replace(made, model=replace(made.model, name=name, weights=weights))
    assert header.model_source(made) == source and header.has_published_weights(made) is published


def test_a_comment_has_one_line_for_each_and_nothing_that_a_terminal_obeys() -> None:
    assert header.one_line("a\nb\x1b[31m\t ") == "a b [31m"
    assert header.comment(["one", "", "two\nthree  "]) == "# one\n#\n# two three"


def test_sections_stand_in_order_with_their_notes_and_empty_ones_are_left_out() -> None:
    long = "word " * 22
    sections = [("", {"b": 1, "a": 2}), ("a note", {"z": [1], "c": long.strip()}), ("nothing", {})]
    assert header.yaml_sections(["head"], sections) == (
        f"# head\n\nb: 1\na: 2\n\n# a note\nz:\n- 1\nc: {long.strip()}\n"
    )
