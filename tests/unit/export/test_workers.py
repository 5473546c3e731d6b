"""Manifests of a search: of the documented form, without the database's URL, and nothing hostile runs.

They were read as those of `export.fleet` were; see there.
"""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.cli.commands.fleet import command
from autotune.core.errors import UsageError
from autotune.export.workers import FORMATS, Workers, kubernetes, skypilot, slurm
from autotune.study.storage.study_record import start_record, update_record
from tests.helpers.factories import FINGERPRINT
from tests.helpers.sessions import Start, record_of
from tests.unit.export.test_clusters import each_name, loaded, shell, stub

CREW = Workers(study="seven", device=resolve_device("a10"), fingerprint=FINGERPRINT, budget_s=900.0, count=4)
CANARY = "s3cr3t-c4n4ry"


def test_the_job_is_indexed_and_its_policy_is_that_of_the_exit_codes() -> None:
    job = loaded(kubernetes(CREW)["workers.yaml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "seven-workers")
    assert set(spec) == {
        *("completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template"),
    }
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert pod["restartPolicy"] == "Never" and pod["activeDeadlineSeconds"] == 2700
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A10"}
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["command"] == ["autotune", "worker", "--study=seven", "--out=/tmp/worker"]
    secret = {"secretKeyRef": {"name": "seven-workers", "key": "url"}}
    assert container["env"] == [{"name": "AUTOTUNE_STORAGE", "valueFrom": secret}]
    *by_code, disrupted = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in by_code] == [
        ("FailJob", [2, 3, 4, 6]),
        ("Ignore", [75]),  # 1 and 5 count
    ]
    assert {rule["onExitCodes"]["containerName"] for rule in by_code} == {container["name"]}
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_the_task_is_of_one_worker() -> None:
    text = skypilot(CREW)["workers.sky.yaml"]
    task = loaded(text)
    assert set(task) == {"name", "resources", "secrets", "setup", "run"}
    assert task["resources"]["accelerators"] == "A10:1" and task["secrets"] == {"AUTOTUNE_STORAGE": None}
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "'autotune-llm[postgres]==" in task["setup"] and "torch==2.11.0" in task["setup"]
    assert "seq 4" in text


def test_the_script_is_an_array() -> None:
    lines = slurm(CREW)["workers.sbatch"].splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    asked = " ".join(line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")).split()
    assert "#SBATCH" not in "\n".join(lines[first:])
    assert {"--array=1-4", "--gres=gpu:a10:1", "--time=0:45:00", "--requeue", "--signal=TERM@120"} <= set(asked)


def test_a_processor_needs_no_card() -> None:
    coordinator = replace(CREW, device=resolve_device("cpu"))
    pod = loaded(kubernetes(coordinator)["workers.yaml"])["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod and "resources" not in pod["containers"][0]
    assert "accelerators" not in loaded(skypilot(coordinator)["workers.sky.yaml"])["resources"]
    assert "--gres" not in slurm(coordinator)["workers.sbatch"]


@pytest.mark.parametrize(("code", "restarts", "requeued"), [(0, 0, 0), (3, 0, 0), (75, 0, 1), (75, 3, 0)])
@each_name
def test_scripts_run_the_worker_and_nothing_else(
    name: str, code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    name = name.replace("\0", "")  # which no study can be called
    coordinator = replace(CREW, study=name)
    (tmp_path / "bin").mkdir()
    for tool, body in (("srun", '"$@"'), ("scontrol", ""), ("pip", ""), ("autotune", f"exit {code}")):
        stub(tmp_path / "bin", tool, body)
    wanted = f"autotune\nworker\n--study={name}".split("\n")
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": str(restarts)}
    script = slurm(coordinator)["workers.sbatch"]
    ended, called = shell(tmp_path, script, "--quiet", AUTOTUNE_STORAGE="x", **environment)
    once = [*wanted, "--out=workers/2", "--quiet"]
    assert (ended, called) == (code, ["srun", *once, *once, *["scontrol", "requeue", "7"] * requeued])
    ended, called = shell(tmp_path, script, **environment)
    assert ended != 0 and called == []  # without a database

    task = loaded(skypilot(coordinator)["workers.sky.yaml"])
    assert shell(tmp_path, task["run"]) == (code, wanted)
    job = loaded(kubernetes(coordinator)["workers.yaml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][2] == f"--study={name.replace('$', '$$')}"  # of which Kubernetes makes one again
    assert job["metadata"]["name"] == task["name"] and len(task["name"]) <= 52
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.name == "CANARY"]


@pytest.fixture
def shared(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes the files of a study that is told to lie on a server."""
    session = start(trials=1)
    session.study.run()
    start_record(session.search, record_of(session.study.task, tmp_path))
    update_record(session.search, limits=session.study.limits)
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    monkeypatch.setattr("autotune.cli.commands.session.storage_url", lambda storage: url)
    server = f"postgresql+psycopg://me:{CANARY}@host/db"
    return lambda *formats, out=None: command("one", server, workers=3, formats=list(formats), out=out)


def test_the_command_writes_the_files_and_no_password(
    shared: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared(out=tmp_path / "fleet")
    written = {path.name: path.read_text() for path in (tmp_path / "fleet").iterdir()}
    assert set(written) == {"workers.yaml", "workers.sky.yaml", "workers.sbatch"}
    assert capsys.readouterr().out.split() == [str(tmp_path / "fleet" / name) for name in written_in_order()]
    assert not [name for name, text in written.items() if CANARY in text or "postgresql" in text]
    assert "#SBATCH --array=1-3\n" in written["workers.sbatch"]
    assert loaded(written["workers.yaml"])["spec"]["completions"] == 3


def written_in_order() -> list[str]:
    return [name for make in FORMATS.values() for name in make(CREW)]


def test_what_cannot_be_is_refused(shared: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no format 'swarm'"):
        shared("swarm")
    with pytest.raises(UsageError, match="an SQLite file, which other machines cannot share"):
        command("one", f"sqlite:///{tmp_path / 'autotune.db'}", workers=1, formats=[], out=None)
