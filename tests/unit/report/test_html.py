"""report.html: what the infos say, that nothing in it is interpreted or loaded, and that it renders in every case."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.report import describe, figures, infos, render, style, tradeoffs
from autotune.report.html import script_json, stats
from autotune.study.summary import Recipe, StudySummary
from tests.helpers.factories import FINGERPRINT, summary

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
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match.group(1))
    return data


# ---- infos: the twelve trials of the factory are OK but for OOM at 2 and 7, refused at 4 and 9


def test_scatter_info(study: StudySummary) -> None:
    info = infos.scatter(study)
    assert len(info.points) == 12
    assert info.limit_gib == 132.0
    by_number = {point.number: point for point in info.points}
    assert (by_number[0].tokens_per_second, by_number[0].peak_gib) == (8000.0, 20.0)
    # No peak was measured: what was needed at least is the limit and the margin of 2 %.
    assert (by_number[2].tokens_per_second, by_number[2].peak_gib) == (None, pytest.approx(132 * 1.02))
    assert [marked.name for marked in info.marked] == ["winner", "baseline"]


def test_limit_without_a_winner_is_the_trials_median(study: StudySummary) -> None:
    rows = [replace(row, limit_gib=limit) for row, limit in zip(study.trials, (100.0, 110.0, 150.0), strict=False)]
    assert infos.limit_gib(replace(study, recipe=None, trials=tuple(rows))) == 110.0
    assert infos.limit_gib(replace(study, recipe=None, trials=())) is None


def test_history_info_keeps_the_best_so_far(study: StudySummary) -> None:
    # Speed rises by 400 a trial, so that each fit is a new best; 11 is the last.
    best = infos.history(study).best
    assert [number for number, _ in best] == [0, 1, 3, 5, 6, 8, 10, 11]
    assert best[-1] == (11, 8000.0 + 400 * 11)
    falling = tuple(
        replace(row, tokens_per_second=None if row.tokens_per_second is None else 100.0 - row.number)
        for row in study.trials
    )
    assert infos.history(replace(study, trials=falling)).best == ((0, 100.0), (11, 100.0))


def test_feasibility_map(study: StudySummary) -> None:
    info = infos.feasibility(study)
    assert info.rows == ("1", "2", "4", "8", "16", "32")
    assert info.columns == ("512", "1,024", "2,048")
    # Micro batch 2**(n % 6) with seq_len n % 3: trials 2 and 8 share a cell (OOM, fit), 4 and 10 too (refused, fit).
    mixed = info.cells[2][2]
    assert (mixed.state, mixed.num_tried, mixed.best_tokens_per_second) == ("mixed", 2, 8000.0 + 400 * 8)
    assert info.cells[4][1].state == "mixed"
    assert (info.cells[0][0].state, info.cells[0][0].num_tried) == ("fits", 2)
    assert (info.cells[0][1].state, info.cells[0][1].num_tried) == ("untried", 0)


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (["oom", "refused"], "oom"),
        (["refused"], "refused"),
        (["crash", "timeout"], "failed"),
        (["ok", "crash"], "fits"),
        (["slow", "oom"], "mixed"),
    ],
)
def test_state_of_a_cell(study: StudySummary, outcomes: list[str], state: str) -> None:
    rows = tuple(replace(study.trials[0], outcome=Outcome(name)) for name in outcomes)
    assert infos.feasibility(replace(study, trials=rows)).cells[0][0].state == state


def test_a_long_axis_is_grouped(study: StudySummary) -> None:
    rows = tuple(replace(study.trials[0], config=TrainConfig(seq_len=length)) for length in range(1000, 1050))
    info = infos.feasibility(replace(study, trials=rows))
    assert info.columns == ("512 to 1,023", "1,024 to 2,047")
    assert [cell.num_tried for cell in info.cells[0]] == [24, 26]


def test_memory_terms_sum_to_the_allocated_peak(study: StudySummary) -> None:
    winner, baseline = infos.memory(study)
    assert (winner.name, baseline.name) == ("winner", "baseline")
    assert tuple(winner.terms) == infos.TERMS
    assert winner.terms["weights"] == 13.5
    assert sum(winner.terms.values()) == pytest.approx(53.3)
    assert infos.memory(replace(study, recipe=None)) == ()


def test_memory_rest_is_never_negative(study: StudySummary) -> None:
    recipe = recipe_of(study)
    odd = replace(recipe.winner, measurement=replace(recipe.winner.measurement, peak_allocated_gib=1.0))
    assert infos.memory(replace(study, recipe=replace(recipe, winner=odd)))[0].terms[infos.TERMS[-1]] == 0.0


def test_compare_marks_what_changed(study: StudySummary) -> None:
    rows = {row.name: row for row in infos.compare(recipe_of(study))}
    changed = {name for name, row in rows.items() if row.changed}
    assert changed == {"micro_batch_size", "checkpointing", "compile", "accumulation steps"}
    assert (rows["checkpointing"].baseline, rows["checkpointing"].winner) == ("full", "none")
    assert (rows["accumulation steps"].baseline, rows["accumulation steps"].winner) == ("4", "8")
    assert rows["useful tokens/s"].ratio == pytest.approx(recipe_of(study).speedup)
    assert rows["USD at the spot price"].ratio is None


def test_compare_without_a_baseline_shows_dashes(study: StudySummary) -> None:
    rows = infos.compare(replace(recipe_of(study), baseline=None))
    assert {row.baseline for row in rows} == {"–"}
    assert not any(row.changed for row in rows)


def test_costs_of_all_sizes_once(study: StudySummary) -> None:
    recipe = recipe_of(study)
    assert [cost.examples for cost in infos.costs(recipe)] == [10_000, 50_000, 100_000]
    own = replace(recipe.winner, cost=replace(recipe.winner.cost, examples=777))
    assert [cost.examples for cost in infos.costs(replace(recipe, winner=own))] == [777, 10_000, 50_000, 100_000]


def test_cells_are_relative_to_the_winner(study: StudySummary) -> None:
    first, second = tradeoffs.cells(recipe_of(study))
    assert (first.is_winner, first.extra) == (True, 0.0)
    assert second.extra == pytest.approx((recipe_of(study).speedup or 0) - 1.0)
    # Rows of 1,024 tokens: half of the first is padding, a third of the second is cut off.
    workload = replace(recipe_of(study).workload, lengths=Lengths.of([512, 1536], "counted"))
    first, _ = tradeoffs.cells(replace(recipe_of(study), workload=workload))
    assert first.candidate.config.seq_len == 1024
    assert (first.cut, first.padding) == (0.25, 0.25)


def test_what_more_capability_costs_is_drawn_with_its_interval(study: StudySummary) -> None:
    """The winner, a cell of a higher rank at 4 / 5 of its speed, and one that differs in nothing learned."""
    recipe = recipe_of(study)
    fast = recipe.winner.performance.tokens_per_second
    speed = replace(recipe.winner.performance, tokens_per_second=0.8 * fast, spread=(-0.1, 0.2))
    higher = replace(recipe.winner, config=replace(recipe.winner.config, lora_rank=64), performance=speed)
    winner, row = tradeoffs.cells(replace(recipe, cells=(higher, recipe.winner)))
    assert winner.is_winner and (row.changes, row.extra) == ("lora_rank 64 instead of 16", pytest.approx(0.25))
    assert row.interval == (pytest.approx(0.125), pytest.approx(0.5))
    drawn = figures.capability((winner, row))
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"]) == ([pytest.approx(0.25)], ["lora_rank 64 instead of 16"])
    assert drawn["data"][0]["error_x"]["array"] == [pytest.approx(0.25)]
    assert drawn["data"][0]["error_x"]["arrayminus"] == [pytest.approx(0.125)]
    assert figures.capability((winner,)) is None


def test_what_each_row_length_does_to_the_examples(study: StudySummary) -> None:
    recipe = recipe_of(study)
    assert tradeoffs.lengths(study) == ()  # all are of one length
    lengths = Lengths.of([512, 512, 1024, 2048], "counted")
    skewed = replace(study, recipe=replace(recipe, workload=replace(recipe.workload, examples=4, lengths=lengths)))
    rows = {row.seq_len: row for row in tradeoffs.lengths(skewed)}
    assert {128, 256, 512, 1024, 2048} <= rows.keys() and {row.config.seq_len for row in study.trials} <= rows.keys()
    assert [seq_len for seq_len, row in rows.items() if row.is_winner] == [recipe.winner.config.seq_len] == [1024]
    one = rows[1024]
    assert (one.examples_cut, one.tokens_cut, one.fill) == (0.25, 0.25, 0.75)
    assert (one.packed_fill, one.examples_a_row) == (1.0, pytest.approx(4 / 3))
    assert (rows[2048].tokens_cut, rows[2048].fill, rows[2048].packed_fill) == (0.0, 0.5, 1.0)
    heading = "What each row length does to your examples"
    assert heading in render(skewed, "out") and heading not in render(study, "out")


def test_words_and_fingerprint(study: StudySummary) -> None:
    words = describe.configuration(recipe_of(study))
    assert "LoRA of rank 16" in words
    assert "4 sequences of 1,024 tokens at a time, accumulated 8 times: a global batch of 32" in words
    assert "no activation checkpointing" in words
    assert ("torch", "2.11.0") in infos.fingerprint(recipe_of(study))
    assert ("threads", "–") in infos.fingerprint(recipe_of(study))


def test_stats_carry_their_evidence(study: StudySummary) -> None:
    recipe = recipe_of(study)
    weaker = replace(recipe, baseline=replace(recipe.winner, evidence=Evidence.ESTIMATED))
    speedup = stats(weaker, study)[0]
    assert (speedup.label, speedup.value, speedup.evidence) == ("Speed-up", "1.00×", Evidence.ESTIMATED)
    assert stats(replace(recipe, baseline=None), study)[0].note == "no baseline measured"


# ---- figures


def test_figures_are_made_of_infos(study: StudySummary) -> None:
    drawn = figures.scatter(infos.scatter(study))
    assert drawn is not None
    traces = {trace.get("name"): trace for trace in drawn["data"]}
    assert len(traces["fits"]["x"]) == 8 and len(traces["out of memory"]["x"]) == 2 and len(traces["refused"]["x"]) == 2
    assert traces["fits"]["marker"]["symbol"] != traces["refused"]["marker"]["symbol"]
    assert traces["fits"]["marker"]["color"] != traces["refused"]["marker"]["color"]
    assert "lora r16 1x512" in traces["fits"]["hovertext"][0]
    history = figures.history(infos.history(study))
    assert history is not None and history["data"][0]["name"] == "best so far"


def test_each_outcome_has_a_look_of_its_own() -> None:
    assert set(style.OUTCOMES) == set(Outcome)
    for part in zip(*style.OUTCOMES.values(), strict=True):
        assert len(set(part)) == len(Outcome)


def test_figures_with_too_little_are_none(study: StudySummary) -> None:
    one = replace(study, trials=study.trials[:1], importances={"compile": 1.0}, recipe=None)
    assert figures.scatter(infos.scatter(one)) is None
    assert figures.history(infos.history(one)) is None
    assert figures.importances(infos.importances(one)) is None
    assert figures.memory(infos.memory(one)) is None
    failed = replace(study, trials=tuple(row for row in study.trials if row.outcome is not Outcome.OK), recipe=None)
    assert figures.history(infos.history(failed)) is None


def test_a_far_miss_is_drawn_at_the_edge_and_told_in_full(study: StudySummary) -> None:
    rows = (study.trials[0], replace(study.trials[4], margin=9.0))
    drawn = figures.scatter(infos.scatter(replace(study, trials=rows)))
    assert drawn is not None
    refused = next(trace for trace in drawn["data"] if trace.get("name") == "refused")
    assert refused["x"] == [132.0 * figures.EDGE]
    assert "1320.0 GiB needed at least" in refused["hovertext"][0]


# ---- the page


def test_first_screen(page: str) -> None:
    head = page[page.index("<header>") : page.index("</header>")]
    assert "2.1× the speed of the baseline" in head
    assert "$0.584" in head and "$0.578 to $0.589" in head and "10 min 20 s" in head
    assert "$3.39 an hour at verda, undated" in head and "skypilot-catalog" in head
    assert "nothing more capable is within the slack" in head
    assert "cd runs/h200\nbash export/launch.sh --dataset data.jsonl" in head
    assert "1,024 tokens are assumed" in head
    assert head.count('class="badge"') == head.count('class="stat"') == 6


def test_the_command_is_for_the_trainer_that_was_probed(study: StudySummary) -> None:
    made = render(replace(study, recipe=replace(recipe_of(study), trainer="trl")), "out")
    assert "head trl_sft.yaml" in made and "launch.sh" not in made


def test_the_directory_is_quoted_for_the_shell(study: StudySummary) -> None:
    assert "cd &#39;a; echo b&#39;\n" in render(study, "a; echo b")


def test_every_section_and_trial_is_there(page: str) -> None:
    for title in ("Winner against baseline", "Speed against memory", "What fits", "How the search went"):
        assert f"<h2>{title}</h2>" in page
    trials = page[page.index("<h2>Every trial</h2>") : page.index("<h2>Out of memory and refused</h2>")]
    assert trials.count("<tr>") == 1 + 12
    assert set(figures_in(page)) == {"scatter", "history", "timeline", "parallel", "importances", "memory"}


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    rest = without_plotly(page)
    assert page.count(style.plotly_js()) == 1
    assert not re.search(r"""\bsrc\s*=|@import|url\(|<link|<img|<iframe|href\s*=""", rest)
    assert "http://" not in rest and "https://" not in rest
    assert "default-src 'none'" in rest


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
        importances={HOSTILE: 0.7, "compile": 0.3},
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
    assert drawn["importances"]["data"][0]["y"][0].startswith("&lt;script&gt;")


def test_json_cannot_end_its_script() -> None:
    text = str(script_json({"a": "</script><!-- &\u2028"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- &\u2028"}


def test_no_winner_renders(study: StudySummary) -> None:
    rows = tuple(row for row in study.trials if row.outcome is not Outcome.OK)
    page = render(replace(study, recipe=None, trials=rows, probes=(), importances={}), "out")
    assert "<h1>Nothing fitted</h1>" in page
    assert "4 trials: 2 out of memory, 2 refused" in page
    assert "Trial 2 came closest" in page
    assert "launch.sh" not in page
    assert page.count('<p class="instead">') >= 3
    # Without a figure there is no plotly.js either.
    assert len(page) < 200_000


def test_no_winner_for_reasons_other_than_memory(study: StudySummary) -> None:
    rows = (replace(study.trials[0], outcome=Outcome.CRASH, margin=None),)
    page = render(replace(study, recipe=None, trials=rows, probes=(), importances={}), "out")
    assert "<h1>No trial came through</h1>" in page


def test_an_empty_study_renders(study: StudySummary) -> None:
    page = render(replace(study, recipe=None, trials=(), importances={}, search_usd=None), "out")
    assert "no trial was run" in page


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
    winner = replace(recipe.winner, cost=cost, performance=replace(recipe.winner.performance, mfu=None))
    bare = replace(recipe, winner=winner, baseline=None, price=None, by_examples=(cost,), cells=(winner,), caveats=())
    page = render(replace(study, recipe=bare, search_usd=None), "out")
    assert "no baseline measured" in page
    assert "No price is known for this GPU" in page
    assert "$" not in page[page.index("<header>") : page.index("</header>")]
    assert ">None<" not in page and "None " not in without_plotly(page)


def test_a_thousand_trials_stay_small() -> None:
    assert len(render(summary(trials=1000), "out").encode()) < 8_000_000
