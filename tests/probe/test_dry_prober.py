"""A DryProber answers for whole models by two depths, keeps its answers, and refuses in a sentence."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.dry_prober import DryProber
from tests.helpers.factories import TINY

pytestmark = pytest.mark.probe

CONFIG = TrainConfig(micro_batch_size=2, seq_len=64, precision="bf16_pure", checkpointing="none")
MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 12, "vocab_size": 64}
REQUEST = ProbeRequest(config=CONFIG, model=MODEL, memory_gib=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dry")


def test_two_depths_give_the_whole_model_and_answers_are_kept(folder: Path) -> None:
    with DryProber(folder) as prober:
        by_depths = prober.count(REQUEST).count
        at_once = prober.count(replace(REQUEST, depth=12)).count
    assert by_depths is not None and at_once is not None
    assert by_depths.segment_peak_gib == pytest.approx(at_once.segment_peak_gib, rel=1e-6)
    assert by_depths.flops == at_once.flops
    assert (by_depths.trainable_params, by_depths.total_params) == (at_once.trainable_params, at_once.total_params)

    with DryProber(folder) as again:
        assert again.count(REQUEST).count == by_depths
        assert again._process is None, "a kept answer needs no process"


def test_what_no_model_can_be_built_of_is_refused_in_a_sentence(folder: Path) -> None:
    encoder = REQUEST.model | {"model_type": "t5"}
    with DryProber(folder) as prober:
        answer = prober.count(replace(REQUEST, model=encoder))
        assert answer.count is None
        assert answer.refused == "transformers has no causal language model of type t5"
        mamba = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 32, "num_heads": 8, "head_dim": 8}
        assert "incompatible with Mamba" in (prober.count(replace(REQUEST, model=mamba)).refused or "")
        assert "GPU alone" in (
            prober.count(replace(REQUEST, config=replace(CONFIG, quantization="int8"))).refused or ""
        )
