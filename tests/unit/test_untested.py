"""Each row of core/untested.yaml is valid, refuses its pair with its message, and is in
docs/knobs.md.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.images import picture_of
from autotune.core.knobs import KNOBS
from autotune.core.objective import Objective
from autotune.core.parallelism import STRATEGIES, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.untested import CONTEXTS, UntestedPair, untested, untested_in, untested_pairs
from autotune.export.formats import FORMATS, export_all, usual_formats
from autotune.problem.constraints import (
    Narrowing,
    narrow_packing,
    narrow_to_images,
    narrow_to_model,
    narrow_to_objective,
    narrow_to_trl,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.problem.workload import Workload
from tests.unit.export.test_script import recipe

H100 = resolve_device("h100")
MISTRAL = resolve_model("mistral-7b")
SEEING = resolve_model("smolvlm")
WORKLOAD = Workload(examples=900, lengths=Lengths.constant(512), global_batch=32)
PAIRS = untested_pairs()

MEMBERS = {
    "attention": KNOBS["attention"].choices,
    "format": tuple(FORMATS),
    "images": ("",),
    "model_type": ("llama", "bloom"),
    "objective": tuple(Objective),
    "several_gpus": ("",),
    "sharding": STRATEGIES,
    "trainer": ("transformers", "trl"),
}
OPTIONS = {
    "eval_share": (True,),
    "gpus": (True,),
    "images": (True,),
    "objective": tuple(Objective),
    "quality": (True,),
    "trainer": ("transformers", "trl"),
}
# a use of each option that has the value `true`
USED = {"eval_share": 0.1, "gpus": 2, "quality": True}


def name_of(pair: UntestedPair) -> str:
    return f"{pair.setting}-{pair.context}-{'-'.join(map(str, (*pair.values, *pair.among)))}"


@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_a_row_names_what_there_is(pair: UntestedPair) -> None:
    assert set(MEMBERS) == set(CONTEXTS)
    assert pair.values and not (pair.among and pair.tested)
    assert set(pair.among) <= set(MEMBERS[pair.context])
    assert pair.context == "model_type" or set(pair.tested) <= set(MEMBERS[pair.context])
    assert pair.feature.endswith((" is", " are"))

    if pair.setting in KNOBS:
        for value in pair.values:
            KNOBS[pair.setting].check(value)
    else:
        assert set(pair.values) <= set(OPTIONS[pair.setting])


def test_a_pair_has_one_row() -> None:
    for context, members in MEMBERS.items():
        for member in members:
            pairs = [
                (pair.setting, value)
                for pair in untested_in(context, member)
                for value in pair.values
            ]
            assert len(pairs) == len(set(pairs)), (context, member)


def test_a_message_is_a_plain_sentence() -> None:
    assert (
        untested("cuda_graphs", "micro_batch", "objective", "dpo")
        == "CUDA graphs are untested with dpo"
    )
    assert untested("cuda_graphs", "micro_batch", "objective", "sft") is None
    assert untested("cuda_graphs", "none", "objective", "dpo") is None
    assert untested("trainer", "trl", "several_gpus") == (
        "--trainer trl is untested on several GPUs: TRL's trainers are probed in one process"
    )
    assert (
        untested("packing", True, "trainer", "trl")
        == "packing is untested with trl: TRL joins packed sequences into one"
    )
    reason = "sharded training computes in bf16 with fp32 master weights"
    assert (
        untested("precision", "fp32", "sharding", "zero1")
        == f"fp32 is untested under zero1: {reason}"
    )
    assert untested("precision", "fp32", "sharding", "fsdp2") is None
    graphs = untested("cuda_graphs", "micro_batch", "model_type", "gpt2")
    assert (
        graphs
        == "CUDA graphs are untested on gpt2: the model's forward pass may read values on the host"
    )


# --- each row is refused


def narrowed(
    narrow: Callable[[Narrowing], None], pair: UntestedPair, value: Any, **others: Any
) -> list[str]:
    """The reasons for which a space of the value and another loses the value."""
    other = next(
        choice
        for choice in (KNOBS[pair.setting].default, *KNOBS[pair.setting].choices)
        if choice not in pair.values
    )
    space = SearchSpace.of(**{pair.setting: [other, value]}, **others)
    narrowing = Narrowing(space=space, reserve=space)
    narrow(narrowing)
    assert (
        narrowing.space.choices(pair.setting) == narrowing.reserve.choices(pair.setting) == (other,)
    )
    return [one.reason for one in narrowing.removals if one.knob == pair.setting]


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        act()
    assert caught.value.remedy
    return str(caught.value)


def of_model_type(pair: UntestedPair, value: Any, member: str) -> list[str]:
    model = replace(MISTRAL, config=MISTRAL.config | {"model_type": member})
    return narrowed(lambda narrowing: narrow_to_model(narrowing, model, WORKLOAD), pair, value)


def of_objective(pair: UntestedPair, value: Any, member: str) -> list[str]:
    return narrowed(
        lambda narrowing: narrow_to_objective(narrowing, Objective(member)), pair, value
    )


def of_trainer(pair: UntestedPair, value: Any, member: str) -> list[str]:
    return narrowed(lambda narrowing: narrow_to_trl(narrowing, installed=False), pair, value)


def of_attention(pair: UntestedPair, value: Any, member: str) -> list[str]:
    others = {"attention": member, "seq_len": 1024, "micro_batch_size": 8}
    return narrowed(lambda narrowing: narrow_packing(narrowing, WORKLOAD), pair, value, **others)


def of_images(pair: UntestedPair, value: Any, member: str) -> list[str]:
    if pair.setting in KNOBS:
        return narrowed(lambda narrowing: narrow_to_images(narrowing, WORKLOAD), pair, value)
    given = {pair.setting: USED.get(pair.setting, value)}
    spec = StudySpec(model=SEEING.short, space="lora", image_size="896x672", **given)
    return [refused(lambda: set_up(spec, Target(device=H100)))]


def of_several_gpus(pair: UntestedPair, value: Any, member: str) -> list[str]:
    spec = StudySpec(model="mistral-7b", gpus=2, **{pair.setting: value})
    return [refused(lambda: set_up(spec, H100))]


def of_sharding(pair: UntestedPair, value: Any, member: str) -> list[str]:
    config = TrainConfig(**{"loss": "full", pair.setting: value})
    return [Parallelism(num_gpus=2, strategy=member).refusal(config) or ""]


def of_format(pair: UntestedPair, value: Any, member: str) -> list[str]:
    made = recipe(TrainConfig())
    if pair.setting == "images":
        picture = picture_of(SEEING.config, 896, 672)
        workload = replace(made.workload, pictured=((2048, (picture,)),))
        made = replace(made, model=SEEING, workload=workload)
    else:
        made = replace(made, workload=replace(made.workload, objective=Objective(value)))
    assert member not in usual_formats(made)
    return [refused(lambda: export_all(made, [member]))]


REFUSALS: dict[str, Callable[[UntestedPair, Any, str], list[str]]] = {
    "attention": of_attention,
    "format": of_format,
    "images": of_images,
    "model_type": of_model_type,
    "objective": of_objective,
    "several_gpus": of_several_gpus,
    "sharding": of_sharding,
    "trainer": of_trainer,
}


@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_each_untested_pair_is_refused_with_the_message_of_its_row(pair: UntestedPair) -> None:
    members = [member for member in MEMBERS[pair.context] if pair.applies(member)]
    assert members
    for member in members:
        for value in pair.values:
            reasons = REFUSALS[pair.context](pair, value, member)
            assert any(pair.sentence(member, value) in reason for reason in reasons), (
                member,
                value,
                reasons,
            )


@pytest.mark.parametrize(
    ("objective", "formats"), [(Objective.DPO, 2), (Objective.CLASSIFICATION, 5)]
)
def test_a_new_format_is_untested_with_other_objectives(objective: Objective, formats: int) -> None:
    assert (
        sum(untested("objective", objective, "format", name) is None for name in FORMATS) == formats
    )
    assert untested("objective", objective, "format", "a new one")
    assert untested("objective", Objective.SFT, "format", "a new one") is None


# --- each row is documented


def documented(pair: UntestedPair) -> str:
    """The line of a row in the table of docs/knobs.md."""
    values = ", ".join("true" if value is True else value for value in pair.values)
    members = f"all but {', '.join(pair.tested)}" if pair.tested else ", ".join(pair.among)
    context = pair.context.replace("_", " ").replace("gpus", "GPUs")
    cells = (f"{pair.setting}: {values}", context, members, pair.reason)
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def test_the_untested_pairs_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "knobs.md").read_text()
    table = page.partition("## Untested pairs\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert lines == [documented(pair) for pair in PAIRS], "\n" + "\n".join(map(documented, PAIRS))
