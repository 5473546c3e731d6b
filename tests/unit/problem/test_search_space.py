"""Search spaces: a typo is named with its line, narrowing returns what it removed, counting agrees
with enumerating.
"""

from itertools import islice
from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, Removal, SearchSpace, shipped_spaces, ways_to_fit

HEAD = "version: 1\nknobs:\n"


def load(tmp_path: Path, text: str) -> SearchSpace:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return SearchSpace.load(str(path))


def failure(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/mine.yaml", "FILE")


def space(**knobs) -> SearchSpace:
    return SearchSpace(
        name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items())
    )


# --- shipped


def test_every_shipped_space_loads_and_makes_configurations():
    assert sorted(shipped_spaces()) == ["cpu", "default", "everything", "full", "lora", "qlora"]
    for name in shipped_spaces():
        shipped = SearchSpace.load(name)
        assert shipped.name == name
        for chosen in islice(shipped.enumerate(), 200):
            assert shipped.clip(shipped.config(chosen)) == chosen


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cpu", 2 * 6 * 3 * 3 * 2 * 2 * 3 * 2 * 2),  # packed or not, grouped adapters or not
        # Compiled: packed with a mask or without one, or in buckets; else also padded to the
        # longest, likewise. One value of checkpointing is for compiled layers alone.
        # All with grouped adapters too, and the compiled ones in bf16, of two precisions, with
        # joined ones.
        ("lora", ((4 * 8 + 1 * 3) * 3 * 2 + 5 * 3 * 2) * 6 * 4 * 4 * 3 * 2),
        # with grouped adapters, and with experts in 4 bits
        ("qlora", (4 * 8 + 1 * 3) * 2 * 2 * 2 * 6 * 4 * 4 * 3 * 3 * 2),
        # Compiled, in two of three precisions: also with two kinds of fp8 products
        ("full", ((4 * 8 + 1 * 3) * 3 + 5 * 3 * 2 * 2) * 6 * 4 * 5 * 2),
        # none, fp8, int8, nf4 with and without double_quant and experts in 4 bits; joined adapters
        # with none and fp8;
        # flash_attention_2 packs with a mask alone
        (
            "default",
            ((4 * 8 + 1 * 3 + 4 * 6 + 1 * 2) * 7 * 3 * 2 + 2 * 5 * (3 + 2) * 2) * 6 * 4 * 4 * 3 * 2,
        ),
    ],
)
def test_size_is_the_number_of_distinct_configurations(name, size):
    shipped = SearchSpace.load(name)
    assert shipped.size() == size
    if size < 50_000:
        assert len({shipped.config(chosen) for chosen in shipped.enumerate()}) == size


def test_kinds():
    lora = SearchSpace.load("lora")
    assert [knob.name for knob in lora.knobs if knob.kind == "learning"] == [
        "method",
        "seq_len",
        "lora_rank",
        "precision",
        "optimizer",
    ]


def test_an_unknown_space():
    with pytest.raises(
        UsageError, match="unknown search space 'qlra'; did you mean 'qlora' or 'lora'"
    ) as caught:
        SearchSpace.load("qlra")
    assert (
        caught.value.remedy
        == "use one of cpu, default, everything, full, lora, qlora, or the path of a YAML file"
    )
    for hostile in (
        "",
        ".",
        "..",
        "/",
        "a\0b",
        "a\nb",
        "lora.yaml",
        "../lora",
        "x" * 300,
        "x/" * 5000,
    ):
        with pytest.raises(UsageError, match="unknown search space"):
            SearchSpace.load(hostile)


# --- files


def test_a_file(tmp_path):
    mine = load(
        tmp_path,
        HEAD + "  double_quant: {values: [true, false], kind: learning}\n"
        "  quantization: {values: [none, nf4]}\n"
        "  seq_len: 128\n"
        "  compile: {values: [none, per_layer], when: {micro_batch_size: [1, 2]}}\n"
        "  lora_rank: {min: 4, max: 7, log: true}\n"
        "  micro_batch_size: {values: [1, 2, 4]}\n",
    )
    assert mine.name == "mine"
    # What a condition names comes first.
    assert [knob.name for knob in mine.knobs] == [
        "quantization",
        "double_quant",
        "seq_len",
        "lora_rank",
        "micro_batch_size",
        "compile",
    ]
    rank = mine.knob("lora_rank")
    assert (rank.low, rank.log, rank.choices()) == (4, True, (4, 5, 6, 7))
    assert mine.knob("seq_len").choices() == (128,)
    assert mine.knob("attention") is None
    assert mine.size() == 3 * 4 * (2 + 2 + 1) == sum(1 for _ in mine.enumerate())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "  method: lora\n  lora_rnk: 8\n", "FILE:4: knobs.lora_rnk: there is no setting"
         " 'lora_rnk'; did you mean "
         "'lora_rank' or 'lora_kernels' or 'lora_targets'?"),
        (HEAD + "  lora_rank: {values: [8], kid: x}\n", "FILE:3: knobs.lora_rank.kid: there is"
         " no such key"),
        (HEAD + "  lora_rank: {values: [8], kind: system}\n",
         "FILE:3: knobs.lora_rank.kind: lora_rank is a learning setting; leave out the key kind"),
        (HEAD + "  lora_rank: {values: [8], kind: hard}\n",
         "FILE:3: knobs.lora_rank.kind: Input should be 'system' or 'learning'"),
        (HEAD + "  precision:\n    values:\n      - fp32\n      - bf16_mixd\n",
         "FILE:6: knobs.precision.values.1: "
         "precision is one of bf16_mixed, bf16_pure, fp16_mixed, fp32, not 'bf16_mixd'"),
        (HEAD + "  method: null\n", "FILE:3: knobs.method.values.0: method is one of full, lora,"
         " not None"),
        (HEAD + "  seq_len: {values: [.nan]}\n",
         "FILE:3: knobs.seq_len.values.0: seq_len is a positive integer, not nan"),
        (HEAD + "  seq_len: [1, 2]\n", "FILE:3: knobs.seq_len.values.0: seq_len is a positive"
         " integer, not [1, 2]"),
        (HEAD + "  seq_len:\n    min: 1\n    max: 99999999999999999999\n",
         "FILE:5: knobs.seq_len.max: at most 1,024 values are searched from min to max: list some"
         " of them, as in values: [1, 4, 16]"),
        (HEAD + "  seq_len: {min: -5, max: 3}\n", "FILE:3: knobs.seq_len: min must be at least 1"
         " and at most max"),
        (HEAD + "  seq_len: {min: 5, max: 3}\n", "FILE:3: knobs.seq_len: min must be at least 1 and"
         " at most max"),
        (HEAD + "  seq_len: {min: 5}\n", "FILE:3: knobs.seq_len: give either values: [..] or min:"
         " and max:"),
        (HEAD + "  seq_len: {}\n", "FILE:3: knobs.seq_len: give either values: [..] or min: and"
         " max:"),
        (HEAD + "  seq_len: {values: [1], min: 5, max: 9}\n",
         "FILE:3: knobs.seq_len: give either values: [..] or min: and max:"),
        (HEAD + "  seq_len: {min: 1, max: 1025}\n",
         "FILE:3: knobs.seq_len.max: at most 1,024 values are searched from min to max: list some"
         " of them, as in values: [1, 4, 16]"),
        (HEAD + "  seq_len: {values: [8, 8]}\n", "FILE:3: knobs.seq_len: a value occurs twice"),
        (HEAD + "  seq_len: {values: [8], log: true}\n", "FILE:3: knobs.seq_len: log: true needs"
         " min: and max:"),
        (HEAD + "  seq_len: 8\n  seq_len: 9\n", "FILE:4: not valid YAML: 'seq_len' occurs twice"),
        (HEAD + "  double_quant: {values: [true, 1]}\n",
         "FILE:3: knobs.double_quant.values.1: double_quant is true or false, not 1"),
        (HEAD + "  method: {min: 1, max: 1}\n", "FILE:3: knobs.method.min: method is one of full,"
         " lora, not 1\n"
         "FILE:3: knobs.method.max: method is one of full, lora, not 1"),
        (HEAD + "  compile:\n    values: [none]\n    when:\n      metod: lora\n",
         "FILE:6: knobs.compile.when.metod: 'metod' is not another setting; did you"
         " mean 'method'?"),
        (HEAD + "  compile: {values: [none], when: {compile: none}}\n",
         "FILE:3: knobs.compile.when.compile: 'compile' is not another setting;"
         " did you mean 'copies'?"),
        (HEAD + "  compile: {values: [none], when: {method: [lora, {a: b}]}}\n",
         "FILE:3: knobs.compile.when.method: method is one of full, lora, not {'a': 'b'}"),
        (HEAD + "  1: 8\n", "FILE:3: knobs.1.[key]: Input should be a valid string"),
        ("version: 1\nknobs: {}\n", "FILE:2: knobs: Dictionary should have at least 1 item after"
         " validation, not 0"),
        ("version: 1\nknobs: [method]\n", "FILE:2: knobs: Input should be a valid dictionary"),
        ("version: 2\nknobs: {method: lora}\n", "FILE:1: version: Input should be 1"),
        ("knobs: {method: lora}\n", "FILE:1: version: Field required"),
        ("version: 1\nknob: {method: lora}\n", "FILE:1: knobs: Field required\n"
         "FILE:2: knob: there is no such key; did you mean 'knobs'?"),
        ("", "FILE:1: the file: Input should be a valid dictionary or instance of SpaceFile"),
        ("- 1", "FILE:1: the file: Input should be a valid dictionary or instance of SpaceFile"),
    ],
)  # fmt: skip
def test_a_typo_is_named_with_its_line(tmp_path, text, message):
    assert failure(tmp_path, text) == message


def test_a_circle_of_conditions_keeps_the_order_of_the_file(tmp_path):
    circle = load(
        tmp_path,
        HEAD + "  seq_len: {values: [8], when: {micro_batch_size: 8}}\n"
        "  micro_batch_size: {values: [8], when: {seq_len: 1024}}\n",
    )
    assert [knob.name for knob in circle.knobs] == ["seq_len", "micro_batch_size"]
    # the default micro batch of 8 lets the first be
    assert list(circle.enumerate()) == [{"seq_len": 8}]


def test_a_knob_outside_the_space_counts_with_its_default():
    rank_only = space(lora_rank=(8, 16))
    assert rank_only.config({"lora_rank": 8}) == TrainConfig(lora_rank=8)
    assert space(double_quant=(True, False)).size() == 1  # quantization is none by default


# --- ranges


def test_a_wide_space_is_enumerated_lazily():
    wide = SearchSpace(
        name="wide",
        knobs=tuple(
            Knob(name=name, low=1, high=5000)
            for name in ("micro_batch_size", "seq_len", "lora_rank")
        ),
    )
    assert wide.size() == 5000**3
    assert list(islice(wide.enumerate(), 2)) == [
        {"micro_batch_size": 1, "seq_len": 1, "lora_rank": 1},
        {"micro_batch_size": 1, "seq_len": 1, "lora_rank": 2},
    ]


def test_a_range_without_gaps_stays_a_range():
    knob = Knob(name="seq_len", low=1, high=100, log=True)
    cut = knob.keep(lambda value: 10 <= value <= 20)
    assert (cut.low, cut.high, cut.log, cut.values) == (10, 20, True, ())
    even = knob.keep(lambda value: value % 50 == 0)
    assert (even.low, even.high, even.log, even.values) == (None, None, False, (50, 100))
    assert knob.keep(lambda value: False).choices() == ()


def test_many_removed_values_are_abbreviated():
    wide = SearchSpace(name="wide", knobs=(Knob(name="seq_len", low=1, high=20_000),))
    narrow, removals = wide.narrow("seq_len", lambda value: value <= 4096, "too long")
    assert narrow.knob("seq_len").high == 4096
    assert [str(removal) for removal in removals] == [
        "seq_len 4097 to 20000 (15,904 values): too long"
    ]
    _, ten = wide.narrow("seq_len", lambda value: value > 10, "too short")
    assert [str(removal) for removal in ten] == ["seq_len 1, 2, 3, 4, 5, 6, 7, 8, 9, 10: too short"]


# --- narrowing and pinning


def test_narrow_returns_what_it_removed():
    lora = SearchSpace.load("lora")
    narrow, removals = lora.narrow("seq_len", lambda value: value < 2048, "because")
    assert narrow.knob("seq_len").values == (512, 1024)
    assert narrow.knob("seq_len").kind == "learning"
    assert removals == [Removal(knob="seq_len", values=(2048, 4096), reason="because")]
    assert str(removals[0]) == "seq_len 2048, 4096: because"
    assert lora.knob("seq_len").values == (512, 1024, 2048, 4096)
    assert lora.narrow("seq_len", lambda value: True, "") == (lora, [])
    assert lora.narrow("quantization", lambda value: False, "") == (lora, [])  # not in the space


def test_narrow_leaves_at_least_one():
    with pytest.raises(UsageError) as caught:
        SearchSpace.load("lora").narrow("checkpointing", lambda value: False, "never")
    values = "none, selective_50, every_2, every_4, full"
    reason = f"no value of checkpointing is left in the space 'lora': {values}: never"
    assert str(caught.value) == reason and "--set checkpointing=VALUE" in caught.value.remedy
    assert caught.value.remedy.startswith("add values")
    with pytest.raises(UsageError) as caught:
        SearchSpace.load("lora").pin("cuda_graphs", "micro_batch").narrow(
            "cuda_graphs", lambda value: False, "never"
        )
    assert caught.value.remedy.startswith("give another value (--set cuda_graphs=VALUE)")


def test_pin():
    lora = SearchSpace.load("lora")
    pinned = lora.pin("seq_len", 777)  # a value that the file does not list
    assert pinned.knob("seq_len") == Knob(name="seq_len", values=(777,))
    assert [knob.name for knob in pinned.knobs] == [knob.name for knob in lora.knobs]


def test_a_pinned_knob_comes_after_the_knobs_it_depends_on():
    for first, second in (
        (("quantization", "nf4"), ("double_quant", True)),
        (("double_quant", True), ("quantization", "nf4")),
    ):
        pinned = SearchSpace.load("lora").pin(*first).pin(*second)
        configs = [pinned.config(chosen) for chosen in islice(pinned.enumerate(), 50)]
        assert {(config.quantization, config.double_quant) for config in configs} == {("nf4", True)}


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("lora_rnk", 8, "there is no setting 'lora_rnk'; did you mean 'lora_rank' or 'lora_kernels'"
         " or 'lora_targets'?"),
        ("zzz", 8, "there is no setting 'zzz'"),
        ("lora_rank", 0, "--set lora_rank: lora_rank is a positive integer, not 0"),
        ("lora_rank", True, "--set lora_rank: lora_rank is a positive integer, not True"),
        ("seq_len", "1024", "--set seq_len: seq_len is a positive integer, not '1024'"),
        ("method", None, "--set method: method is one of full, lora, not None"),
        ("checkpointing", "every_1", "--set checkpointing: checkpointing is none, full, offload,"
         " selective_80, "
         "selective_50, selective_30 or every_K with K of 2 or more, not 'every_1'"),
    ],
)  # fmt: skip
def test_an_impossible_pin_is_a_usage_error(knob, value, message):
    with pytest.raises(UsageError) as caught:
        SearchSpace.load("lora").pin(knob, value)
    assert str(caught.value) == message
    assert caught.value.remedy
    if knob not in KNOBS:
        assert caught.value.remedy == "the settings are " + ", ".join(KNOBS)


# --- clip and description


@pytest.mark.parametrize(
    ("knobs", "wanted", "chosen"),
    [
        ({"seq_len": (512, 2048)}, {"seq_len": 1024}, {"seq_len": 512}),
        # as near to both: the smaller
        ({"seq_len": (512, 2048)}, {"seq_len": 1280}, {"seq_len": 512}),
        ({"seq_len": (512, 2048)}, {"seq_len": 1281}, {"seq_len": 2048}),
        (
            {"checkpointing": ("none", "full")},
            {"checkpointing": "every_2"},
            {"checkpointing": "none"},
        ),
        ({"method": ("full",), "lora_rank": (8, 16)}, {}, {"method": "full"}),
        ({"lora_rank": (32, 64)}, {"method": "full"}, {"lora_rank": 32}),
        (
            {"quantization": ("nf4",), "double_quant": (True,)},
            {},
            {"quantization": "nf4", "double_quant": True},
        ),
    ],
)
def test_clip_takes_the_nearest(knobs, wanted, chosen):
    assert space(**knobs).clip(TrainConfig(**wanted)) == chosen


def test_the_description_follows_what_can_be_chosen():
    one = space(seq_len=(512, 1024))
    assert one.describe() == SearchSpace(name="other", knobs=one.knobs).describe()
    assert one.describe() != space(seq_len=(512, 1024, 2048)).describe()
    assert one.describe() != one.pin("seq_len", 512).describe()
    assert one.describe() == {
        "seq_len": {"values": [512, 1024], "range": [None, None, False], "when": None}
    }


def test_the_size_of_a_space_is_known_at_once_and_a_sample_is_of_it():
    knobs = {name: {"min": 1, "max": 1024} for name in ("micro_batch_size", "seq_len", "lora_rank")}
    knobs["seq_len"]["when"], knobs["lora_rank"]["when"] = (
        {"micro_batch_size": [1, 2]},
        {"seq_len": 7},
    )
    large = SearchSpace(
        name="large",
        knobs=tuple(
            Knob(name=name, low=entry["min"], high=entry["max"], when=entry.get("when"))
            for name, entry in knobs.items()
        ),
    )
    assert large.size() == 1022 + 2 * (1023 + 1024)
    drawn = list(large.sample(50))
    assert drawn == list(large.sample(50)) and len({str(one) for one in drawn}) > 40
    assert all(
        set(one) <= set(knobs) and ("seq_len" in one) is (one["micro_batch_size"] in (1, 2))
        for one in drawn
    )


def test_the_leanest_choice():
    assert SearchSpace.load("default").leanest() == {
        "method": "lora",
        "quantization": "nf4",
        "double_quant": True,
        "micro_batch_size": 1,
        "seq_len": 512,
        "lora_rank": 8,
        "precision": "bf16_pure",
        "optimizer": "paged_adamw_8bit",
        "checkpointing": "full",
        "compile": "none",
        "lora_kernels": "grouped",
        "quantize_experts": True,
        "attention": "flash_attention_2",
        "loss": "chunked",
        "packing": False,
        "padding": "longest",
    }
    assert space(checkpointing=("none", "every_4", "every_2")).leanest() == {
        "checkpointing": "every_2"
    }
    assert space(method=("full", "lora"), lora_rank=(8, 4)).leanest() == {
        "method": "lora",
        "lora_rank": 4,
    }
    assert space(method=("full",), lora_rank=(8,)).leanest() == {"method": "full"}


@pytest.mark.parametrize("name", ["cpu", "default", "full", "lora", "qlora"])
def test_the_leanest_is_a_configuration_of_every_space(name):
    shipped = SearchSpace.load(name)
    assert shipped.clip(shipped.config(shipped.leanest())) == shipped.leanest()


@pytest.mark.parametrize(
    ("leanest", "ways"),
    [
        (
            TrainConfig(seq_len=2048),
            "take a larger GPU, a smaller model, --space qlora or a shorter --seq-len",
        ),
        (
            TrainConfig(seq_len=2048, quantization="nf4"),
            "take a larger GPU, a smaller model or a shorter --seq-len",
        ),
        (TrainConfig(seq_len=256, quantization="nf4"), "take a larger GPU or a smaller model"),
    ],
)
def test_a_way_to_fit_is_not_one_that_was_tried(leanest: TrainConfig, ways: str) -> None:
    assert ways_to_fit(leanest) == ways


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "  seq_len: {min: '5', max: 9}\n",
            "FILE:3: knobs.seq_len.min: Input should be a valid integer",
        ),
        (
            "  seq_len: {min: 5, max: 9, log: 1}\n",
            "FILE:3: knobs.seq_len.log: Input should be a valid boolean",
        ),
        (
            "  seq_len: {min: 0, max: 3}\n",
            "FILE:3: knobs.seq_len: min must be at least 1 and at most max",
        ),
    ],
)
def test_a_file_says_what_it_means(tmp_path, text, message):
    assert failure(tmp_path, HEAD + text) == message


def test_the_ends_of_a_range(tmp_path):
    assert load(tmp_path, HEAD + "  seq_len: {min: 1, max: 1024}\n").choices("seq_len") == tuple(
        range(1, 1025)
    )
    assert load(tmp_path, HEAD + "  seq_len: {min: 7, max: 7}\n").choices("seq_len") == (7,)
    plain = load(tmp_path, HEAD + "  seq_len: {min: 7, max: 8}\n").knob("seq_len")
    assert plain is not None and (plain.low, plain.high, plain.log, plain.when) == (
        7,
        8,
        False,
        None,
    )


def test_a_knob_without_effect_names_the_condition_that_no_choice_meets():
    made = space(method=("full",), lora_rank=(8, 16), compile=("none",))
    assert made.idle("lora_rank") == made.idle("dora") == "method lora"
    assert made.idle("micro_batch_size") is made.idle("compile") is None
    assert space(lora_rank=(8,)).idle("lora_rank") is None
    conditioned = SearchSpace(
        name="test",
        knobs=(
            Knob(name="micro_batch_size", values=(4, 8)),
            Knob(name="compile", values=("none",), when={"micro_batch_size": [1, 2]}),
        ),
    )
    assert conditioned.idle("compile") == "micro_batch_size 1, 2"


def test_a_further_condition_narrows_the_one_before():
    searched = space(compile=("none", "per_layer"), packing=(False, True), micro_batch_size=(1, 2))
    once = searched.condition("compile", "micro_batch_size", (1, 2))
    twice = once.condition("compile", "micro_batch_size", (2, 4)).condition(
        "compile", "packing", (True,)
    )
    knob = twice.knob("compile")
    assert knob is not None and knob.when == {"micro_batch_size": [2], "packing": [True]}
    assert [one.name for one in twice.knobs] == ["packing", "micro_batch_size", "compile"]
    assert searched.condition("loss", "packing", (True,)) is searched  # it is not in the space


@pytest.mark.parametrize(
    ("wanted", "values", "nearest"),
    [
        (4, (1, 4, 8), 4),
        (3, (1, 4, 8), 4),
        (6, (4, 8), 4),  # as near to both: the smaller
        ("every_2", ("full", "none"), "full"),  # no number: the first
        (True, (False,), False),
        (None, (8, 16), 8),
    ],
)
def test_the_nearest_value(wanted, values, nearest):
    assert Knob(name="seq_len", values=values).nearest(wanted, values) == nearest


def test_a_space_is_written_in_python_as_a_list_or_a_value():
    made = SearchSpace.of(
        micro_batch_size=[1, 2], lora_rank=range(8, 11), seq_len=(512,), compile="none"
    )
    assert made.name == "own"
    assert {knob.name: knob.choices() for knob in made.knobs} == {
        "micro_batch_size": (1, 2),
        "lora_rank": (8, 9, 10),
        "seq_len": (512,),
        "compile": ("none",),
    }
    for wrong in ([], [1, 1], ()):
        with pytest.raises(
            UsageError, match="micro_batch_size: a list needs values, each only once"
        ) as caught:
            SearchSpace.of(micro_batch_size=wrong)
        assert caught.value.remedy == "list each value once"
    with pytest.raises(UsageError, match="--set micro_batch_size: "):
        SearchSpace.of(micro_batch_size=[1, 0])
