"""The report in a real browser, from disk and without a network: figures, sortable tables, and a
phone's width.
"""

import html
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.report import versus
from autotune.report.html import draw, render
from autotune.study.summary import StudySummary
from tests.helpers.browser import CHROMIUM, chromium, needs_chromium
from tests.helpers.factories import summary
from tests.unit.report.test_html import HOSTILE, hostile_study

pytestmark = needs_chromium

# A script appended to the page. It inspects the finished page and writes its results into an
# attribute, which
# --dump-dom prints.
LOOK = """<script>
addEventListener("load", () => setTimeout(() => {
  const seen = {figures: {}, alerts: window.alerts || 0, width: innerWidth};
  seen.needs = document.documentElement.scrollWidth;
  for (const plot of document.querySelectorAll("[data-figure]")) {
    const box = plot.getBoundingClientRect();
    const marks = plot.querySelectorAll(".point path, path.point, .js-line");
    seen.figures[plot.dataset.figure] = {marks: marks.length, wide: box.width, high: box.height};
  }
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
  const cross = (a, b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const boxes = kind =>
    [...document.querySelectorAll(kind)].map(
      one => [one.textContent, one.getBoundingClientRect(), one]);
  seen.clipped = boxes(".plot .ytick text, .plot .xtick text, .plot .xtitle")
    .filter(([, box, one]) => !inside(box, one.closest("svg").getBoundingClientRect()))
    .map(([text]) => text);
  const values = boxes("[data-figure=parallel] .annotation-text");
  seen.crossing = values
    .filter(([, a], i) => values.some(([, b], j) => i < j && cross(a, b)))
    .map(([text]) => text);
  const buttons = [...document.querySelectorAll(".sortable th button")];
  const button = buttons.find(one => one.textContent.includes("tokens/s"));
  const at = button.closest("th").cellIndex, body = button.closest("table").tBodies[0];
  const column = () => [...body.rows].map(row => row.cells[at].dataset.v);
  button.click(); seen.up = column(); button.click(); seen.down = column();
  seen.text = document.body.innerText;
  document.body.dataset.seen = JSON.stringify(seen);
}, 1500));
</script></body>"""


def opened(study: StudySummary, folder: Path, *flags: str) -> dict[str, Any]:
    page = render(study, "out").replace(
        "<head>", "<head><script>window.alert = () => window.alerts = 1</script>", 1
    )
    file = folder / "report.html"
    file.write_text(LOOK.join(page.rsplit("</body>", 1)), encoding="utf-8")
    always = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    always += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    command = [str(CHROMIUM), *always, *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert match is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(match[1]))
    return seen


def test_figures_are_drawn_and_tables_sort(tmp_path: Path) -> None:
    study = summary(trials=40)
    seen = opened(study, tmp_path)
    assert seen["figures"].keys() == {
        name for name, drawn in draw(study).items() if drawn is not None
    }
    assert len(seen["figures"]) >= 4
    for name, figure in seen["figures"].items():
        assert figure["marks"] > 0 and figure["wide"] > 300 and figure["high"] > 100, name
    speeds = [float(value) for value in seen["up"] if value]
    assert len(speeds) > 10 and speeds == sorted(speeds) and len(seen["up"]) == 40
    assert [float(value) for value in seen["down"] if value] == speeds[::-1]


def test_a_phone_needs_no_horizontal_scrolling_and_no_label_is_clipped_or_covered(
    tmp_path: Path,
) -> None:
    study = summary()
    assert study.recipe is not None
    winner = study.recipe.winner
    other = {"optimizer": "paged_adamw_8bit", "precision": "bf16_pure", "lora_rank": 64}
    rows = [
        replace(
            row,
            config=replace(row.config, **(other if row.number % 2 else {"compile": "per_layer"})),
        )
        for row in study.trials
    ]
    cells = (winner, replace(winner, config=replace(winner.config, **other)))
    study = replace(study, trials=tuple(rows), recipe=replace(study.recipe, cells=cells))
    seen = opened(study, tmp_path, "--window-size=400,800")
    assert seen["needs"] <= seen["width"]
    assert {"parallel", "capability"} <= seen["figures"].keys()
    assert (seen["clipped"], seen["crossing"]) == ([], [])


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    seen = opened(hostile_study(), tmp_path)
    assert seen["alerts"] == 0 and HOSTILE in seen["text"]


def test_an_old_browser_shows_a_sentence_for_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    old = "<head><script>delete window.DecompressionStream</script>"
    file.write_text(render(summary(), "out").replace("<head>", old, 1), encoding="utf-8")
    with chromium(tmp_path / "profile") as page:
        page.open(file.as_uri())
        page.text("This figure needs a browser of 2023 or later.", "Every configuration")


def test_two_studies_fit_a_phone_and_a_link_opens_what_is_folded(tmp_path: Path) -> None:
    first, second = summary(trials=40), summary(study="another")
    file = tmp_path / "versus.html"
    file.write_text(versus.render(first, second), encoding="utf-8")
    with chromium(tmp_path / "profile") as page:
        page.open(f"{file.as_uri()}")
        page.text("What differs")
        marks = "document.querySelectorAll('.plot .point path, .plot path.point').length"
        page.run(
            f"new Promise(done => (function look() {{ {marks} > 10 ? done() : setTimeout(look, 50);"
            f" }})())"
        )
        folded = "document.getElementById('term-mfu').closest('details').open"
        assert page.run(folded) is False
        page.run("document.querySelector('a[href=\"#term-mfu\"]').click()")
        page.run("new Promise(done => setTimeout(done, 200))")
        assert page.run(folded) is True
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom")
    over = "document.body.dataset.over = document.documentElement.scrollWidth - innerWidth"
    look = f"<script>addEventListener('load', () => {over})</script></body>"
    file.write_text(look.join(versus.render(first, second).rsplit("</body>", 1)), encoding="utf-8")
    command = [
        str(CHROMIUM),
        *flags,
        f"--user-data-dir={tmp_path / 'phone'}",
        "--virtual-time-budget=5000",
    ]
    command.append(file.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'data-over="(-?\d+)"', done.stdout)
    assert match and int(match[1]) <= 0
