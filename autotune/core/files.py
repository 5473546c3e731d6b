"""Reading users' YAML with line numbers, and writing files whole or not at all."""

import functools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.core.errors import StorageError, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")

MAX_BYTES = 2**20  # of a configuration
MAX_VALUES = (
    10_000  # of a user's file, its aliases written out; the shipped ones have fewer than a hundred
)


def load_yaml(text: str) -> Any:
    """Safe-load one YAML document; libyaml's parser is used where it was built in (ten times faster).

    Raises yaml.YAMLError, RecursionError, and ValueError of a number or date that cannot be.
    """
    import yaml

    try:
        # CSafeLoader is SafeLoader over libyaml: the same restricted set of types.
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
    ):  # PyYAML's own, of tags such as `!!bool maybe`
        raise yaml.YAMLError("a value is not of its tag") from None


@functools.cache
def load_data(package: str, name: str) -> Any:
    """The parsed `<name>.yaml` of one of our packages. Shared between callers: copy what you hand out."""
    return load_yaml(files(package).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def shipped_files(inside: str, beside: str) -> dict[str, Path]:
    """Name -> path of the YAML files of a folder that ships with the package, which a user may copy.

    A wheel has the folder inside the package as `inside`, a checkout next to it as `beside`.
    """
    package = Path(str(files("autotune")))
    folder = package / inside
    if not folder.is_dir():
        folder = package.parent / beside
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError for any other, without waiting for the writer of a pipe."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"it has more than {max_bytes >> 20} MiB")
    return data


def read_user_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file that a person named. Raises UsageError if it is no regular file of UTF-8 text."""
    try:
        return read_regular(path, max_bytes).decode()
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, ValueError) as error:  # a path with a zero in it is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
    raise UsageError(f"cannot read {path}: {reason}", remedy="check the path")


def cache_directory() -> Path:
    """What is kept for this user between studies: $XDG_CACHE_HOME or ~/.cache, and in it autotune."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"


def refuse_special_files(directory: Path) -> None:
    """Raises UsageError if a directory holds a pipe, a socket or a device, on which a library may wait for ever."""
    for path in directory.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(
                f"{path} is not a regular file", remedy="remove it, or name another directory"
            )


def read_user_yaml(path: Path, model: type[M]) -> M:
    """Read a YAML file that a person wrote and validate it.

    Raises UsageError if it is unreadable, not YAML, or not of the model's form; the line is named.
    """
    import yaml
    from pydantic import ValidationError

    text = read_user_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values, with its aliases written out")
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
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors()[:5]:
            message = item["msg"].removeprefix("Value error, ")
            # A check of the whole begins with the name of the key it found wrong.
            line = _line_of(node, item["loc"] or (message.partition(" ")[0],))
            where = ".".join(str(part) for part in item["loc"]) or "the file"
            problems.append(f"{path}:{line}: {where}: {message}")
        raise UsageError("\n".join(problems), remedy="correct the line named above") from None


def _num_values(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML tree has once its aliases are written out. Raises YAMLError if a key stands twice."""
    import yaml

    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MAX_VALUES  # whoever is met again while it is being counted holds itself
    children = []
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if (key.tag, key.value) in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                    )
                names.add((key.tag, key.value))
            children += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def _line_of(node: Any, loc: tuple[int | str, ...]) -> int:
    """The 1-based line of the deepest part of `loc` that exists in the composed YAML tree."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in loc:
        children = getattr(node, "value", None)
        if not isinstance(children, list):
            break
        if node.id == "mapping":
            found = next(((key, value) for key, value in children if key.value == str(part)), None)
        elif isinstance(part, int) and part < len(children):
            found = children[part], children[part]
        else:
            found = None
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError on `path` into a StorageError that names it."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="choose a place that can be written, with --out or --storage, or free some space",
        ) from None


def write_atomic(path: Path, text: str, *, executable: bool = False) -> None:
    """Write `text` to `path` by rename, so that a reader, a crash or a power cut never leaves half a file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    mode = 0o777 if executable else 0o666  # less the umask
    with write_errors(path):
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
    """Wait until the names of a directory's files are on disk, on file systems that can say so."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
