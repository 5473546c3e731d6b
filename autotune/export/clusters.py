"""job.yaml, sky.yaml and train.sbatch: launch.sh on one GPU of Kubernetes, SkyPilot or Slurm. Image and data are yours.

Nothing that others named reaches a shell: names stand in comments, in YAML strings, or sanitised.
"""

import math
import re
import shlex
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.core.probe_types import Fingerprint
from autotune.export.header import ALLOCATOR, ALLOCATOR_VARIABLE, comment, facts, has_published_weights
from autotune.study.summary import Recipe

UNPROJECTED_H = 0.5  # start-up, downloads and saves are in no projection
PREEMPTED = 75  # exit codes: come back later,
HOPELESS = [2, 4]  # and what no other attempt mends: wrong arguments, nothing fits
GRACE_S = 120  # from the signal to the end: a step and a checkpoint, from which the next attempt goes on
RETRIES = 3  # of a run that was preempted; one that fails otherwise has a single one
_MAKER = re.compile(r"^(nvidia-)?(geforce-|tesla-)?")
_FORM = re.compile(r"-(sxm\d?|pcie|blackwell|server|16gb|40gb|96gb)(?=-|$)")  # and the size that a plain name means


def kubernetes(recipe: Recipe) -> dict[str, str]:
    """`job.yaml`: a batch/v1 Job, whose pod failure policy is stable since Kubernetes 1.31."""
    name, gpu = slug(recipe.study), recipe.device.kind != "cpu"
    head = [
        "Kubernetes: change the image and both claims, then, in this folder:",
        f"  kubectl create configmap {name} --from-file=. && kubectl apply -f job.yaml",
        "GPU feature discovery labels the nodes: kubectl get nodes -L nvidia.com/gpu.product",
    ]
    container: dict[str, Any] = {
        "name": "train",
        "image": "your-registry/your-image:tag",
        "command": [
            "bash",
            "/export/launch.sh",
            "--dataset",
            "/data/train.jsonl",
            "--output-dir",
            "/output",
            "--resume",
        ],
        "env": [{"name": ALLOCATOR_VARIABLE, "value": ALLOCATOR}],
        "volumeMounts": [{"name": folder, "mountPath": f"/{folder}"} for folder in ("export", "data", "output")],
    }
    label = gpu_product(recipe.device, recipe.fingerprint)
    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": 3600 * limit_hours(recipe),  # of a pod that runs; waiting for a GPU does not count
        "terminationGracePeriodSeconds": GRACE_S,
        **({"nodeSelector": {"nvidia.com/gpu.product": label}} if label else {}),
        "containers": [container | ({"resources": {"limits": {f"{recipe.device.vendor}.com/gpu": 1}}} if gpu else {})],
        "volumes": [
            {"name": "export", "configMap": {"name": name}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "your-data"}},
            {"name": "output", "persistentVolumeClaim": {"claimName": "your-output"}},
        ],
    }
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": HOPELESS}},
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    told = {"study": recipe.study, "model": recipe.model.name, "fingerprint": recipe.fingerprint.digest}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "annotations": {f"autotune-{key}": value for key, value in told.items()}},
        "spec": {"backoffLimit": 1, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}},
    }
    return {"job.yaml": _yaml(recipe, head, job)}


def skypilot(recipe: Recipe) -> dict[str, str]:
    """`sky.yaml`: a task, in the fields of SkyPilot 0.14."""
    packages = [f"{name}=={version.partition('+')[0]}" for name, version in recipe.fingerprint.packages.items()]
    head = [
        f"SkyPilot: `sky launch -c {slug(recipe.study)} sky.yaml` in this folder, or `sky jobs launch sky.yaml`.",
        "An image is `image_id: docker:your-registry/your-image:tag` under resources. OUTPUT is to be fetched, or a",
        "mounted bucket. Clouds name forms of a card apart (H200-SXM); `sky show-gpus -a` lists the names.",
    ]
    gpu = {"accelerators": f"{sky_gpu(recipe.device)}:1"} if recipe.device.kind != "cpu" else {}
    task = {
        "name": slug(recipe.study),
        "workdir": ".",
        "resources": {**gpu, "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [PREEMPTED]}},
        "envs": {"DATASET": "your-data.jsonl", "OUTPUT": "out", ALLOCATOR_VARIABLE: ALLOCATOR},
        "setup": f"pip install -- {shlex.join(packages)}",  # as probed; which build of torch is the index's to say
        "run": 'bash launch.sh --dataset "$DATASET" --output-dir "$OUTPUT" --resume',
    }
    return {"sky.yaml": _yaml(recipe, head, task)}


def slurm(recipe: Recipe) -> dict[str, str]:
    """`train.sbatch`, to be submitted from the folder of the exports."""
    gpu = f"#SBATCH --gres=gpu:{slurm_gpu(recipe.device)}:1\n" if recipe.device.kind != "cpu" else ""
    head = [
        "Slurm: `DATASET=data.jsonl sbatch train.sbatch` in this folder, PYTHON=... for another interpreter.",
        "Clusters name their GPUs as they like: sinfo -o %G. With pyxis, srun takes --container-image=your-image:tag.",
    ]
    script = f"""#!/usr/bin/env bash
{_head(recipe, head)}
#SBATCH --job-name={slug(recipe.study)}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={4 + recipe.winner.config.loader_workers}
{gpu}#SBATCH --time={limit_hours(recipe)}:00:00
#SBATCH --signal=TERM@{GRACE_S} --requeue
#SBATCH --open-mode=append --output=%x-%j.log
set -euo pipefail
cd -- "${{SLURM_SUBMIT_DIR:?submit it with sbatch}}"
export {ALLOCATOR_VARIABLE}={shlex.quote(ALLOCATOR)}
code=0
srun bash launch.sh --dataset "${{DATASET:?name your data}}" --output-dir "${{OUTPUT:-out}}" --resume "$@" || code=$?
if [ "$code" -eq {PREEMPTED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RETRIES} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
    return {"train.sbatch": script}


def limit_hours(recipe: Recipe) -> int:
    """The upper end of the projection and what it leaves out, in whole hours."""
    return math.ceil(recipe.winner.cost.interval_hours[1] + UNPROJECTED_H)


def slug(name: str) -> str:
    """A label of DNS (RFC 1123), which is a name to Kubernetes, SkyPilot and Slurm alike."""
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"autotune-{name}")[:52].strip("-")


def gpu_product(device: DeviceSpec, fingerprint: Fingerprint) -> str | None:
    """The card as GPU feature discovery labels it: the driver's name with dashes for blanks. None if not NVIDIA's."""
    if device.vendor != "nvidia":
        return None
    name = device.nvml_names[0] if device.nvml_names else fingerprint.device  # uncatalogued: it is the one here
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("-_.")


def sky_gpu(device: DeviceSpec) -> str:
    """The name in SkyPilot's catalogue: A100-80GB, H200, RTX6000-Ada. Forms that clouds name apart are left out."""
    name = re.sub("^rtx-(?:(pro)-)?", r"rtx\1", _MAKER.sub("", _FORM.sub("", device.name)))
    return re.sub("-ws$", "-wk", name).upper().replace("-ADA", "-Ada").replace("-MAXQ", "-MaxQ")


def slurm_gpu(device: DeviceSpec) -> str:
    """A type as clusters like to name it: a100, h200, rtx_4090."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"-\d+gb(?=-|$)", "", _MAKER.sub("", _FORM.sub("", device.name))))


def _head(recipe: Recipe, lines: list[str]) -> str:
    limit = f"{limit_hours(recipe)} h, the longest that is projected and {60 * UNPROJECTED_H:.0f} min, rounded up"
    told = [*facts(recipe), "", *lines, f"The speed holds for train.py on this card. Time limit: {limit}."]
    if recipe.model.weights:
        told.append(f"The weights are a local directory, to be had there too: {recipe.model.weights}")
    elif not has_published_weights(recipe):
        told.append("There are no published weights of this shape: add --model.")
    return comment(told)


def _yaml(recipe: Recipe, lines: list[str], values: dict[str, Any]) -> str:
    import yaml

    return f"{_head(recipe, lines)}\n\n{yaml.safe_dump(values, sort_keys=False, width=120)}"
