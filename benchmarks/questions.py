"""Take the pictures of `docs/questions.md`: the pages that three commands write, as Chromium shows them.

    python benchmarks/questions.py

The third page is of a study that two processes search on this machine's processors. No GPU is needed, but chromium is.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from common import ROOT

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
STUDY = ("--gpu", "cpu", "--model", "demo-3m", "--space", "space.yaml", "--global-batch", "4", "--examples", "100")
STUDY += ("--memory-gib", "1", "--study", "two-processes", "--trials", "10", "--budget", "5m", "--workers", "2")
CARDS = "rtx-3090,rtx-4090,rtx-5090,a100-80gb,h100"
# Of each picture: the commands, of which the last writes page.html, and the height that is shown, in pixels.
PICTURES = {
    "card": ([("plan", "--gpu", "rtx-4090", "--tokens-per-example", "1024")], 1060),
    "costs": ([("compare", "--model", "llama-3.1-8b", "--gpus", CARDS, "--buy", "2000")], 1420),
    "nodes": ([("run", *STUDY), ("status", "two-processes", "--nodes")], 620),
}


def take(name: str, folder: Path, out: Path, chromium: str) -> Path:
    """Run the commands of a picture in `folder`, and show the page that the last writes. Returns the picture's path."""
    commands, height = PICTURES[name]
    (folder / "space.yaml").write_text(SPACE)
    for command in commands:
        page = ["--html", "page.html"] if command is commands[-1] else []
        subprocess.run(
            [*module_command("autotune"), *command, *page], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
    picture = out / f"question-{name}.png"
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=6000")
    shown = (f"--window-size={WIDTH},{height}", f"--screenshot={picture}", (folder / "page.html").as_uri())
    subprocess.run([chromium, *options, *shown], check=True, stderr=subprocess.DEVNULL)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PICTURES), metavar="NAME", help="card, costs, nodes")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            print(take(name, Path(folder), args.out.absolute(), chromium))


if __name__ == "__main__":
    main()
