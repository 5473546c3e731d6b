"""report.html: nothing in it is interpreted or loaded from
elsewhere, and it renders in every case.
"""

import gzip
import hashlib
import json
import re
from base64 import b64decode
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.json_view import json_data
from autotune.core.probe_types import Evidence, Outcome
from autotune.report import describe, style
from autotune.report.html import render, script_json, stats
from autotune.report.infos import feasibility
from autotune.report.oom import oom_report
from autotune.study.decomposition import Decomposition, Factor
from autotune.study.summary import Recipe, StudySummary
from tests.helpers.factories import FINGERPRINT, summary

LIMIT_BYTES = 1_500_000  # of a report
# The file in plotly.js-basic-dist-min 4.1.1 on npm.
PUBLISHED = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
HOSTILE = "<script>alert(1)</script><b>x</b>&amp;"


@pytest.fixture(scope="module")
def study() -> StudySummary:
    return summary()


@pytest.fixture(scope="module")
def page(study: StudySummary) -> str:
    return render(study, "runs/h200")


def recipe_of(study: StudySummary) -> Recipe:
    assert study.recipe is not None
    return study.recipe


def without_plotly(page: str) -> str:
    return page.replace(style.plotly_js(), "")


def figures_in(page: str) -> dict[str, Any]:
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert match
    data: dict[str, Any] = json.loads(match.group(1))
    return data


def test_stats_carry_their_evidence(study: StudySummary) -> None:
    recipe = recipe_of(study)
    weaker = replace(recipe, baseline=replace(recipe.winner, evidence=Evidence.ESTIMATED))
    speedup = stats(weaker, study)[0]
    assert (speedup.label, speedup.value, speedup.evidence) == (
        "Speed-up",
        "none",
        Evidence.ESTIMATED,
    )
    assert stats(replace(recipe, baseline=None), study)[0].note == "no baseline was measured"


def test_a_ratio_to_a_baseline_that_was_not_measured_as_a_whole_is_labelled(
    study: StudySummary,
) -> None:
    recipe = recipe_of(study)
    assert recipe.baseline is not None and "extrapolated" not in describe.speed_up(recipe)
    weaker = replace(recipe, baseline=replace(recipe.baseline, evidence=Evidence.EXTRAPOLATED))
    assert describe.speed_up(weaker) == f"{describe.speed_up(recipe)} (extrapolated)"
    assert stats(weaker, study)[0].evidence is Evidence.EXTRAPOLATED


def test_a_note_does_not_repeat_the_speed_up_above_it(study: StudySummary) -> None:
    recipe = recipe_of(study)
    clear = stats(recipe, study)[0]
    assert clear.value.endswith("×") and clear.note == describe.speed_up_range(recipe)
    why = "measurements of a differ by 9%"
    wide = stats(replace(recipe, disagreement=why), study)[0]
    low, high = map(float, wide.value.removesuffix("×").split(" to "))
    assert low < float(clear.value.removesuffix("×")) < high and wide.note == why


def test_the_speed_up_says_what_it_consists_of(study: StudySummary) -> None:
    recipe = recipe_of(study)
    assert recipe.baseline is not None
    parts = {"padding or packing": 1.6, "batch": 1.0, "compilation": 1.25}
    made = Decomposition(
        winner=recipe.config,
        baseline=recipe.baseline.config,
        factors=tuple(Factor(name=name, factor=factor) for name, factor in parts.items()),
    )
    assert stats(recipe, replace(study, decomposition=made))[0].note.endswith(
        "; padding or packing 1.60, compilation 1.25"
    )


@pytest.mark.parametrize(
    ("ratio", "spread", "headline", "value"),
    [
        (1.4, 0.05, "1.4 times the speed of the baseline", "1.40×"),
        (1.4, 0.2, "No measurable difference in speed from the baseline", "none"),
        (1.04, 0.01, "4% faster than the baseline", "1.04×"),
        (0.96, 0.01, "4% slower than the baseline", "0.96×"),
        (1.01, 0.01, "No measurable difference in speed from the baseline", "none"),
    ],
)
def test_no_ratio_without_a_difference(
    study: StudySummary, ratio: float, spread: float, headline: str, value: str
) -> None:
    recipe = recipe_of(study)
    assert recipe.baseline is not None
    fast = recipe.winner.performance.tokens_per_second
    speeds = [
        replace(recipe.winner.performance, tokens_per_second=speed, spread=(-spread, spread))
        for speed in (fast, fast / ratio)
    ]
    pair = [
        replace(candidate, performance=speed)
        for candidate, speed in zip((recipe.winner, recipe.baseline), speeds, strict=True)
    ]
    made = replace(study, recipe=replace(recipe, winner=pair[0], baseline=pair[1]))
    page = render(made, "out")
    assert f"<h1>{headline}</h1>" in page
    assert f'<div class="value lead">{value}</div>' in page
    assert ("of the baseline" in headline or "than" in headline) is (f"{ratio:.2f}×" in page)
    reason = f"The table has no ratio of speed or cost: {describe.speed_up(made.recipe)}."
    assert (reason in page) is not made.recipe.differs


def test_disturbed_measurements_are_not_called_equally_fast(study: StudySummary) -> None:
    recipe = recipe_of(study)
    winner = replace(recipe.winner, evidence=Evidence.DISTURBED)
    page = render(replace(study, recipe=replace(recipe, winner=winner)), "out")
    assert "equally fast" not in page and "no ratio of speed or cost: the machine is too" in page


def test_first_screen(page: str) -> None:
    head = page[page.index("<header>") : page.index("</header>")]
    assert "2.1 times the speed of the baseline" in head
    assert "$0.617" in head and "$0.611 to $0.623" in head and "10 min 19 s" in head
    assert "$3.59/h, runpod, " in head and "gpu-price-feed" in head
    assert "no more capable configuration costs at most 5% more" in head
    assert "<pre>bash runs/h200/export/launch.sh --random-weights --max-steps 5</pre>" in head
    assert "<pre>bash runs/h200/export/launch.sh --dataset data.jsonl</pre>" in head
    assert "1,024 tokens are assumed" in head
    assert head.count('class="badge"') == head.count('class="stat"') == 6


def test_the_command_is_for_the_trainer_that_was_probed(study: StudySummary) -> None:
    made = render(replace(study, recipe=replace(recipe_of(study), trainer="trl")), "out")
    assert (
        "<pre>cd out/export &amp;&amp; " in made
        and "trl sft --config" in made
        and "launch.sh" not in made
    )


def test_the_directory_is_quoted_for_the_shell(study: StudySummary) -> None:
    assert "bash &#39;a; echo b/export/launch.sh&#39; " in render(study, "a; echo b")


def test_every_section_and_trial_is_there(page: str) -> None:
    for title in ("Winner against baseline", "What fits", "How the search went"):
        assert f"<h2>{title}</h2>" in page
    trials = page[
        page.index("<h2>Every configuration that was tried</h2>") : page.index(
            "<h2>Out of memory and refused</h2>"
        )
    ]
    assert trials.count("<tr>") == 1 + 12
    assert set(figures_in(page)) == {
        "scatter",
        "history",
        "timeline",
        "parallel",
        "memory",
        "scaling",
    }


def test_no_heading_stands_twice_or_over_nothing(study: StudySummary, page: str) -> None:
    titles = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", without_plotly(page))
    assert len(titles) == len(set(titles)) and "Why it won" in titles
    assert "The same run on other GPUs" not in titles  # no estimates
    assert re.findall(r"<h2>[^<]*</h2>\s*</section>", page) == []
    bare = render(
        replace(study, recipe=replace(recipe_of(study), baseline=None, price=None)), "out"
    )
    compare = bare[(at := bare.index("The winner in numbers")) : bare.index("</section>", at)]
    assert "–" not in compare and "baseline" not in compare
    costs = bare[bare.index("Cost by size of the dataset") : bare.index('id="sure"')]
    assert "USD" not in costs.replace("USD/h", "")


@pytest.mark.parametrize(
    ("rank", "title", "learns"),
    [(8, "What less capability would save", "less"), (64, "What more capability costs", "more")],
)
def test_the_cost_of_capability_says_in_which_direction(
    study: StudySummary, rank: int, title: str, learns: str
) -> None:
    winner = recipe_of(study).winner
    cells = (winner, replace(winner, config=replace(winner.config, lora_rank=rank)))
    page = render(replace(study, recipe=replace(recipe_of(study), cells=cells)), "out")
    assert f"<h2>{title}</h2>" in page
    assert f"<td>{learns}</td>" in page and "not measurable" in page


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Evidence.MEASURED, "spread of the measured steps"),
        (Evidence.PROJECTED, "80% of the errors"),
    ],
)
def test_the_caption_says_what_the_intervals_are(
    study: StudySummary, kind: Evidence, said: str
) -> None:
    recipe = recipe_of(study)
    page = render(
        replace(study, recipe=replace(recipe, winner=replace(recipe.winner, evidence=kind))), "out"
    )
    assert said in page[page.index("Intervals ") :][:200]


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    rest = without_plotly(page)
    assert page.count(style.plotly_js()) == 1
    assert not re.search(r"""\bsrc\s*=|@import|url\(|<link|<img|<iframe|href\s*=(?!"#)""", rest)
    assert "http://" not in rest and "https://" not in rest
    assert "default-src 'none'" in rest


def test_a_report_is_small_and_its_library_is_the_published_one() -> None:
    """The largest stored study has 66 trials."""
    assert len(render(summary(trials=500), "out").encode()) <= LIMIT_BYTES
    assert hashlib.sha256(gzip.decompress(b64decode(style.plotly_js()))).hexdigest() == PUBLISHED


def test_each_link_leads_to_a_place_of_the_page(study: StudySummary, page: str) -> None:
    nothing = render(replace(study, recipe=None), "out")
    for made in (page, nothing):
        rest = without_plotly(made)
        links, places = re.findall(r'href="#([^"]*)"', rest), re.findall(r'\bid="([^"]*)"', rest)
        assert len(places) == len(set(places)) and set(links) <= set(places)
        assert set(re.findall(r'class="part" id="(\w+)"', rest)) <= set(links)
    wanted = ("term-mfu", "term-useful-tokens-s", "term-measured", "term-lora-rank", "term-margin")
    assert all(f'href="#{one}"' in page for one in wanted)


def test_a_configuration_that_was_proposed_again_has_one_row(study: StudySummary) -> None:
    """Answered from memory it tells nothing new; measured again it does.

    An OOM is a row of two tables.
    """
    fits, too_large = study.trials[0], study.trials[2]
    again = [
        replace(fits, number=12 + number, reused=True, tokens_per_second=1.0) for number in range(6)
    ]
    anew = replace(study.trials[1], number=18, tokens_per_second=7654.0)
    more = replace(study, trials=(*study.trials, *again, anew, replace(too_large, number=19)))
    page = render(more, "out")
    tried = page[
        page.index("<h2>Every configuration") : page.index("<h2>Out of memory and refused</h2>")
    ]
    refused = page[page.index("<h2>Out of memory and refused</h2>") :]
    assert "All 12 configurations" in tried and tried.count("<tr>") == 1 + 12 and "7,654" in tried
    label = f'<span class="label">{too_large.config.label()}</span>'
    assert tried.count(label) == refused.count(label) == 1
    report = oom_report(more)
    assert len(json_data(report)["entries"]) == 5 and report.markdown().count("## Trial") == 4
    assert feasibility(more)["1"]["512"].num_tried == feasibility(study)["1"]["512"].num_tried


def test_the_first_screen_has_the_picture_and_long_tables_are_folded(
    study: StudySummary, page: str
) -> None:
    assert page.index("<header>") < page.index('data-figure="scatter"') < page.index("</header>")
    assert re.findall(r"<details( open)?><summary>All 12 configurations</summary>", page) == [
        " open"
    ]
    long = render(summary(trials=40), "out")
    assert re.findall(r"<details( open)?><summary>All 40 configurations</summary>", long) == [""]
    same = re.search(
        r"<summary>(\d+) more settings, the same in both</summary>(.*?)</details>", page, re.DOTALL
    )
    assert same and int(same[1]) == same[2].count("<tr>") > 5 and "changed" not in same[2]


def hostile_study() -> StudySummary:
    study = summary(study=HOSTILE)
    recipe = recipe_of(study)
    assert recipe.price is not None
    fingerprint = replace(FINGERPRINT, device=HOSTILE, packages={HOSTILE: HOSTILE})
    return replace(
        study,
        recipe=replace(
            recipe,
            study=HOSTILE,
            reason=HOSTILE,
            caveats=(HOSTILE,),
            trainer=HOSTILE,
            fingerprint=fingerprint,
            model=replace(recipe.model, name=HOSTILE),
            device=replace(recipe.device, nvml_names=(HOSTILE,)),
            price=replace(recipe.price, provider=HOSTILE, source=HOSTILE, as_of=HOSTILE),
        ),
        trials=tuple(replace(row, reason=HOSTILE, log=HOSTILE) for row in study.trials),
        notes=(HOSTILE,),
    )


def test_hostile_text_is_shown_as_text() -> None:
    page = without_plotly(render(hostile_study(), HOSTILE))
    assert "<script>alert" not in page and "<b>x</b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    # The empty one is where plotly.js stood.
    assert page.count("<script") == page.count("</script>") == 3


def test_hostile_text_is_escaped_in_figures() -> None:
    drawn = figures_in(render(hostile_study(), "out"))
    hover = drawn["history"]["data"][1]["hovertext"][0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;x&lt;/b&gt;&amp;amp;" in hover


def test_json_cannot_end_its_script() -> None:
    text = str(script_json({"a": "</script><!-- &\u2028"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- &\u2028"}


def test_no_winner_renders(study: StudySummary) -> None:
    rows = tuple(row for row in study.trials if row.outcome is not Outcome.OK)
    page = render(replace(study, recipe=None, trials=rows, probes=()), "out")
    assert "<h1>Nothing fits</h1>" in page
    assert "4 configurations: 2 out of memory, 2 refused" in page
    assert "Trial 2 came closest" in page
    assert "launch.sh" not in page
    for title in (
        "How the search went",
        "What the fastest have in common",
        "Where the memory goes",
    ):
        assert title not in page  # no heading over nothing
    # Without a figure there is no plotly.js either.
    assert len(page) < 200_000


def test_no_winner_for_reasons_other_than_memory(study: StudySummary) -> None:
    rows = (replace(study.trials[0], outcome=Outcome.CRASH, margin=None),)
    page = render(replace(study, recipe=None, trials=rows, probes=()), "out")
    assert "<h1>No trial succeeded</h1>" in page


def test_an_empty_study_renders(study: StudySummary) -> None:
    page = render(replace(study, recipe=None, trials=(), search_usd=None), "out")
    assert "no trial has ended" in page


def test_no_baseline_and_no_price_render(study: StudySummary) -> None:
    recipe = recipe_of(study)
    cost = replace(
        recipe.winner.cost,
        usd_per_hour=None,
        full_run_usd=None,
        interval_usd=None,
        cost_per_1000_samples_usd=None,
        kwh=None,
    )
    winner = replace(
        recipe.winner, cost=cost, performance=replace(recipe.winner.performance, mfu=None)
    )
    bare = replace(
        recipe,
        winner=winner,
        baseline=None,
        price=None,
        by_examples=(cost,),
        cells=(winner,),
        caveats=(),
    )
    page = render(replace(study, recipe=bare, search_usd=None), "out")
    assert "<h1>No baseline was measured</h1>" in page
    assert "No price is known for this GPU" in page
    assert "$" not in page[page.index("<header>") : page.index("</header>")]
    assert ">None<" not in page and "None " not in without_plotly(page)
