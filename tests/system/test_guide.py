"""docs/your-data.md: its five steps work in their order, each command as it is printed.

Options are added to a command only to save time: one trial, and three steps of training.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.test_demo import SPACE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your-data.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDED = {
    "run": "--space space.yaml --trials 1 --global-batch 4",
    # A busy machine is no failure of the export.
    "verify": "--tolerance 99 --micro-steps 20",
    "train": "--max-steps 3",
}


def steps() -> list[tuple[str, str]]:
    """Return the page's programs and commands, in its order: the language and the text.

    An output is a block whose first line is no command.
    """
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return [
        (language or "autotune", text)
        for language, text in blocks
        if language in ("bash", "python") or text.startswith("autotune ")
    ]


@pytest.mark.probe
def test_the_five_steps_work(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    commands = []
    for language, text in steps():
        if language == "bash":
            program = re.findall(r"^python - <<'END'\n(.*?)^END", text, re.MULTILINE | re.DOTALL)[0]
            words = ["-c", program]
        elif language == "python":
            words = ["-c", text]
        else:
            name, *options = text.split()[1:]
            commands.append(name)
            words = ["-m", "autotune", name, *options, *ADDED.get(name, "").split()]

        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, (text, done.stderr)

    assert commands == ["plan", "run", "verify", "train"]
    assert (tmp_path / "merged" / "model.safetensors").is_file()
