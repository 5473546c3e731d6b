"""The export for TRL says with which trainer the configuration was measured."""

from dataclasses import replace

import pytest
import yaml

from autotune.core.train_config import TrainConfig
from autotune.export import keys
from autotune.export.formats import export_all
from tests.helpers.factories import summary


@pytest.mark.parametrize("compile", ["none", "per_layer"])
def test_the_export_for_the_trainer_that_was_probed_promises_its_speed(compile: str) -> None:
    known = summary().recipe
    assert known is not None
    padding = "longest" if compile == "none" else "max_length"  # what is probed with TRL
    config = TrainConfig(loss="chunked", quantization="nf4", compile=compile, padding=padding)
    for trainer in ("transformers", "trl"):
        made = replace(known, winner=replace(known.winner, config=config), trainer=trainer)
        files = export_all(made, ["trl", "train"])
        text = files["trl_sft.yaml"]
        assert yaml.safe_load(text)["load_in_4bit"] is True
        assert f"Probed with {trainer}" in text
        assert ("The speed was measured with train.py" in text) is (trainer == "transformers")
        assert ("not with this script" in files["train_config.json"]) is (trainer == "trl")
        named = {item.split()[0] for item in keys.inexpressible_knobs("trl", made)}
        assert named == ({"compile"} if compile != "none" else set()) | (
            {"precision"} if trainer == "transformers" else set()
        )
