"""Every page that the program writes, in a real browser: on a desk and on a phone, in light and in
dark colours.

Nothing overflows, all text stands out from what is behind it, figures are drawn, and terms lead to
their meanings.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import find_price, resolve_device
from autotune.core.probe_types import Outcome, Rung
from autotune.planning.compare import compare
from autotune.planning.trainable import trainable
from autotune.problem.study_spec import StudySpec
from autotune.report import answer, comparison, versus
from autotune.report.html import render
from autotune.report.micro_batch import profile_answer
from autotune.report.values.comparison import Comparison
from autotune.report.values.rent_or_buy import PurchaseBudget
from autotune.study.nodes import nodes_of
from autotune.study.storage.probe_store import StoredProbe
from tests.helpers.browser import Page, chromium, needs_chromium
from tests.helpers.factories import measurement, result, summary
from tests.helpers.sessions import BASELINE, subject_of
from tests.unit.planning.test_micro_batch import report as profile_report

pytestmark = needs_chromium
TODAY = date(2026, 11, 26)
LLAMA = StudySpec(model="llama-3.1-8b")
CARDS = ["rtx-3090", "rtx-4090", "a2", "a100-80gb", "h100"]
SCREENS = {
    "desk": (1200, False),
    "desk, dark": (1200, True),
    "phone": (390, False),
    "phone, dark": (390, True),
}
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
# Texts that end outside of the window; what scrolls by itself does not count.
OUTSIDE = """[...document.querySelectorAll('body *')].filter(one =>
    !one.closest('.scroll, .wide, pre, .js-plotly-plot')
    && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
CLIPPED = """[...document.querySelectorAll(
    '.plot .ytick text, .plot .xtick text, .plot .xtitle')].filter(one => {
    const box = one.getBoundingClientRect(), frame = one.closest('svg').getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
    }).map(one => one.textContent)"""
# Labels of an axis that lie over one another, unless they are turned.
CROSSING = """[...document.querySelectorAll('.plot')].flatMap(plot => {
    const level = one => /rotate[(]0/.test(one.getAttribute('transform') ?? 'rotate(0');
    const labels = [...plot.querySelectorAll('.xtick text')].filter(level)
        .map(one => [one.textContent, one.getBoundingClientRect()]);
    return labels.filter(([, a], i) => labels.some(([, b], j) =>
      i < j && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom))
      .map(([text]) => `${plot.dataset.figure}: ${text}`); })"""
# Lines of a grid in other colours than the page's own lines.
LOUD = """[...document.querySelectorAll('.plot [class*="gridlayer"] path')]
    .map(one => [one, getComputedStyle(one).stroke]).filter(([one, stroke]) => {
      const line = document.createElement('hr'); one.closest('.plot').append(line);
      line.style.color = 'var(--line)'; const wanted = getComputedStyle(line).color; line.remove();
      return stroke !== wanted; }).map(([, stroke]) => stroke)"""
# WCAG's contrast of each text to what is painted behind it; below 4.5 it is hard to read.
PALE = """(() => {
  const channels = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => channels(colour).slice(0, 3).map(value => value / 255)
    .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [.2126, .7152, .0722][i], 0);
  const behind = one => { for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if ((channels(colour)[3] ?? 1) > 0) return colour; }
    return 'rgb(255, 255, 255)'; };
  const pale = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || one.closest('.modebar, script, style')) continue;
    const style = getComputedStyle(one), colour = one.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(colour), light(behind(one))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) pale.push(`${one.textContent.trim().slice(0, 30)}: ${contrast.toFixed(1)}`);
  }
  return pale;
})()"""


def nodes_page() -> str:
    task = replace(subject_of(), device=resolve_device("h200"), price=find_price("h200-sxm"))
    seconds = {
        "gpu-node-1.cluster:40112:9311842": 0.5,
        "gpu-node-2:40113:9311843": 0.51,
        "gpu-node-3:4011:931": 0.62,
    }
    rows = [
        result(BASELINE, rung=Rung.NODE, measurement=measurement(s, 20.0), node=node)
        for node, s in seconds.items()
    ]
    rows.append(
        result(
            BASELINE,
            Outcome.OOM,
            rung=Rung.FULL,
            measurement=None,
            node="small:1:1",
            reason="no room",
        )
    )
    found = nodes_of(task, [StoredProbe(trial=None, result=row) for row in rows])
    return answer.page(answer.nodes_answer(found, task), TODAY)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare([LLAMA], gpus=CARDS)


@pytest.fixture(scope="module")
def pages(compared: Comparison) -> dict[str, Callable[[], str]]:
    """How each page is made, with what a reader looks for on it."""
    budget = PurchaseBudget(budget_usd=2000, usd_per_kwh=0.3)
    return {
        "report": lambda: render(summary(trials=40), "out"),
        "two studies": lambda: versus.render(summary(trials=40), summary(study="another")),
        "cards": lambda: comparison.FORMATS["html"](compared, TODAY),
        "costs": lambda: answer.page(
            answer.costs_answer(compared, (10_000, 50_000, 100_000), budget, TODAY), TODAY
        ),
        "a card": lambda: answer.page(
            answer.trainable_answer(trainable(LLAMA, resolve_device("rtx-4090")), TODAY), TODAY
        ),
        "nodes": nodes_page,
        "profile": lambda: answer.page(profile_answer(profile_report()), TODAY),
        "atlas": lambda: (Path(__file__).parents[2] / "docs" / "atlas.html").read_text(
            encoding="utf-8"
        ),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        yield page


def shown(browser: Page, file: Path) -> None:
    """Open a page, wait for its figures, and unfold all that is folded."""
    browser.open(file.as_uri())
    browser.wait("document.readyState === 'complete' &&"
    " [...document.querySelectorAll('[data-figure]')]"
                 ".every(plot => plot.querySelector('.main-svg'))")  # fmt: skip
    browser.run(OPEN)


NAMES = ("report", "two studies", "cards", "costs", "a card", "nodes", "profile", "atlas")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_readable_on_every_screen(
    name: str, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages[name](), encoding="utf-8")
    for screen, (width, dark) in SCREENS.items():
        browser.screen(width, 900, dark=dark)
        shown(browser, file)
        seen: dict[str, Any] = {
            "needs more width": max(0, browser.run("document.documentElement.scrollWidth") - width),
            "outside": browser.run(OUTSIDE),
            "clipped": browser.run(CLIPPED),
            "crossing": browser.run(CROSSING),
            "pale": browser.run(PALE),
            "loud": browser.run(LOUD),
        }
        assert not any(seen.values()), (screen, seen)
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(17, 20, 23)") is dark, (screen, background)


@pytest.mark.parametrize("name", ["cards", "costs", "a card", "nodes", "profile"])
def test_an_answer_has_its_figures_and_terms_that_lead_to_their_meanings(
    name: str, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages[name](), encoding="utf-8")
    browser.screen(1200, 900)
    shown(browser, file)
    marks = (
        "[...document.querySelectorAll('[data-figure]')].map(one =>"
        " one.querySelectorAll('.point, .js-line').length)"
    )
    figures = {"cards": 0, "costs": 2, "a card": 1, "nodes": 1, "profile": 1}
    found = browser.run(marks)
    assert len(found) == figures[name] and all(found)
    dead = (
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(one =>"
        " !document.getElementById(one.hash.slice(1)))"
    )
    assert (
        browser.run("document.querySelectorAll('a.term').length") >= 3
        and browser.run(f"{dead}.length") == 0
    )
    browser.run("document.querySelectorAll('details').forEach(one => one.open = false)")
    browser.run("document.querySelector('a.term').click()")
    browser.wait("document.querySelector(':target')?.closest('details').open")


@pytest.mark.parametrize(("name", "column"), [("costs", "price"), ("report", "trial")])
def test_the_rows_of_a_wide_table_are_cards_on_a_phone(
    name: str, column: str, pages: dict[str, Callable[[], str]], browser: Page, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(pages[name](), encoding="utf-8")
    beside = """(row => row.cells[1].getBoundingClientRect().top
        < row.cells[0].getBoundingClientRect().bottom)(
        document.querySelector('.rows tbody tr'))"""
    for width, expected in ((1200, True), (390, False)):
        browser.screen(width, 900)
        shown(browser, file)
        assert browser.run(beside) is expected
    label = "getComputedStyle(document.querySelector('.rows td'), '::before').content"
    assert browser.run(label) == f'"{column}"'
