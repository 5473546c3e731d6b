"""Two studies on one page: who is faster and how sure that is, what differs, and hostile names."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.probe_types import Evidence
from autotune.report import versus
from autotune.report.infos import compare_winners, speed_ratio
from autotune.report.study_directory import write_versus
from autotune.study.summary import Recipe, StudySummary
from tests.helpers.factories import summary
from tests.unit.report.test_html import (
    HOSTILE,
    figures_in,
    hostile_study,
    recipe_of,
    without_plotly,
)


def slower(
    ratio: float, *, spread: float = 0.01, **changes: Any
) -> tuple[StudySummary, StudySummary]:
    """Two studies, of which the second one's winner has 1/ratio of the speed of the first one's."""
    first = summary()
    winner = recipe_of(first).winner

    def study(name: str, part: float, **others: Any) -> StudySummary:
        speed = replace(
            winner.performance,
            tokens_per_second=winner.performance.tokens_per_second / part,
            spread=(-spread, spread),
        )
        recipe = replace(
            recipe_of(first), study=name, winner=replace(winner, performance=speed), **others
        )
        return replace(first, study=name, recipe=recipe)

    return study("one", 1.0), study("other", ratio, **changes)


@pytest.mark.parametrize(
    ("ratio", "spread", "headline"),
    [
        (2.0, 0.01, "one is 2.0 times as fast as other"),
        (0.5, 0.01, "other is 2.0 times as fast as one"),
        (1.06, 0.01, "one is 6% faster than other"),
        (1.06, 0.05, "No measurable difference in speed"),
    ],
)
def test_the_headline_names_the_faster_one_where_they_differ(
    ratio: float, spread: float, headline: str
) -> None:
    first, second = slower(ratio, spread=spread)
    assert versus.headline(recipe_of(first), recipe_of(second)) == headline
    rows = {row.name: row for row in compare_winners(recipe_of(first), recipe_of(second))}
    ratio_shown = rows["useful tokens/s"].ratio
    assert (ratio_shown is None) is headline.startswith("No")
    assert ratio_shown is None or ratio_shown == pytest.approx(1 / ratio)
    assert f"<h1>{headline}</h1>" in versus.render(first, second)


def test_disturbed_speeds_are_not_compared() -> None:
    first, second = slower(2.0)
    winner = replace(recipe_of(second).winner, evidence=Evidence.DISTURBED)
    pair = recipe_of(first), replace(recipe_of(second), winner=winner)
    for one in (pair, pair[::-1]):
        assert versus.headline(*one) == (
            "The machine was too unsteady to compare speeds: every measurement of the winner of "
            "other was disturbed"
        )
        rows = {row.name: row for row in compare_winners(*one)}
        assert rows["useful tokens/s"].ratio is None


def test_speeds_of_two_devices_differ_by_what_a_projection_may_be_off() -> None:
    first, second = slower(1.3)
    winner = recipe_of(second).winner
    projected = replace(winner.performance, spread=(-0.3, 0.3), own_spread=(-0.01, 0.01))
    made = replace(recipe_of(second), winner=replace(winner, performance=projected))
    assert speed_ratio(recipe_of(first), made)[1] < 1.0
    elsewhere = replace(made, device=resolve_device("a10"))
    low, high = speed_ratio(recipe_of(first), elsewhere)
    assert low < 1.0 / 1.3 * 0.75 and high > 1.0 / 1.3 * 1.25


def test_it_says_how_sure_it_is_and_that_the_studies_asked_for_different_things() -> None:
    first, second = slower(2.0, device=resolve_device("a10"), price=None)
    other: Recipe = recipe_of(second)
    second = replace(
        second, recipe=replace(other, winner=replace(other.winner, evidence=Evidence.PROJECTED))
    )
    said = versus.sentences(recipe_of(first), recipe_of(second))
    assert "The comparison has the weaker evidence of the two winners: projected." in said
    assert "The studies differ in more than the configuration: device, price of an hour." in said
    same = versus.sentences(*map(recipe_of, slower(2.0)))
    assert not any("alone differs" in line for line in same)


def test_the_page_has_both_pictures_and_folds_what_is_the_same() -> None:
    first, second = slower(2.0)
    page = versus.render(first, second)
    assert set(figures_in(page)) == {"first", "second"}
    rest = without_plotly(page)
    links, places = re.findall(r'href="#([^"]*)"', rest), re.findall(r'\bid="([^"]*)"', rest)
    assert set(links) <= set(places) and not re.search(
        r"""\bsrc\s*=|url\(|<link|<img|href\s*=(?!"#)""", rest
    )
    match = re.search(
        r"<summary>(\d+) more, the same in both</summary>(.*?)</details>", page, re.DOTALL
    )
    assert match and int(match[1]) == match[2].count("<tr>") > 10


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    page = without_plotly(versus.render(hostile_study(), summary(study="../" + HOSTILE)))
    assert "<script>alert" not in page and "<b>x</b>" not in page and page.count("<script") == 3
    written = write_versus(tmp_path, hostile_study(), summary(study="../" + HOSTILE))
    assert written.parent == tmp_path and written.is_file()
