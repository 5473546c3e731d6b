"""Makes text of unknown origin safe for a terminal, a file name, or Markdown, and splits texts."""

import re
import shlex
from pathlib import Path

from autotune.core.units import DASH


def printable(text: str, replacement: str = "?") -> str:
    """Return the text on one line, without characters that control a terminal."""
    return "".join(char if char.isprintable() else replacement for char in text)


def printable_lines(text: str) -> str:
    """Return the text without characters that control a terminal, except line ends and tabs."""
    return re.sub(r"[^\n\t -~]", lambda found: printable(found[0]), text)


def kebab_case(text: str) -> str:
    """Return the text in lower case, with a dash for each run of characters except a-z and 0-9."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def slug(study: str) -> str:
    """Return a readable directory name for a study; the name contains no slash.

    If the study's name contains characters that must be replaced, or already looks like a name with
    a hash, a hash is added at the end. So no two studies share a directory.
    """
    import hashlib

    plain = re.sub(r"[^a-z0-9._-]+", "-", study.lower()).strip("-.")[:80]
    if plain == study and plain and not re.search(r"-[0-9a-f]{8}$", plain):
        return plain
    digest = hashlib.sha256(study.encode(errors="surrogatepass")).hexdigest()
    return f"{plain or 'study'}-{digest[:8]}"


def operands(*texts: str) -> list[str]:
    """Return the texts as arguments of a command, after "--" if any text begins with a dash."""
    return ["--", *texts] if any(text.startswith("-") for text in texts) else [*texts]


def study_command(verb: str, study: str) -> str:
    """Return an autotune command line with the name of a study as its argument."""
    return shlex.join(["autotune", verb, *operands(study)])


def short_path(path: Path) -> str:
    """Return a path inside the working directory relative to it, and other paths unchanged."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def code_span(text: str) -> str:
    """Return the text as one Markdown code span; a dash replaces an empty text."""
    flat = " ".join(printable(text, " ").split()) or DASH
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    padding = " " if "`" in (flat[0], flat[-1]) else ""
    return f"{fence}{padding}{flat}{padding}{fence}"


def markdown_text(text: str) -> str:
    """Escape a text for one line of Markdown, or for a cell of a table in Markdown.

    The text cannot add markup, end its line or its cell, or open a formula with a dollar sign.
    """
    import html

    flat = " ".join(printable(text, " ").split())
    return re.sub(r"([\\|`*~$\[\]])", r"\\\1", html.escape(flat, quote=False))


def split_count(gpu: str) -> tuple[str | None, str]:
    """Split a count from a name: '8xh100' -> ('8', 'h100'), 'h100' -> (None, 'h100')."""
    match = re.fullmatch(r"\s*([0-9]+)\s*x\s*(.+)", gpu)
    return (match[1], match[2]) if match else (None, gpu)
