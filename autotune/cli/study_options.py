"""Makes the options of commands from the fields of StudySpec, and a StudySpec from the options."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from autotune.cli.options import Storage, gpu_names
from autotune.core.errors import UsageError
from autotune.core.files import load_yaml
from autotune.problem.study_spec import OPTIONS, StudySpec, make_spec

if TYPE_CHECKING:
    from dataclasses import Field


def _models(incomplete: str) -> list[str]:
    """Return the names of models that the shell proposes when the user presses Tab."""
    from autotune.catalog import list_models

    return [
        name
        for model in list_models()
        for name in (*model.aliases, model.name)
        if name.startswith(incomplete)
    ]


def _spaces(incomplete: str) -> list[str]:
    """Return the names of search spaces that the shell proposes when the user presses Tab."""
    from autotune.problem.search_space import shipped_spaces

    return [name for name in shipped_spaces() if name.startswith(incomplete)]


_COMPLETIONS = {"model": _models, "gpu": gpu_names, "space": _spaces}
# Options with a definition of their own; all others are made from a field of StudySpec
_PINS: dict[str, Any] = {
    "spec": Annotated[
        Path | None,
        typer.Option(
            help="Read a study spec (YAML, or a name of `autotune suites`); options override it."
        ),
    ],
    "seq_len": Annotated[int | None, typer.Option(help="Pin the sequence length.")],
    "rank": Annotated[int | None, typer.Option(help="Pin the LoRA rank.")],
    "set_": Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="Pin a knob; repeatable."),
    ],
    "storage": Storage,
}
LENGTHS = (
    *("examples", "dataset", "split", "tokenizer", "loss_on", "lengths"),
    *("mean_tokens", "p99_tokens", "tokens_per_example", "tokens"),
)
CARD = ("memory_gib", "headroom", "price", "prices", "calibration")
PLANNED = (
    *("spec", "space", "objective", *LENGTHS, "epochs", "global_batch", "global_batch_tokens"),
    *("seq_len", "rank", "set_", *CARD),
    *("min_rank", "max_truncated", "allow_quantized", "allow_pure_bf16", "allow_any_optimizer"),
    "slack",
)
_OTHERS = tuple(name for name in OPTIONS if name not in ("model", "gpu"))
ALL = ("model", "gpu", "spec", *_OTHERS, "seq_len", "rank", "set_")


def _annotation(name: str) -> Any:
    """Return the type annotation of an option in the form that the library typer reads."""
    if name in _PINS:
        return _PINS[name]
    option = OPTIONS[name]

    field: Field[Any] = StudySpec.__dataclass_fields__[name]
    text = (
        option.help if option.shown_default is None else f"{option.help} [{option.shown_default}]"
    )
    names = (f"--{name.replace('_', '-')}",)
    # If a field accepts text, its option takes text. The field's other types are for Python and for
    # spec files.
    kinds: Any = str | None if str in get_args(field.type) else field.type
    parameter = typer.Option(
        *names, help=text, metavar=option.metavar, autocompletion=_COMPLETIONS.get(name)
    )
    return Annotated[kinds | None, parameter]


def with_study_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options of a study to a command that takes **options, before the command's own options.

    `names` are the names of the added options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        declared = inspect.signature(command).parameters.values()
        own_parameters = {
            parameter.name: parameter
            for parameter in declared
            if parameter.kind is not parameter.VAR_KEYWORD
        }

        parameters = [
            inspect.Parameter(name, keyword, default=None, annotation=_annotation(name))
            for name in names
            if name not in own_parameters
        ]
        parameters += [parameter.replace(kind=keyword) for parameter in own_parameters.values()]

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def spec_of(options: dict[str, Any]) -> StudySpec:
    """Return the StudySpec that these options describe. Raises UsageError."""
    options = dict(options)
    pins = pins_of(
        options.pop("set_") or [], seq_len=options.pop("seq_len"), lora_rank=options.pop("rank")
    )
    return make_spec(options.pop("spec"), options | {"pins": pins or None})


def pins_of(settings: list[str], **options: Any) -> dict[str, Any]:
    """Return {knob: value} from KNOB=VALUE settings and the named options.

    Values are parsed as YAML. Raises UsageError for a setting that cannot be parsed, or for two
    values of one knob.
    """
    pins = {name: value for name, value in options.items() if value is not None}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name or not text:
            raise UsageError(
                f"--set {setting!r} is not KNOB=VALUE",
                remedy="for example --set checkpointing=none",
            )

        try:
            value = load_yaml(text)
        except Exception:
            raise UsageError(
                f"--set {setting!r}: the value cannot be read", remedy="quote the value"
            ) from None

        if pins.setdefault(name.strip(), value) != value:
            raise UsageError(
                f"{name.strip()} is pinned to {pins[name.strip()]} and to {value}",
                remedy="give one value",
            )
    return pins
