"""Reads a user's description of a card: a YAML file, or keys with values (`memory=24,...`)."""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.catalog.links import link_rate
from autotune.core.errors import UsageError
from autotune.core.files import problem_of, read_user_text, read_user_yaml
from autotune.core.text import kebab_case, printable

if TYPE_CHECKING:
    from pydantic import BaseModel

EXAMPLE = "memory=24,bf16_tflops=165,bandwidth_gb_s=1008,tdp_w=450"
MAX_SIZE = 1e6  # the largest accepted rate or size; a larger number must be a typing error


def split_names(text: str) -> list[str]:
    """Split a text into cards at its commas: 'a10,memory=24,tdp_w=450,h100' has three cards.

    Consecutive items with an equals sign describe one card. If a key repeats, the next card begins.
    """
    cards: list[str] = []
    keys: set[str] = set()  # the keys that the description of the current card has so far
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, _ = part.partition("=")
        if equals and keys and key.strip() not in keys:
            cards[-1] += f",{part}"
        else:
            keys = set()
            cards.append(part)
        if equals:
            keys.add(key.strip())
    return cards


def is_own(name: str) -> bool:
    """Return whether the value of `--gpu` describes a card instead of naming one."""
    return "=" in name or name.strip().lower().endswith((".yaml", ".yml"))


def own_row(name: str) -> dict[str, Any]:
    """Return the described card as a row with the keys of `data/gpus.yaml`.

    Raises UsageError for a wrong description.
    """
    if "=" in name:
        row = _row_of_text(name)
    else:
        row = _row_of_file(Path(os.path.expanduser(name.strip())))
    memory = row.pop("memory")
    return row | {
        "marketed_gb": row["marketed_gb"] or memory,
        "source": row["source"] or "given by --gpu",
    }


def _row_of_file(path: Path) -> dict[str, Any]:
    lines = (
        line for line in read_user_text(path).splitlines() if line.strip()[:1] not in ("", "#")
    )
    listed = next((line for line in lines if not line.startswith("---")), "").startswith("-")
    read: Any = read_user_yaml(path, _file_model(listed)).model_dump()
    row: dict[str, Any] = read[0] if listed else read
    return row | {"name": row["name"] or kebab_case(path.stem)[:60] or "card"}


def _row_of_text(text: str) -> dict[str, Any]:
    from pydantic import ValidationError

    given: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key in given:
            problem = (
                f"{key} is given twice" if equals else f"{part!r} is not of the form key=value"
            )
            raise UsageError(
                f"--gpu {printable(text)}: {problem}", remedy=f"for example --gpu {EXAMPLE}"
            )
        given[key] = value

    try:
        row: dict[str, Any] = _row_model().model_validate_strings(given).model_dump()
    except ValidationError as error:
        raise UsageError(
            "\n".join(_problem(printable(text), item) for item in error.errors()[:5]),
            remedy=f"for example --gpu {EXAMPLE}",
        ) from None
    return row | {"name": row["name"] or _usual_name(row)}


def _problem(text: str, item: Any) -> str:
    key = ".".join(map(str, item["loc"]))
    message = problem_of(item, _row_model().model_fields)
    return f"--gpu {text}: {key}: {message}" if key else f"--gpu {text}: {message}"


def _usual_name(row: dict[str, Any]) -> str:
    """Return a name such as 'card-24gb' from the card's memory, for tables and the study's name."""
    mib = row["memory_mib"]
    gb = row["marketed_gb"] or row["memory"]
    return f"card-{kebab_case(f'{gb or mib / 1024:.4g}')}gb"


@functools.cache
def _row_model() -> "type[BaseModel]":
    """Make the pydantic model of one row, on first use."""
    from typing import Annotated, Literal, Self

    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

    size = Annotated[float | None, Field(gt=0, le=MAX_SIZE)]
    text = Annotated[
        str | None, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]+\z")
    ]

    def as_text(value: Any) -> Any:
        """Convert a value to text, because YAML reads 8.9 as a number and 2026-11-24 as a date."""
        return value if value is None else str(value)

    class Row(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

        name: Annotated[str | None, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,59}\z")] = None
        memory: size = None  # in GB, as the card is sold
        marketed_gb: size = None
        memory_mib: size = None
        unified_memory: bool = False
        bandwidth_gb_s: size = None
        link: text = None
        link_gb_s: size = None
        link_source: text = None
        tdp_w: size = None
        bf16_tflops: size = None
        fp16_tflops: size = None
        fp8_tflops: size = None
        fp32_tflops: size = None
        vendor: Literal["nvidia", "amd"] = "nvidia"
        arch: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,29}\z")] = "unknown"
        compute_capability: Annotated[
            str | None, BeforeValidator(as_text), Field(pattern=r"^[0-9]{1,2}\.[0-9]\z")
        ] = None
        nvml_names: Annotated[
            list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=8)
        ] = []
        aliases: Annotated[list[str], Field(max_length=0)] = []
        as_of: Annotated[text, BeforeValidator(as_text)] = None
        source: text = None

        @model_validator(mode="after")
        def _is_enough(self) -> Self:
            sizes = (self.memory, self.marketed_gb, self.memory_mib)
            if sum(size is not None for size in sizes) != 1:
                raise ValueError(
                    "say how much memory the GPU has, with one key: memory (GB, as the GPU is"
                    " sold), or memory_mib (the total that nvidia-smi prints)"
                )
            if self.link is not None:
                link_rate(self.link)
            if not (self.bf16_tflops or self.fp16_tflops or self.compute_capability):
                raise ValueError(
                    "say how fast the GPU multiplies: bf16_tflops, its dense peak with fp32"
                    " accumulation (or fp16_tflops of a GPU without bf16); if the peak is"
                    " unknown, give compute_capability, like 8.9"
                )
            return self

    return Row


@functools.cache
def _file_model(listed: bool) -> "type[BaseModel]":
    """Make the pydantic model of a file: one row, alone or in a list as in `data/gpus.yaml`."""
    from typing import Annotated

    from pydantic import Field, RootModel

    row: Any = _row_model()
    rows: Any = RootModel[Annotated[list[row], Field(min_length=1, max_length=1)]]
    model: type[BaseModel] = rows if listed else row
    return model
