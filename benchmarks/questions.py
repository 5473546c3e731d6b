"""Take the pictures of `docs/questions.md`: the pages that its commands write, as Chromium shows them.

    python benchmarks/questions.py

The last three are of small studies on this machine's processors. No GPU is needed, but chromium is.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from common import ROOT
from pictures import DRAWN, browser, save

from autotune.core.process import module_command

WIDTH = 1080
SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [1, 2, 4]}
  seq_len: 16
  lora_rank: {values: [16, 32, 64]}
  precision: fp32
"""
ON_CPU = ("run", "--gpu", "cpu", "--model", "demo-3m", "--global-batch", "4", "--examples", "100")
STUDY = (*ON_CPU, "--memory-gib", "1", "--budget", "5m", "--space", "space.yaml", "--trials", "10")
DEMO = (*ON_CPU, "--tokens-per-example", "128", "--budget", "1m")
CARDS = "rtx-3090,rtx-4090,rtx-5090,a100-80gb,h100"
COMPARE = ("compare", "--model", "llama-3.1-8b", "--gpus", CARDS)
PAGE = ("--html", "page.html")
# Of each picture: the commands, the page that the last of them writes, and the height that is shown, in pixels.
PICTURES: dict[str, tuple[list[tuple[str, ...]], str, int]] = {
    "card": ([("plan", "--gpu", "rtx-4090", "--tokens-per-example", "1024", *PAGE)], "page.html", 960),
    "costs": ([(*COMPARE, *PAGE)], "page.html", 900),
    "buy": ([(*COMPARE, "--buy", "2000", *PAGE)], "page.html", 860),
    "nodes": (
        [(*STUDY, "--study", "two-processes", "--workers", "2"), ("status", "two-processes", "--nodes", *PAGE)],
        "page.html",
        1160,
    ),
    "profile": ([(*DEMO, "--study", "demo"), ("explain", "demo", "--profile")], "runs/demo/profile.html", 1160),
    "studies": (
        [
            (*DEMO, "--study", "adapters", "--set", "method=lora"),
            (*DEMO, "--study", "all-weights", "--set", "method=full"),
            ("report", "adapters", "all-weights"),
        ],
        "runs/adapters/against-all-weights.html",
        1160,
    ),
}


def make(name: str, folder: Path) -> Path:
    """Run the commands of a picture in `folder`. Returns the page that the last writes."""
    commands, page, _ = PICTURES[name]
    (folder / "space.yaml").write_text(SPACE)
    for arguments in commands:
        subprocess.run([*module_command("autotune"), *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PICTURES), metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    with browser() as screen:
        for name in args.names:
            with tempfile.TemporaryDirectory() as folder:
                screen.screen(WIDTH, PICTURES[name][-1])
                screen.open(make(name, Path(folder)).as_uri())
                screen.wait(f"document.readyState === 'complete' && {DRAWN}")
                save(screen, args.out.absolute() / f"question-{name}.png")


if __name__ == "__main__":
    main()
