"""A study on two ranks of this machine's processor, from the
search to runs of the exported script.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune import tune
from autotune.api.studies import result_of
from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.prediction.collectives import added_s, traffic
from autotune.prediction.projection import run_performance
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import step_time_s
from autotune.problem.target import find_target
from autotune.problem.workload import Workload
from autotune.study import preparation
from tests.helpers.next_commands import stranger
from tests.helpers.tokenizers import byte_level
from tests.system.test_end_to_end import autotune, command
from tests.unit.export.test_script import demo, recipe, write

pytestmark = pytest.mark.probe

SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [2, 4], kind: system}
  seq_len: 16
  lora_rank: 16
  precision: fp32
  checkpointing: none
"""
ARGUMENTS = (
    "--gpu",
    "cpu",
    "--model",
    "demo-3m",
    "--space",
    "space.yaml",
    "--gpus",
    "2",
    "--global-batch",
    "16",
)
ARGUMENTS += (
    "--examples",
    "4000",
    "--tokens-per-example",
    "16",
    "--price",
    "0.5",
    "--budget",
    "5m",
    "--trials",
    "2",
)


def test_two_ranks_are_searched_confirmed_exported_verified_and_stopped_together(
    tmp_path: Path,
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    ended = autotune(tmp_path, "run", *ARGUMENTS, "--study", "pair", "--verify")
    # The pace of a busy machine may differ from the study's: that alone may fail the verification.
    assert ended.code == 0 or "the run is" in ended.err, ended.err
    assert "micro batches of train.py" in ended.err
    found = json.loads((tmp_path / "runs" / "pair" / "summary.json").read_text())
    winner = found["winner"]
    assert (winner["config"]["num_gpus"], winner["config"]["sharding"]) == (2, "ddp")
    assert winner["evidence"] == "measured" and found["baseline"]["config"]["sharding"] == "ddp"
    assert winner["cost"]["usd_per_hour"] == 1.0  # of two

    script = tmp_path / "runs" / "pair" / "export"
    assert {path.name for path in script.iterdir()} == {
        *("train.py", "train_config.json", "launch.sh", "model_config.json", "runtime")
    }
    train = command("train", "pair", "--output-dir", "out", "--random-weights")
    with subprocess.Popen(
        train, cwd=tmp_path, env=stranger(), stderr=subprocess.PIPE, text=True
    ) as process:
        progress, until = tmp_path / "out" / "progress.jsonl", time.monotonic() + 120
        while not (progress.exists() and len(progress.read_text().splitlines()) > 3):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    assert process.returncode == 75 and "a checkpoint of step" in said, said
    steps = [line["step"] for line in lines]
    # by one rank alone; a logged loss and a save after the last step add lines
    assert steps == sorted(steps) and set(steps) == set(range(1, steps[-1] + 1))
    assert len(steps) < 1.5 * steps[-1] + 3 and steps[-1] < lines[-1]["of"] == 250
    assert any((tmp_path / "out").glob("checkpoint-*/trainer_state.json"))


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of `tune` for a short study on this processor, several of which are said to be
    linked.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    target = replace(find_target("cpu"), device=replace(resolve_device("cpu"), link_gb_s=1.0))
    monkeypatch.setattr(preparation, "find_target", lambda name: target)
    options: dict[str, Any] = {
        "gpu": "cpu",
        "model": "demo-3m",
        "space": "space.yaml",
        "global_batch": 16,
    }
    return options | {"examples": 4000, "tokens_per_example": 16, "price": 0.5, "budget": "5m"}


def test_one_device_plays_a_rank_of_four(tmp_path: Path, linked: dict[str, Any]) -> None:
    options = linked | {"pins": {"micro_batch_size": 2}}
    said: list[str] = []
    result = tune(**options, gpus=4, play_ranks=True, study="played", progress=said.append)
    recipe = result.summary.recipe
    assert (
        recipe is not None
        and recipe.config.num_gpus == 4
        and recipe.winner.evidence is Evidence.PROJECTED
    )
    assert (
        recipe.winner.memory_evidence is Evidence.MEASURED
        and recipe.winner.cost.evidence is Evidence.PROJECTED
    )
    assert recipe.winner.cost.usd_per_hour == 2.0 and recipe.winner.cost.pauses is None
    assert any("one GPU simulated one of 4 ranks" in caveat for caveat in recipe.caveats)
    assert result.record.task.plays_ranks and result.record.task.search_price.usd_per_hour == 0.5

    # A step of one measurement takes what was computed, and what four ranks send each other; the
    # winner's is the median of several.
    task, played = result.record.task, recipe.winner.measurement
    sent = traffic(task.model, recipe.config, Parallelism.of(recipe.config))
    assert sent is not None
    accumulation = recipe.accumulation
    computed_s = step_time_s(played, accumulation)
    each_s, once_s = added_s(statistics.median(played.micro_step_s), recipe.config, sent, 1.0)
    projected_s = run_performance(task, recipe.config, [played]).step_time_s
    assert projected_s == pytest.approx(computed_s + accumulation * each_s + once_s)
    assert recipe.winner.performance.spread[1] > 0
    exported = tmp_path / "runs" / "played" / "export" / "train_config.json"
    assert json.loads(exported.read_text())["num_gpus"] == 4
    with pytest.raises(UsageError, match="simulation of ranks differs"):
        tune(**options, gpus=4, study="played")


def test_one_study_compares_numbers_of_gpus(tmp_path: Path, linked: dict[str, Any]) -> None:
    """One device is a rank of one, of two and of four in turn.

    Which number wins depends on the deadline alone.
    """
    options = linked | {"pins": {"micro_batch_size": 2}}
    options["play_ranks"] = True
    result = tune(**options, gpus="1,2,4", within="2h", study="numbers")
    recipe, task = result.recipe, result.record.task
    assert [one.config.num_gpus for one in recipe.by_gpus] == [
        1,
        2,
        4,
    ] and task.numbers_of_gpus == (1, 2, 4)
    alone, pair, four = recipe.by_gpus
    assert (
        alone.evidence is Evidence.MEASURED and pair.evidence is four.evidence is Evidence.PROJECTED
    )
    assert {one.memory_evidence for one in recipe.by_gpus} == {Evidence.MEASURED}
    assert [one.cost.usd_per_hour for one in recipe.by_gpus] == [0.5, 1.0, 2.0]
    assert recipe.baseline is not None and recipe.baseline.config.num_gpus == 1
    page = (tmp_path / "runs" / "numbers" / "report.html").read_text()
    assert "<h2>How many GPUs</h2>" in page and "cheapest within 2 h: " in page
    assert [one["config"]["num_gpus"] for one in result.data()["by_gpus"]] == [1, 2, 4]
    with pytest.raises(UsageError, match="deadline in hours differs"):
        tune(**options, gpus=[1, 2, 4], within="1s", study="numbers")
    hurried = result_of(
        replace(result.record, task=replace(task, within_hours=1 / 3600)), result.url
    ).recipe
    speeds = {one.config.num_gpus: one.performance.tokens_per_second for one in hurried.by_gpus}
    assert speeds[hurried.config.num_gpus] > speeds[1]
    assert any("nothing that was tried ends within 1.0 s" in caveat for caveat in hurried.caveats)


def test_numbers_of_gpus_are_compared_on_real_ranks(linked: dict[str, Any]) -> None:
    """One rank trains alone, and then two train together."""
    result = tune(**linked, gpus="1,2", pins={"micro_batch_size": 2}, study="real")
    recipe, task = result.recipe, result.record.task
    assert not task.plays_ranks and task.search_price.usd_per_hour == 1.0
    assert [one.config.num_gpus for one in recipe.by_gpus] == [1, 2]
    assert Evidence.PROJECTED not in {one.evidence for one in recipe.by_gpus}


# accelerate shards on GPUs alone, by code that runs on a processor as it is.
ON_PROCESSORS = """\
import pathlib, sys
from accelerate.state import DistributedType, PartialState

PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
from runtime.command_line import start

start(folder)
"""


def shared_out(
    folder: Path, is_larger_than_gpu: bool, *arguments: str, processes: int = 2
) -> dict[str, Any]:
    """What train.py prints that two processes run, each with a shard of the model."""
    settings = json.loads((folder / "train_config.json").read_text())
    (folder / "train_config.json").write_text(
        json.dumps(settings | {"is_larger_than_gpu": is_larger_than_gpu})
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    ended = subprocess.run(
        [*torchrun, str(folder / "on_processors.py"), "--max-steps", "3", *arguments],
        env=os.environ | alone,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def weights_and_examples(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """A model whose weights lie in a folder, and options by which train.py trains it on 60
    examples.
    """
    from transformers import AutoModelForCausalLM

    from autotune.catalog import resolve_model
    from autotune.trainer.model_builder import config_of

    base = AutoModelForCausalLM.from_config(config_of(resolve_model("demo-3m").config))
    base.save_pretrained(folder / "weights")
    byte_level().save_pretrained(folder / "weights")
    rows = [
        json.dumps({"text": f"{number} plus {number} " * (1 + number % 7)}) for number in range(60)
    ]
    (folder / "data.jsonl").write_text("\n".join(rows))
    return base, (
        "--model",
        str(folder / "weights"),
        "--dataset",
        str(folder / "data.jsonl"),
        "--held-out",
        "8",
        "400",
    )


@pytest.mark.extra
# PEFT asks for what transformers 5.23 calls otherwise
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_deepspeed_trains_and_saves_what_one_process_would(method: str, tmp_path: Path) -> None:
    """The second stage, and the third, which has to gather what it saves, learn the same."""
    pytest.importorskip("deepspeed")
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base, data = weights_and_examples(tmp_path)
    saved, losses = [], []
    for strategy in ("zero2", "zero3"):
        knobs = {"method": method, "precision": "bf16_mixed", "micro_batch_size": 2, "seq_len": 32}
        made = demo(TrainConfig(num_gpus=2, sharding=strategy, **knobs))
        folder = write(
            export_all(made, ["train"]) | {"on_processors.py": ON_PROCESSORS}, tmp_path / strategy
        )
        saved.append(tmp_path / f"saved-{strategy}")
        losses += shared_out(folder, False, *data, "--output-dir", str(saved[-1]))["held_out_loss"]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    kind = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    first, second = (dict(kind.from_pretrained(path).named_parameters()) for path in saved)
    before = dict(base.named_parameters())
    trained = [name for name in first if method == "full" or "lora_B" in name]
    assert trained
    for name in trained:
        assert first[name].float().allclose(second[name].float(), atol=1e-3), name
    changed = [name for name in trained if not first[name].equal(before.get(name, 0 * first[name]))]
    assert len(changed) > len(trained) / 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("zero3", marks=pytest.mark.extra)])
def test_a_model_larger_than_a_gpu_is_trained_as_shards(sharding: str, tmp_path: Path) -> None:
    """One rank reads the weights and sends the other its
    shards: all is as if each had read them.
    """
    if sharding == "zero3":
        pytest.importorskip("deepspeed")
    from transformers import AutoModelForCausalLM

    knobs = {"method": "full", "micro_batch_size": 2, "seq_len": 32}
    knobs |= {"precision": "bf16_mixed", "loss": "chunked"} if sharding == "zero3" else {}
    made = demo(TrainConfig(num_gpus=2, sharding=sharding, **knobs))
    write(export_all(made, ["train"]) | {"on_processors.py": ON_PROCESSORS}, tmp_path / "out")
    base, data = weights_and_examples(tmp_path)
    saved, losses = [], []
    for is_larger in (False, True):
        saved.append(tmp_path / f"saved-{is_larger}")
        losses.append(
            shared_out(tmp_path / "out", is_larger, *data, "--output-dir", str(saved[-1]))[
                "held_out_loss"
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    first, second = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in saved
    )
    before = dict(base.named_parameters())
    for name, parameter in first.items():
        assert parameter.equal(second[name]), name
    assert any(not parameter.equal(before[name]) for name, parameter in first.items())
    alone = shared_out(tmp_path / "out", True, "--random-weights", "--output-dir", "")
    assert alone["steps"] == 3 and alone["seconds_per_step"] > 0


# Each rank writes the rows of its micro batches of two as the Trainer takes them.
RECORDING = """\
import json, os, pathlib, sys

folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(folder))
from runtime import rows

collate = rows.collate


def recording(batch, *given, **named):
    if len(batch) == 2:  # not one that is held out
        with open(folder / f"rank{os.environ['RANK']}", "a") as file:
            file.write(json.dumps([row[0].tolist() for row in batch]) + "\\n")
    return collate(batch, *given, **named)


rows.collate = recording
"""


def test_rows_that_are_dealt_out_are_learned_as_they_are_by_one_process(tmp_path: Path) -> None:
    """Each step of two ranks has the rows that it has if they stay as drawn, and the ranks wait
    less for each other.
    """
    # of one length, or ranks weigh them otherwise
    data = (*weights_and_examples(tmp_path)[1], "--held-out", "8", "10")
    losses, steps, waited = [], [], []
    for name, num_gpus, dealt in (("drawn", 2, False), ("dealt", 2, True), ("alone", 1, True)):
        config = TrainConfig(
            method="full", precision="fp32", micro_batch_size=2, seq_len=64, num_gpus=num_gpus
        )
        config = replace(
            config, optimizer="adamw_torch", sharding="fsdp2" if num_gpus > 1 else "none"
        )
        lengths = Lengths.of(range(1, 53), "counted")
        workload = Workload(examples=52, lengths=lengths, global_batch=12, dealt=dealt)
        files = export_all(
            recipe(config, model=resolve_model("demo-3m"), workload=workload), ["train"]
        )
        alone = RECORDING + "from runtime.command_line import start\n\nstart(folder)\n"
        files["on_processors.py"] = alone if num_gpus == 1 else RECORDING + ON_PROCESSORS
        folder = write(files, tmp_path / name)
        losses.append(
            shared_out(folder, False, *data, "--output-dir", "", processes=num_gpus)[
                "held_out_loss"
            ][-1]
        )
        ranks = [(folder / f"rank{rank}").read_text().splitlines() for rank in range(num_gpus)]
        # in turn by the ranks
        taken = [json.loads(line) for lines in zip(*ranks, strict=True) for line in lines]
        steps.append(
            [sorted(row for batch in taken[at : at + 6] for row in batch) for at in (0, 6, 12)]
        )
        longest = [max(map(len, batch)) for batch in taken[:18]]
        waited.append(
            sum(max(longest[at : at + num_gpus]) * num_gpus for at in range(0, 18, num_gpus))
            - sum(longest)
        )
    assert steps[0] == steps[1] == steps[2] and [len(step) for step in steps[0]] == [12, 12, 12]
    assert waited[0] > 2 * waited[1] > 0
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


@pytest.mark.real_processes
def test_no_rank_outlives_the_launcher(tmp_path: Path) -> None:
    """Each has a session of its own, which a kill of the launcher's process group does not reach.

    One that loads its libraries would go on, and look for the others for minutes.
    """
    script = (
        write(export_all(demo(TrainConfig(num_gpus=2)), ["train"]), tmp_path / "out") / "launch.sh"
    )
    arguments = ["bash", str(script), "--random-weights", "--output-dir", ""]
    variables = os.environ | {
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(arguments, env=variables, **quiet) as launcher:  # type: ignore[call-overload]
        until, started = time.monotonic() + 120, list[psutil.Process]()
        while sum("torch" in library_paths(one) for one in started) < 2:
            assert launcher.poll() is None and time.monotonic() < until
            time.sleep(0.1)
            started = psutil.Process(launcher.pid).children(recursive=True)
        os.killpg(launcher.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=30)
    for rank in alive:
        rank.kill()
    assert not alive


def library_paths(process: psutil.Process) -> str:
    """The files that a process has mapped into its memory."""
    try:
        return " ".join(area.path for area in process.memory_maps())
    except psutil.Error:
        return ""
