"""Count the parameters of each model of the catalogue on torch's meta device, the rows without a
source, and the GPUs without a link.

A stored row is kept if the shape of its model is unchanged. Some families need further packages:
Gemma 3n needs timm.
"""

import argparse
import re
from typing import Any

from bench import RESULTS, Mode, finish, load, run_program

from autotune.catalog import DeviceSpec, ModelSpec, list_devices, list_models

# What `source` may name: a repository and a path, a page, a file of an index, or a default config.
READ = re.compile(
    r"[\w.-]+/[\w.-]+ [\w.-]+(/[\w.-]+)*"
    r"|https://\S+"
    r"|public code index, file \d+"
    r"|transformers \d+\.\d+\.\d+, default of \w+"
)
MADE_HERE = "made up for this program"


def is_recalled(source: str | None) -> bool:
    """Return whether no config was read for a row with this `source`."""
    parts = (source or "").split("; ")
    return source != MADE_HERE and not all(
        READ.fullmatch(part.removesuffix(", text_config")) for part in parts
    )


def has_unknown_link(device: DeviceSpec) -> bool:
    """Return whether a GPU's row lacks the link to other GPUs, its bandwidth or its source."""
    if device.kind == "cpu":
        return False
    is_rated = device.is_alone or device.link_gb_s is not None
    return not (device.link and device.link_source and is_rated)


def row_of(model: ModelSpec) -> dict[str, Any]:
    """Build a model without weights, with its towers, and count its parameters."""
    import torch
    import transformers

    digest = model.digest  # before transformers completes the config in place
    config = transformers.AutoConfig.for_model(**model.config)
    kind = transformers.AutoModelForMultimodalLM
    if (
        "text_config" not in model.config
        and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(config)
    return {
        "model": model.name,
        "digest": digest,
        "class": type(built).__name__,
        "params": sum(parameter.numel() for parameter in built.parameters()),
        "sdpa": bool(built._supports_sdpa),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of rows, of rows without a source, of rows with another total, of GPUs, and
    of GPUs without a link.
    """
    params = {model.name: model.params for model in list_models()}
    return {
        "rows": len(rows),
        "recalled": sum(is_recalled(model.source) for model in list_models()),
        "differ": sum(params.get(row["model"]) != row["params"] for row in rows),
        "gpus": sum(device.kind != "cpu" for device in list_devices()),
        "links_unknown": sum(map(has_unknown_link, list_devices())),
    }


def count(args: argparse.Namespace) -> None:
    """Count every model whose shape is not in the stored result."""
    stored = RESULTS / "catalogue.json"
    known = {
        (row["model"], row["digest"]): row for row in (load(stored) if stored.is_file() else ())
    }
    rows = [known.get((model.name, model.digest)) or row_of(model) for model in list_models()]

    finish(args, None, rows)


MODES = {"": Mode(run=count, result="catalogue", summarize=summary)}

if __name__ == "__main__":
    run_program(MODES, __doc__)
