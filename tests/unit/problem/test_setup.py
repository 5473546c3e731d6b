"""From a spec to a task: names are resolved, the space is narrowed, and study names are never
paths.
"""

import importlib.util
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError

import pytest

from autotune.catalog import EXAMPLE, describe_price, resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import adapt_to_layers, known_shape, open_reserve, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.problem.task import BASELINE

CPU = resolve_device("cpu")
H200 = resolve_device("h200")
HERE = Target(device=H200)  # probes run on this machine


@pytest.fixture
def installed(monkeypatch):
    """Pretends that these packages are installed, and the others that are asked for are not."""
    real = importlib.util.find_spec

    def pretend(*names):
        def find(name, package=None):
            if name in ("flash_attn", "bitsandbytes", "liger_kernel", "trl"):
                return object() if name in names else None
            return real(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    pretend("bitsandbytes")
    return pretend


# --- the task


def test_a_task(installed):
    setup = set_up(StudySpec(model="mistral-7b"), HERE)
    task = setup.task
    assert task.study == "h200-sxm-mistral-7b-v0.3-default"
    assert (task.model.short, task.device, task.space.name) == ("Mistral-7B-v0.3", H200, "default")
    assert (task.price.provider, task.price.usd_per_hour) == ("runpod", 3.59)
    assert task.workload.lengths.source == "assumed" and task.workload.examples_assumed
    assert {removal.knob for removal in setup.removals} == {
        "attention",
        "precision",
        "seq_len",
        "lora_rank",
        "quantization",
        "packing",
    }
    assert "attention flash_attention_2: flash-attn is not installed" in map(str, setup.removals)
    assert task.space.knob("quantization").values == ("none",)
    assert setup.reserve.knob("quantization").values == ("none", "fp8", "int8", "nf4")
    assert setup.reserve.knob("lora_rank").values == (16, 32, 64)  # a floor, not a reserve
    opened = open_reserve(setup)
    assert opened.task.space == setup.reserve
    assert replace(opened.task, space=task.space) == task
    # all examples have one length, and no padding
    assert task.baselines[0] == replace(BASELINE, padding="longest")
    assert [config.micro_batch_size for config in task.baselines] == [8, 4, 2, 1]


def test_a_cpu_loses_what_it_cannot_do(installed):
    setup = set_up(StudySpec(model="demo-3m"), CPU)
    assert setup.task.study == "cpu-demo-3m-cpu"
    # the longest of its space
    assert setup.task.workload.lengths == Lengths.constant(256, "assumed")
    with pytest.raises(
        UsageError,
        match="no value of precision is left in the space 'cpu': fp16_mixed: fp16 does not",
    ):
        set_up(StudySpec(model="demo-3m", pins={"precision": "fp16_mixed"}), CPU)


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16_mixed"), (False, "fp32")])
@pytest.mark.parametrize("space", ["cpu", "default", "everything", "full", "lora", "qlora"])
def test_every_shipped_space_has_a_precision_on_either_kind_of_processor(
    installed, monkeypatch: pytest.MonkeyPatch, space: str, bf16: bool, precision: str
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: bf16)
    installed("bitsandbytes")
    task = set_up(StudySpec(model="demo-3m", space=space), CPU).task
    assert precision in task.space.choices("precision")
    assert {config.precision for config in task.baselines} == {precision}


@pytest.mark.parametrize(
    ("packages", "attention", "quantization"),
    [
        ((), ("sdpa",), ("none", "fp8")),
        (("bitsandbytes",), ("sdpa",), ("none", "fp8", "int8", "nf4")),
        (
            ("flash_attn", "bitsandbytes"),
            ("sdpa", "flash_attention_2"),
            ("none", "fp8", "int8", "nf4"),
        ),
    ],
)
def test_what_needs_a_missing_package_is_not_searched(installed, packages, attention, quantization):
    installed(*packages)
    reserve = set_up(StudySpec(model="mistral-7b"), HERE).reserve
    assert reserve.knob("attention").values == attention
    assert reserve.knob("quantization").values == quantization
    allowed = set_up(StudySpec(model="mistral-7b", allow_quantized=True), HERE)
    assert allowed.reserve.knob("quantization") == allowed.task.space.knob("quantization")


def test_an_estimate_for_another_machine_does_not_depend_on_the_packages_of_this_one(installed):
    installed()
    spec = StudySpec(
        model="mistral-7b", space="everything", allow_quantized=True, allow_any_optimizer=True
    )
    space = set_up(spec, H200).task.space
    assert {"fp8", "int8", "nf4"} <= set(space.knob("quantization").choices())
    assert "flash_attention_2" in space.knob("attention").choices()
    assert "liger" in space.knob("kernels").choices()
    assert "lion_8bit" in space.knob("optimizer").choices()
    by_trl = set_up(replace(spec, trainer="trl"), H200).task
    assert by_trl.trainer == "trl" and not by_trl.workload.dealt
    assert set_up(spec, H200).task.workload.dealt  # train.py does so


def test_copies_that_no_number_of_gpus_can_hold_are_refused():
    spec = StudySpec(
        model="mistral-7b", space="full", gpus="4", pins={"sharding": "fsdp2", "copies": 2}
    )
    assert set_up(spec, H200).task.baselines[0].copies == 2
    with pytest.raises(UsageError, match="2: each copy of the model needs at least two GPUs"):
        set_up(replace(spec, gpus="2"), H200)


def test_bf16(installed):
    t4, spec = resolve_device("t4"), StudySpec(model="mistral-7b", space="lora")
    assert set_up(spec, t4).task.space.knob("precision").values == ("fp16_mixed",)
    assert set_up(spec, H200).task.space.knob("precision").values == ("bf16_mixed",)
    allowed = replace(spec, allow_pure_bf16=True)
    assert set_up(allowed, H200).task.space.knob("precision").values == ("bf16_mixed", "bf16_pure")
    assert set_up(replace(spec, space="full"), t4).task.baselines[0].precision == "fp16_mixed"
    pinned = replace(spec, pins={"precision": "bf16_mixed"})
    with pytest.raises(
        UsageError, match=r"no value of precision is left in the space 'lora': .*: t4 has no bf16"
    ):
        set_up(pinned, t4)


@pytest.mark.parametrize("name", ["t4", "v100-16gb"])
@pytest.mark.parametrize("kind", ["lora", "qlora", "full", "everything"])
def test_a_card_before_compute_capability_8_is_asked_for_fp16_and_no_flash_attention(
    installed, name, kind
):
    task = set_up(StudySpec(model="qwen2.5-0.5b", space=kind), resolve_device(name)).task
    for config in (task.baselines[0], task.space.config(task.space.clip(TrainConfig()))):
        asked = task.request(config, device="cuda", memory_gib=14.0, headroom=0.05, seed=0)
        assert (asked.config.precision, asked.flash) == ("fp16_mixed", False)
    assert {"sdpa_cudnn", "flash_attention_2"}.isdisjoint(task.space.choices("attention"))


def test_the_global_batch_and_the_context_bound_the_space(installed):
    space = set_up(
        StudySpec(model="llama-2-7b", space="lora", global_batch=12, tokens_per_example=9000), H200
    ).task
    assert space.space.knob("micro_batch_size").values == (1, 2, 4)
    assert space.space.knob("seq_len").values == (4096,)
    with pytest.raises(
        UsageError, match=r"micro_batch_size is left .*: 8: does not divide the global batch of 12"
    ):
        set_up(StudySpec(model="mistral-7b", global_batch=12, pins={"micro_batch_size": 8}), H200)
    with pytest.raises(
        UsageError, match=r"seq_len is left .*: 8192: longer than the model's context of 4096"
    ):
        set_up(StudySpec(model="llama-2-7b", pins={"seq_len": 8192}), H200)


@pytest.mark.parametrize(
    ("tokens", "length", "batch"),
    [
        (32 * 1024, 1024, 32),
        # 218.5 examples: seven times as large a micro batch as there is, 2.5 % more
        (65_536, 300, 224),
        (10_000, 1024, 10),  # 9.8: 8 would be over a tenth off
        (30 * 1024, 1024, 32),  # 7 % more, which every micro batch divides
        (29 * 1024, 1024, 28),  # 32 would be 10.3 % more
        (1000, 1024, 1),
        (10**15, 1024, 976_562_500_000),
    ],
)
def test_a_global_batch_in_tokens(installed, tokens, length, batch):
    asked = StudySpec(
        model="mistral-7b", space="lora", global_batch_tokens=tokens, tokens_per_example=length
    )
    workload = set_up(asked, H200).task.workload
    assert workload.global_batch == batch


def test_a_global_batch_in_tokens_holds_an_example(installed):
    spec = StudySpec(
        model="mistral-7b", space="lora", global_batch_tokens=900, tokens_per_example=1024
    )
    with pytest.raises(UsageError, match="900 is less than an example, which has 1,024") as caught:
        set_up(spec, H200)
    assert caught.value.remedy.startswith("give at least 1024, or the number of examples")


def test_a_default_micro_batch_must_divide_the_global_batch_too(installed, tmp_path):
    file = tmp_path / "odd.yaml"
    file.write_text("version: 1\ndescription: odd\nknobs: {method: lora}\n")
    with pytest.raises(UsageError, match="no value of micro_batch_size is left"):
        set_up(StudySpec(model="mistral-7b", space=str(file), global_batch=12), H200)
    assert set_up(
        StudySpec(model="mistral-7b", space=str(file), global_batch=16), H200
    ).task.baselines


def test_a_global_batch_in_tokens_fits_what_there_is(installed):
    asked = StudySpec(
        model="llama-2-7b", space="lora", global_batch_tokens=65_536, tokens_per_example=9000
    )
    assert set_up(asked, H200).task.workload.global_batch == 16  # cut at the context of 4,096
    pinned = replace(asked, pins={"micro_batch_size": 12})
    assert set_up(pinned, H200).task.workload.global_batch == 12
    longer = replace(asked, space=SearchSpace.of(seq_len=[4096, 8192], micro_batch_size=[1, 2, 4]))
    # rows of 8,192 are beyond the context
    assert set_up(longer, H200).task.workload.global_batch == 16
    assert set_up(replace(longer, model="mistral-7b"), H200).task.workload.global_batch == 8


def test_a_given_price_says_that_it_was_given(installed):
    price = set_up(StudySpec(model="mistral-7b", space="lora", price=1.5), H200).task.price
    assert price is not None
    assert (price.provider, price.source, price.usd_per_hour) == (
        "given by --price",
        "--price",
        1.5,
    )


def test_of_global_batches_that_as_many_micro_batches_divide_the_nearest_is_taken(
    installed, tmp_path
):
    file = tmp_path / "two.yaml"
    file.write_text("version: 1\nknobs: {micro_batch_size: {values: [7, 9]}}\n")
    asked = StudySpec(
        model="mistral-7b", space=str(file), global_batch_tokens=100 * 1024, tokens_per_example=1024
    )
    assert set_up(asked, H200).task.workload.global_batch == 99  # nearer than 98


def test_a_global_batch_in_tokens_is_a_micro_batch_at_least(installed, tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text("version: 1\nknobs: {micro_batch_size: {values: [4, 6]}}\n")
    asked = StudySpec(
        model="mistral-7b", space=str(file), global_batch_tokens=1024, tokens_per_example=1024
    )
    assert set_up(asked, H200).task.workload.global_batch == 4


def test_a_global_batch_that_one_micro_batch_divides_is_not_rounded_to_the_smallest(installed):
    """3.4 examples: 3 is a micro batch, though both it and 4 are over a tenth off."""
    space = SearchSpace.of(micro_batch_size=[2, 3])
    asked = StudySpec(
        model="mistral-7b", space=space, global_batch_tokens=3482, tokens_per_example=1024
    )
    assert set_up(asked, H200).task.workload.global_batch == 3


@pytest.mark.parametrize("size", [3, 4, 7, 32])
@pytest.mark.parametrize("examples", [1, 13, 31.4, 100, 1001])
def test_a_global_batch_in_tokens_is_the_nearest_that_a_pinned_micro_batch_divides(
    installed, size, examples
):
    tokens = int(1024 * examples)
    asked = StudySpec(
        model="mistral-7b",
        pins={"micro_batch_size": size},
        global_batch_tokens=tokens,
        tokens_per_example=1024,
    )
    batch = set_up(asked, H200).task.workload.global_batch
    assert (
        batch in sorted(range(size, 2000, size), key=lambda other: abs(other - tokens / 1024))[:1]
    )


@pytest.mark.parametrize(
    ("asked", "examples", "length", "assumed"),
    [
        ({}, 10_000, 1024, (True, True)),
        ({"examples": 7}, 7, 1024, (True, False)),
        ({"tokens": 1025}, 2, 1024, (True, False)),
        ({"tokens": 1000, "tokens_per_example": 300}, 4, 300, (False, False)),
        # pinning cuts examples, not the workload
        ({"pins": {"seq_len": 512}}, 10_000, 1024, (True, True)),
    ],
)
def test_the_workload(installed, asked, examples, length, assumed):
    workload = set_up(StudySpec(model="mistral-7b", **asked), H200).task.workload
    assert (workload.examples, workload.lengths.mean) == (examples, length)
    assert (workload.lengths.source == "assumed", workload.examples_assumed) == assumed


def test_a_micro_batch_is_no_larger_than_the_examples(installed):
    """Its other rows would always be blank."""
    for examples, sizes in ((1, (1,)), (7, (1, 2, 4)), (31, (1, 2, 4, 8, 16))):
        setup = set_up(StudySpec(model="mistral-7b", space="lora", examples=examples), H200)
        assert (
            setup.task.space.choices("micro_batch_size")
            == setup.reserve.choices("micro_batch_size")
            == sizes
        )
        assert any(
            f"{examples} examples do not fill a global batch of 32" in text
            for text in setup.warnings
        )
    with pytest.raises(UsageError, match=r"8: more sequences than examples \(7\)"):
        set_up(StudySpec(model="mistral-7b", examples=7, pins={"micro_batch_size": 8}), H200)
    assert set_up(StudySpec(model="mistral-7b", space="lora", examples=32), H200).warnings == ()


def test_examples_that_are_too_long_are_a_warning(installed):
    setup = set_up(StudySpec(model="mistral-7b", tokens_per_example=16_384), H200)
    assert setup.warnings == (
        "100% of the examples are longer than every seq_len of the space (4096): 75% of the tokens"
        " will be cut off; --seq-len 16384 keeps them",
    )
    assert setup.cut_off is not None and setup.warnings[0].startswith(setup.cut_off)
    (warning,) = set_up(StudySpec(model="mistral-7b", tokens_per_example=262_144), H200).warnings
    assert warning.endswith("; --seq-len 32768 keeps more of them")  # the model's context
    at_context = StudySpec(model="mistral-7b", tokens_per_example=262_144, pins={"seq_len": 32_768})
    assert set_up(at_context, H200).warnings[0].endswith("of the tokens will be cut off")


def pinned(space="default", gpus=None, **pins):
    return set_up(StudySpec(model="mistral-7b", space=space, gpus=gpus, pins=pins), H200)


@pytest.mark.parametrize(
    ("space", "pins", "narrowed"),
    [
        ("default", {"kernels": "liger"}, {"compile": ("none",)}),
        ("default", {"padding": "bucket"}, {"packing": (False,)}),
        ("default", {"group_by_length": True}, {"packing": (False,)}),
        (
            "default",
            {"cuda_graphs": "micro_batch"},
            {"packing": (False,), "padding": ("bucket",), "checkpointing": ("none",)},
        ),
        # of the needed knobs, the conditions apply, too
        ("default", {"kbit_preparation": True}, {"quantization": ("nf4",)}),
        ("everything", {"compile": "per_layer"}, {"compile": ("per_layer",)}),
        ("default", {"padding": "longest"}, {"packing": (False,), "compile": ("none",)}),
        ("full", {"optimizer_in_backward": True}, {"micro_batch_size": (32,)}),
    ],
)
def test_a_pin_has_its_value_in_every_configuration(installed, space, pins, narrowed):
    setup = pinned(space, **pins)
    for one in (setup.task.space, setup.reserve):
        assert {name: one.choices(name) for name in narrowed} == narrowed
        configs = [one.config(chosen) for chosen in one.sample(200)]
        assert {getattr(config, name) for name in pins for config in configs} == {*pins.values()}
    assert setup.warnings == ()


def test_the_values_that_a_pin_excludes_are_reported(installed):
    removals = list(map(str, pinned(kernels="liger").removals))
    assert "compile per_layer: kernels liger needs compile none" in removals
    assert (
        "checkpointing selective_50: compile none needs checkpointing other than selective_50"
        " (because of kernels liger)" in removals
    )


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (
            {"cuda_graphs": "micro_batch", "tiling": "tokens"},
            "tiling tokens has no effect with cuda_graphs micro_batch: it needs checkpointing other"
            " than none",
        ),
        (
            {"kernels": "liger", "compile": "per_layer"},
            "kernels liger has no effect with compile per_layer: it needs compile none",
        ),
        (
            {"padding": "bucket", "packing": True},
            "padding bucket has no effect with packing true: it needs packing false",
        ),
        ({"method": "full", "dora": True}, "dora true .* with method full: it needs method lora"),
        (
            {"space": "full", "dora": True},
            "dora true has no effect in this space: it needs method lora",
        ),
        ({"space": "lora", "double_quant": True}, "in this space: it needs quantization nf4"),
        ({"sharding": "fsdp2"}, "in this space: it needs num_gpus other than 1"),
        ({"sync_each_batch": True}, "in this space: it needs sharding fsdp2 or fsdp2_keep"),
        (
            {"gpus": "2", "tiling": "tokens"},
            "tiling tokens .* with num_gpus 2: it needs num_gpus 1",
        ),
    ],
)
def test_a_pin_without_effect_is_refused(installed, asked, refused):
    with pytest.raises(UsageError, match=refused):
        pinned(**asked)


def test_a_value_that_a_pin_needs_may_be_impossible(installed):
    with pytest.raises(UsageError, match="no bf16; cuda_graphs micro_batch excludes the other"):
        set_up(
            StudySpec(model="smollm2-135m", pins={"cuda_graphs": "micro_batch"}),
            resolve_device("t4"),
        )


def test_a_rank_without_adapters_is_a_warning(installed):
    """The same `--rank` is given for LoRA and for full fine-tuning when they are compared."""
    setup = pinned(space="full", lora_rank=16)
    assert setup.warnings == ("lora_rank has no effect: it needs method lora",)


def test_a_pinned_strategy_leaves_the_numbers_of_gpus(installed):
    space = pinned(gpus="1,2", sharding="fsdp2", sync_each_batch=True).task.space
    assert (space.choices("num_gpus"), space.choices("sharding")) == ((1, 2), ("fsdp2",))


@pytest.mark.parametrize(
    ("pins", "numbers"), [({"offload": True}, (2, 4, 8)), ({"copies": 4}, (8,))]
)
def test_a_number_of_gpus_that_would_ignore_a_pin_is_left_out(installed, pins, numbers):
    setup = pinned(gpus="1,2,4,8", **pins)
    assert setup.task.space.choices("num_gpus") == numbers
    assert any(removal.knob == "num_gpus" for removal in setup.removals)


def test_a_value_of_a_space_may_have_no_effect(installed):
    """Only pins narrow other knobs."""
    own = SearchSpace.load("default").offer("kernels", ("liger",))
    space = set_up(StudySpec(model="mistral-7b", space=own), H200).task.space
    assert space.choices("compile") == ("none", "per_layer")


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"space": "full", "min_rank": 32}, ("--min-rank has no effect: it needs method lora",)),
        (
            {"space": "full", "allow_quantized": True},
            ("--allow-quantized has no effect: no value of quantization in the space needs it",),
        ),
        (
            {"space": "default", "allow_quantized": True, "min_rank": 32, "allow_pure_bf16": True},
            (),
        ),
    ],
)
def test_a_floor_without_effect_is_a_warning(installed, asked, reported):
    installed("bitsandbytes")
    assert set_up(StudySpec(model="mistral-7b", **asked), H200).warnings == reported


def test_a_price_given_by_the_user(installed):
    price = set_up(StudySpec(model="mistral-7b", price=0.0), H200).task.price
    assert (price.usd_per_hour, price.provider, price.spot_usd_per_hour) == (
        0.0,
        "given by --price",
        None,
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            StudySpec(model="mistral-7b", pins={"lora_rnk": 8}),
            "there is no setting 'lora_rnk'; did you mean 'lora_rank'",
        ),
        (
            StudySpec(model="mistral-7b", pins={"seq_len": {"a": 1}}),
            "seq_len is a positive integer, not {'a': 1}",
        ),
        (StudySpec(model="mistral-7b", space="qlra"), "unknown search space 'qlra'"),
        (StudySpec(model="mistrl-7b"), "catalogue nor a directory; did you mean 'mistral-7b' or"),
    ],
)
def test_unknown_names_are_usage_errors(installed, spec, message):
    with pytest.raises(UsageError) as caught:
        set_up(spec, H200)
    assert message in str(caught.value)


def test_a_model_without_sdpa_has_a_baseline_with_eager_attention_and_the_removal_is_recorded(
    installed,
):
    for space in ("lora", "default"):
        setup = set_up(StudySpec(model="gemma-2-9b", space=space), HERE)
        assert setup.task.space.knob("attention").choices() == ("eager", "flex_attention")
        assert setup.task.baselines[0].attention == "eager"
        assert any(
            removal.knob == "attention" and "SDPA" in removal.reason for removal in setup.removals
        )


@pytest.mark.parametrize("space", ["default", "lora", "qlora", "full"])
def test_flex_attention_is_searched_for_a_model_without_sdpa(installed, space):
    """In every space whose attention is SDPA. The baseline has transformers' default."""
    installed("bitsandbytes")
    setup = set_up(StudySpec(model="openai/gpt-oss-20b", space=space), H200)
    for one in (setup.task.space, setup.reserve):
        assert one.choices("attention") == ("eager", "flex_attention")
    assert setup.task.baselines[0].attention == "eager"
    shape = ModelShape(num_layers=24, prefix=0, period=2, sdpa=False, flex=True)
    assert adapt_to_layers(setup, shape).task.space.choices("attention") == (
        "eager",
        "flex_attention",
    )


def test_flex_attention_is_searched_for_a_type_that_the_catalogue_does_not_know(installed):
    installed("bitsandbytes")
    llama = resolve_model("llama-3.1-8b")
    new = replace(llama, config=llama.config | {"model_type": "newest"}, name="newest")
    setup = set_up(StudySpec(model="llama-3.1-8b", space="lora"), H200)
    setup = replace(setup, task=replace(setup.task, model=new))
    for flex, found in ((True, ("eager", "flex_attention")), (False, ("eager",))):
        shape = ModelShape(num_layers=32, prefix=0, period=1, sdpa=False, flex=flex)
        assert adapt_to_layers(setup, shape).task.space.choices("attention") == found


def test_a_model_without_sdpa_uses_another_attention_of_the_space(installed):
    installed("bitsandbytes", "flash_attn")
    setup = set_up(StudySpec(model="gemma-2-9b", space="default"), H200)
    assert setup.task.space.knob("attention").choices() == ("flash_attention_2",)


MIXTURE = ModelShape(
    num_layers=32, prefix=0, period=1, unquantized=0.9, parametrized=True, plain_head=True
)


def test_adapters_on_fused_experts_are_not_compiled(installed):
    setup = adapt_to_layers(set_up(StudySpec(model="mixtral-8x7b", gpu="h200"), H200), MIXTURE)
    for space in (setup.task.space, setup.reserve):
        assert space.knob("compile").choices() == ("none",)
    assert [removal.values for removal in setup.removals if removal.knob == "compile"] == [
        ("per_layer",)
    ]
    with pytest.raises(UsageError, match="does not compile"):
        adapt_to_layers(
            set_up(
                StudySpec(model="mixtral-8x7b", gpu="h200", pins={"compile": "per_layer"}), H200
            ),
            MIXTURE,
        )


@pytest.mark.parametrize("space", ["lora", "full"])
@pytest.mark.parametrize(
    ("shape", "losses"),
    [
        (ModelShape(num_layers=32, prefix=0, period=1, plain_head=True), ("full", "chunked")),
        (ModelShape(num_layers=32, prefix=0, period=1), ("full",)),
        (None, ("full",)),
    ],
)
def test_a_loss_in_chunks_is_for_plain_heads(installed, space, shape, losses):
    setup = adapt_to_layers(
        set_up(StudySpec(model="mistral-7b", gpu="h200", space=space), H200), shape
    )
    assert setup.task.space.knob("loss").choices() == setup.reserve.knob("loss").choices() == losses
    assert any(removal.knob == "loss" for removal in setup.removals) is (losses == ("full",))


@pytest.mark.parametrize(
    ("spec", "shape", "reported"),
    [
        ({}, MIXTURE, []),
        ({}, replace(MIXTURE, untrained=0.9), ["do not train them"]),
        ({"allow_quantized": True}, MIXTURE, ["never quantised"]),
        (
            {"allow_quantized": True},
            replace(MIXTURE, experts=("mlp.experts.down_proj",)),
            ["only quantize_experts stores them in fewer bits"],
        ),
        ({"space": "full", "allow_pure_bf16": True}, replace(MIXTURE, untrained=0.9), []),
    ],
)
def test_parameters_that_adapters_and_quantisation_do_not_reach_are_a_warning(
    installed, spec, shape, reported
):
    setup = set_up(StudySpec(model="mixtral-8x7b", gpu="h200", **spec), H200)
    warnings = [
        text for text in adapt_to_layers(setup, shape).warnings if text not in setup.warnings
    ]
    assert len(warnings) == len(reported)
    assert all(part in text for part, text in zip(reported, warnings, strict=True))
    if spec.get("space") == "full":
        assert adapt_to_layers(setup, shape) == setup


def test_a_search_space_may_be_given_by_value():
    space = SearchSpace.of("mine", micro_batch_size=[1, 2], seq_len=512, lora_rank=[16, 32])
    task = set_up(
        StudySpec(model="mistral-7b", space=space, tokens_per_example=512), resolve_device("h200")
    ).task
    assert task.space.knob("micro_batch_size").choices() == (1, 2)
    assert task.study.endswith("-mine")


def test_rows_that_lose_half_a_percent_of_the_tokens_are_a_warning(installed, tmp_path):
    """Of 400 examples of 1,000 tokens one is longer, and loses all that 1,024 tokens cannot hold of
    it.
    """
    pins = {"seq_len": 1024}
    for longest, warned in ((3039, False), (3040, True), (3140, True)):
        file = tmp_path / f"{longest}.txt"
        file.write_text("\n".join(["1000"] * 400 + [str(longest)]))
        setup = set_up(
            StudySpec(model="mistral-7b", space="lora", lengths=str(file), pins=pins), H200
        )
        cut = (longest - 1024) / (400_000 + longest)
        assert (cut >= 0.005) is warned and bool(setup.warnings) is warned
    assert setup.warnings == (
        "0% of the examples are longer than every seq_len of the space (1024): 1% of the tokens"
        " will be cut off; --seq-len 3140 keeps them",
    )


@pytest.mark.parametrize(
    ("shares", "reported"),
    [
        ({"untrained": 0.02, "unquantized": 0.02}, []),
        (
            {"untrained": 0.021},
            [
                "2% of the parameters are fused experts of a mixture: adapters on linear layers do"
                " not train them"
            ],
        ),
        (
            {"unquantized": 0.021},
            ["2% of the parameters are fused experts: they are never quantised"],
        ),
    ],
)
def test_two_percent_of_the_parameters_may_be_out_of_reach(installed, shares, reported):
    shape = ModelShape(num_layers=32, prefix=0, period=1, plain_head=True, liger=True, **shares)
    allowed = set_up(StudySpec(model="mistral-7b", allow_quantized=True), H200)
    assert list(adapt_to_layers(allowed, shape).warnings) == reported
    plain = set_up(StudySpec(model="mistral-7b", space="lora"), H200)
    assert list(adapt_to_layers(plain, shape).warnings) == [
        text for text in reported if "adapters" in text
    ]


def test_what_is_known_of_layers_without_a_worker():
    linear = [
        *(f"mlp.{name}_proj" for name in ("down", "gate", "up")),
        *(f"self_attn.{name}_proj" for name in "koqv"),
    ]
    shape = {"num_layers": 32, "prefix": 0, "period": None, "linear_layers": tuple(linear)}
    known = ModelShape(**shape, plain_head=True, liger=True, sdpa=True, flex=True)
    assert known_shape(resolve_model("mistral-7b")) == known
    capped = known_shape(resolve_model("gemma-2-9b"))
    assert capped is not None and (capped.plain_head, capped.sdpa, capped.liger) == (
        False,
        False,
        True,
    )
    assert known_shape(resolve_model("mixtral-8x7b")) is None


def test_what_only_the_reserve_has_is_told_in_words(installed):
    setup = set_up(StudySpec(model="mistral-7b"), HERE)
    assert setup.reserved == "quantization fp8 or int8 or nf4"
    assert open_reserve(setup).reserved == ""


def test_a_file_of_lengths_has_as_many_examples_as_lines(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lengths.txt").write_text("100\n" * 40 + "300\n" * 10)
    (tmp_path / "prices.yaml").write_text(
        "- {provider: mine, device: h200, usd: 2.5, as_of: 2026-11-01}\n"
    )
    spec = StudySpec(
        model="mistral-7b", space="lora", lengths="~/lengths.txt", prices="~/prices.yaml"
    )
    task = set_up(spec, H200).task
    assert (task.workload.examples, task.workload.examples_assumed, task.workload.form) == (
        50,
        False,
        "unknown",
    )
    assert task.workload.lengths == Lengths.of([100] * 40 + [300] * 10, "counted")
    assert task.price is not None and (task.price.provider, task.price.usd_per_hour) == (
        "mine",
        2.5,
    )
    assert set_up(replace(spec, examples=7, global_batch=1), H200).task.workload.examples == 7
    # of 140 tokens each on average
    assert set_up(replace(spec, tokens=1400), H200).task.workload.examples == 10
    # a hundred examples, of which all micro batches divide 96
    in_tokens = replace(spec, global_batch_tokens=14_000)
    assert set_up(in_tokens, H200).task.workload.global_batch == 96
    given = set_up(
        StudySpec(model="mistral-7b", space="lora", price=1.5, prices="~/none.yaml"), H200
    ).task.price
    assert given is not None and (given.count, given.as_of, given.spot_usd_per_hour) == (
        1,
        None,
        None,
    )


def test_the_run_is_that_of_the_spec(installed):
    spec = StudySpec(
        model="mistral-7b", space="lora", epochs=3, eval_share=0.1, loss_on="all", study="mine"
    )
    task = set_up(replace(spec, save_steps=7, slack=0.2, min_rank=32), H200).task
    assert (task.workload.epochs, task.workload.eval_share, task.workload.loss_on) == (
        3,
        0.1,
        "all",
    )
    assert (task.study, task.run_options.save_steps, task.trainer) == ("mine", 7, "transformers")
    assert (task.floors.slack, task.floors.min_rank, task.space.choices("lora_rank")) == (
        0.2,
        32,
        (32, 64),
    )
    assert (task.measured_on, task.carried, task.calibration) == (None, None, None)


def test_two_numbers_that_no_lengths_have_are_an_error_with_another_way(installed):
    with pytest.raises(UsageError, match="--mean-tokens, --p99-tokens: no log-normal") as caught:
        set_up(StudySpec(model="mistral-7b", mean_tokens=10, p99_tokens=1000), H200)
    assert caught.value.remedy == "give --lengths FILE instead"
    described = set_up(
        StudySpec(model="mistral-7b", mean_tokens=200, p99_tokens=900), H200
    ).task.workload
    assert described.lengths == Lengths.from_summary(200, 900)


def test_a_global_batch_that_no_micro_batch_is_near_is_whole_smallest_ones(installed):
    """28 examples: 32 and 20 are over a tenth off, and neither 8 nor 20 divides 28."""
    space = SearchSpace.of(micro_batch_size=[8, 20])
    asked = StudySpec(
        model="mistral-7b", space=space, global_batch_tokens=28 * 1024, tokens_per_example=1024
    )
    assert set_up(asked, H200).task.workload.global_batch == 32


def test_the_demonstration_has_an_example_card_unless_its_limit_and_price_are_given():
    task = set_up(StudySpec(model="demo-3m"), CPU).task
    assert task.example_gib == 0.3 and task.price is not None and task.price.provider == EXAMPLE
    assert (
        describe_price(task.price, date(2026, 11, 26)) == "$0.60/h, an example and no market price"
    )
    given = set_up(StudySpec(model="demo-3m", price=2.0, memory_gib=4.0), CPU).task
    assert (
        given.example_gib is None
        and given.price is not None
        and given.price.provider == "given by --price"
    )
    for model, device in (("demo-3m", "a10"), ("smollm2-135m", "cpu")):
        other = set_up(StudySpec(model=model), Target(device=resolve_device(device))).task
        assert other.example_gib is None and (
            other.price is None or other.price.provider != EXAMPLE
        )


@pytest.mark.parametrize(
    ("model", "gpu", "warned"),
    [("gemma-2-2b", "t4", True), ("gemma-2-2b", "a10", False), ("qwen3-0.6b", "t4", False)],
)
def test_a_model_that_overflows_in_fp16_is_warned_of(model: str, gpu: str, warned: bool) -> None:
    """A card without bf16 leaves fp16 alone in the space."""
    spec = StudySpec(model=model, gpu=gpu, space="qlora")
    warnings = set_up(spec, resolve_device(gpu)).warnings
    assert any("known to overflow in fp16" in warning for warning in warnings) is warned


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("qwen3.5-4b", "causal-conv1d flash-linear-attention"),
        ("lfm2-1.2b", "causal-conv1d"),
        ("granite-4.0-h-1b", "causal-conv1d mamba-ssm"),
        ("granite-4.0-1b", ""),  # the same type of model, with attention in each layer
        ("mistral-7b", ""),
    ],
)
def test_the_packages_with_kernels_for_layers_other_than_attention_are_named(
    name: str, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StudySpec(model=name, gpu="h100")
    target = Target(device=resolve_device("h100"))
    planned = set_up(spec, target.device).warnings
    missing = set_up(spec, target).warnings
    if not packages:
        assert not any("fast kernels" in warning for warning in (*planned, *missing))
        return
    assert planned[0].endswith(f"({packages}); all numbers here are without them")
    assert missing[0].endswith(f"for fast kernels: pip install {packages}")

    monkeypatch.setattr("autotune.catalog.fast_kernels.is_installed", lambda name: True)
    uncounted = packages.removesuffix(" flash-linear-attention")
    planned, missing = set_up(spec, target.device).warnings, set_up(spec, target).warnings
    assert missing[0].startswith(
        f"probes measure the fast kernels of {uncounted}, but estimates do not"
    )
    assert planned[0].endswith(f"({uncounted}); all numbers here are without them")
    if uncounted != packages:
        counted = "all numbers here are with the fast kernels of flash-linear-attention"
        assert planned[1].startswith(counted)
    assert "pip install" not in missing[0]


@pytest.mark.parametrize(
    ("gpu", "triton", "lacks"),
    [
        ("h100", "3.6.0", True),
        ("h100", "3.3.1", False),
        ("h100", "3.7.1", False),
        ("h100", None, False),
        ("a100-80gb-sxm", "3.6.0", False),
    ],
)
def test_tilelang_is_named_where_triton_is_refused(
    gpu: str, triton: str | None, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if triton is None:
            raise PackageNotFoundError(name)
        return triton

    monkeypatch.setattr("importlib.metadata.version", version)
    spec, target = StudySpec(model="qwen3.5-4b", gpu=gpu), Target(device=resolve_device(gpu))
    wanted = "pip install causal-conv1d flash-linear-attention" + " tilelang" * lacks
    assert set_up(spec, target).warnings[0].endswith(wanted)
    monkeypatch.setattr("autotune.catalog.fast_kernels.is_installed", lambda name: name == "fla")
    found = set_up(spec, target).warnings
    assert any(one.endswith("Hopper GPUs: pip install tilelang") for one in found) is lacks
