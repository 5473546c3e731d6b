"""What commands share of their flags: the options of another command, and knobs pinned as KNOB=VALUE."""

import inspect
from collections.abc import Callable
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_yaml


def with_options_of(source: Callable[..., None], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes **flags the options of `source` of these names, before its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        theirs = inspect.signature(source).parameters
        own = [one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD]
        parameters = [theirs[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def pins_of(settings: list[str], **named: Any) -> dict[str, Any]:
    """{knob: value} from KNOB=VALUE settings (values as YAML reads them) and the named flags."""
    pins = {name: value for name, value in named.items() if value is not None}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name or not text:
            raise UsageError(f"--set {setting!r} is not KNOB=VALUE", remedy="for example --set checkpointing=none")
        try:
            pins[name.strip()] = load_yaml(text)
        except Exception:
            raise UsageError(f"--set {setting!r}: the value cannot be read", remedy="quote it") from None
    return pins
