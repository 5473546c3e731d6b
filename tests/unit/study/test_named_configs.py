"""A suite, with recorded probes: each case as its own subject, what becomes of it, and how it is
compared.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import Cancelled, UsageError
from autotune.core.json_view import json_data
from autotune.core.other_trainer import OtherTrainer
from autotune.core.probe_types import Evidence, Outcome, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.study_spec import NamedConfig, Published, StudySpec
from autotune.problem.workload import Workload
from autotune.study.named_configs import (
    ConfigResult,
    agreement,
    cases,
    probe_configs,
    to_config_result,
    with_doubts,
)
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.factories import measurement, result
from tests.helpers.replay import ReplayProber, machine
from tests.helpers.sessions import subject_of

TASK = replace(
    subject_of(),
    workload=Workload(examples=1000, lengths=Lengths.of([512, 256], "given"), global_batch=32),
)
PLAIN = TrainConfig()


def spec(*configs: NamedConfig, **changes: Any) -> StudySpec:
    return StudySpec(**{"model": "demo-3m", "gpu": "cpu", "configs": configs} | changes)


def of(
    outcome: Outcome = Outcome.OK,
    published: Published | None = None,
    *,
    config: TrainConfig = PLAIN,
    accumulation: int = 1,
    differs: str | None = None,
    excluded: str | None = None,
    **values: Any,
) -> ConfigResult:
    case = NamedConfig(
        name="a|b",
        published=published,
        accumulation=accumulation,
        differs=differs,
        excluded=excluded,
    )
    return ConfigResult(
        case=case, config=config, outcome=outcome, evidence=Evidence.MEASURED, **values
    )


def test_a_case_has_full_rows_its_own_batch_and_model() -> None:
    made = spec(
        NamedConfig(name="one", knobs={"micro_batch_size": 2, "seq_len": 128}, accumulation=3),
        NamedConfig(name="two", knobs={"packing": True}, model="qwen2.5-0.5b"),
        pins={"checkpointing": "none", "micro_batch_size": 4},
    )
    (_, first, one), (_, second, two) = cases(made, TASK)
    assert (first.micro_batch_size, second.micro_batch_size) == (2, 4)
    assert first.checkpointing == second.checkpointing == "none"
    assert (one.workload.global_batch, two.workload.global_batch) == (6, 4)
    assert (
        one.workload.lengths == Lengths.constant(128)
        and two.workload.lengths == TASK.workload.lengths
    )
    assert one.model == TASK.model and "Qwen2.5-0.5B" in two.model.name
    assert one.workload.examples == 1000


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"lora_rnk": 8},
            "odd: there is no setting 'lora_rnk'; did you mean 'lora_rank' or 'lora_kernels' or"
            " 'lora_targets'?",
        ),
        ({"precision": "bf17"}, "odd: precision is one of"),
    ],
)
def test_a_case_that_cannot_be_is_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        list(cases(spec(NamedConfig(name="odd", knobs=knobs)), TASK))
    assert str(caught.value).startswith(said) and caught.value.remedy


def test_speeds_are_of_whole_rows_and_memory_of_the_whole_process() -> None:
    """Two rows of 1,024 tokens in 0.5 s, three times a step, and 0.1 s for the rest: 6 rows in 1.6
    s.
    """
    config = TrainConfig(micro_batch_size=2, seq_len=1024)
    (case, _, task), *_ = cases(
        spec(NamedConfig(name="x", knobs=config.as_dict(), accumulation=3)), TASK
    )
    found = measurement(
        0.5, rest_s=(0.1,), peak_reserved_gib=20.0, managed_gib=1.5, context_gib=0.5
    )
    made = to_config_result(case, config, task, result(config, measurement=found))
    assert made.samples_per_s == pytest.approx(6 / 1.6)
    assert made.tokens_per_s == pytest.approx(6 * 1024 / 1.6)
    assert (made.step_time_s, made.peak_reserved_gib) == (pytest.approx(1.6), 20.0)
    assert (made.with_context_gib, made.evidence, made.outcome) == (
        22.0,
        Evidence.MEASURED,
        Outcome.OK,
    )
    assert made.interval == pytest.approx((6 * 1024 / 1.6 / 1.01, 6 * 1024 / 1.6 / 0.99))
    full = replace(found, peak_reserved_gib=0.95 * found.limit_gib)
    tight = to_config_result(case, config, task, result(config, measurement=full))
    assert (made.tight, tight.tight, tight.reason) == (False, True, "5% of the memory is free")
    hidden = to_config_result(
        case, config, task, result(config, measurement=replace(found, context_gib=None))
    )
    assert hidden.with_context_gib is None
    carried = replace(task, carried=SpeedTransfer(products=0.5, bytes=0.5, error=0.1))
    assert to_config_result(case, config, carried, result(config)).evidence is Evidence.PROJECTED


def test_a_packed_row_has_its_examples() -> None:
    """512 and 256 tokens fill rows of 1,024 as two and as four: 2.67 examples each, and whole rows
    count.
    """
    config = TrainConfig(micro_batch_size=2, packing=True)
    (case, _, task), *_ = cases(spec(NamedConfig(name="x", knobs=config.as_dict())), TASK)
    found = measurement(0.5, rest_s=())
    made = to_config_result(case, config, task, result(config, measurement=found))
    assert made.tokens_per_s == pytest.approx(2 * 1024 / 0.5)
    assert made.samples_per_s == pytest.approx(2 * 8 / 3 / 0.5, rel=0.01)


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.CRASH])
def test_what_failed_has_its_reason_and_no_numbers(outcome: Outcome) -> None:
    failed = result(PLAIN, outcome, reason="it did not work", measurement=measurement())
    made = to_config_result(NamedConfig(name="x"), PLAIN, TASK, failed)
    assert (made.outcome, made.reason, made.tokens_per_s) == (outcome, "it did not work", None)


NUMBERS = {
    "tokens_per_s": 1100.0,
    "samples_per_s": 3.0,
    "step_time_s": 2.0,
    "peak_reserved_gib": 10.0,
}
NUMBERS |= {"peak_allocated_gib": 9.0}


@pytest.mark.parametrize(
    ("made", "pairs"),
    [
        (of(published=Published(tokens_per_s=1000.0), **NUMBERS), {"tokens/s": (1000.0, 1100.0)}),
        (
            of(published=Published(samples_per_s=2.0, s_per_step=4.0, peak_gib=8.0), **NUMBERS),
            {"samples/s": (2.0, 3.0), "s/step": (4.0, 2.0), "peak GiB": (8.0, 9.0)},
        ),
        (of(published=Published(reserved_gib=8.0), **NUMBERS), {"reserved GiB": (8.0, 10.0)}),
        (
            of(published=Published(reserved_gb=8.0), **NUMBERS),
            {"reserved GB": (8.0, 10.73741824)},
        ),
        (
            of(accumulation=4, published=Published(s_per_micro_batch=0.4), **NUMBERS),
            {"s/micro batch": (0.4, 0.5)},
        ),
        (
            of(published=Published(process_gib=20.0), with_context_gib=10.0),
            {"whole GiB": (20.0, 10.0)},
        ),
        (
            of(published=Published(outcome="oom"), tight=True, **NUMBERS),
            {"outcome": ("oom", "tight")},
        ),
        (
            of(published=Published(peak_gb=20.0), with_context_gib=10.0),
            {"whole GB": (20.0, 10.73741824)},
        ),
        (of(published=Published(peak_gb=20.0)), {}),
        (of(Outcome.OOM, Published(tokens_per_s=9.0)), {"outcome": ("ok", "oom")}),
        (of(published=Published(outcome="oom"), **NUMBERS), {"outcome": ("oom", "ok")}),
        (of(Outcome.CRASH), {}),
    ],
)
def test_what_was_published_is_compared_number_by_number(
    made: ConfigResult, pairs: dict[str, Any]
) -> None:
    assert made.known_pairs() == pairs


def test_a_row_says_everything_in_words() -> None:
    published = Published(tokens_per_s=1000.0, peak_gib=8.0)
    assert of(published=published, **NUMBERS).cells() == (
        "a|b",
        PLAIN.label(),
        "fits",
        "1,100 [measured]",
        "10.0",
        "tokens/s 1,000, here 1,100 (+10%); peak GiB 8, here 9 (+12%)",
    )
    bare = of(Outcome.OOM, reason="in backward").cells()
    assert bare[2:] == ("does not fit: in backward", "–", "–", "–")  # nothing was published of it
    near = of(tight=True, reason="it is near", interval=(1000.0, 1200.0), **NUMBERS).cells()
    assert near[2:4] == ("tight: it is near", "1,100 (1,000 to 1,200) [measured]")
    assert of(Outcome.CRASH).cells()[2:] == ("crash", "–", "–", "–")
    estimated = of(interval_gib=(9.5, 10.5), **NUMBERS)
    assert estimated.cells()[4] == "10.0 (9.5 to 10.5)"
    unknown = of(Outcome.REFUSED, Published(tokens_per_s=1000.0, peak_gib=8.0))
    assert unknown.cells()[-1] == "tokens/s 1,000; peak GiB 8" and unknown.known_pairs() == {}
    slow = of(published=Published(samples_per_s=0.01234), samples_per_s=100.0)
    assert slow.cells()[-1].startswith("samples/s 0.0123, here 100 (+")


def test_a_published_number_is_inside_or_outside_with_the_reason() -> None:
    """A time of 2 s for 1,100 tokens/s may be 20 % shorter or 10 % longer, as the speed may be
    higher or lower.
    """
    span = {"interval": (1000.0, 1375.0), "interval_gib": (9.5, 10.5)}
    theirs = Published(tokens_per_s=1400.0, s_per_step=2.15, peak_gib=9.4, reserved_gb=10.0)
    made = of(published=theirs, differs="it sleeps", **span, **NUMBERS)
    told = {
        name: (pair.interval and tuple(round(end, 3) for end in pair.interval), pair.inside)
        for name, pair in made.published.items()
    }
    assert told == {
        "tokens/s": ((1000.0, 1375.0), False),
        "s/step": ((1.6, 2.2), True),
        "peak GiB": ((8.55, 9.45), True),
        "reserved GB": ((10.201, 11.274), False),
    }
    assert made.comparison() == [
        ("a|b", "tokens/s", "1,400", "1,100 (1,000 to 1,375)", "outside", "it sleeps"),
        ("a|b", "s/step", "2.15", "2 (1.6 to 2.2)", "inside", ""),
        ("a|b", "peak GiB", "9.4", "9 (8.55 to 9.45)", "inside", ""),
        ("a|b", "reserved GB", "10", "10.7 (10.2 to 11.3)", "outside", "it sleeps"),
    ]
    assert made.cells()[-1].startswith("tokens/s 1,400, here 1,100 (-21%), outside; s/step 2.15")
    unknown = replace(made, case=replace(made.case, differs=None)).comparison()
    assert [row[-1] for row in unknown] == ["the cause is not known", "", "", unknown[0][-1]]
    counted = replace(made, case=replace(made.case, trainer=OtherTrainer(keeps_logits=True)))
    assert [row[-1] for row in counted.comparison()] == [
        *("it sleeps", "", ""),
        "the cause is not known",
    ]
    assert json_data(made)["differs"] == "it sleeps" and json_data(made)["doubt"] is None


def test_what_is_not_estimated_says_why() -> None:
    theirs = Published(tokens_per_s=9.0)
    (left_out,) = of(Outcome.REFUSED, theirs, excluded="it is in GPTQ").comparison()
    assert left_out == ("a|b", "tokens/s", "9", "–", "–", "it is in GPTQ")
    (refused,) = of(Outcome.REFUSED, theirs, reason="no formula").comparison()
    assert refused[-1] == "no formula"
    outcome, speed = of(Outcome.OOM, theirs, differs="it is smaller").comparison()
    assert outcome[1:] == ("outcome", "ok", "oom", "outside", "it is smaller")
    assert speed[3:] == ("–", "–", "does not fit")
    slow = replace(of(published=theirs, differs="it sleeps", **NUMBERS), tokens_per_s=None)
    assert slow.comparison()[0][3:] == ("–", "–", "it sleeps")
    near = of(published=Published(outcome="oom"), tight=True, reason="it is near", **NUMBERS)
    assert near.comparison()[0][2:] == ("oom", "tight", "–", "it is near")


H100 = resolve_device("h100")
LLAMA = resolve_model("llama-3.1-8b")


def doubts(*results: ConfigResult) -> list[str | None]:
    return [one.doubt for one in with_doubts(list(results), [LLAMA] * len(results), H100)]


@pytest.mark.parametrize(
    "published",
    [
        {"tokens_per_s": 16_384.0},
        {"samples_per_s": 2.0},
        {"s_per_step": 4.0},
        {"s_per_micro_batch": 1.0},
    ],
)
def test_a_speed_above_the_peak_is_doubted_in_every_unit(published: dict[str, float]) -> None:
    """Two rows of 8,192 tokens in a second by full fine-tuning: 6 FLOPs for each of 7.5 billion
    parameters, and 12 x 4,096 x 4,096 for attention in each of 32 layers.
    """
    config = TrainConfig(method="full", micro_batch_size=2, seq_len=8192)
    flops = 16_384 * (6 * 7.505e9 + 12 * 4096 * 4096 * 32)
    within = {"config": config, "accumulation": 4}
    (doubt,) = doubts(of(published=Published(**published), **within))
    assert flops == pytest.approx(844e12, rel=0.01) and doubt is None  # the peak is 989
    times = {name: value / 1.25 if name[0:2] == "s_" else value * 1.25
             for name, value in published.items()}  # fmt: skip
    (doubt,) = doubts(of(published=Published(**times), **within))
    assert doubt == "1,054 TFLOP/s on each GPU, above the peak of 989"
    two = replace(config, num_gpus=2, sharding="ddp")
    if "tokens_per_s" in times or "samples_per_s" in times:
        assert doubts(of(published=Published(**times), config=two)) == [None]


def test_adapters_that_are_slower_than_full_fine_tuning_are_doubted() -> None:
    full = TrainConfig(method="full", micro_batch_size=2, seq_len=8192)
    lora = TrainConfig(micro_batch_size=2, seq_len=8192)
    rows = [
        of(published=Published(s_per_micro_batch=4.7), config=full),
        of(published=Published(s_per_micro_batch=6.4), config=lora),
        of(published=Published(s_per_micro_batch=4.6), config=lora),
        of(published=Published(s_per_micro_batch=6.4), config=replace(lora, seq_len=4096)),
        of(published=Published(peak_gib=6.4), config=lora),
    ]
    said = "full fine-tuning is published as 1.4 times as fast"
    assert doubts(*rows) == [None, said, None, None, None]
    assert doubts(*rows[1:]) == [None] * 4
    span = {"interval": (1000.0, 1200.0)}
    slow = with_doubts(
        [rows[0], replace(rows[1], **span, **NUMBERS)], [LLAMA] * 2, H100
    )[1]  # fmt: skip
    assert slow.comparison()[0][-1] == said
    explained = replace(slow, case=replace(slow.case, differs="in fp32"))
    assert explained.comparison()[0][-1] == f"{said}; in fp32"


def test_what_was_published_is_summed_up() -> None:
    """Two verdicts of four are definite, one of them wrong; the speed of one of two lies in its
    interval.
    """
    span = {"interval": (1000.0, 1200.0)}
    found = [
        of(published=Published(tokens_per_s=1150.0, peak_gib=10.0), **span, **NUMBERS),
        of(published=Published(samples_per_s=2.0), tight=True, **span, **NUMBERS),
        of(published=Published(outcome="oom"), tight=True, **NUMBERS),
        of(Outcome.OOM, Published(tokens_per_s=9.0)),
        of(Outcome.REFUSED, Published(tokens_per_s=9.0)),
        of(**span, **NUMBERS),
    ]
    assert agreement(found) == (
        "Compared with published numbers: 4 verdicts, of which 1 wrong and 2 too close to tell; 2"
        " published speeds, 1 of them in the"
        " predicted interval; memory 10.0% off (median) and 10.0% at worst."
    )
    assert agreement(found[-2:]) == agreement([]) == ""


# --- probing


class Worker(ReplayProber):
    device = "cpu"


Probe = Callable[..., tuple[list[ConfigResult], Worker, list[str]]]


@pytest.fixture
def probe(tmp_path: Path) -> Any:
    def run(
        made: StudySpec, answers: Any = None, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[ConfigResult], Worker, list[str]]:
        worker, said = Worker(answers or machine(limit_gib=100.0)), list[str]()
        store: Any = ProbeStore(f"sqlite:///{tmp_path / 'a.db'}")
        prober: Any = worker
        try:
            found = probe_configs(
                made,
                TASK,
                prober,
                store,
                tmp_path,
                memory_gib=80.0,
                say=said.append,
                should_stop=should_stop,
            )
        finally:
            store.close()
        return found, worker, said

    return run


CASES = tuple(
    NamedConfig(name=f"of {size}", knobs={"micro_batch_size": size}, accumulation=5)
    for size in (1, 2, 4)
)


def test_each_case_is_probed_once_with_the_steps_of_a_confirmation(
    probe: Probe, tmp_path: Path
) -> None:
    found, worker, said = probe(spec(*CASES, headroom=0.1, seed=7))
    assert [one.case.name for one in found] == ["of 1", "of 2", "of 4"]
    assert said == [f"{one.case.name}: {one.config.label()}" for one in found]
    for request in worker.requests:
        assert (request.micro_steps, request.min_timed_s, request.device) == (4, 2.0, "cpu")
        assert (request.memory_gib, request.headroom, request.seed) == (80.0, 0.1, 7)
        assert (request.trainer, request.weights, request.model) == (
            "transformers",
            None,
            TASK.model.config,
        )
    data = json.loads((tmp_path / "suite.json").read_text())
    assert [row["name"] for row in data] == ["of 1", "of 2", "of 4"]
    assert data[0]["config"] == found[0].config.as_dict() and data[0]["published"] == {}
    head, rule, *rows = (tmp_path / "suite.md").read_text().splitlines()
    assert (
        head == "| case | configuration | verdict | tokens/s | GiB | published |"
        and rule == "|---|---|---|---|---|---|"
    )
    assert len(rows) == 3 and rows[0].startswith("| of 1 | lora r16")
    again, worker, _ = probe(spec(*CASES, headroom=0.1, seed=7))
    assert again == found and worker.requests == []


def test_a_bar_in_a_name_does_not_divide_a_cell(probe: Probe, tmp_path: Path) -> None:
    probe(spec(NamedConfig(name="a|b")))
    assert (tmp_path / "suite.md").read_text().splitlines()[2].startswith("| a\\|b | ")


def test_a_suite_that_is_stopped_keeps_what_it_has(probe: Probe, tmp_path: Path) -> None:
    count = iter([False, False, True])
    found, _, said = probe(spec(*CASES), should_stop=lambda: next(count))
    assert len(found) == len(said) == 2 == len(json.loads((tmp_path / "suite.json").read_text()))

    def cancel(request: ProbeRequest) -> ProbeResult:
        raise Cancelled

    found, _, said = probe(
        spec(CASES[0], NamedConfig(name="new", knobs={"seq_len": 64}), CASES[1]), cancel
    )
    assert len(found) == 1 and len(said) == 2


def test_what_cannot_be_probed_is_not(probe: Probe) -> None:
    odd = (
        NamedConfig(name="GPTQ", excluded="its base is of GPTQ", published=Published(peak_gib=8.0)),
        NamedConfig(name="two", knobs={"num_gpus": 2, "sharding": "fsdp2"}),
    )
    found, worker, _ = probe(spec(*odd, CASES[0]))
    assert [one.verdict for one in found] == ["not predicted", "refused", "fits"] and len(
        worker.requests
    ) == 1
    assert (
        found[0].reason == "its base is of GPTQ"
        and found[1].reason
        and "autotune run --gpus" in found[1].reason
    )


def test_a_model_may_differ_from_the_catalogues(probe: Probe) -> None:
    _, worker, _ = probe(spec(replace(CASES[0], model_overrides={"num_hidden_layers": 2})))
    assert worker.requests[0].model == TASK.model.config | {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "remote code is never run"),
        ({"quantization_config": {}}, "describes the files of a checkpoint"),
        ({"hidden_size": "wide"}, "no positive integer hidden_size"),
        ({"num_hidden_layer": 2}, "'num_hidden_layer'; did you mean 'num_hidden_layers'"),
        (
            {"rope_parameters": {"rope_thet": 2.0}},
            "'rope_parameters.rope_thet'; did you mean 'rope_parameters.rope_th",
        ),
    ],
)
def test_overrides_are_checked_like_a_config_of_somebody_else(
    overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        list(cases(spec(NamedConfig(name="odd", model_overrides=overrides)), TASK))


def test_overrides_name_no_kernels() -> None:
    """An attention implementation may be a Hub repository whose code transformers would run."""
    odd = NamedConfig(
        name="odd",
        model_overrides={"attn_implementation": "somebody/kernels", "_name_or_path": "x"},
    )
    ((_, _, task),) = cases(spec(odd), TASK)
    assert task.model.config == TASK.model.config and task.model.weights is None


def test_a_case_that_the_model_or_trainer_cannot_do_is_refused(probe: Probe) -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        if request.config.micro_batch_size == 2:
            raise UsageError("this model has no such layers", remedy="none")
        return machine(limit_gib=100.0)(request)

    found, worker, _ = probe(spec(*CASES[:2], CASES[2]), answer)
    assert [one.outcome for one in found] == [Outcome.OK, Outcome.REFUSED, Outcome.OK]
    assert (
        found[1].reason == "this model has no such layers"
        and found[1].evidence is Evidence.MEASURED
    )
    assert len(worker.requests) == 3
