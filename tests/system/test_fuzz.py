"""1,000 hostile inputs: each gives a value or a documented error, quickly, and writes only inside
its folder.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from autotune.catalog import list_models, load_prices, resolve_device, resolve_model
from autotune.cli.app import app
from autotune.cli.study_options import pins_of
from autotune.core.errors import AutotuneError
from autotune.core.serialization import to_data
from autotune.planning.device_estimate import device_limit_gib
from autotune.planning.observations import load_evidence, store_submission
from autotune.planning.plan import plan_task
from autotune.planning.run_check import check
from autotune.planning.submission import submission_of
from autotune.prediction.step_time import host_of
from autotune.prediction.transfer import speed_transfer
from autotune.problem.calibration import read_calibration
from autotune.problem.dataset import dataset_lengths
from autotune.problem.length_distribution import read_lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import set_up
from autotune.problem.study_spec import make_spec
from autotune.study.storage.location import study_directory
from tests.helpers.factories import calibration, summary
from tests.helpers.hostile import fuzz, guarded, mutated, scalars, values, yaml_files

ROOT = Path(__file__).parents[2]
CPU, H200, A10 = map(resolve_device, ("cpu", "h200", "a10"))
EXIT_CODES = {0, 2, 3, 4, 6}


def loaded(*patterns: str) -> tuple[Any, ...]:
    return tuple(
        yaml.safe_load(path.read_text()) for one in patterns for path in sorted(ROOT.glob(one))
    )


RANGES = {
    "micro_batch_size": {"min": 1, "max": 1024, "log": True},
    "seq_len": {"min": 64, "max": 512},
    "method": "lora",
}
SPACES = (
    *loaded("search_spaces/*.yaml"),
    {
        "version": 1,
        "knobs": RANGES | {"lora_rank": {"min": 8, "max": 64, "when": {"method": ["lora"]}}},
    },
)
SPECS = (
    *loaded("studies/*.yaml"),
    {
        "model": "demo-3m",
        "gpu": "cpu",
        "pins": {"seq_len": 64},
        "examples": 100,
        "global_batch_tokens": 4096,
    },
    {
        "model": "demo-3m",
        "mean_tokens": 100.0,
        "p99_tokens": 400.0,
        "tokens": 10**6,
        "study": "mine",
        "budget": "5m",
    },
    {
        "model": "demo-3m",
        "tokens_per_example": 64,
        "epochs": 3,
        "price": 1.5,
        "min_rank": 8,
        "max_truncated": 0.1,
    },
)
PRICES = (
    [
        {
            "provider": "mine",
            "device": "a10",
            "usd": 0.55,
            "spot_usd": 0.2,
            "count": 8,
            "as_of": "2026-11-01",
        }
    ],
    [
        {"provider": "x", "device": "h200", "usd": 3, "source": "a page", "quotable": False},
        {"provider": "y", "usd": 1},
    ],
)
COMMON = {
    "learning_rate": 2e-4,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "gradient_checkpointing": True,
}
TRL = {
    "model_name_or_path": "mistral-7b",
    "dataset_name": "org/d",
    "use_peft": True,
    "lora_r": 16,
    "max_length": 512,
}
AXOLOTL = {
    "base_model": "mistral-7b",
    "adapter": "qlora",
    "load_in_4bit": True,
    "micro_batch_size": 2,
    "lora_r": 8,
}
AXOLOTL |= {
    "sequence_len": 4096,
    "sample_packing": True,
    "datasets": [{"path": "org/d"}],
    "num_epochs": 1,
}
FACTORY = {
    "model_name_or_path": "demo-3m",
    "stage": "sft",
    "finetuning_type": "lora",
    "cutoff_len": 1024,
}
FACTORY |= {
    "quantization_bit": 4,
    "template": "llama3",
    "dataset": "a,b",
    "max_samples": 1000,
    "num_train_epochs": 2.0,
}
FOREIGN = tuple(COMMON | one for one in (TRL, AXOLOTL, FACTORY))
CONFIGS = tuple(model.config for model in list_models())
RECIPE = summary().recipe
assert RECIPE is not None
SUBMISSION = json.loads(submission_of(RECIPE, "2026-11-22").text)
OLD_SUBMISSION = json.loads(
    (Path(__file__).parents[1] / "unit" / "planning" / "submission_1.json").read_text()
)
CALIBRATION = to_data(calibration())
ROWS = (
    {"text": "some words"},
    {"prompt": "a question", "completion": "an answer"},
    {
        "messages": [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "an answer"},
        ]
    },
)


@pytest.fixture(scope="module", autouse=True)
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory so deep that `../../x` stays inside the checked root.

    It holds temporary files; no Hub.
    """
    import huggingface_hub.constants as hub
    from hypothesis.internal.conjecture import providers

    root = tmp_path_factory.mktemp("fuzz")
    folder = root / "a" / "b" / "c"
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(root))
        patch.setattr(hub, "HF_HUB_OFFLINE", True)
        patch.setattr(tempfile, "tempdir", str(folder))
        # Hypothesis takes constants from loaded modules, so that the inputs would depend on the
        # tests that ran before.
        patch.setattr(providers, "_get_local_constants", lambda: providers._local_constants)
        for name in ("AUTOTUNE_STORAGE", "COLUMNS"):
            patch.delenv(name, raising=False)
        yield folder


def written(workdir: Path, name: str, content: bytes) -> Path:
    path = workdir / name
    path.write_bytes(content)
    return path


def as_json(data: Any) -> bytes:
    return json.dumps(data, default=str, skipkeys=True).encode(errors="surrogatepass")


@fuzz(100)
@given(content=yaml_files(SPACES))
def test_search_spaces(workdir: Path, content: bytes) -> None:
    path = written(workdir, "space.yaml", content)
    with guarded(workdir), suppress(AutotuneError):
        space = SearchSpace.load(str(path))
        assert space.knobs and space.size() >= 1
        set_up(make_spec(None, {"model": "demo-3m", "space": str(path)}), CPU)


@fuzz(100)
@given(content=yaml_files(SPECS))
def test_study_specs(workdir: Path, content: bytes) -> None:
    path = written(workdir, "study.yaml", content)
    with guarded(workdir), suppress(AutotuneError):
        spec = make_spec(path, {})
        task = set_up(replace(spec, gpu="cpu"), CPU).task
        assert study_directory(None, task.study).resolve().parent == workdir / "runs"


@fuzz(75)
@given(content=yaml_files(PRICES))
def test_price_files(workdir: Path, content: bytes) -> None:
    path = written(workdir, "prices.yaml", content)
    with guarded(workdir), suppress(AutotuneError):
        assert all(
            price.usd_per_hour >= 0 and price.provider.isprintable() for price in load_prices(path)
        )


@fuzz(50)
@given(
    content=mutated((SUBMISSION, OLD_SUBMISSION)).map(as_json)
    | st.binary(max_size=50)
    | values.map(as_json)
)
def test_submissions(workdir: Path, content: bytes) -> None:
    path = written(workdir, "theirs.json", content)
    evidence = workdir / "evidence"
    with guarded(evidence), suppress(AutotuneError):
        target, _ = store_submission(path, evidence)
        assert target.parent == evidence
        target.unlink()
    with guarded(evidence):
        load_evidence(workdir)


@fuzz(25)
@given(content=mutated((CALIBRATION,)).map(as_json) | st.binary(max_size=50) | values.map(as_json))
def test_calibrations(workdir: Path, content: bytes) -> None:
    path = written(workdir, "node.json", content)
    with guarded(workdir), suppress(AutotuneError):
        given = read_calibration(path)
        assert given.label.isprintable()
        found = speed_transfer(H200, A10, calibration=given, side=3000.0)
        assert found and 0 < found.products < math.inf and 0 < host_of(given).scale < math.inf


@fuzz(50)
@given(content=yaml_files(FOREIGN))
def test_yaml_of_other_tools(workdir: Path, content: bytes) -> None:
    path = written(workdir, "run.yaml", content)
    with guarded(workdir), suppress(AutotuneError):
        check(path, {"gpu": "h200"})


@fuzz(25)
@given(content=mutated(CONFIGS).map(as_json) | values.map(as_json) | st.binary(max_size=50))
def test_configs_of_models(workdir: Path, content: bytes) -> None:
    folder = workdir / "model"
    folder.mkdir(exist_ok=True)
    written(folder, "config.json", content)
    with guarded(workdir), suppress(AutotuneError):
        resolve_model(str(folder))
        task = set_up(make_spec(None, {"model": str(folder), "space": "lora"}), H200).task
        plan_task(task, device_limit_gib(H200, 0.05))


LINES = st.lists(
    st.integers(-5, 5000).map(str)
    | st.sampled_from(("", " 7 ", "1e3", "9" * 30, "٣", "\x00", "7,8")),
    max_size=6,
)


@fuzz(25)
@given(content=st.binary(max_size=40) | LINES.map(lambda lines: "\n".join(lines).encode()))
def test_files_of_lengths(workdir: Path, content: bytes) -> None:
    path = written(workdir, "lengths.txt", content)
    with guarded(workdir), suppress(AutotuneError):
        assert read_lengths(path).mean >= 1


@fuzz(35)
@given(
    rows=st.lists(mutated(ROWS), max_size=4),
    noise=st.binary(max_size=30),
    suffix=st.sampled_from((".jsonl",) * 9 + (".txt",)),
)
def test_datasets(workdir: Path, rows: list[Any], noise: bytes, suffix: str) -> None:
    path = written(
        workdir,
        f"rows{suffix}",
        b"\n".join(map(as_json, rows)) + (noise if len(noise) > 20 else b""),
    )
    with guarded(workdir), suppress(AutotuneError):
        assert dataset_lengths(path, None).mean >= 1


KNOB = st.sampled_from(
    (
        *("micro_batch_size", "lora_rank", "checkpointing", "method", "packing", "compile"),
        *("global_batch_tokens", "slack", "seed", "report_to", "no_such"),
    )
)
OPTIONS = st.sampled_from(
    (
        *(
            "--examples",
            "--epochs",
            "--mean-tokens",
            "--p99-tokens",
            "--tokens-per-example",
            "--tokens",
            "--global-batch",
        ),
        *(
            "--seq-len",
            "--rank",
            "--set",
            "--memory-gib",
            "--headroom",
            "--price",
            "--prices",
        ),
        *(
            "--min-rank",
            "--max-truncated",
            "--space",
            "--spec",
            "--dataset",
            "--lengths",
            "--tokenizer",
        ),
    )
)
VALUES = scalars.map(str)
FLAGS = st.lists(
    st.tuples(OPTIONS, VALUES) | st.tuples(st.just("--set"), st.tuples(KNOB, VALUES).map("=".join)),
    max_size=3,
)
TAILS = st.lists(VALUES, max_size=2)
COMMANDS = st.one_of(
    st.tuples(st.just(["plan", "--json", "--gpu", "h200", "--model", "demo-3m"]), FLAGS),
    st.tuples(st.tuples(VALUES, VALUES).map(lambda two: ["plan", "--gpu", two[0], "--model",
    two[1]]), st.just([])),
    st.tuples(st.just(["compare", "--gpus", "a10,h200", "--model", "demo-3m", "--format", "json"]),
    FLAGS),
    st.tuples(TAILS.map(lambda rest: ["prices", *rest]), st.just([])),
    st.tuples(TAILS.map(lambda rest: ["check", *rest]), FLAGS),
    st.tuples(TAILS.map(lambda rest: ["import", *rest]), st.just([])),
    st.tuples(VALUES.map(lambda budget: ["run", "--model", "demo-3m", "--gpu", "a10", "--budget",
    budget]), FLAGS),
    st.tuples(TAILS, st.just([])),
)  # fmt: skip


@fuzz(40)
@given(command=COMMANDS)
def test_the_command_line(workdir: Path, command: tuple[list[str], list[tuple[str, str]]]) -> None:
    words = [*command[0], *(word for flag in command[1] for word in flag)]
    with guarded(workdir.parent.parent.parent):
        ended = CliRunner().invoke(app, words)
    if isinstance(ended.exception, AutotuneError):
        assert ended.exception.exit_code in EXIT_CODES and str(ended.exception)
    elif not isinstance(ended.exception, SystemExit) and ended.exception is not None:
        raise ended.exception
    else:
        assert ended.exit_code in EXIT_CODES


@fuzz(25)
@given(settings=st.lists(st.tuples(KNOB | VALUES, VALUES).map("=".join) | VALUES, max_size=3))
def test_pinned_knobs(workdir: Path, settings: list[str]) -> None:
    with guarded(workdir), suppress(AutotuneError):
        space = SearchSpace.load("lora")
        for knob, value in pins_of(settings).items():
            space = space.pin(knob, value)
