"""Reads users' YAML files with line numbers for errors, and writes files atomically."""

import functools
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.core.errors import StorageError, UsageError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound="BaseModel")

MAX_BYTES = 2**20  # the largest accepted configuration file, in bytes
# The largest accepted number of values in a user's file, with YAML aliases expanded. Files that
# come with the package have fewer than a hundred.
MAX_VALUES = 10_000
# Flags that Windows lacks
NONBLOCK = getattr(os, "O_NONBLOCK", 0)
DIRECTORY = getattr(os, "O_DIRECTORY", 0)


def load_yaml(text: str) -> Any:
    """Load one YAML document safely, with libyaml's parser if PyYAML has it (ten times faster).

    Raises yaml.YAMLError for invalid YAML, RecursionError for deep nesting, and ValueError for an
    impossible number or date.
    """
    import yaml

    try:
        # CSafeLoader is SafeLoader with libyaml's parser, and makes the same restricted set of
        # types.
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (AttributeError, IndexError, KeyError, TypeError):
        # PyYAML raises these exceptions for a value that contradicts its tag, such as `!!bool
        # maybe`.
        raise yaml.YAMLError("a value does not match its YAML tag") from None


@functools.cache
def load_data(package: str, name: str) -> Any:
    """Return the parsed file `<name>.yaml` of a package of autotune.

    All callers share the result, so a caller must copy the parts that it passes on.
    """
    return load_yaml(files(package).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def shipped_files(inside: str, beside: str) -> dict[str, Path]:
    """Return the YAML files of a folder that comes with the package, as a dict of names and paths.

    In an installed wheel, the folder is `inside`, a path within the package. In a checkout, the
    folder is `beside`, a path next to the package.
    """
    package = Path(str(files("autotune")))
    folder = package / inside
    if not folder.is_dir():
        folder = package.parent / beside
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def document(name: str) -> Path:
    """Return the path of a page of docs/, in a wheel or in a checkout. Messages name this path."""
    package = Path(str(files("autotune")))
    inside = package / "docs" / name
    return inside if inside.is_file() else package.parent / "docs" / name


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises OSError for any other kind of file. The function does not wait for the writer of a pipe.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"it has more than {max_bytes >> 20} MiB")
    return data


def is_file(path: Path) -> bool:
    """Return whether a file has this path, which a user may have written; false for any text."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long or otherwise impossible for a file
        return False


def read_user_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a user's file, without the byte order mark of editors on Windows.

    Raises UsageError unless it is a regular UTF-8 file.
    """
    remedy = "check the path"
    try:
        return read_regular(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        reason, remedy = "it is not UTF-8 text", "save it as UTF-8, or check the path"
    except (OSError, ValueError) as error:  # a path with a NUL character raises ValueError
        reason = getattr(error, "strerror", None) or str(error)
    raise UsageError(f"cannot read {path}: {reason}", remedy=remedy)


def refuse_special_files(directory: Path) -> None:
    """Raise UsageError if a directory holds a pipe, a socket or a device.

    A library may wait forever for such a file.
    """
    for path in directory.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(
                f"{path} is not a regular file", remedy="remove it, or name another directory"
            )


def read_user_yaml(path: Path, model: type[M]) -> M:
    """Read and validate a YAML file that a user wrote.

    Raises UsageError, with line numbers, if the file is unreadable, is not YAML, or does not match
    the pydantic model.
    """
    import yaml
    from pydantic import ValidationError

    text = read_user_text(path)
    # Parse the text. `node` keeps the line numbers for messages about invalid values.
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values after its aliases are expanded")
        data = load_yaml(text)
    except RecursionError:
        raise UsageError(
            f"{path}: not valid YAML: nested too deeply", remedy="check the file"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(
            f"{path}:{line}: not valid YAML: {error.reason}", remedy="fix that line"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(
            f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}",
            remedy="fix the syntax at that line",
        ) from None

    # Validate the data, and name the lines of the first five problems.
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors()[:5]:
            message = problem_of(item, _keys_of(model) if len(item["loc"]) == 1 else ())
            # An error about the whole file has no location, but its message starts with the wrong
            # key, which gives the line.
            line = _line_of(node, item["loc"] or (message.partition(" ")[0],))
            where = ".".join(str(part) for part in item["loc"]) or "the file"
            problems.append(f"{path}:{line}: {where}: {message}")
        raise UsageError("\n".join(problems), remedy="correct the line named above") from None


def problem_of(item: "ErrorDetails", known: Iterable[str]) -> str:
    """Return pydantic's message of an error. For a key that is not `known`, name similar ones."""
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"there is no such key{did_you_mean(str(item['loc'][-1]), known)}"
    return item["msg"].removeprefix("Value error, ")


def _keys_of(model: "type[BaseModel]") -> list[str]:
    """Return the keys of a file that a pydantic model describes, also if it wraps a dataclass."""
    root = model.model_fields.get("root")
    if root is None:
        return list(model.model_fields)
    wrapped = root.annotation
    return [item.name for item in fields(wrapped)] if is_dataclass(wrapped) else []


def _num_values(node: Any, known: dict[int, int]) -> int:
    """Return the number of values in a YAML tree with its aliases expanded.

    Raises YAMLError if a key occurs twice.
    """
    import yaml

    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MAX_VALUES  # if a node contains itself, its count is too large

    children = []
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} occurs twice", problem_mark=key.start_mark
                    )
                names.add((key.tag, key.value))
            children += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value

    known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def _line_of(node: Any, loc: tuple[int | str, ...]) -> int:
    """Return the 1-based line of the key path `loc`, or of its longest prefix in the YAML tree."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in loc:
        children = getattr(node, "value", None)
        if not isinstance(children, list):
            break
        if node.id == "mapping":
            pair = next(((key, value) for key, value in children if key.value == str(part)), None)
        elif isinstance(part, int) and part < len(children):
            pair = children[part], children[part]
        else:
            pair = None
        if pair is None:
            break

        line = pair[0].start_mark.line + 1
        node = pair[1]
    return line


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="choose a writable path with --out or --storage, or free disk space",
        ) from None


def write_atomic(path: Path, text: str, *, executable: bool = False) -> None:
    """Write `text` to a temporary file, and rename it to `path`.

    So `path` never holds half a file, even after a crash or a power cut. A device or a pipe is
    written directly, because a rename by root could replace /dev/null.
    """
    mode = 0o777 if executable else 0o666  # the umask removes bits

    with write_errors(path):
        is_device = path.is_relative_to("/dev")  # such as /dev/stdout, a link to a file
        if is_device or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")  # raises OSError for a folder
            return

        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(
                temporary,
                "x",
                encoding="utf-8",
                opener=lambda name, flags: os.open(name, flags, mode),
            ) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Wait until a directory's list of files is on disk, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
