"""Figures as data for plotly: what each draws, and that one with nothing to show is None."""

from dataclasses import replace

import pytest

from autotune.catalog import resolve_device
from autotune.core.probe_types import Outcome
from autotune.planning.more_gpus import project_gpu_counts
from autotune.report import figures, infos, style
from autotune.report.html import draw, render
from autotune.study.summary import StudySummary
from tests.helpers.factories import summary


@pytest.fixture(scope="module")
def study() -> StudySummary:
    """Twelve trials, all OK except for OOM at 2 and 7 and refusals at 4 and 9."""
    return summary()


def test_figures_are_made_of_infos(study: StudySummary) -> None:
    drawn = draw(study)["scatter"]
    assert drawn is not None
    traces = {trace.get("name"): trace for trace in drawn["data"]}
    assert (
        len(traces["fits"]["x"]) == 8
        and len(traces["out of memory"]["x"]) == 2
        and len(traces["refused"]["x"]) == 2
    )
    assert traces["fits"]["marker"]["symbol"] != traces["refused"]["marker"]["symbol"]
    assert traces["fits"]["marker"]["color"] != traces["refused"]["marker"]["color"]
    assert "lora r16 1x512" in traces["fits"]["hovertext"][0]
    history = draw(study)["history"]
    assert history is not None and history["data"][0]["name"] == "best so far"


def test_figures_with_too_little_are_none(study: StudySummary) -> None:
    one = replace(study, trials=study.trials[:1], recipe=None)
    drawn = draw(replace(one, probes=()))
    assert drawn.keys() == draw(study).keys() and set(drawn.values()) == {None}
    failed = replace(
        study,
        trials=tuple(row for row in study.trials if row.outcome is not Outcome.OK),
        recipe=None,
    )
    assert draw(failed)["history"] is None


def test_a_far_miss_is_drawn_at_the_edge_with_its_number_in_full(study: StudySummary) -> None:
    rows = (study.trials[0], replace(study.trials[4], margin=9.0))
    drawn = draw(replace(study, trials=rows))["scatter"]
    assert drawn is not None
    refused = next(trace for trace in drawn["data"] if trace.get("name") == "refused")
    assert refused["x"] == [132.0 * figures.EDGE]
    assert "1320.0 GiB needed at least" in refused["hovertext"][0]


def test_what_more_capability_costs_is_drawn_with_its_interval(study: StudySummary) -> None:
    """The winner, whose steps agree, and a cell of a higher rank at 4 / 5 of its speed."""
    recipe = study.recipe
    assert recipe is not None
    recipe = replace(
        recipe,
        winner=replace(
            recipe.winner, performance=replace(recipe.winner.performance, spread=(0, 0))
        ),
    )
    fast = recipe.winner.performance.tokens_per_second
    speed = replace(recipe.winner.performance, tokens_per_second=0.8 * fast, spread=(-0.1, 0.2))
    higher = replace(
        recipe.winner, config=replace(recipe.winner.config, lora_rank=64), performance=speed
    )
    winner, row = infos.learning_cells(replace(recipe, cells=(higher, recipe.winner)))
    assert winner.is_winner and (row.changes, row.extra) == (
        "lora_rank 64 instead of 16",
        pytest.approx(0.25),
    )
    assert row.interval == (pytest.approx(0.125), pytest.approx(0.5))
    drawn = figures.capability((winner, row))
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"]) == (
        [pytest.approx(0.25)],
        ["lora_rank 64 instead of 16"],
    )
    assert drawn["data"][0]["error_x"]["array"] == [pytest.approx(0.25)]
    assert drawn["data"][0]["error_x"]["arrayminus"] == [pytest.approx(0.125)]
    assert figures.capability((winner,)) is None


def test_small_differences_in_cost_have_distinct_ticks_and_long_names_are_wrapped(
    study: StudySummary,
) -> None:
    recipe = study.recipe
    assert recipe is not None
    less = replace(recipe.winner, config=replace(recipe.winner.config, optimizer="adamw_8bit"))
    drawn = figures.capability(infos.learning_cells(replace(recipe, cells=(less, recipe.winner))))
    assert drawn is not None
    assert drawn["layout"]["xaxis"]["tickformat"] == "+.3~%"  # -2.5 % is not -2 %
    assert drawn["data"][0]["y"] == ["optimizer adamw_8bit<br>instead of<br>adamw_torch_fused"]


def test_horizontal_bars() -> None:
    bars = [figures.Bar(name="a", value=1.0), figures.Bar(name="<b>", value=2.0)]
    plain = figures.horizontal_bars(bars, x="s", ticks=",", row_px=10)
    (trace,) = plain["data"]
    assert (trace["x"], trace["y"]) == ([1.0, 2.0], ["a", "&lt;b&gt;"]) and "error_x" not in trace
    assert trace["hoverinfo"] == "skip" and "shapes" not in plain["layout"]
    bars = [
        figures.Bar(
            name="a", value=1.0, interval=(0.9, 1.2), text="1", hover="one", highlighted=True
        ),
        figures.Bar(name="b", value=2.0),
    ]
    rich = figures.horizontal_bars(bars, x="s", ticks=",", row_px=10, line_at=1.5, end=3.0)
    (trace,) = rich["data"]
    assert trace["error_x"]["arrayminus"] == pytest.approx([0.1, 0.0])
    assert trace["error_x"]["array"] == pytest.approx([0.2, 0.0])
    assert (trace["hovertext"], trace["text"], trace["hoverinfo"]) == (
        ["one", ""],
        ["1", ""],
        "text",
    )
    assert trace["marker"]["color"] == [style.ACCENT, style.BLUE]
    assert rich["layout"]["shapes"][0]["x0"] == 1.5 and rich["layout"]["xaxis"]["range"] == [
        0.0,
        3.12,
    ]


def test_more_gpus_are_shown_as_a_picture_and_a_table(study: StudySummary) -> None:
    recipe = study.recipe
    assert recipe is not None
    drawn = draw(study)["scaling"]
    assert drawn is not None
    ideal, speeds, usd = drawn["data"]
    assert ideal["y"] == pytest.approx([number * ideal["y"][0] for number in (1, 2, 4, 8)])
    assert all(speed <= most for speed, most in zip(speeds["y"], ideal["y"], strict=True))
    assert speeds["text"][0] == "100%" and "[projected]" in speeds["hovertext"][3]
    assert usd["y"][0] == recipe.winner.cost.full_run_usd and len(usd["y"]) == 4
    page = render(study, "out")
    section = page[page.index("<h2>The same run on more GPUs</h2>") :].partition("</section>")[0]
    assert (
        section.count("<tr") == 5
        and section.count("</span> projected</a>") == 3
        and "370 GB/s" in section
    )
    priceless = draw(replace(study, scaling=project_gpu_counts(replace(recipe, price=None))))[
        "scaling"
    ]
    assert priceless is not None and len(priceless["data"]) == 2
    alone = replace(recipe, device=resolve_device("rtx-4090-laptop"))  # a host has one of these
    assert draw(replace(study, scaling=project_gpu_counts(alone)))["scaling"] is None
