"""Check whether a larger card with a memory cap gives the same outcomes as the smaller card that it emulates.

The program probes each configuration twice: with the memory cap of an A10, as `autotune run --gpu a10` does, and
without a cap. The memory reserved without a cap plus the CUDA context shows whether the configuration fits. If that sum
differs from the limit by more than 2 %, the capped probe must give the same outcome. About half of the configurations
are the published suite of the A10. The others need about as much memory as an A10 has, by the formula of
`autotune plan`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import save, table

from autotune.catalog import resolve_device, resolve_model
from autotune.core.probe_types import Outcome, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import make_spec

TARGET, HEADROOM, BAND = "a10", 0.05, 0.02
SUITE = Path(__file__).parent.parent / "studies" / "published" / "a10-mistral-7b.yaml"
AROUND: list[tuple[str, dict[str, Any]]] = [
    ("mistral-7b", {"micro_batch_size": 8, "seq_len": 1024}),
    ("mistral-7b", {"micro_batch_size": 16, "seq_len": 512, "loss": "chunked", "lora_rank": 64}),
    ("mistral-7b", {"micro_batch_size": 2, "seq_len": 512, "checkpointing": "none", "precision": "bf16_pure"}),
    ("mistral-7b", {"micro_batch_size": 3, "seq_len": 1024, "quantization": "nf4", "checkpointing": "none"}),
    ("llama-3.1-8b", {"micro_batch_size": 2, "seq_len": 1024, "optimizer": "adamw_8bit"}),
    ("phi-3-mini", {"micro_batch_size": 4, "seq_len": 512, "checkpointing": "none"}),
    ("phi-3-mini", {"micro_batch_size": 2, "seq_len": 2048, "checkpointing": "every_2"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0, help="memory of the card that emulates the A10")
    parser.add_argument("--cap-gib", type=float, help="memory cap [usable memory of an A10]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cap_gib = args.cap_gib or round(resolve_device(TARGET).usable_gib or 0.0, 2)
    spec = make_spec(SUITE, {})
    known = [(case.knobs, case.published) for case in spec.configs]
    cases = [("mistral-7b", spec.pins | knobs, published and published.outcome) for knobs, published in known]
    cases += [(model, knobs, None) for model, knobs in AROUND]
    rows: list[dict[str, Any]] = []
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with WorkerProber(args.device, logs) as prober:
        fingerprint = prober.fingerprint
        for model, knobs, published in cases:
            rows.append(probe_config(prober, logs, args, cap_gib, model, TrainConfig(**knobs), published))
            table(rows[-1:], ["model", "config", "needs_over_limit", "fits", "under_cap", "published"])
    summary = summarize(rows) | {"cap_gib": cap_gib}
    save("cap", fingerprint, summary, rows, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts. Within the band the need without a cap implies none, so that such a row proves nothing."""
    beyond_band = [row for row in rows if row["needs_over_limit"] is None or abs(row["needs_over_limit"]) > BAND]
    published = [row for row in rows if row["published"] is not None]
    return {
        "configs": len(rows),
        "verdicts": len(beyond_band),
        "disagreements": sum((row["under_cap"] == "ok") is not row["fits"] for row in beyond_band),
        "within_the_band": len(rows) - len(beyond_band),
        "published": len(published),
        "published_disagreements": sum(row["under_cap"] != row["published"] for row in published),
    }


def probe_config(
    prober: WorkerProber,
    logs: Path,
    args: argparse.Namespace,
    cap_gib: float,
    model: str,
    config: TrainConfig,
    published: str | None,
) -> dict[str, Any]:
    """Probe one configuration with and without the cap. Return the memory it needs and both outcomes as a row."""
    results = {}
    for name, memory_gib in (("free", args.memory_gib), ("capped", cap_gib)):
        request = ProbeRequest(
            config=config,
            model=resolve_model(model).config,
            device=args.device,
            memory_gib=memory_gib,
            headroom=HEADROOM,
        )
        results[name] = prober.probe(request, logs / "probe.log")
    row: dict[str, Any] = {
        "model": model,
        "config": config.label(),
        "under_cap": results["capped"].outcome.value,
        "reason": results["capped"].reason,
        "published": published,
        "needs_gib": None,
        "needs_over_limit": None,
        "fits": False,
    }
    measured = results["free"].measurement
    if results["free"].outcome is Outcome.OK and measured is not None:
        assert measured.context_gib is not None, "the memory of the CUDA context was not measured"
        needed_gib = measured.peak_reserved_gib + measured.context_gib + measured.managed_gib
        over = needed_gib / (cap_gib * (1 - HEADROOM)) - 1
        row |= {"needs_gib": needed_gib, "needs_over_limit": over, "fits": over <= 0}
    return row


if __name__ == "__main__":
    main()
