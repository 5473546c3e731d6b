"""Files for clusters, of a training run and of a study's workers.

They are of the documented form, they name the card as each system does, and nothing hostile in them
runs. They were read by kubernetes-validate (strict, Kubernetes 1.37) and by the schemas and Task of
SkyPilot 0.14.1. Neither is a
dependency: the tests check their form by name.
"""

import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import list_devices, resolve_device
from autotune.core.train_config import TrainConfig
from autotune.export import clusters, script
from tests.helpers.factories import FINGERPRINT
from tests.helpers.hostile import NAMES
from tests.unit.export.test_script import HOSTILE, demo, recipe, run, write

each_name = pytest.mark.parametrize("name", NAMES)

# Accelerators in the docs of SkyPilot (compute/show-gpus-all.txt) and in the catalogue fetchers of
# 0.14.1.
SKYPILOT = {
    *(
        "T4",
        "V100",
        "V100-32GB",
        "A10",
        "A10G",
        "L4",
        "L40S",
        "A40",
        "A100",
        "A100-80GB",
        "H100",
        "H100-NVL",
        "GH200",
    ),
    *(
        "H200",
        "B200",
        "GB200",
        "MI300X",
        "RTX3090",
        "RTX4080",
        "RTX4090",
        "RTX5090",
        "RTXA6000",
        "RTX6000-Ada",
    ),
    *("RTXPRO6000", "RTXPRO6000-WK", "RTXPRO6000-MaxQ"),
}


def loaded(text: str) -> Any:
    return yaml.safe_load(text)


def test_the_job_is_of_the_documented_form() -> None:
    made = recipe(TrainConfig())
    text = clusters.export(made, "kubernetes")["job.yaml"]
    job = loaded(text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert set(job["spec"]) == {"backoffLimit", "podFailurePolicy", "template"}
    assert job["spec"]["backoffLimit"] == 1
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["activeDeadlineSeconds"] == 3600
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["env"] == [
        {"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"}
    ]
    assert container["command"][:2] == ["bash", "/export/launch.sh"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    *by_code, disrupted = job["spec"]["podFailurePolicy"]["rules"]
    for rule, action, values in zip(by_code, ("FailJob", "Ignore"), ([2, 4], [75]), strict=True):
        assert rule == {
            "action": action,
            "onExitCodes": {"containerName": "train", "operator": "In", "values": values},
        }
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert container["name"] == "train"
    assert f"# Fingerprint {made.fingerprint.digest}" in text and "# Expect (measured)" in text
    assert job["metadata"]["annotations"]["autotune-fingerprint"] == made.fingerprint.digest


def test_the_task_is_of_the_documented_form() -> None:
    packages = {"torch": "2.13.0+cu130", "transformers": "5.23.0"}
    made = recipe(TrainConfig())
    made = replace(made, fingerprint=replace(made.fingerprint, packages=packages))
    task = loaded(clusters.export(made, "skypilot")["sky.yaml"])
    assert set(task) == {"name", "workdir", "resources", "envs", "setup", "run"}
    assert task["resources"]["accelerators"] == "H200:1"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert task["setup"] == "pip install -- torch==2.13.0 transformers==5.23.0"
    assert "bash launch.sh" in task["run"]


def test_the_batch_script_asks_for_one_gpu() -> None:
    text = clusters.export(recipe(TrainConfig(loader_workers=4)), "slurm")["train.sbatch"]
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    asked = " ".join(
        line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")
    ).split()
    # sbatch reads no further than the first command
    assert "#SBATCH" not in "\n".join(lines[first:])
    assert {
        "--gres=gpu:h200:1",
        "--signal=TERM@120",
        "--requeue",
        "--time=1:00:00",
        "--cpus-per-task=8",
    } <= set(asked)


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.name)
def test_every_card_has_its_names(device: Any) -> None:
    made = recipe(TrainConfig(), device=device)
    task = loaded(clusters.export(made, "skypilot")["sky.yaml"])
    pod = loaded(clusters.export(made, "kubernetes")["job.yaml"])["spec"]["template"]["spec"]
    script = clusters.export(made, "slurm")["train.sbatch"]
    if device.kind == "cpu":
        assert "accelerators" not in task["resources"]
        assert "nodeSelector" not in pod and "resources" not in pod["containers"][0]
        assert "--gres" not in script
        return
    name = task["resources"]["accelerators"].removesuffix(":1")
    # SkyPilot has not all of them
    assert name in SKYPILOT or re.fullmatch(r"[A-Z]+[0-9]+[A-Z]?(-[A-Za-z]+)*", name)
    assert re.search(r"^#SBATCH --gres=gpu:[a-z0-9_]+:1$", script, re.MULTILINE)
    assert pod["containers"][0]["resources"]["limits"] == {f"{device.vendor}.com/gpu": 1}
    label = pod.get("nodeSelector", {}).get("nvidia.com/gpu.product")
    # the study's, where one name means two sizes
    product = (*device.nvml_names, made.fingerprint.device)[0]
    assert label is None if device.vendor != "nvidia" else label == product.replace(" ", "-")
    assert label is None or len(label) <= 63


@pytest.mark.parametrize(
    ("card", "sky", "slurm"),
    [
        ("rtx-3060-12gb", "RTX3060", "rtx_3060"),
        ("rtx-4070-ti-super", "RTX4070-TI-SUPER", "rtx_4070_ti_super"),
        ("rtx-a5000", "RTXA5000", "rtx_a5000"),
        ("rtx-4000-ada", "RTX4000-Ada", "rtx_4000_ada"),
        ("b300-sxm", "B300", "b300"),
    ],
)
def test_sizes_and_forms_are_no_part_of_a_name(card: str, sky: str, slurm: str) -> None:
    device = resolve_device(card)
    assert (clusters.sky_gpu(device), clusters.slurm_gpu(device)) == (sky, slurm)


def test_a_card_that_is_not_catalogued_is_labelled_by_the_driver() -> None:
    made = recipe(TrainConfig())
    device = replace(made.device, name="nvidia-geforce-rtx-4070", nvml_names=())
    fingerprint = replace(made.fingerprint, device="NVIDIA GeForce RTX 4070")
    made = replace(made, device=device, fingerprint=fingerprint)
    assert clusters.gpu_product(device, fingerprint) == "NVIDIA-GeForce-RTX-4070"
    assert (clusters.sky_gpu(device), clusters.slurm_gpu(device)) == ("RTX4070", "rtx_4070")


def test_the_time_limit_is_the_upper_end_of_the_projection_and_half_an_hour() -> None:
    made = recipe(TrainConfig())
    for hours, limit in ((0.2, 1), (0.6, 2), (30.5, 31), (30.6, 32)):
        cost = replace(made.winner.cost, interval_hours=(0.1, hours))
        longer = replace(made, winner=replace(made.winner, cost=cost))
        assert f"#SBATCH --time={limit}:00:00" in clusters.export(longer, "slurm")["train.sbatch"]
        assert (
            f"activeDeadlineSeconds: {3600 * limit}\n"
            in clusters.export(longer, "kubernetes")["job.yaml"]
        )


def test_missing_weights_are_reported() -> None:
    local = demo(TrainConfig())
    for system in clusters.SYSTEMS:
        (text,) = clusters.export(local, system).values()
        assert "# There are no published weights of this shape" in text
        with_weights = replace(local, model=replace(local.model, weights=f"/w\n{HOSTILE}"))
        (text,) = clusters.export(with_weights, system).values()
        assert (
            "# The weights are in a local directory (model in train_config.json): the job's machine"
            " needs this directory too." in text
        )


@each_name
def test_names_are_sanitised_in_labels_and_whole_in_annotations(name: str) -> None:
    base = recipe(TrainConfig())
    made = replace(base, study=name, model=replace(base.model, name=name))
    job = loaded(clusters.export(made, "kubernetes")["job.yaml"])
    task = loaded(clusters.export(made, "skypilot")["sky.yaml"])
    label = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,50}[a-z0-9]", label)
    assert task["name"] == label
    assert f"\n#SBATCH --job-name={label}\n" in clusters.export(made, "slurm")["train.sbatch"]
    assert job["metadata"]["annotations"]["autotune-study"] == name
    assert job["metadata"]["annotations"]["autotune-model"] == name


def stub(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f'#!/bin/bash\nprintf \'%s\\n\' {name} "$@" >>"$STUB_LOG"\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def shell(
    tmp_path: Path, script: str, *arguments: str, **environment: str
) -> tuple[int, list[str]]:
    """(exit code, what the stubs were called with) of a bash script in a hostile folder."""
    log = tmp_path / "log"
    log.write_text("")
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STUB_LOG": str(log)}
    command = ["bash", "-c", script, "script", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    return done.returncode, log.read_bytes().decode().split("\n")[:-1]


@pytest.mark.parametrize(
    ("name", "code", "restarts", "requeued"),
    [
        *((name, 0, 0, 0) for name in NAMES),
        *((HOSTILE, *end) for end in ((2, 0, 0), (4, 0, 0), (75, 0, 1), (75, 3, 0))),
    ],
)
def test_scripts_run_launch_sh_and_nothing_else(
    name: str, code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    base = recipe(TrainConfig())
    packages = base.fingerprint.packages | {"peft": name.replace("\0", "")}
    made = replace(
        base, study=name, trainer=name, model=replace(base.model, name=name, weights=name)
    )
    made = replace(made, fingerprint=replace(base.fingerprint, device=name, packages=packages))
    folder = write(
        script.export(made) | clusters.export(made, "slurm"),
        tmp_path / "out; touch CANARY $(touch CANARY)",
    )
    task = loaded(clusters.export(made, "skypilot")["sky.yaml"])
    (tmp_path / "bin").mkdir()
    for command, body in (
        ("srun", '"$@"'),
        ("scontrol", ""),
        ("pip", ""),
        ("python", f"exit {code}"),
    ):
        stub(tmp_path / "bin", command, body)
    for text in (
        (folder / "train.sbatch").read_text(),
        (folder / "launch.sh").read_text(),
        *task.values(),
    ):
        if isinstance(text, str):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    data = "$(touch CANARY)'; touch CANARY"
    environment = {"DATASET": data, "OUTPUT": "-out", "PYTHON": "python"}
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    ended, called = shell(
        tmp_path, (folder / "train.sbatch").read_text(), "--max-steps", "2", **environment, **slurm
    )
    assert ended == code
    always = ["--dataset", data, "--output-dir", "-out", "--resume"]
    asked = [*always, "--max-steps", "2"]
    expected = ["srun", "bash", "launch.sh", *asked, "python", "--", "./train.py", *asked]
    assert called == expected + ["scontrol", "requeue", "7"] * requeued

    ended, called = shell(
        tmp_path, f'cd "$FOLDER"\n{task["run"]}', FOLDER=str(folder), **environment
    )
    assert (ended, called) == (code, ["python", "--", "./train.py", *always])
    ended, called = shell(tmp_path, task["setup"])
    wanted = [f"{package}=={version.partition('+')[0]}" for package, version in packages.items()]
    assert "\n".join(called) == "\n".join(["pip", "install", "--", *wanted])
    pod = loaded(clusters.export(made, "kubernetes")["job.yaml"])["spec"]["template"]["spec"]
    # called without a shell: no name is among its arguments
    assert pod["containers"][0]["command"][0] == "bash"
    assert (
        pod["containers"]
        == loaded(clusters.export(base, "kubernetes")["job.yaml"])["spec"]["template"]["spec"][
            "containers"
        ]
    )
    assert not [path for path in tmp_path.rglob("*") if path.name == "CANARY"]


def test_the_pod_has_the_exported_folder(tmp_path: Path) -> None:
    """Of a folder, `kubectl create configmap --from-file` takes the files alone.

    The kubelet writes them as links.
    """
    made = recipe(TrainConfig())
    text = clusters.export(made, "kubernetes")["job.yaml"]
    folder = write(script.export(made), tmp_path / "export")
    commands = [
        line.removeprefix("#   ")
        for line in text.splitlines()
        if line.startswith("#   kubectl create")
    ]
    (tmp_path / "bin").mkdir()
    stub(tmp_path / "bin", "kubectl", "")
    _, called = shell(tmp_path, "\n".join(["cd export", *commands]))
    created = " ".join(called).split("kubectl create configmap ")[1:]
    maps = {
        name: {
            path.name: path.read_text() for path in (folder / source).iterdir() if path.is_file()
        }
        for name, source in (
            one.split()[:2] for one in (command.replace("--from-file=", "") for command in created)
        )
    }
    (volume,) = (
        one
        for one in loaded(text)["spec"]["template"]["spec"]["volumes"]
        if one["name"] == "export"
    )
    pod = tmp_path / "pod"
    for source in volume["projected"]["sources"]:
        files = maps[source["configMap"]["name"]]
        items = source["configMap"].get("items", [{"key": name, "path": name} for name in files])
        (pod / "..data" / "runtime").mkdir(parents=True, exist_ok=True)
        for item in items:
            (pod / "..data" / item["path"]).write_text(files[item["key"]])
    for path in (pod / "..data").iterdir():
        (pod / path.name).symlink_to(f"..data/{path.name}")
    done = run(pod, "--help")
    assert done.returncode == 0 and "--random-weights" in done.stdout, done.stderr


def test_a_missing_dataset_is_reported(tmp_path: Path) -> None:
    script = clusters.export(recipe(TrainConfig(), device=resolve_device("a10")), "slurm")[
        "train.sbatch"
    ]
    (tmp_path / "bin").mkdir()
    stub(tmp_path / "bin", "srun", "")
    ended, called = shell(tmp_path, script, SLURM_SUBMIT_DIR=str(tmp_path))
    assert ended != 0 and called == []


def workers_file(system: str, *, study: str = "seven", device: str = "a10") -> str:
    """The text of the file that starts four workers."""
    card = resolve_device(device)
    job = clusters.workers_job(
        study=study, device=card, fingerprint=FINGERPRINT, budget_s=900.0, count=4
    )
    (text,) = clusters.render(job, system).values()
    return text


def test_the_job_of_workers_is_indexed_and_retries_by_exit_code() -> None:
    job = loaded(workers_file("kubernetes"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == (
        "batch/v1",
        "Job",
        "seven-workers",
    )
    assert set(spec) == {
        *(
            "completionMode",
            "completions",
            "parallelism",
            "backoffLimit",
            "podFailurePolicy",
            "template",
        ),
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
    assert disrupted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def test_the_task_of_workers_runs_one_worker() -> None:
    text = workers_file("skypilot")
    task = loaded(text)
    assert set(task) == {"name", "resources", "secrets", "setup", "run"}
    assert task["resources"]["accelerators"] == "A10:1" and task["secrets"] == {
        "AUTOTUNE_STORAGE": None
    }
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "'autotune-llm[postgres]==" in task["setup"] and "torch==2.11.0" in task["setup"]
    assert "seq 4" in text


def test_the_batch_script_of_workers_is_an_array() -> None:
    lines = workers_file("slurm").splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    asked = " ".join(
        line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")
    ).split()
    assert "#SBATCH" not in "\n".join(lines[first:])
    assert {
        "--array=1-4",
        "--gres=gpu:a10:1",
        "--time=0:45:00",
        "--requeue",
        "--signal=TERM@120",
    } <= set(asked)


def test_workers_on_a_cpu_ask_for_no_gpu() -> None:
    pod = loaded(workers_file("kubernetes", device="cpu"))["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod and "resources" not in pod["containers"][0]
    assert "accelerators" not in loaded(workers_file("skypilot", device="cpu"))["resources"]
    assert "--gres" not in workers_file("slurm", device="cpu")


@pytest.mark.parametrize(
    ("name", "code", "restarts", "requeued"),
    [
        *((name, 0, 0, 0) for name in NAMES),
        *((HOSTILE, *end) for end in ((3, 0, 0), (75, 0, 1), (75, 3, 0))),
    ],
)
def test_scripts_run_the_worker_and_nothing_else(
    name: str, code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    name = name.replace("\0", "")  # no study can have such a name
    (tmp_path / "bin").mkdir()
    for tool, body in (
        ("srun", '"$@"'),
        ("scontrol", ""),
        ("pip", ""),
        ("autotune", f"exit {code}"),
    ):
        stub(tmp_path / "bin", tool, body)
    wanted = f"autotune\nworker\n--study={name}".split("\n")
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    script = workers_file("slurm", study=name)
    ended, called = shell(tmp_path, script, "--quiet", AUTOTUNE_STORAGE="x", **environment)
    once = [*wanted, "--out=workers/2", "--quiet"]
    assert (ended, called) == (
        code,
        ["srun", *once, *once, *["scontrol", "requeue", "7"] * requeued],
    )
    ended, called = shell(tmp_path, script, **environment)
    assert ended != 0 and called == []  # without a database

    task = loaded(workers_file("skypilot", study=name))
    assert shell(tmp_path, task["run"]) == (code, wanted)
    job = loaded(workers_file("kubernetes", study=name))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    # Kubernetes makes one $ of two
    assert container["command"][2] == f"--study={name.replace('$', '$$')}"
    assert job["metadata"]["name"] == task["name"] and len(task["name"]) <= 52
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.name == "CANARY"]


def test_a_job_on_several_gpus_asks_for_them_all() -> None:
    made = recipe(TrainConfig(num_gpus=4, loader_workers=2))
    pod = yaml.safe_load(clusters.export(made, "kubernetes")["job.yaml"])["spec"]["template"][
        "spec"
    ]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    accelerators = yaml.safe_load(clusters.export(made, "skypilot")["sky.yaml"])["resources"][
        "accelerators"
    ]
    assert accelerators.endswith(":4")
    script = clusters.export(made, "slurm")["train.sbatch"]
    assert re.search(r"--gres=gpu:\w+:4\n", script) and "--cpus-per-task=24" in script
