"""The examples: the notebook's cells run without a GPU, and the workflow's steps judge
configurations.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
LORA = (
    "model_name_or_path: mistralai/Mistral-7B-v0.3\nper_device_train_batch_size: 1\n"
    "max_length: 512\ndtype: bfloat16\n"
)
FITS = LORA + "use_peft: true\n"
PROGRAM = f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n'
# it reads nothing, and costs nothing
REFUSING = "#!/bin/sh\nprintf 'error: 5%% of\\r it\\n' >&2\nexit 2\n"


@pytest.mark.probe
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "cpu_demo.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (
        4,
        len(notebook["cells"]),
    )
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # what a machine printed is no example
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    environment = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORAGE"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "tokens/s measured" in done.stdout and "h100-sxm" in done.stdout and " GiB, " in done.stdout
    )
    assert (tmp_path / "exported" / "export" / "train.py").is_file()


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (EXAMPLES / "github" / "fits.yml").read_text(encoding="utf-8")
    )
    return found


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run the step that checks, as GitHub runs `shell: bash`, on these files; the exit code, output
    and summary.
    """

    def run(
        program_text: str = PROGRAM, paths: Sequence[str] = (), **files: str
    ) -> tuple[int, str, str]:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "autotune"
        program.write_text(program_text)
        program.chmod(0o755)
        (tmp_path / "configs").mkdir()
        texts = {f"{name}.yaml": text for name, text in files.items()} | dict.fromkeys(paths, "")
        for name, text in texts.items():
            path = tmp_path / "configs" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        job = workflow()["jobs"]["fits"]
        (step,) = (
            step["run"]
            for step in job["steps"]
            if step["name" if "name" in step else "uses"].startswith("Check")
        )
        summary = tmp_path / "summary.md"
        environment = os.environ | job["env"] | {"GITHUB_STEP_SUMMARY": str(summary)}
        environment["PATH"] = f"{program.parent}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return (
            done.returncode,
            done.stdout + done.stderr,
            summary.read_text() if summary.exists() else "",
        )

    return run


needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="GitHub's machines have jq")


@needs_jq
def test_what_fits_passes(run: Any) -> None:
    code, output, summary = run(lora=FITS)
    assert (code, output) == (0, "")
    assert summary.startswith("- `configs/lora.yaml`: fits: 14") and "of 20.1 GiB on a10" in summary


@needs_jq
def test_what_no_longer_fits_fails_the_pull_request(run: Any) -> None:
    code, output, summary = run(fits=FITS, full=LORA, broken="model_name_or_path: [")
    assert code == 1
    broken, full = output.splitlines()
    assert (
        full.startswith("::error file=configs/full.yaml::out of memory: ")
        and "; try use_peft: true" in full
    )
    assert broken.startswith("::error file=configs/broken.yaml::not checked (exit 2): error: ")
    assert [line.split("`")[1] for line in summary.splitlines()] == [
        f"configs/{name}.yaml" for name in ("broken", "fits", "full")
    ]


@needs_jq
def test_what_is_too_close_to_tell_warns(run: Any) -> None:
    """Twelve rows of 1,024 tokens need about what an A10 has."""
    near = FITS.replace("batch_size: 1", "batch_size: 12").replace(
        "max_length: 512", "max_length: 1024"
    )
    code, output, summary = run(near=near)
    assert (
        code == 0
        and output.startswith("::warning file=configs/near.yaml::too close to tell: ")
        and ": too close to tell: " in summary
    )


def test_each_file_below_the_folder_is_checked_whatever_its_name(run: Any) -> None:
    """A name could end GitHub's command, or begin another one."""
    code, output, summary = run(
        REFUSING,
        paths=(
            "d.yml",
            "sub/c.yaml",
            "a b,c::error.yaml",
            "e\n::stop-commands::x.yml",
            "`f`.yaml",
            "no.txt",
        ),
    )
    assert code == 1
    names = (
        "`f`.yaml",
        "a b%2Cc%3A%3Aerror.yaml",
        "d.yml",
        "e%0A%3A%3Astop-commands%3A%3Ax.yml",
        "sub/c.yaml",
    )
    problem = "::not checked (exit 2): error: 5%25 of%0D it"
    assert sorted(output.splitlines()) == sorted(
        f"::error file=configs/{name}{problem}" for name in names
    )
    shown = {line.split("`")[1] for line in summary.splitlines() if line.startswith("- ")}
    names = ("?f?.yaml", "a b,c::error.yaml", "d.yml", "e?::stop-commands::x.yml", "sub/c.yaml")
    assert shown == {f"configs/{name}" for name in names}


def test_a_folder_without_configurations_fails(run: Any) -> None:
    code, output, _ = run(REFUSING, paths=("no.txt",))
    assert (code, output) == (1, "::error::there is no .yaml or .yml in configs\n")


def test_the_workflow_may_only_read() -> None:
    made = workflow()
    assert made["permissions"] == {"contents": "read"} and list(made["jobs"]) == ["fits"]
    assert all(step.get("shell", "bash") == "bash" for step in made["jobs"]["fits"]["steps"])
