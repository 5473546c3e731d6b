"""Every exported file, with hostile names for all that a user or a stranger may name: names are
data, and none runs.
"""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.export import clusters
from autotune.export.formats import FORMATS, export_all
from autotune.export.script import ENCODING
from autotune.study.summary import Recipe
from tests.helpers.hostile import NAMES
from tests.unit.export.test_script import recipe, run, write

JOB_NAME = re.compile(r"(?m)^#SBATCH --job-name=[a-z0-9-]+$")


def named(name: str) -> Recipe:
    """A recipe in which everything that is not the program's own has this name."""
    base = recipe(TrainConfig(quantization="nf4", kernels="liger"))
    fingerprint = base.fingerprint
    packages = fingerprint.packages | {"peft": name}
    fingerprint = replace(
        fingerprint, device=name, driver=name, cuda=name, python=name, packages=packages
    )
    demo = resolve_model("demo-3m")
    shape = demo.config | {"architectures": [name], "_name_or_path": name, "hidden_act": name}
    return replace(
        base,
        study=name,
        model=replace(demo, name=name, weights=name, tokenizer=name, config=shape),
        device=replace(resolve_device("a10"), nvml_names=(name,)),
        fingerprint=fingerprint,
        trainer=name,
        reason=name,
        numerics=name,
        caveats=(name,),
    )


def exported(name: str) -> dict[str, str]:
    """All files of all formats, and those that start workers."""
    made = named(name)
    workers = clusters.workers_job(
        study=name, device=made.device, fingerprint=made.fingerprint, budget_s=900.0, count=4
    )
    return export_all(made, FORMATS) | {
        file: text
        for system in clusters.SYSTEMS
        for file, text in clusters.render(workers, system).items()
    }


def python_of(notes: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", notes, re.DOTALL | re.MULTILINE)
    return str(code)


@pytest.mark.parametrize("name", NAMES)
def test_code_is_the_same_whatever_the_names_are(name: str) -> None:
    plain, files = exported("plain"), exported(name)
    assert files.keys() == plain.keys() and {file.rpartition(".")[2] for file in files} == {
        *("py", "sh", "sbatch", "yaml", "json", "md"),
    }
    for file, text in files.items():
        if file.endswith((".py", ".sh")):
            assert text == plain[file]
        if file.endswith(".py"):
            assert text.startswith(ENCODING)
            ast.parse(text.encode())
        # the study's name is an argument of `autotune worker`, in quotes
        if file.endswith(".sbatch"):
            job, other = (JOB_NAME.sub("", one) for one in (text, plain[file]))
            assert (
                job == other
                if file == "train.sbatch"
                else job.split("srun")[0] == other.split("srun")[0]
            )
        if file.endswith(".md"):
            assert python_of(text) == python_of(plain[file]) and text.count("\n```") == 2
        if file.endswith(".json"):
            assert json.loads(text) and text.startswith("{\n  ")  # a person reads it
        if file.endswith(".yaml"):
            assert yaml.safe_load(text).keys() == yaml.safe_load(plain[file]).keys()


@pytest.mark.parametrize("name", NAMES)
def test_names_arrive_as_they_are(name: str) -> None:
    files = exported(name)
    data = {file: json.loads(text) for file, text in files.items() if file.endswith(".json")}
    data |= {file: yaml.safe_load(text) for file, text in files.items() if file.endswith(".yaml")}
    assert data["train_config.json"]["model"] == name
    assert data["adapter_config.json"]["base_model_name_or_path"] == name
    assert data["recipe.yaml"]["study"] == data["recipe.yaml"]["model"]["name"] == name
    assert data["recipe.yaml"]["caveats"] == [name]
    assert (
        data["trl_sft.yaml"]["model_name_or_path"]
        == data["llamafactory.yaml"]["model_name_or_path"]
        == name
    )
    assert data["axolotl.yaml"]["base_model"] == name
    assert data["job.yaml"]["metadata"]["annotations"]["autotune-study"] == name


@pytest.mark.parametrize("name", NAMES)
def test_running_the_script_and_its_launcher_runs_nothing_of_a_name(
    name: str, tmp_path: Path
) -> None:
    directory = write(exported(name), tmp_path / name.replace("/", "").replace("\0", ""))
    done = run(directory, "--help")
    assert done.returncode == 0 and "--random-weights" in done.stdout, done.stderr
    programs = map(str, directory.rglob("*.py"))
    subprocess.run([sys.executable, "-m", "py_compile", *programs], check=True, cwd=tmp_path)
    for file in (*directory.glob("*.sh"), *directory.glob("*.sbatch")):
        subprocess.run(["bash", "-n", str(file)], check=True)
    assert not [path for path in tmp_path.rglob("*") if path.name == "CANARY"]


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_exports_of_a_cpu_study_are_for_the_cpu(precision: str) -> None:
    config = TrainConfig(precision=precision, optimizer="adamw_torch")
    files = export_all(recipe(config, device=resolve_device("cpu")), FORMATS)
    data = {file: json.loads(text) for file, text in files.items() if file.endswith(".json")}
    data |= {file: yaml.safe_load(text) for file, text in files.items() if file.endswith(".yaml")}
    for file in (
        "train_config.json",
        "trl_sft.yaml",
        "llamafactory.yaml",
        "accelerate.yaml",
        "training_args.json",
    ):
        assert data[file]["use_cpu"] is True, file
    for file in ("trl_sft.yaml", "axolotl.yaml", "llamafactory.yaml", "accelerate.yaml"):
        (command,) = re.findall(r"(?m)^#   CUDA_VISIBLE_DEVICES=(.*)$", files[file])
        assert command.startswith(" ") and "on the processor" in files[file], file
    assert "Axolotl has no key to train on the CPU" in files["axolotl.yaml"]
    assert "\n    CUDA_VISIBLE_DEVICES= accelerate launch" in files["transformers_notes.md"]

    files = export_all(recipe(config), FORMATS)
    for file in ("trl_sft.yaml", "llamafactory.yaml", "training_args.json"):
        assert "use_cpu" not in files[file]
    assert json.loads(files["train_config.json"])["use_cpu"] is False
    own = [text for name, text in files.items() if not name.startswith("runtime/")]
    assert "processor" not in "".join(own)
