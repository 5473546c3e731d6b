"""tools.yaml: each condition names a setting that exists, and each text can be filled in."""

import pytest

from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export import keys, tool_file
from tests.unit.export.test_tool_file_axolotl import recipe


@pytest.mark.parametrize("tool", keys.TOOLS)
def test_conditions_and_texts_name_settings_that_exist(tool: str) -> None:
    about = load_data("autotune.export", "tools")[tool]
    settings = tool_file.settings_of(recipe(TrainConfig()), tool)
    lists = ("commands", "differences", "notes")
    items = [item for name in lists for item in about.get(name, ())]
    assert len(items) > 5 and "{" not in about["run"].format_map(settings)
    for item in items:
        assert "{" not in item["text"].format_map(settings)
        for name, values in item.get("when", {}).items():
            assert name in KNOBS or name in settings, name
            if name in KNOBS and name != "attention":  # which is the tool's own here
                for value in values if isinstance(values, list) else [values]:
                    KNOBS[name].check(value)


def test_the_command_of_trl_trains_by_its_file() -> None:
    command = tool_file.training_command(recipe(TrainConfig(compile="per_layer")), "trl")
    assert command.endswith(
        " trl sft --config trl_sft.yaml --num_processes 1 --dynamo_use_regional_compilation"
    )
