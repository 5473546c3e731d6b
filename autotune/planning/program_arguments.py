"""Finds the values that a program takes from its command line and its environment.

A shell script may give them. Without it, the program's own defaults are assumed, and named.
"""

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.core.child_environment import is_secret
from autotune.planning.program_syntax import keywords_of, name_of

_PARSERS = ("HfArgumentParser", "TrlParser")  # they make objects of dataclasses
_MAKES = ("parse_args_into_dataclasses", "parse_args_and_config")
# TRL's own dataclasses of arguments beside those of a trainer
_OF_MODEL = (
    *("lora_", "load_in_", "bnb_4bit_", "use_peft", "use_bnb_", "use_rslora", "use_dora"),
    *("model_", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code"),
)
_OF_SCRIPT = ("dataset_name", "dataset_config", "dataset_train_", "dataset_test_", "datasets")
_OFF_WORDS = ("false", "no", "off", "0", "f", "n")
_ON_WORDS = ("true", "yes", "on", "1", "t", "y")
# The ranks of a process, which no script gives and which change nothing that is read
_RANKS = ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a script starts a program: the words after the program, and variables for it.

    `words` is None if no script starts the program.
    """

    words: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def flags(self) -> dict[str, list[str]]:
        """Return the words after each option, such as {"--lr": ["1e-4"]}.

        The key "" has the words before the first option.
        """
        found: dict[str, list[str]] = {"": []}
        key = ""
        for word in self.words or ():
            if word.startswith("-") and not _is_number(word):
                key, equals, value = word.partition("=")
                found[key] = [value] if equals else []
            else:
                found[key].append(word)
        return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class Arguments:
    """The arguments of a program.

    `resolve` finds the expression behind another one. `defaults` has the expressions that the
    program has for arguments that were not given, with the arguments' names, and `missing` the
    names of arguments without one. `used` has the options of the command that the program knows.
    """

    command: Command
    calls: list[ast.Call]
    classes: Mapping[str, list[ast.ClassDef]]
    resolve: Callable[[ast.expr], ast.expr | None]
    defaults: dict[ast.AST, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    # --- argparse

    def parsed(self, made: ast.expr | None, name: str) -> ast.expr | None:
        """Return the value of an attribute of argparse's result, or None if it is unknown."""
        call = _parse_call(made)
        options = [one for one in self.calls if _dest(one) == name]
        if call is None or len(options) != 1 or not _is_of_command(call):
            return None
        option = options[0]
        if any(
            name in keywords_of(one) for one in self.calls if name_of(one.func) == "set_defaults"
        ):
            return None
        given = self._given(option)
        if given is None and not self.command.flags().keys() & set(_options(option)):
            return self._default(option, name)
        return given

    def unused(self) -> list[str]:
        """Return the options of the command that the program does not know."""
        known = self.used.union(*map(_options, self.calls))
        names = {one.replace("-", "_").strip("_") for one in known}
        names |= {f"no_{name}" for name in names}
        return [
            one
            for one in self.command.flags()
            if one.replace("-", "_").strip("_") not in {"", *names}
        ]

    def _given(self, option: ast.Call) -> ast.expr | None:
        """Return the value that the command has for an option of argparse, or None."""
        flags = self.command.flags()
        names = _options(option)
        settings = keywords_of(option)
        if not names:
            positional = [one for one in self.calls if _dest(one) and not _options(one)]
            words = flags[""][positional.index(option) :][:1]
            return _value(option, words, settings) if words else None
        key = next((one for one in names if one in flags), None)
        if key is None:
            negated = f"--no-{names[0].removeprefix('--')}"
            is_negated = negated in flags and name_of(settings.get("action")) != ""
            return _constant(option, False) if is_negated else None
        action = settings.get("action")
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            return _constant(option, action.value == "store_true")
        if name_of(action) == "BooleanOptionalAction":
            return _constant(option, True)
        if not flags[key] and "const" in settings:
            return settings["const"]
        return _value(option, flags[key], settings)

    def _default(self, option: ast.Call, name: str) -> ast.expr | None:
        """Return the value that an option of argparse has if it is not given."""
        settings = keywords_of(option)
        label = next(iter(_options(option)), name)
        action = settings.get("action")
        found = settings.get("default")
        if found is None and isinstance(action, ast.Constant) and action.value != "store":
            found = _constant(option, action.value == "store_false")
        required = settings.get("required")
        needed = isinstance(required, ast.Constant) and required.value is True
        if found is None and (needed or not _options(option)):
            self.missing[name] = label
            return None
        found = _constant(option, None) if found is None else found
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            found = _value(option, [found.value], settings) or found
        self.defaults[found] = label
        return found

    # --- dataclasses

    def made(self, node: ast.Subscript) -> ast.Call | None:
        """Return a call that makes an object of a dataclass as the command line does.

        `node` is an element of what transformers' or TRL's parser returns. Returns None for another
        expression.
        """
        call, place = self.resolve(node.value), node.slice
        if not isinstance(call, ast.Call) or name_of(call.func) not in _MAKES:
            return None
        parser = self.resolve(call.func.value) if isinstance(call.func, ast.Attribute) else None
        is_index = isinstance(place, ast.Constant) and isinstance(place.value, int)
        if not isinstance(parser, ast.Call) or name_of(parser.func) not in _PARSERS or not is_index:
            return None
        given = next(iter(parser.args), keywords_of(parser).get("dataclass_types"))
        several = None if given is None else self.resolve(given)
        kinds = several.elts if isinstance(several, ast.Tuple | ast.List) else [given]
        names = list(map(name_of, kinds))
        assert isinstance(place, ast.Constant) and isinstance(place.value, int)
        if not 0 <= place.value < len(names) or not _is_of_command(call):
            return None
        name = names[place.value]
        keywords = self._fields(call, name) | self._of_libraries(call, names, name)
        made = ast.Call(
            ast.Name(name, ast.Load()), [], [ast.keyword(*item) for item in keywords.items()]
        )
        return ast.fix_missing_locations(ast.copy_location(made, call))

    def fields_of(self, name: str) -> dict[str, ast.AnnAssign]:
        """Return the fields of a class of the program, and of the program's classes it extends."""
        found: dict[str, ast.AnnAssign] = {}
        for kind in self.classes.get(name, ())[:1]:
            for base in map(name_of, kind.bases):
                found |= self.fields_of(base) if base != name else {}
            for one in kind.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    found[one.target.id] = one
        return found

    def _fields(self, place: ast.Call, name: str) -> dict[str, ast.expr]:
        """Return the values of the fields of a class of the program."""
        flags = self._by_name()
        values: dict[str, ast.expr] = {}
        for key, one in self.fields_of(name).items():
            if f"no_{key}" in flags:
                values[key] = _constant(place, False)
            elif key in flags:
                values[key] = _of_type(place, flags[key], ast.unparse(one.annotation))
            elif (default := default_of_field(one.value)) is not None:
                values[key] = default
                self.defaults[default] = f"--{key}"
            else:
                self.missing[key] = f"--{key}"
            self.used.add(f"--{key}")
        return values

    def _of_libraries(self, place: ast.Call, names: list[str], name: str) -> dict[str, ast.expr]:
        """Return the options for a class of a library, or for one that the program extends."""
        own = set().union(*(self.fields_of(one) for one in names))
        if name == "ModelConfig":
            prefixes: tuple[str, ...] = _OF_MODEL
        elif name == "ScriptArguments" and name not in self.classes:
            prefixes = _OF_SCRIPT
        elif name in self.classes and not self._extends_library(name):
            return {}
        else:
            prefixes = ("",)
        others = () if prefixes != ("",) else (*_OF_MODEL, *_OF_SCRIPT)
        has_model = "ModelConfig" in names
        values = {}
        for key, words in self._by_name().items():
            is_others = has_model and key.startswith(others) if others else False
            if key not in own and key.startswith(prefixes) and not is_others:
                values[key] = _of_type(place, words, "")
                self.used.add(f"--{key}")
        return values

    def _extends_library(self, name: str) -> bool:
        bases = [name_of(base) for base in self.classes[name][0].bases]
        return any(base not in self.classes or base == name for base in bases)

    def _by_name(self) -> dict[str, list[str]]:
        """Return the words of each option, by its name without dashes."""
        flags = self.command.flags().items()
        return {key.lstrip("-").replace("-", "_"): words for key, words in flags if key}

    # --- the environment, and functions that a library calls with the command's words

    def variable(self, node: ast.expr) -> ast.expr | None:
        """Return the value of a variable of the environment, or None for another expression.

        Returns the expression itself if the variable is unknown.
        """
        default: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[name, *others]):
                of_os = method == "getenv" or (method == "get" and name_of(owner) == "environ")
                default = next(iter(others), keywords_of(node).get("default", ast.Constant(None)))
            case ast.Subscript(value=owner, slice=name, ctx=ast.Load()):
                of_os = name_of(owner) == "environ"
            case _:
                return None
        if not of_os or not isinstance(name, ast.Constant):
            return None
        key = str(name.value)
        if key in self.command.environment:
            return _constant(node, self.command.environment[key])
        here = None if key in _RANKS else os.environ.get(key)
        if here is not None and (here.isdigit() or not is_secret(key, here)):
            found = _constant(node, here)
            self.defaults[found] = f"{key}={here}"
            return found
        if default is None:
            return node
        default = ast.copy_location(default, node) if not hasattr(default, "lineno") else default
        if key not in _RANKS:
            self.defaults[default] = key
        return default

    def of_function(self, place: ast.Call, names: list[str]) -> dict[str, ast.expr]:
        """Return the arguments that Fire or Typer gives a function with these argument names."""
        flags = self._by_name()
        self.used |= {f"--{name}" for name in names}
        return {name: _of_type(place, flags[name], "") for name in names if name in flags}


def default_of_field(value: ast.expr | None) -> ast.expr | None:
    """Return the default value of a field of a dataclass, or None if it has none."""
    if not isinstance(value, ast.Call) or name_of(value.func) not in ("field", "HfArg", "Field"):
        return value
    given = keywords_of(value)
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    return given.get("default")


def _parse_call(made: ast.expr | None) -> ast.Call | None:
    """Return argparse's call that makes an object, or None."""
    match made:
        case ast.Call(func=ast.Attribute(attr="parse_args")):
            return made
        case ast.Subscript(value=ast.Call(func=ast.Attribute(attr="parse_known_args")) as call):
            return call
    return None


def _is_of_command(call: ast.Call) -> bool:
    """Return whether a parser reads the command line, or nothing, and not a list of the program."""
    given = next(iter(call.args), keywords_of(call).get("args"))
    empty = isinstance(given, ast.List) and not given.elts
    none = isinstance(given, ast.Constant) and not given.value
    return given is None or empty or none


def _options(call: ast.Call) -> list[str]:
    """Return the names of an option that argparse gets, such as --lr; [] for another call."""
    if name_of(call.func) != "add_argument":
        return []
    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
    names = [text for text in texts if isinstance(text, str) and text.startswith("-")]
    return sorted(names, key=lambda name: not name.startswith("--"))


def _dest(call: ast.Call) -> str:
    """Return the attribute that an option of argparse sets, or "" for another call."""
    if name_of(call.func) != "add_argument":
        return ""
    dest = keywords_of(call).get("dest")
    if isinstance(dest, ast.Constant):
        return str(dest.value)
    first = next(iter(call.args), None)
    names = _options(call) or ([str(first.value)] if isinstance(first, ast.Constant) else [])
    return names[0].lstrip("-").replace("-", "_") if names else ""


def _constant(place: ast.expr, value: Any) -> ast.expr:
    return ast.copy_location(ast.Constant(value), place)


def _value(option: ast.Call, words: list[str], settings: Mapping[str, ast.expr]) -> ast.expr | None:
    """Return argparse's value of words, or None if the type of the option is unknown."""
    kind = settings.get("type")
    try:
        values = [_converted(word, kind) for word in words]
    except ValueError:
        return None
    if "nargs" in settings and getattr(settings["nargs"], "value", "") != "?":
        items = [_constant(option, value) for value in values]
        return ast.copy_location(ast.List(items, ast.Load()), option)
    return _constant(option, values[0]) if len(values) == 1 else None


def _converted(word: str, kind: ast.expr | None) -> Any:
    """Return a word as the type of an option. Raises ValueError if that is impossible."""
    name = "str" if kind is None else name_of(kind)
    if "$" in word or name == "str":
        return word
    if name in ("int", "float"):
        return int(word) if name == "int" else float(word)
    if name == "bool":
        return bool(word)  # argparse's own rule: every word is true
    if "bool" in name.lower() and word.lower() in (*_ON_WORDS, *_OFF_WORDS):
        return word.lower() in _ON_WORDS
    raise ValueError


def _of_type(place: ast.expr, words: list[str], annotation: str) -> ast.expr:
    """Return the value of words for a field with this annotation."""
    is_text = "str" in annotation and not any(
        kind in annotation for kind in ("int", "float", "bool")
    )
    values = [word if is_text else _parsed(word) for word in words]
    if not words:
        return _constant(place, True)
    if len(words) == 1 and "list" not in annotation.lower():
        return _constant(place, values[0])
    return ast.copy_location(
        ast.List([_constant(place, value) for value in values], ast.Load()), place
    )


def _parsed(word: str) -> Any:
    """Return the value of a word: a number or a truth value if it is one, else a text."""
    if "$" not in word and _is_number(word):
        return int(word) if word.lstrip("-").isdecimal() else float(word)
    return word.lower() == "true" if word.lower() in ("true", "false") else word
