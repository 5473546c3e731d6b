"""Take the pictures of the documents with Chromium."""

import argparse
import io
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import ROOT, Mode, run_program
from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from autotune.api import load_study
from autotune.core.process import module_command
from autotune.core.text import short_path
from autotune.report.html import render
from tests.helpers.browser import CHROMIUM, Page, chromium

# --- report


IMAGES = ROOT / "docs" / "images"
# width and height in pixels of CSS, and how many pixels each becomes
DESK, PHONE = (1280, 1010, 1.5), (390, 844, 2.0)
# Of the report's pictures: the screen, whether it is dark, and the figure whose section is shown,
# if not the top.
REPORT = {
    "report": (DESK, False, None),
    "report-dark": (DESK, True, None),
    "report-phone": (PHONE, False, None),
    "report-phone-dark": (PHONE, True, None),
    "report-timeline": (DESK, False, "timeline"),
    "report-cards": (DESK, False, "cards"),
}
DRAWN = (
    "[...document.querySelectorAll('[data-figure]')].every(plot => plot.querySelector('.main-svg'))"
)
NAMES = (*REPORT, "dashboard", "dashboard-trial", "terminal")
RECORDING = ROOT / "docs" / "recordings" / "first-minutes-100.cast"


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with a profile of its own. Ends the program without one."""
    if CHROMIUM is None:
        raise SystemExit("chromium is not installed")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        chromium(Path(profile)) as page,
    ):
        yield page


def save_picture(page: Page, file: Path, of: str | None = None) -> None:
    """Write the screen, or the element that a selector finds, with at most 256 colours; print the
    path.
    """
    page.picture(file, of=of)
    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        file, optimize=True
    )
    print(file)


def take(page: Page, html: Path, name: str, out: Path) -> None:
    """One picture of a report."""
    (width, height, scale), dark, figure = REPORT[name]
    page.screen(width, height, dark=dark, scale=scale)
    page.open(html.as_uri())
    page.wait(f"document.readyState === 'complete' && {DRAWN}")
    section = f"section:has([data-figure={figure}])"
    if figure is None or page.run(f"document.querySelector('{section}') !== null"):
        save_picture(page, out / f"{name}.png", of=section if figure else None)
    else:
        print(f"{name}: the report has no such section")


def take_terminal(page: Page, recording: Path, out: Path) -> None:
    """Take the last screen of a recorded terminal: all output after its last move to the top."""
    header, *frames = map(json.loads, recording.read_text(encoding="utf-8").splitlines())
    shown = "".join(text for _, _, text in frames).rpartition("\x1b[H")[-1].replace("\r", "")
    screen = Console(record=True, width=header["width"], file=io.StringIO())
    screen.print(Text.from_ansi(f"$ {header['command']}\n\n{shown}"))
    lines = screen.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")
    html = out / "terminal.html"
    look = (
        "background: #111417; color: #e9ebee; font: 15px/1.4 monospace; display: inline-block;"
        " padding: 20px 26px"
    )
    html.write_text(
        '<meta charset="utf-8"><body style="margin: 0"><pre style="margin: 0;'
        f' {look}">{lines}</pre>'
    )
    page.screen(1280, 900, dark=True, scale=1.5)
    page.open(html.as_uri())
    page.wait("document.querySelector('pre') !== null")
    save_picture(page, out / "terminal.png", of="pre")
    html.unlink()


def take_dashboard(page: Page, study: str, storage: str, names: list[str], out: Path) -> None:
    """The dashboard's first page, and the note of a trial that ran out of memory."""
    arguments = [
        *module_command("autotune"),
        "dashboard",
        study,
        "--storage",
        storage,
        "--port",
        "0",
    ]
    failed = next(
        (row.number for row in load_study(study, storage).summary.trials if row.outcome == "oom"), 0
    )
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        page.screen(1280, 1000, scale=1.5)
        places = {
            "dashboard": (url, "Timeline"),
            "dashboard-trial": (f"{url}/trials?numbers={failed}", "Note"),
        }
        for name in names:
            place, text = places[name]
            page.open(place)
            page.text(text)
            page.run("new Promise(done => setTimeout(done, 2000))")  # its figures grow
            save_picture(page, out / f"{name}.png")
        process.terminate()


def run_report(args: argparse.Namespace) -> None:
    """Take the pictures of a study: its report and its dashboard, from any database, and a
    terminal's last screen.

    README and `docs/reading-the-report.md` show them. A section that the report lacks is left out.
    The picture of the terminal is the last screen of a recording by `first_minutes.py record`.
    Chromium is needed, but no GPU:

        python benchmarks/pictures.py report STUDY --storage sqlite:///runs/autotune.db
    """
    out, result = args.out.absolute(), load_study(args.study, args.storage)
    with browser() as page, tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "report.html"
        html.write_text(render(result.summary, short_path(result.out)), encoding="utf-8")
        for name in [name for name in args.only if name in REPORT]:
            take(page, html, name, out)
        if of_dashboard := [name for name in args.only if name.startswith("dashboard")]:
            take_dashboard(page, args.study, args.storage, of_dashboard, out)
        if "terminal" in args.only:
            take_terminal(page, args.recording, out)


# --- questions

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
# Of each picture: the commands, the page that the last of them writes, and the height that is
# shown, in pixels.
QUESTIONS: dict[str, tuple[list[tuple[str, ...]], str, int]] = {
    "card": (
        [("plan", "--gpu", "rtx-4090", "--tokens-per-example", "1024", *PAGE)],
        "page.html",
        960,
    ),
    "costs": ([(*COMPARE, *PAGE)], "page.html", 900),
    "buy": ([(*COMPARE, "--buy", "2000", *PAGE)], "page.html", 860),
    "nodes": (
        [
            (*STUDY, "--study", "two-processes", "--workers", "2"),
            ("status", "two-processes", "--nodes", *PAGE),
        ],
        "page.html",
        1160,
    ),
    "profile": (
        [(*DEMO, "--study", "demo"), ("explain", "demo", "--profile")],
        "runs/demo/profile.html",
        1160,
    ),
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


def make_page(name: str, folder: Path) -> Path:
    """Run the commands of a picture in `folder`. Returns the page that the last writes."""
    commands, page, _ = QUESTIONS[name]
    (folder / "space.yaml").write_text(SPACE)
    for arguments in commands:
        subprocess.run(
            [*module_command("autotune"), *arguments],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder / page


def run_questions(args: argparse.Namespace) -> None:
    """Take the pictures of `docs/questions.md`: the pages that its commands write, as Chromium
    shows them.

    The last three are of small studies on this machine's processors. Chromium is needed, but no
    GPU.
    """
    with browser() as screen:
        for name in args.names:
            with tempfile.TemporaryDirectory() as folder:
                screen.screen(WIDTH, QUESTIONS[name][-1])
                screen.open(make_page(name, Path(folder)).as_uri())
                screen.wait(f"document.readyState === 'complete' && {DRAWN}")
                save_picture(screen, args.out.absolute() / f"question-{name}.png")


MODES = {
    "report": Mode(
        run=run_report,
        options={
            "study": {},
            "--storage": {"default": "sqlite:///runs/autotune.db", "metavar": "URL"},
            "--recording": RECORDING,
            "--only": {
                "nargs": "+",
                "choices": NAMES,
                "default": NAMES,
                "metavar": "NAME",
                "help": ", ".join(NAMES),
            },
            "--out": IMAGES,
        },
    ),
    "questions": Mode(
        run=run_questions,
        options={
            "names": {
                "nargs": "*",
                "default": list(QUESTIONS),
                "metavar": "NAME",
                "help": ", ".join(QUESTIONS),
            },
            "--out": IMAGES,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
