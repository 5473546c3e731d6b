"""Cross-entropy in chunks of tokens: the same loss and gradients in less memory, probed and
exported.
"""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.prediction.memory_formula import kept_factors
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.setup import known_shape
from autotune.problem.workload import Workload
from tests.helpers.factories import TINY, summary
from tests.unit.export.test_script import write

pytestmark = pytest.mark.probe

SMALL = TINY | {"num_hidden_layers": 2}
UNCAPPED = {"model_type": "gemma2", "final_logit_softcapping": None}


@pytest.mark.parametrize(
    "more", [*({"model_type": family} for family in kept_factors("eager")), UNCAPPED], ids=str
)
def test_a_plan_knows_of_a_family_what_the_worker_says(
    prober: WorkerProber, more: dict[str, Any]
) -> None:
    model = SMALL | {"head_dim": 16} | more
    shape, known = prober.describe(model), known_shape(ModelSpec(name="small", config=model))
    assert shape is not None and known is not None
    assert replace(shape, period=None, liger=True) == known
    assert known.plain_head is (more["model_type"] != "gemma2" or more == UNCAPPED)


def measured(prober: WorkerProber, loss: str, **knobs: Any) -> Measurement:
    small = {"micro_batch_size": 16, "seq_len": 256, "precision": "fp32", "checkpointing": "none"}
    asked = ProbeRequest(
        config=TrainConfig(**(small | knobs), loss=loss),
        model=SMALL | {"model_type": "llama", "vocab_size": 8192},
        device="cpu",
        memory_gib=4.0,
        micro_steps=1,
        min_timed_s=0.0,
        min_timed_micros=1,
        evaluate=True,
    )
    result = prober.probe(asked, prober.logs / "probe.log")
    assert result.measurement is not None and result.notes == (), result.reason
    return result.measurement


def test_a_probe_needs_less_memory_and_leaves_nothing_behind(prober: WorkerProber) -> None:
    """4,096 tokens of 8,192 logits are 128 MiB, and more than one of these is held at once."""
    whole, chunked, again = (measured(prober, loss) for loss in ("full", "chunked", "full"))
    assert chunked.peak_allocated_gib < whole.peak_allocated_gib - 0.125
    assert again.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)
    assert again.losses[:2] == whole.losses[:2]


TRAINED: dict[str, dict[str, Any]] = {
    "lora": {},
    "saved": {"modules_to_save": "embedding_and_head"},
    "full": {"method": "full"},
}
IN_GATE = {("lora", "fp32"), ("saved", "bf16_mixed"), ("full", "bf16_pure")}


@pytest.mark.parametrize(
    ("trained", "precision"),
    [
        pytest.param(*row, marks=() if row in IN_GATE else pytest.mark.families)
        for row in product(TRAINED, ("fp32", "bf16_mixed", "bf16_pure"))
    ],
)
def test_a_probe_learns_the_same_in_the_same_precision(
    prober: WorkerProber, trained: str, precision: str
) -> None:
    """Under autocast the head computes in bf16: in fp32 the first loss would be another."""
    knobs = TRAINED[trained] | {"precision": precision, "micro_batch_size": 8}
    whole, chunked = (measured(prober, loss, **knobs) for loss in ("full", "chunked"))
    assert chunked.loss_first == pytest.approx(whole.loss_first, rel=1e-6)
    # how many there are hangs on their time
    assert chunked.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-4)


def test_the_exported_script_learns_the_same(tmp_path: Path) -> None:
    known, reported = summary().recipe, {}
    assert known is not None
    for loss in ("full", "chunked"):
        config = TrainConfig(
            micro_batch_size=8,
            seq_len=256,
            precision="fp32",
            checkpointing="none",
            loss=loss,
            modules_to_save="head",
        )
        workload = Workload(examples=32, lengths=Lengths.constant(256), global_batch=16)
        made = replace(known, winner=replace(known.winner, config=config), workload=workload)
        files = export_all(replace(made, model=resolve_model("demo-3m")), ["train"])
        folder = write(files, tmp_path / loss)
        ended = subprocess.run(
            [
                sys.executable,
                "train.py",
                "--random-weights",
                "--max-steps",
                "2",
                "--held-out",
                "4",
                "256",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        reported[loss] = json.loads(ended.stdout.splitlines()[-1])["held_out_loss"]
    assert len(reported["full"]) == 2
    assert reported["chunked"] == pytest.approx(reported["full"], rel=1e-5)
