"""Text of unknown origin, made safe for a terminal, a command line, a file name, or Markdown."""

import re
import shlex
from pathlib import Path

from autotune.core.units import DASH


def printable(text: str, replacement: str = "?") -> str:
    """The text on one line, without characters that a terminal would act on."""
    return "".join(char if char.isprintable() else replacement for char in text)


def printable_lines(text: str) -> str:
    """The same with the ends of its lines, and tabs, kept."""
    return re.sub(r"[^\n\t -~]", lambda found: printable(found[0]), text)


def dashed(text: str) -> str:
    """The lower-case letters and digits of the text, with one dash for each run of other characters between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def slug(study: str) -> str:
    """A directory name for a study: readable, and never a path. Names that had to be changed end in a hash.

    So does a name that looks as if it ended in one, so that no two names share a directory.
    """
    import hashlib

    plain = re.sub(r"[^a-z0-9._-]+", "-", study.lower()).strip("-.")[:80]
    if plain == study and plain and not re.search(r"-[0-9a-f]{8}$", plain):
        return plain
    return (
        f"{plain or 'study'}-{hashlib.sha256(study.encode(errors='surrogatepass')).hexdigest()[:8]}"
    )


def operands(*texts: str) -> list[str]:
    """Arguments of a command that are no options, also where one begins with a dash; shlex.join makes them a line."""
    return ["--", *texts] if any(text.startswith("-") for text in texts) else [*texts]


def study_command(verb: str, study: str) -> str:
    """A command line of autotune that takes a study by its name."""
    return shlex.join(["autotune", verb, *operands(study)])


def short_path(path: Path) -> str:
    """The path as it is typed here: relative to the working directory, if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def code_span(text: str) -> str:
    """Any text as one Markdown code span, in which nothing is interpreted; a dash for text without content."""
    flat = " ".join(printable(text, " ").split()) or DASH
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    padding = " " if "`" in (flat[0], flat[-1]) else ""
    return f"{fence}{padding}{flat}{padding}{fence}"
