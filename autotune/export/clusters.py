"""Writes files that start a full training or a study's workers on Kubernetes, SkyPilot or Slurm.

A JobSpec describes the job, and each system has a renderer for it. The user provides the container
image and the dataset. Names that users or model authors chose, such as a study's name, are
untrusted. A file contains an untrusted name only as a YAML value, as a sanitised name, or as one
quoted argument of a command. Shell code and its comments contain no untrusted names. No file
contains the URL of a study's database; the URL comes from a secret or from the environment.
"""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.core.errors import PREEMPTED
from autotune.core.files import load_data
from autotune.core.probe_types import Fingerprint
from autotune.core.text import kebab_case
from autotune.core.version import __version__
from autotune.export.header import (
    allocator,
    comment,
    has_published_weights,
    summary_lines,
    yaml_sections,
)
from autotune.export.script import runtime_files
from autotune.study.storage.location import VARIABLE
from autotune.study.summary import Recipe

# The hours that a training run may need in addition to its projected time, for start-up, downloads
# and saves
UNPROJECTED_H = 0.5
# A worker's time limit is the study's budget plus this number of seconds, because the job also
# pulls the image, installs packages and waits in a queue.
STARTING_S = 1800.0
# The seconds between the termination signal and the kill. This time is enough to finish a step and
# to save the checkpoint that the next attempt continues from.
GRACE_S = 120
# After a preemption, the job is started again at most this many times. After other failures, the
# job is not started again.
RETRIES = 3
_MAKER = re.compile(r"^(nvidia-)?(geforce-|tesla-)?")
# The parts of the catalogue's card names that SkyPilot and Slurm omit: the form factor, and some
# memory sizes
_FORM = re.compile(r"-(sxm\d?|pcie|blackwell|server|16gb|40gb|96gb)(?=-|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job on one or several GPUs of one node, or `count` parallel copies of the job.

    `use` is a key of `clusters.yaml`: `train` or `worker`. The comment at the top of a YAML file
    has `about`, then the steps that start the job on the system, then `notes`. The comment of a
    Slurm script omits `about`, because `about` contains untrusted names. If the job ends with an
    exit code in `hopeless`, it is not started again.

    `command`, `env` and `volumes` describe a Kubernetes container. `task` holds further keys of a
    SkyPilot task, and `run` is the shell code that SkyPilot runs. The Slurm script runs the lines
    in `before`, then `srun`.
    """

    use: str  # a key of clusters.yaml
    name: str
    about: Sequence[str]
    notes: Sequence[str] = ()
    device: DeviceSpec
    fingerprint: Fingerprint
    limit_s: int
    hopeless: list[int]
    annotations: dict[str, str]
    packages: Sequence[str]
    command: list[str]
    env: list[dict[str, Any]]
    volumes: Sequence[dict[str, Any]] = ()
    task: dict[str, Any]
    run: str
    before: str
    srun: str
    cpus: int = 4
    gpus: int = 1
    count: int | None = None

    def file(self, system: str) -> str:
        """Return the name of the job's file for a system in SYSTEMS."""
        return str(load_data("autotune.export", "clusters")[self.use][system]["file"])

    def head(self, system: str) -> list[str]:
        """Return the lines of the comment at the top of the file."""
        steps = load_data("autotune.export", "clusters")[self.use][system]["steps"]
        filled = steps.format(name=self.name, count=self.count, version=__version__, url=VARIABLE)
        about = () if system == "slurm" else (*self.about, "")
        return [*about, *filled.splitlines(), *self.notes]


def export(recipe: Recipe, system: str) -> dict[str, str]:
    """Return the file that runs launch.sh on the GPUs of one node, for a system in SYSTEMS."""
    return render(training_job(recipe), system)


def render(job: JobSpec, system: str) -> dict[str, str]:
    """Return the name and text of the job's file for a system in SYSTEMS."""
    return {job.file(system): SYSTEMS[system](job)}


def training_job(recipe: Recipe) -> JobSpec:
    """Return the job that runs launch.sh for the full training.

    The job's time limit is the longest projected time plus UNPROJECTED_H, rounded up to whole
    hours.
    """
    name = slug(recipe.study)
    variable, value = allocator(recipe)
    hours = math.ceil(recipe.winner.cost.interval_hours[1] + UNPROJECTED_H)
    limit = (
        f"{hours} h, the upper end of the projection plus {60 * UNPROJECTED_H:.0f} min, rounded up"
    )

    notes = [f"The speed holds for train.py on this GPU. Time limit: {limit}."]
    if recipe.model.weights:
        notes.append(
            "The weights are in a local directory (model in train_config.json):"
            " the job's machine needs this directory too."
        )
    elif not has_published_weights(recipe):
        notes.append(
            "There are no published weights of this shape: name your weights with --model."
        )

    return JobSpec(
        use="train",
        name=name,
        about=summary_lines(recipe),
        notes=notes,
        device=recipe.device,
        fingerprint=recipe.fingerprint,
        limit_s=3600 * hours,
        cpus=recipe.config.num_gpus * (4 + recipe.config.loader_workers),
        gpus=recipe.config.num_gpus,
        # Exit code 2 means wrong arguments, and exit code 4 means that no configuration fits.
        hopeless=[2, 4],
        annotations={
            "autotune-study": recipe.study,
            "autotune-model": recipe.model.name,
            "autotune-fingerprint": recipe.fingerprint.digest,
        },
        command=[
            "bash",
            "/export/launch.sh",
            "--dataset",
            "/data/train.jsonl",
            "--output-dir",
            "/output",
            "--resume",
        ],
        env=[{"name": variable, "value": value}],
        volumes=[
            {"name": "export", "projected": {"sources": _config_maps(name)}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "your-data"}},
            {"name": "output", "persistentVolumeClaim": {"claimName": "your-output"}},
        ],
        task={"envs": {"DATASET": "your-data.jsonl", "OUTPUT": "out", variable: value}},
        packages=_packages(recipe.fingerprint),
        before=f'cd -- "${{SLURM_SUBMIT_DIR:?submit it with sbatch}}"\nexport {variable}={value}',
        run='bash launch.sh --dataset "$DATASET" --output-dir "$OUTPUT" --resume',
        srun='bash launch.sh --dataset "${DATASET:?name your data}"'
        ' --output-dir "${OUTPUT:-out}" --resume',
    )


def workers_job(
    *, study: str, device: DeviceSpec, fingerprint: Fingerprint, budget_s: float, count: int
) -> JobSpec:
    """Return the job of `count` workers for a study with a budget of `budget_s` seconds.

    `device` is the card that runs the probes.
    """
    name = f"{slug(study)[:44].strip('-')}-workers"
    versions = ", ".join(
        f"{package} {version}" for package, version in sorted(fingerprint.packages.items())
    )
    argument = f"--study={study}"

    return JobSpec(
        use="worker",
        name=name,
        about=[
            f"autotune study {study}, led by `autotune run`: {count} workers on {device.name}",
            f"A worker can join only with these packages: python {fingerprint.python}, {versions}",
        ],
        device=device,
        fingerprint=fingerprint,
        limit_s=math.ceil((budget_s + STARTING_S) / 60) * 60,
        hopeless=[2, 3, 4, 6],  # after exit code 1 or 5, another node may succeed
        annotations={"autotune-study": study},
        # Kubernetes replaces $(NAME) in this list by the value of the variable NAME, and $$ by a $.
        command=["autotune", "worker", argument.replace("$", "$$"), "--out=/tmp/worker"],
        env=[{"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": "url"}}}],
        task={"secrets": {VARIABLE: None}},
        packages=[f"autotune-llm[postgres]=={__version__}", *_packages(fingerprint)],
        before=f': "${{{VARIABLE}:?the database of the study}}"',
        run=f"autotune worker {shlex.quote(argument)}",
        srun=f'autotune worker {shlex.quote(argument)} --out="workers/${{SLURM_ARRAY_TASK_ID:?}}"',
        count=count,
    )


def _kubernetes(job: JobSpec) -> str:
    """Return a Kubernetes Job (batch/v1), which is an Indexed Job if it has several pods.

    The job's pod failure policy needs Kubernetes 1.31.
    """
    label = gpu_product(job.device, job.fingerprint)
    gpu = {"limits": {f"{job.device.vendor}.com/gpu": job.gpus}}
    mounts = [{"name": volume["name"], "mountPath": f"/{volume['name']}"} for volume in job.volumes]
    volumes = list(job.volumes)
    # NCCL connects the GPUs of a node through shared memory, but containers get only 64 MB by
    # default.
    if job.gpus > 1:
        shared = "/dev/shm"  # noqa: S108 (the path is inside the container)
        mounts.append({"name": "shared-memory", "mountPath": shared})
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})

    container = {
        "name": job.use,
        "image": "your-registry/your-image:tag",
        "command": job.command,
        "env": job.env,
        "volumeMounts": mounts,
        "resources": None if job.device.kind == "cpu" else gpu,
    }
    pod = {
        "restartPolicy": "Never",
        # This time limit begins when the pod starts to run, so waiting for a GPU does not count.
        "activeDeadlineSeconds": job.limit_s,
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": label and {"nvidia.com/gpu.product": label},
        "containers": [_without_empty(container)],
        "volumes": volumes,
    }

    codes = {"containerName": job.use, "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": job.hopeless}},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]

    spec = {
        "completionMode": "Indexed" if job.count else None,
        "completions": job.count,
        "parallelism": job.count,
        "backoffLimit": job.count or 1,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _without_empty(pod)},
    }
    values = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "annotations": job.annotations},
        "spec": _without_empty(spec),
    }
    return yaml_sections(job.head("kubernetes"), [("", values)])


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _skypilot(job: JobSpec) -> str:
    """Return a SkyPilot 0.14 task for the training run or for one worker.

    Each worker needs its own task, because a task for all workers would end with its first node.
    """
    gpu = {"accelerators": f"{sky_gpu(job.device)}:{job.gpus}"} if job.device.kind != "cpu" else {}
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [PREEMPTED]}
    # A training run needs the other exported files.
    workdir = {"workdir": "."} if job.count is None else {}

    values = {
        "name": job.name,
        **workdir,
        "resources": {**gpu, "job_recovery": recovery},
        **job.task,
        # pip installs the probed versions. The build of torch, such as +cu130, is the one that
        # pip's package index offers.
        "setup": f"pip install -- {shlex.join(job.packages)}",
        "run": job.run,
    }
    return yaml_sections(job.head("skypilot"), [("", values)])


def _slurm(job: JobSpec) -> str:
    """Return a Slurm batch script, to be submitted from its folder. Copies form a job array."""
    hours, minutes = divmod(job.limit_s // 60, 60)
    options = [
        f"--job-name={job.name}",
        f"--array=1-{job.count}" if job.count else "",
        f"--nodes=1 --ntasks=1 --cpus-per-task={job.cpus}",
        f"--gres=gpu:{slurm_gpu(job.device)}:{job.gpus}" if job.device.kind != "cpu" else "",
        f"--time={hours}:{minutes:02}:00",
        f"--signal=TERM@{GRACE_S} --requeue",
        f"--open-mode=append --output={'%x-%A_%a.log' if job.count else '%x-%j.log'}",
    ]
    sbatch = "\n".join(f"#SBATCH {option}" for option in options if option)

    return f"""#!/usr/bin/env bash
{comment(job.head("slurm"))}
{sbatch}
set -euo pipefail
{job.before}
code=0
srun {job.srun} "$@" || code=$?
if [ "$code" -eq {PREEMPTED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RETRIES} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


SYSTEMS: dict[str, Callable[[JobSpec], str]] = {
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "slurm": _slurm,
}


def slug(name: str) -> str:
    """Return a DNS label (RFC 1123), which is a valid name for Kubernetes, SkyPilot and Slurm."""
    name = kebab_case(name)
    return (name if name[:1].isalpha() else f"autotune-{name}")[:52].strip("-")


def gpu_product(device: DeviceSpec, fingerprint: Fingerprint) -> str | None:
    """Return the card's label from NVIDIA's GPU feature discovery, or None for other vendors.

    The label is the driver's name of the card with dashes instead of blanks.
    """
    if device.vendor != "nvidia":
        return None
    # For a card that is not in the catalogue, the fingerprint has the driver's name of the card.
    name = device.nvml_names[0] if device.nvml_names else fingerprint.device
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("-_.")


def sky_gpu(device: DeviceSpec) -> str:
    """Return the card's name in SkyPilot's catalogue: A100-80GB, H200, RTX6000-Ada.

    The name omits the variant of the card, such as SXM, because clouds name variants differently.
    """
    name = _MAKER.sub("", _FORM.sub("", device.name))
    # SkyPilot's names of GeForce cards have no memory size.
    name = re.sub("^(rtx-[0-9].*)-[0-9]+gb$", r"\1", name)
    name = re.sub("^rtx-(?:(pro)-)?", r"rtx\1", name)
    return re.sub("-ws$", "-wk", name).upper().replace("-ADA", "-Ada").replace("-MAXQ", "-MaxQ")


def slurm_gpu(device: DeviceSpec) -> str:
    """Return the GPU type as most Slurm clusters write it: a100, h200, rtx_4090."""
    name = _MAKER.sub("", _FORM.sub("", device.name))
    name = re.sub(r"-\d+gb(?=-|$)", "", name)
    return re.sub(r"[^a-z0-9]+", "_", name)


def _config_maps(name: str) -> list[dict[str, Any]]:
    """Return two config maps: one for the files of the exported folder, one for its subfolder."""
    files = [path.rpartition("/")[2] for path in runtime_files()]
    runtime = [{"key": file, "path": f"runtime/{file}"} for file in files]
    return [
        {"configMap": {"name": name}},
        {"configMap": {"name": f"{name}-runtime", "items": runtime}},
    ]


def _packages(fingerprint: Fingerprint) -> list[str]:
    """Return pip's arguments for the probed packages, without builds such as +cu130 in versions."""
    return [
        f"{name}=={version.partition('+')[0]}" for name, version in fingerprint.packages.items()
    ]
