"""Makes the options of commands from the fields of StudySpec, and a StudySpec from the options.

A rare field of StudySpec has no option of its own. `--set NAME=VALUE` sets it, just as it pins a
knob.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from autotune.cli.options import Storage, gpu_names
from autotune.core.errors import UsageError
from autotune.core.files import load_yaml
from autotune.problem.study_spec import OPTIONS, RARE, ROLLOUTS, StudySpec, make_spec

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
    *("min_rank", "max_truncated", "allow_quantized", "allow_fp8", "allow_pure_bf16"),
    *("allow_any_optimizer", "slack", "save_steps", "interruptions_per_day", "restart_minutes"),
)
_OTHERS = tuple(name for name in OPTIONS if name not in ("model", "gpu", *ROLLOUTS))
ALL = ("model", "gpu", "spec", *_OTHERS, "seq_len", "rank", "set_")


def _annotation(name: str, rare: tuple[str, ...]) -> Any:
    """Return the type annotation of an option in the form that the library typer reads.

    The help of `--set` lists the rare fields that it sets.
    """
    if name == "set_":
        text = f"Pin a setting, or set one of {', '.join(sorted(rare))}; repeatable."

        def settings(incomplete: str) -> list[str]:
            """Return the names of settings that the shell proposes when the user presses Tab."""
            from autotune.core.knobs import KNOBS

            return [f"{name}=" for name in (*KNOBS, *rare) if name.startswith(incomplete)]

        option = typer.Option("--set", metavar="NAME=VALUE", help=text, autocompletion=settings)
        return Annotated[list[str] | None, option]
    if name in _PINS:
        return _PINS[name]
    option = OPTIONS[name]

    field: Field[Any] = StudySpec.__dataclass_fields__[name]
    text = (
        option.help if option.shown_default is None else f"{option.help} [{option.shown_default}]"
    )
    names = (f"--{name.replace('_', '-')}",)
    kinds: Any = str | None if _takes_text(name) else field.type
    parameter = typer.Option(
        *names, help=text, metavar=option.metavar, autocompletion=_COMPLETIONS.get(name)
    )
    return Annotated[kinds | None, parameter]


def _takes_text(name: str) -> bool:
    """Return whether the command line gives a field of StudySpec as text.

    If a field accepts text, its other types are for Python and for spec files.
    """
    annotation = StudySpec.__dataclass_fields__[name].type
    return str in (annotation, *get_args(annotation))


def _is_flag(name: str) -> bool:
    """Return whether the option of a field of StudySpec takes no value."""
    return StudySpec.__dataclass_fields__[name].type is bool


def with_study_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options of a study to a command that takes **options, before the command's own options.

    `names` are the names of the added options. A rare name gets no option: **options has the value
    None for it, and `spec_of` replaces None with the value from `--set`.
    """
    rare = tuple(name for name in names if name in RARE)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        declared = inspect.signature(command).parameters.values()
        own_parameters = {
            parameter.name: parameter
            for parameter in declared
            if parameter.kind is not parameter.VAR_KEYWORD
        }

        parameters = [
            inspect.Parameter(name, keyword, default=None, annotation=_annotation(name, rare))
            for name in names
            if name not in own_parameters and name not in rare
        ]
        parameters += [parameter.replace(kind=keyword) for parameter in own_parameters.values()]

        @functools.wraps(command)
        def with_rare(*arguments: Any, **options: Any) -> None:
            command(*arguments, **dict.fromkeys(rare), **options)

        with_rare.__dict__ |= {"rare": rare, "__signature__": inspect.Signature(parameters)}
        with_rare.__annotations__ = {one.name: one.annotation for one in parameters}
        return with_rare

    return decorate


def spec_of(options: dict[str, Any]) -> StudySpec:
    """Return the StudySpec that these options describe. Raises UsageError."""
    options = dict(options)
    settings = options.pop("set_") or []
    rare = [setting for setting in settings if _split(setting)[0] in OPTIONS]
    for setting in rare:
        _set_rare(options, setting)

    pins = pins_of(
        [setting for setting in settings if setting not in rare],
        seq_len=options.pop("seq_len"),
        lora_rank=options.pop("rank"),
    )
    return make_spec(options.pop("spec"), options | {"pins": pins or None})


def _set_rare(options: dict[str, Any], setting: str) -> None:
    """Set a rare field among the options. Raises UsageError if the command ignores the field."""
    name, text = _split(setting)
    if name not in RARE:
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(
            f"--set {name}: {name} is not a setting, and has an option of its own",
            remedy=f"give {flag}" if _is_flag(name) else f"give {flag} {text}",
        )
    if name not in options:
        reader = "plan --gpus" if name == "expert_parallel" else "run"
        raise UsageError(
            f"--set {name}: this command does not read {name}",
            remedy=f"leave it out, or give it to `autotune {reader}`",
        )
    value = _value(name, text)
    if options[name] not in (None, value):
        raise _two_values(name, options[name], value)
    options[name] = value


def _value(name: str, text: str) -> Any:
    """Convert the text of a rare field to a value, as an option would convert it."""
    if _takes_text(name):
        return text
    if StudySpec.__dataclass_fields__[name].type is float:
        with suppress(ValueError):
            return float(text)
    return _parsed(name, text)


def pins_of(settings: list[str], **options: Any) -> dict[str, Any]:
    """Return {knob: value} from KNOB=VALUE settings and the named options.

    Values are parsed as YAML. Raises UsageError for a setting that cannot be parsed, or for two
    values of one knob.
    """
    pins = {name: value for name, value in options.items() if value is not None}
    for setting in settings:
        name, text = _split(setting)
        value = _parsed(name, text)
        if pins.setdefault(name, value) != value:
            raise _two_values(name, pins[name], value)
    return pins


def _split(setting: str) -> tuple[str, str]:
    """Return the name and the text of a setting. Raises UsageError without a name or a value."""
    name, _, text = map(str.strip, setting.partition("="))
    if not name or not text:
        raise UsageError(
            f"--set {setting!r} is not NAME=VALUE", remedy="for example --set checkpointing=none"
        )
    return name, text


def _parsed(name: str, text: str) -> Any:
    """Return the value of a text in YAML. Raises UsageError."""
    try:
        return load_yaml(text)
    except Exception:
        raise UsageError(
            f"--set {f'{name}={text}'!r}: the value cannot be read", remedy="quote the value"
        ) from None


def _two_values(name: str, first: Any, second: Any) -> UsageError:
    return UsageError(f"{name} is set to {first} and to {second}", remedy="give one value")
