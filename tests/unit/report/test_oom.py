"""The OOM report: what it counts, what it advises, and that no text of a user is interpreted as
Markdown.
"""

import json
from dataclasses import replace

import pytest

from autotune.core.json_view import json_data
from autotune.core.probe_types import Outcome, Rung
from autotune.core.text import code_span
from autotune.core.train_config import TrainConfig
from autotune.report.oom import Term, advise, distance, oom_report
from autotune.study.summary import StudySummary, TrialRecord
from tests.helpers.factories import oom_detail, summary

HOSTILE = "`a` | <script>alert(1)</script>\n# title [x](http://x.invalid)"


def row(number: int, outcome: Outcome, **changes: object) -> TrialRecord:
    values = {
        "number": number,
        "config": TrainConfig(),
        "outcome": outcome,
        "rung": Rung.FULL,
    } | changes
    return TrialRecord(**values)  # type: ignore[arg-type]


def study(*rows: TrialRecord) -> StudySummary:
    return StudySummary(study="s", recipe=None, trials=rows, wall_seconds=2.0, search_usd=None)


def test_counts_every_oom_and_refusal() -> None:
    # Trials 0 to 11; number % 5 == 2 is an OOM (2, 7), == 4 a refusal (4, 9).
    report = oom_report(summary())
    assert [(entry.number, entry.outcome) for entry in report.entries] == [
        (2, "oom"),
        (4, "refused"),
        (7, "oom"),
        (9, "refused"),
    ]
    assert (
        report.headline() == "2 of 12 trials ran out of memory: activations hold 83 % of the memory"
    )


def test_oom_numbers_come_from_the_detail() -> None:
    entry = oom_report(summary()).entries[0]
    assert (entry.phase, entry.requested_gib, entry.allocated_gib) == ("backward", 2.0, 131.0)
    # 131 allocated and 2 asked for, under 132.
    assert entry.margin == pytest.approx(133 / 132 - 1)
    assert entry.missed_gib == pytest.approx(1.0)
    assert (entry.terms[0].name, entry.terms[0].share) == (
        "activations",
        pytest.approx(108.8 / 131.0),
    )
    assert sum(term.share for term in entry.terms) == pytest.approx(1.0)


def test_a_refusal_without_detail_keeps_the_unknown_unknown() -> None:
    entry = oom_report(study(row(0, Outcome.REFUSED, margin=0.5, limit_gib=100.0))).entries[0]
    assert (entry.phase, entry.allocated_gib, entry.terms) == (None, None, ())
    assert entry.missed_gib == pytest.approx(50.0)
    assert entry.changes
    assert oom_report(study(row(0, Outcome.OOM))).entries[0].missed_gib is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"micro_batch_size": 32}, 2.0),  # two doublings from 8
        ({"seq_len": 512}, 2.0),  # one halving, weight 2
        ({"checkpointing": "none"}, 1.0),
        ({"quantization": "nf4", "double_quant": True}, 3.5),
        ({"method": "full"}, 4.0),  # the rank goes with the method
    ],
)
def test_distance(changes: dict[str, object], expected: float) -> None:
    other = replace(TrainConfig(), **changes)  # type: ignore[arg-type]
    assert distance(TrainConfig(), other) == pytest.approx(expected)
    assert distance(other, TrainConfig()) == pytest.approx(expected)


def test_nearest_are_fitting_distinct_and_sorted() -> None:
    near, far = TrainConfig(micro_batch_size=4), TrainConfig(micro_batch_size=1)
    rows = [row(0, Outcome.OOM), row(1, Outcome.OK, config=far), row(2, Outcome.OK, config=near)]
    rows += [
        row(3, Outcome.OK, config=near),
        row(4, Outcome.CRASH, config=TrainConfig(compile="per_layer")),
    ]
    nearest = oom_report(study(*rows)).entries[0].nearest
    assert [one.number for one in nearest] == [2, 1]
    assert nearest[0].differs == {"micro_batch_size": [8, 4]}


def test_sdpa_is_advised_only_if_the_model_has_it() -> None:
    eager = row(0, Outcome.OOM, config=TrainConfig(attention="eager"))
    for has_sdpa in (True, False):
        made = oom_report(replace(study(eager), has_sdpa=has_sdpa)).entries[0].changes
        assert ("attention" in [change.knob for change in made]) == has_sdpa


FULL = TrainConfig(method="full", optimizer="adamw_torch")


@pytest.mark.parametrize(
    ("term", "config", "knobs"),
    [
        (
            "activations",
            TrainConfig(checkpointing="none"),
            ["checkpointing", "micro_batch_size", "seq_len"],
        ),
        (
            "activations",
            TrainConfig(attention="eager"),
            ["attention", "micro_batch_size", "seq_len"],
        ),
        ("logits", TrainConfig(), ["loss", "micro_batch_size", "seq_len"]),
        ("logits", TrainConfig(loss="chunked"), ["micro_batch_size", "seq_len"]),
        ("optimizer", FULL, ["optimizer", "method"]),
        (
            "optimizer",
            TrainConfig(optimizer="adamw_8bit"),
            ["optimizer", "lora_rank", "lora_targets"],
        ),
        ("weights", TrainConfig(), ["quantization"]),
        ("weights", TrainConfig(quantization="nf4"), ["double_quant"]),
        ("weights", FULL, ["method", "precision"]),
        ("gradients", FULL, ["method"]),
        ("gradients", TrainConfig(), ["lora_rank", "lora_targets"]),
        ("adapters", TrainConfig(lora_rank=1), ["lora_targets"]),
        ("adapters", TrainConfig(lora_targets="q_v"), ["lora_rank"]),
        ("weights", TrainConfig(quantization="nf4", double_quant=True), [None]),
        ("activations", TrainConfig(micro_batch_size=1), ["checkpointing", "seq_len"]),
        (
            "something new",
            TrainConfig(micro_batch_size=1, seq_len=1, checkpointing="offload"),
            [None],
        ),
    ],
)
def test_advice_follows_the_dominant_term(
    term: str, config: TrainConfig, knobs: list[str | None]
) -> None:
    terms = (Term(name="small", gib=1.0, share=0.1), Term(name=term, gib=9.0, share=0.9))
    changes = advise(config, terms)
    assert [change.knob for change in changes] == knobs
    for change in changes:
        if change.knob:
            assert change.current == getattr(config, change.knob)
            replace(
                config,
                **{change.knob: change.suggested}
                | ({"lora_rank": 16} if change.knob == "method" else {}),
            )


def test_advice_is_not_repeated_for_two_large_terms() -> None:
    terms = (Term(name="activations", gib=5.0, share=0.5), Term(name="logits", gib=4.0, share=0.4))
    assert [change.knob for change in advise(TrainConfig(), terms)] == [
        "micro_batch_size",
        "seq_len",
        "loss",
    ]


def test_markdown_of_a_study() -> None:
    text = oom_report(summary()).markdown()
    assert text.startswith(
        "# 2 of 12 trials ran out of memory: activations hold 83 % of the memory"
    )
    assert "Study `h200-mistral-7b`" in text
    assert "## Trial 2: oom" in text
    assert "Requested 2.00 GiB on top of 131.0 GiB allocated, 131.9 GiB reserved" in text
    assert "`activations` 108.8 GiB (83%)" in text
    assert (
        "| 4 | `lora r16 16x1024 bf16_mixed ckpt-every_2 adamw_torch_fused` | refused | – |" in text
    )


def test_markdown_without_any() -> None:
    text = oom_report(study(row(0, Outcome.OK))).markdown()
    assert text == "# No trial of 1 ran out of memory, and none was refused.\n\nStudy `s`\n"


def test_markdown_when_nothing_fits() -> None:
    assert (
        "no configuration of this study fits"
        in oom_report(study(row(0, Outcome.OOM, oom=oom_detail()))).markdown()
    )


def test_hostile_text_stays_in_code_spans() -> None:
    hostile = replace(
        study(row(0, Outcome.OOM, reason=HOSTILE, log=HOSTILE, oom=oom_detail())), study=HOSTILE
    )
    detail = replace(oom_detail(), terms_gib={HOSTILE: 9.0, "weights": 1.0})
    hostile = replace(hostile, trials=(replace(hostile.trials[0], oom=detail),))
    span = code_span(HOSTILE)
    assert "\n" not in span
    text = oom_report(hostile).markdown()
    assert text.count(span) == 4
    assert "<script>" not in text.replace(span, "") and "[x](" not in text.replace(span, "")
    assert text.splitlines()[0].startswith("# 1 of 1 trials ran out of memory: \\`a\\` \\|")


def test_the_answer_is_the_cause_and_the_first_change() -> None:
    first, *rest = oom_report(summary()).answer()
    assert first == (
        "2 of 12 trials ran out of memory: activations hold 83 % of the memory. "
        "First change: micro_batch_size 4 → 2."
    )
    assert rest[0].startswith("Fewer sequences at a time; more micro batches")
    assert rest[1] == ("2 more trials were predicted not to fit, and refused before launch.")
    assert rest[2].startswith("Closest to fitting: trial 2, lora r16 4x2048 ")
    assert rest[2].endswith("missed the limit of 132.0 GiB by 0.8 % (1.00 GiB) in backward.")
    assert rest[3].startswith("A similar configuration fits: trial ") and len(rest) == 4


def test_the_answer_says_the_range_of_the_largest_share_and_changes_what_is_closest() -> None:
    """Logits are the largest in two configurations of three; the closer one gets its remedy."""
    detail = oom_detail()

    def ran_out(
        number: int, terms: dict[str, float], config: TrainConfig, gib: float
    ) -> TrialRecord:
        oom = replace(detail, terms_gib=terms, allocated_gib=gib)
        return row(number, Outcome.OOM, config=config, oom=oom)

    rows = (
        ran_out(0, {"logits": 6.0, "weights": 4.0}, TrainConfig(micro_batch_size=32), 400.0),
        ran_out(1, {"logits": 5.0, "weights": 4.0}, TrainConfig(loss="chunked"), 140.0),
        ran_out(2, {"weights": 9.0, "logits": 1.0}, TrainConfig(lora_rank=32), 131.0),
    )
    report = oom_report(study(*rows))
    assert report.cause is not None and report.cause.shares == (pytest.approx(5 / 9), 0.6)
    assert report.answer()[0] == (
        "3 of 3 trials ran out of memory: logits hold 56 to 60 % of the memory. "
        "First change: micro_batch_size 8 → 4."
    )
    assert report.answer()[2].startswith("Closest to fitting: trial 2, ")


def test_without_a_known_cause_the_answer_is_the_least_excess() -> None:
    refused = row(0, Outcome.REFUSED, margin=0.5, limit_gib=100.0)
    assert (
        oom_report(study(refused))
        .answer()[0]
        .startswith(
            "1 of 1 trials was refused before launch: the closest missed the limit by 50.0 % "
            "(50.0 GiB). First change: "
        )
    )
    assert oom_report(study(row(0, Outcome.OOM))).headline() == "1 of 1 trials ran out of memory"
    smallest = TrainConfig(
        micro_batch_size=1,
        seq_len=1,
        checkpointing="offload",
        quantization="nf4",
        double_quant=True,
    )
    detail = replace(oom_detail(), terms_gib={"weights": 9.0})
    (answer, *_) = oom_report(study(row(0, Outcome.OOM, config=smallest, oom=detail))).answer()
    assert answer.endswith(
        "First change: no setting reduces this memory: use a smaller model, or a GPU with more "
        "memory."
    )


def test_data_is_json_and_complete() -> None:
    data = json.loads(json.dumps(json_data(oom_report(summary()))))
    assert (data["schema_version"], data["oom"], data["refused"], data["trials"]) == (1, 2, 2, 12)
    first = data["entries"][0]
    assert first["config"]["micro_batch_size"] == 4
    assert first["terms"][0]["name"] == "activations"
    assert first["nearest"] and first["changes"]
