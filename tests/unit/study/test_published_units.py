"""The units of the suites: each published number is what its source printed, in the source's unit.

`published_rows.yaml` has facts as the sources print them. A function below says what a row means.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.units import GIB
from autotune.problem.study_spec import NamedConfig, Published, make_spec, shipped_suites

ROWS = yaml.safe_load(Path(__file__).with_name("published_rows.yaml").read_text(encoding="utf-8"))
# These suites have no source that can be read.
UNREAD = {
    "a10-mistral-7b": "its address is not known",
    "h200-capped-mistral-7b": "measured by this project",
    "h200-mistral-7b-shape": "measured by this project",
}


def trainer_8k(memory: float, seconds: float, **_: Any) -> dict[str, float]:
    """'78 GiB 4.7': memory_reserved() / 1E9, called GiB by the table; seconds of a micro batch."""
    return {"reserved_gb": memory, "s_per_micro_batch": seconds}


def qwen(memory: float, seconds: float, *, tokens: int) -> dict[str, float]:
    """'20.1 G / 1.2 s/it': 'memory (GB)', and the time of a step of 8 micro batches."""
    return {"peak_gb": memory, "tokens_per_s": tokens / seconds}


def gb(memory: float, **_: Any) -> dict[str, float]:
    """'12.62 GB': max_memory_allocated() / 1e9."""
    return {"peak_gib": memory * 1e9 / GIB}


def llama_factory(speed: float, memory: float, **_: Any) -> dict[str, float]:
    """'2392 TGS 18 GB': tokens a second on a GPU, and the memory of the GPU."""
    return {"tokens_per_s": speed, "process_gib": memory * 1e9 / GIB}


def fms(speed: float, allocated: float, **_: Any) -> dict[str, float]:
    """train_tokens_per_second and mem_peak_torch_mem_alloc_in_bytes."""
    return {"tokens_per_s": speed, "peak_gib": allocated / GIB}


def gib(*numbers: float, **_: Any) -> dict[str, float]:
    """'7075 60.0': tokens a second, if any, and 'Peak Memory Active (GiB)' or 'GiB VRAM'."""
    *speed, memory = numbers
    return {"peak_gib": memory} | ({"tokens_per_s": speed[0]} if speed else {})


UNITS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function for function in (trainer_8k, qwen, gb, llama_factory, fms, gib)
}


def numbers(row: str) -> list[float]:
    return [float(word) for word in row.split() if word.replace(".", "", 1).isdigit()]


@cache
def configs(suite: str) -> dict[str, tuple[NamedConfig, int]]:
    """The suite's configurations by name, with the tokens of a step on one GPU."""
    spec = make_spec(shipped_suites()[suite], {})
    found = {}
    for case in spec.configs:
        knobs = spec.pins | case.knobs
        rows = case.accumulation * knobs["micro_batch_size"]
        found[case.name] = (case, rows * knobs.get("seq_len", 0))
    return found


def test_every_suite_was_compared_with_its_source() -> None:
    assert ROWS.keys() | UNREAD.keys() == shipped_suites().keys()
    assert not ROWS.keys() & UNREAD.keys()


@pytest.mark.parametrize(
    ("suite", "name"), [(suite, name) for suite, each in ROWS.items() for name in each["rows"]]
)
def test_a_published_number_is_in_the_unit_of_its_source(suite: str, name: str) -> None:
    row = ROWS[suite]["rows"][name]
    case, tokens = configs(suite)[name]
    if row == "OOM":
        assert case.published == Published(outcome="oom")
        return
    meant = UNITS[ROWS[suite]["unit"]](*numbers(row), tokens=tokens)
    assert case.published is not None
    told = {key: getattr(case.published, key) for key in meant}
    assert told == pytest.approx(meant, rel=0.002)
    assert case.published == Published(**told)


@pytest.mark.parametrize("suite", [suite for suite, each in ROWS.items() if len(each["rows"]) > 1])
def test_most_rows_of_a_suite_were_read(suite: str) -> None:
    rows, cases = ROWS[suite]["rows"], configs(suite)
    assert rows.keys() <= cases.keys() and len(rows) >= 0.6 * len(cases)


@pytest.mark.parametrize(
    ("model", "printed"),
    [("llama-3.1-8b", 16.0), ("llama-2-13b", 26.2), ("gemma-2-9b", 18.5), ("gemma-7b", 17.0)],
)
def test_the_table_that_prints_gib_has_gb(model: str, printed: float) -> None:
    """It also prints what the weights take in bf16, which is known."""
    params = resolve_model(model).params
    assert params is not None
    assert 2 * params / 1e9 == pytest.approx(printed, rel=0.01)
    assert 2 * params / GIB < 0.94 * printed
