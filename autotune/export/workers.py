"""workers.yaml, workers.sky.yaml and workers.sbatch: `autotune worker` on many GPUs of Kubernetes, SkyPilot or Slurm.

They search; `fleet` has the full run. The database's URL is in none of them: it comes from a secret or the environment.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune import __version__
from autotune.catalog import DeviceSpec
from autotune.core.probe_types import Fingerprint
from autotune.export.clusters import GRACE_S, PREEMPTED, RETRIES, gpu_product, sky_gpu, slug, slurm_gpu
from autotune.export.header import comment

URL = "AUTOTUNE_STORAGE"
HOPELESS = [2, 3, 4, 6]  # exit codes that another attempt would end with too; 1 and 5 may be the node's
STARTING_S = 1800.0  # of the time limit, beside the study's budget: packages, images, a queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers that a study is to get. `device` is the card that probes."""

    study: str
    device: DeviceSpec
    fingerprint: Fingerprint
    budget_s: float
    count: int

    @property
    def name(self) -> str:
        return f"{slug(self.study)[:44].strip('-')}-workers"

    @property
    def limit_s(self) -> int:
        """After which a worker hangs: it ends with the study's budget."""
        return math.ceil((self.budget_s + STARTING_S) / 60) * 60


def kubernetes(workers: Workers) -> dict[str, str]:
    """`workers.yaml`: an Indexed Job, whose pod failure policy is stable since Kubernetes 1.31."""
    head = [
        f"Kubernetes: change the image, which needs autotune-llm[postgres] {__version__}; then, with {URL} set:",
        f'  printf %s "${URL}" | kubectl create secret generic {workers.name} --from-file=url=/dev/stdin',
        "  kubectl apply -f workers.yaml",
        "A pod that is preempted or drained comes again and counts for nothing; its trial is queued for the others.",
    ]
    gpu = workers.device.kind != "cpu"
    container: dict[str, Any] = {
        "name": "worker",
        "image": "your-registry/your-image:tag",
        # Kubernetes replaces $(NAME) in here, and $$ by $.
        "command": ["autotune", "worker", f"--study={workers.study}".replace("$", "$$"), "--out=/tmp/worker"],
        "env": [{"name": URL, "valueFrom": {"secretKeyRef": {"name": workers.name, "key": "url"}}}],
        **({"resources": {"limits": {f"{workers.device.vendor}.com/gpu": 1}}} if gpu else {}),
    }
    label = gpu_product(workers.device, workers.fingerprint)
    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": workers.limit_s,
        "terminationGracePeriodSeconds": GRACE_S,
        **({"nodeSelector": {"nvidia.com/gpu.product": label}} if label else {}),
        "containers": [container],
    }
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "worker", "operator": "In", "values": HOPELESS}},
        {"action": "Ignore", "onExitCodes": {"containerName": "worker", "operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": workers.name, "annotations": {"autotune-study": workers.study}},
        "spec": {
            "completionMode": "Indexed",
            "completions": workers.count,
            "parallelism": workers.count,
            "backoffLimit": workers.count,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": pod},
        },
    }
    return {"workers.yaml": _yaml(workers, head, job)}


def skypilot(workers: Workers) -> dict[str, str]:
    """`workers.sky.yaml`: one worker, in the fields of SkyPilot 0.14. Nodes of one task would end with the first."""
    packages = [f"{name}=={version.partition('+')[0]}" for name, version in workers.fingerprint.packages.items()]
    head = [
        f"SkyPilot: a job for each worker, so that one that is preempted takes no other with it; with {URL} set:",
        f"  for n in $(seq {workers.count}); do sky jobs launch -y -d --secret {URL} workers.sky.yaml; done",
        "Clouds name forms of a card apart (H200-SXM); `sky show-gpus -a` lists the names.",
    ]
    gpu = {"accelerators": f"{sky_gpu(workers.device)}:1"} if workers.device.kind != "cpu" else {}
    task = {
        "name": workers.name,
        "resources": {**gpu, "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [PREEMPTED]}},
        "secrets": {URL: None},
        "setup": f"pip install -- {shlex.join([f'autotune-llm[postgres]=={__version__}', *packages])}",
        "run": f"autotune worker {shlex.quote(f'--study={workers.study}')}",
    }
    return {"workers.sky.yaml": _yaml(workers, head, task)}


def slurm(workers: Workers) -> dict[str, str]:
    """`workers.sbatch`: an array, a worker each."""
    gpu = f"#SBATCH --gres=gpu:{slurm_gpu(workers.device)}:1\n" if workers.device.kind != "cpu" else ""
    hours, minutes = divmod(workers.limit_s // 60, 60)
    head = [
        f"Slurm: with {URL} set, `sbatch workers.sbatch` where `autotune` is on the PATH.",
        "Clusters name their GPUs as they like: sinfo -o %G.",
    ]
    study = shlex.quote(f"--study={workers.study}")
    script = f"""#!/usr/bin/env bash
{_head(workers, head)}
#SBATCH --job-name={workers.name}
#SBATCH --array=1-{workers.count}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4
{gpu}#SBATCH --time={hours}:{minutes:02}:00
#SBATCH --signal=TERM@{GRACE_S} --requeue
#SBATCH --open-mode=append --output=%x-%A_%a.log
set -euo pipefail
: "${{{URL}:?the database of the study}}"
code=0
srun autotune worker {study} --out="workers/${{SLURM_ARRAY_TASK_ID:?}}" "$@" || code=$?
if [ "$code" -eq {PREEMPTED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {RETRIES} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
    return {"workers.sbatch": script}


FORMATS: dict[str, Callable[[Workers], dict[str, str]]] = {
    "kubernetes": kubernetes,
    "skypilot": skypilot,
    "slurm": slurm,
}


def _head(workers: Workers, lines: list[str]) -> str:
    packages = [f"{name} {version}" for name, version in sorted(workers.fingerprint.packages.items())]
    told = [
        f"autotune study {workers.study}: {workers.count} workers on {workers.device.name}, "
        "beside `autotune run`, which leads",
        f"A worker joins with the same packages only: python {workers.fingerprint.python}, {', '.join(packages)}",
    ]
    return comment([*told, "", *lines])


def _yaml(workers: Workers, lines: list[str], values: dict[str, Any]) -> str:
    import yaml

    return f"{_head(workers, lines)}\n\n{yaml.safe_dump(values, sort_keys=False, width=120)}"
