"""`autotune doctor`: what this machine has of what a study needs, and what to do about the rest."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.core.errors import AutotuneError, EnvironmentProblem
from autotune.core.nvml import list_gpus
from autotune.core.units import fmt_gib, gib
from autotune.probe.worker_process import child_environment
from autotune.study.storage.location import storage_url

# Asked of a fresh process, with the environment that probes run in.
_TORCH_SCRIPT = """
import json, torch
out = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if out["available"]:
    out["bf16"] = torch.cuda.is_bf16_supported()
    out["matmul"] = bool(torch.isfinite(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).all())
try:
    import bitsandbytes
    out["bitsandbytes"] = bitsandbytes.__version__
    if out["available"]:
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16).cuda()
        out["bnb_cuda"] = bool(torch.isfinite(layer(torch.ones(1, 64, device="cuda", dtype=torch.bfloat16))).all())
except Exception as error:
    out["bnb_error"] = str(error).splitlines()[0][:200]
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at. `ok` None: not needed here, or only good to know."""

    name: str
    ok: bool | None
    found: str
    remedy: str | None = None


def doctor(storage: str | None, as_json: bool) -> None:
    """Print every check. Raises EnvironmentProblem (exit 3) if something that is needed is missing."""
    checks = [*_packages(), *_gpus(), *_torch(), *_disk(), _storage(storage)]
    if as_json:
        sys.stdout.write(json.dumps([asdict(check) for check in checks], indent=2) + "\n")
    else:
        for check in checks:
            mark = {True: "ok", False: "MISSING", None: "--"}[check.ok]
            print(
                f"{mark:>7}  {check.name:<22} {check.found}" + (f"\n{'':>9}-> {check.remedy}" if check.remedy else "")
            )
    missing = [check.name for check in checks if check.ok is False]
    if missing:
        raise EnvironmentProblem(f"this machine lacks: {', '.join(missing)}", remedy="see the lines marked MISSING")


def _packages() -> list[Check]:
    from importlib import metadata

    checks = []
    for name, needed in (
        ("transformers", True),
        ("peft", True),
        ("accelerate", True),
        ("optuna", True),
        ("bitsandbytes", False),
        ("torchao", False),
        ("trl", False),
        ("liger-kernel", False),
        ("optuna-dashboard", False),
        ("flash-attn", False),
    ):
        try:
            checks.append(Check(name=name, ok=True if needed else None, found=metadata.version(name)))
        except metadata.PackageNotFoundError:
            remedy = f"pip install {name}" if needed else None
            checks.append(Check(name=name, ok=False if needed else None, found="not installed", remedy=remedy))
    return checks


def _gpus() -> list[Check]:
    cards = list_gpus()
    if not cards:
        remedy = "without one, try --gpu cpu --model demo-3m; with one, install NVIDIA's driver"
        return [Check(name="NVIDIA GPU", ok=None, found="none (NVML finds no card)", remedy=remedy)]
    checks = []
    for card in cards:
        holders = ", ".join(f"{one.name or '?'} pid {one.pid} {fmt_gib(one.used_gib)}" for one in card.processes)
        found = f"{card.name}, {fmt_gib(card.memory_gib - card.used_gib)} of {fmt_gib(card.memory_gib)} free"
        found += f", driver {card.driver}" + (f", held by {holders}" if holders else "")
        checks.append(Check(name=f"GPU {card.index}", ok=True, found=found))
    return checks


def _torch() -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return [Check(name="torch", ok=False, found="not installed", remedy="pip install torch")]
    done = subprocess.run(
        [sys.executable, "-c", _TORCH_SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=child_environment(os.environ, "cuda"),
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        return [Check(name="torch", ok=False, found=f"does not import: {last}", remedy="reinstall torch")]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    checks = [Check(name="torch", ok=True, found=f"{seen['torch']}, CUDA {seen['cuda'] or 'none'}")]
    if list_gpus() and not seen["available"]:
        remedy = "install a CUDA build of torch that this driver can run"
        checks.append(Check(name="torch sees the GPU", ok=False, found="no", remedy=remedy))
    elif seen["available"]:
        checks.append(Check(name="torch sees the GPU", ok=bool(seen["matmul"]), found="yes, a matrix product ran"))
        checks.append(Check(name="bf16", ok=None, found="yes" if seen["bf16"] else "no: fp16 will be used"))
        works = "an nf4 layer ran on the GPU" if seen.get("bnb_cuda") else seen.get("bnb_error", "nf4 failed")
        checks.append(Check(name="bitsandbytes on GPU", ok=None, found=works))
    return checks


def _disk() -> list[Check]:
    free = gib(shutil.disk_usage(Path.cwd()).free)
    return [Check(name="disk", ok=free > 0.5, found=f"{fmt_gib(free)} free here")]


def _storage(storage: str | None) -> Check:
    from autotune.study.storage.database import public_url
    from autotune.study.storage.probe_store import ProbeStore

    url = storage_url(storage)
    try:
        ProbeStore(url).close()
    except AutotuneError as error:
        return Check(name="storage", ok=False, found=str(error), remedy=error.remedy)
    return Check(name="storage", ok=True, found=f"{public_url(url)} can be written")
