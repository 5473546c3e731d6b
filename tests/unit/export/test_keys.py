"""The key table: each knob has a row or a reason for each tool, and a reader finds the keys that
are written.
"""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export import header, keys, tool_file
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_options import TRACKERS, RunOptions
from autotune.problem.workload import Workload
from autotune.study.summary import Recipe
from autotune.trainer.settings import LIGER_KERNELS
from tests.helpers.refresh_export_keys import KEYS
from tests.unit.export.test_tool_file_axolotl import CONFIGS, recipe

each_tool = pytest.mark.parametrize("tool", keys.TOOLS)


@each_tool
# the command's environment says it
@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob != "allocator"])
def test_each_knob_has_a_row_or_a_reason(tool: str, knob: str) -> None:
    has_row = any(
        row.of == knob and getattr(row, tool) is not None
        for rows in keys.sections().values()
        for row in rows
    )
    assert has_row or any(tool in entry["tools"] for entry in keys.gaps()[knob])


def test_the_table_names_knobs_settings_and_tools_only() -> None:
    known = set(KNOBS) | set(keys.settings("trl", recipe(TrainConfig())))
    for row in (row for rows in keys.sections().values() for row in rows):
        assert {row.of} - {None} | set(row.when) <= known
        assert set(row.defaults) <= set(keys.TOOLS)
    for knob, entries in keys.gaps().items():
        assert knob in KNOBS
        for entry in entries:
            assert set(entry) == {"tools", "when", "reason"}
            assert set(entry["tools"]) <= set(keys.TOOLS)
            assert set(entry["when"]) <= known


def test_a_knob_without_a_row_is_named_in_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        section: tuple(row for row in rows if row.of != "dora")
        for section, rows in keys.sections().items()
    }
    monkeypatch.setattr(keys, "sections", lambda: table)
    with_dora, without = (
        tool_file.export(recipe(TrainConfig(dora=dora)), "axolotl")["axolotl.yaml"]
        for dora in (True, False)
    )
    assert "# not expressed: dora: Axolotl has no key for it\n" in with_dora
    assert "dora" not in without


def test_a_row_is_all_that_a_knob_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = keys.Row(of="dora", axolotl={"new_key": {True: "on"}})
    table = keys.sections() | {"memory": (*keys.sections()["memory"], row)}
    monkeypatch.setattr(keys, "sections", lambda: table)
    assert (
        "\nnew_key: 'on'\n"
        in tool_file.export(recipe(TrainConfig(dora=True)), "axolotl")["axolotl.yaml"]
    )


def test_liger_is_switched_on_as_it_was_probed() -> None:
    assert (
        keys.write("trl", "memory", recipe(TrainConfig(kernels="liger")))["liger_kernel_config"]
        == LIGER_KERNELS
    )


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("model", ("model_name_or_path", "base_model", "model_name_or_path")),
        (
            "micro_batch_size",
            ("per_device_train_batch_size", "micro_batch_size", "per_device_train_batch_size"),
        ),
        ("seq_len", ("max_length", "sequence_len", "cutoff_len")),
        ("epochs", ("num_train_epochs", "num_epochs", "num_train_epochs")),
        ("optimizer", ("optim", "optimizer", "optim")),
        ("lora_rank", ("lora_r", "lora_r", "lora_rank")),
        (
            "double_quant",
            ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization"),
        ),
    ],
)
def test_a_reader_finds_the_key_of_each_tool(what: str, names: tuple[str, ...]) -> None:
    assert tuple(keys.key_of(tool, what) for tool in ("trl", "axolotl", "llamafactory")) == names


def test_a_reader_fails_for_a_knob_without_a_key() -> None:
    with pytest.raises(KeyError, match="tiling"):
        keys.key_of("trl", "tiling")


def test_a_reader_finds_the_defaults() -> None:
    assert [keys.default_of(tool, "seq_len") for tool in keys.TOOLS] == [1024, 512, 2048]
    assert keys.default_of("trl", "optimizer") is None


@each_tool
@pytest.mark.parametrize("config", CONFIGS, ids=TrainConfig.label)
def test_writing_leaves_the_table_as_it_is(tool: str, config: TrainConfig) -> None:
    made = recipe(config)
    first = {section: keys.write(tool, section, made) for section in keys.sections()}
    keys.write(
        tool,
        "schedule",
        replace(made, winner=replace(made.winner, config=TrainConfig(optimizer="lion_8bit"))),
    )
    assert first == {section: keys.write(tool, section, made) for section in keys.sections()}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (TrainConfig(attention="sdpa"), ("sdpa", "sdpa", "sdpa")),
        (TrainConfig(attention="sdpa_cudnn"), ("sdpa", "sdpa", "sdpa")),
        (TrainConfig(attention="eager"), ("eager", "eager", "disabled")),
        (
            TrainConfig(attention="flex_attention"),
            ("flex_attention", "flex_attention", "auto"),
        ),
        (
            TrainConfig(attention="flash_attention_2"),
            ("flash_attention_2", "flash_attention_2", "fa2"),
        ),
        (
            TrainConfig(attention="flash_attention_2", packing=True, micro_batch_size=1),
            ("flash_attention_2", "flash_attention_2", "fa2"),
        ),
        (
            TrainConfig(attention="flash_attention_2", packing=True, micro_batch_size=2),
            ("flash_attention_2", "flash_attention_2", "sdpa"),
        ),
    ],
)
def test_the_attention_by_each_tools_name(config: TrainConfig, names: tuple[str, ...]) -> None:
    assert tuple(keys.attention_of(tool, config) for tool in keys.TOOLS) == names


@pytest.mark.parametrize(("compile", "length"), [("per_layer", 4 * 512), ("none", None)])
def test_compiled_packed_rows_have_one_length(compile: str, length: int | None) -> None:
    """TRL makes the packed rows of a micro batch one row."""
    config = TrainConfig(compile=compile, packing=True, micro_batch_size=4, seq_len=512)
    assert keys.write("trl", "batch", recipe(config)).get("pad_to_multiple_of") == length


def with_lengths(config: TrainConfig, *lengths: int) -> Recipe:
    """A run on 64 examples, as many of each of these lengths."""
    return recipe(config, workload=Workload(examples=64, lengths=Lengths.of(lengths, "given")))


PADDING_KEYS = {"pad_to_sequence_len", "pad_to_multiple_of"}


@pytest.mark.parametrize(
    ("config", "trl", "axolotl", "unsaid"),
    [
        ({"padding": "longest"}, {}, {"pad_to_sequence_len": False}, ""),
        (
            {"padding": "max_length"},
            {"pad_to_multiple_of": 1024},
            {"pad_to_sequence_len": True},
            "llamafactory",
        ),
        (
            {"padding": "max_length", "seq_len": 1000},
            {"pad_to_multiple_of": 1000},
            {"pad_to_sequence_len": True, "pad_to_multiple_of": 1000},
            "llamafactory",
        ),
        # Axolotl would not pad to multiples with pad_to_sequence_len: false.
        (
            {"padding": "bucket"},
            {"pad_to_multiple_of": 450},
            {"pad_to_multiple_of": 450},
            "trl axolotl llamafactory",
        ),
        (
            {"padding": "longest", "compile": "per_layer"},  # means bucket
            {"pad_to_multiple_of": 450},
            {"pad_to_multiple_of": 450},
            "trl axolotl llamafactory",
        ),
        ({"packing": True}, {}, {"pad_to_sequence_len": True}, ""),
    ],
    ids=str,
)
def test_how_rows_are_padded(config: dict[str, Any], trl: Any, axolotl: Any, unsaid: str) -> None:
    made = with_lengths(TrainConfig(micro_batch_size=1, **config), 300, 900)
    expected = {"trl": trl, "axolotl": axolotl, "llamafactory": {}}
    for tool in keys.TOOLS:
        batch = keys.write(tool, "batch", made)
        assert {key: batch[key] for key in PADDING_KEYS & set(batch)} == expected[tool], tool
        assert any(
            item.startswith("padding ") for item in keys.inexpressible_knobs(tool, made)
        ) is (tool in unsaid)


def test_a_multiple_of_the_padded_length_is_never_longer_than_seq_len() -> None:
    """Three lengths would be multiples of 342, up to 1,026: more positions than a model of 1,024
    has.
    """
    made = with_lengths(TrainConfig(padding="bucket", micro_batch_size=1), 100, 500, 1024)
    assert len(made.workload.padded_lengths(made.config)) == 3
    assert keys.write("trl", "batch", made)["pad_to_multiple_of"] == 512


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("trl", {"train_sampling_strategy": "group_by_length"}),
        ("axolotl", {"group_by_length": True}),
        ("llamafactory", {"train_sampling_strategy": "group_by_length"}),
    ],
)
def test_examples_are_grouped_by_length(tool: str, written: dict[str, Any]) -> None:
    for config, grouped in ((TrainConfig(group_by_length=True), True), (TrainConfig(), False)):
        batch = keys.write(tool, "batch", recipe(config))
        found = {
            key: batch[key]
            for key in ("group_by_length", "train_sampling_strategy")
            if batch.get(key)
        }
        assert found == (written if grouped else {})
        unsaid = any(
            item.startswith("group_by_length: ")
            for item in keys.inexpressible_knobs(tool, recipe(config))
        )
        assert unsaid is (grouped and not written)


@pytest.mark.parametrize("tool", keys.TOOLS)
def test_what_does_not_deal_out_rows_says_so(tool: str) -> None:
    """But not where the rows of the study were not dealt out either."""
    made = with_lengths(TrainConfig(padding="longest"), 100, 500)
    for dealt in (True, False):
        found = keys.inexpressible_knobs(
            tool, replace(made, workload=replace(made.workload, dealt=dealt))
        )
        assert any("does not sort the sequences of a step" in item for item in found) is dealt


def test_values_that_follow_from_a_configuration() -> None:
    config = TrainConfig(
        lora_rank=16, rslora=True, seq_len=520, checkpointing="every_3", kernels="liger"
    )
    assert keys.settings("trl", recipe(config))["unusual_seq_len"] is None  # rows are not filled
    config = replace(config, padding="max_length")
    found = keys.settings("trl", recipe(config))
    expected = {"lora_alpha": 8, "unusual_seq_len": 520, "skips_layers": True}
    assert {name: found[name] for name in expected} == expected
    assert found["needs_liger"] and found["by_layer"] is False and not found["probed_with_trl"]
    plain = keys.settings(
        "trl", recipe(TrainConfig(method="full", seq_len=512, checkpointing="full"))
    )
    expected = {"lora_alpha": None, "unusual_seq_len": None, "skips_layers": False}
    assert {name: plain[name] for name in expected} == expected and not plain["needs_liger"]
    assert keys.settings("trl", recipe(TrainConfig(loss="chunked")))["needs_liger"]
    assert keys.settings("trl", recipe(TrainConfig(checkpointing="none")))["skips_layers"] is False


@pytest.mark.parametrize(
    ("step_s", "steps", "saves"), [(2.0, 5000, 900), (2.0, 100, 100), (7200.0, 100, 1), (2.0, 0, 1)]
)
def test_a_checkpoint_every_half_hour_and_warm_up_for_three_hundredths(
    step_s: float, steps: int, saves: int
) -> None:
    made = recipe(TrainConfig())
    speed, cost = (
        replace(made.winner.performance, step_time_s=step_s),
        replace(made.winner.cost, num_steps=steps),
    )
    made = replace(made, winner=replace(made.winner, performance=speed, cost=cost))
    assert header.save_steps(made) == header.eval_steps(made) == saves
    asked = replace(made, run_options=RunOptions(save_steps=7))
    assert header.save_steps(asked) == header.eval_steps(asked) == max(min(7, steps), 1)
    assert header.eval_steps(replace(made, run_options=RunOptions(eval_steps=1, save_steps=7))) == 1
    assert header.warmup_steps(made) == 3 * steps / 100


def evaluating(tracker: str = "none", study: str = "my study") -> Recipe:
    made = recipe(TrainConfig(micro_batch_size=4))
    workload = replace(made.workload, eval_share=0.05)
    return replace(
        made,
        study=study,
        workload=workload,
        run_options=RunOptions(eval_steps=50, report_to=tracker),
    )


def written(tool: str, made: Recipe) -> dict[str, Any]:
    return {
        key: value
        for section in tool_file.SECTIONS
        for key, value in keys.write(tool, section, made).items()
    }


OF_TRAINER = {
    "eval_strategy": "steps",
    "eval_steps": 50,
    "per_device_eval_batch_size": 4,
    "save_total_limit": 2,
}


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("trl", OF_TRAINER | {"test_split_size": 0.05, "datasets": [{"path": "your/dataset"}]}),
        ("llamafactory", OF_TRAINER | {"val_size": 0.05}),
        (
            "axolotl",
            {
                "eval_strategy": "steps",
                "eval_steps": 50,
                "eval_batch_size": 4,
                "val_set_size": 0.05,
            },
        ),
    ],
)
def test_the_tools_evaluate_what_is_held_out(tool: str, expected: dict[str, Any]) -> None:
    known = yaml.safe_load(KEYS.read_text()).get(tool, {}).get("keys", "").split()
    found = written(tool, evaluating())
    assert found.items() >= expected.items() and "dataset_name" not in found
    assert not known or set(found) <= set(known)
    without = written(tool, recipe(TrainConfig()))
    assert not any("eval" in key or "val_" in key or "test_split" in key for key in without)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_the_tools_report_to_the_tracker(tracker: str) -> None:
    made = evaluating(tracker, "a ${b}")  # OmegaConf would fill it in
    name = {} if tracker == "none" else {"run_name": "a {b}"}
    for tool in ("trl", "llamafactory"):
        found = written(tool, made)
        assert {key: found[key] for key in found if key in ("report_to", "run_name")} == {
            "report_to": tracker
        } | name
    found = written("axolotl", made)
    own = {"wandb": "wandb_name", "mlflow": "mlflow_run_name", "trackio": "trackio_run_name"}
    expected = {f"use_{tracker}": True} if tracker != "none" else {}
    expected |= {own[tracker]: "a {b}"} if tracker in own else {}
    assert {key: found[key] for key in found if any(one in key for one in TRACKERS)} == expected


@pytest.mark.parametrize(("tool", "rows"), [("trl", 64), ("axolotl", 21), ("llamafactory", 21)])
def test_an_evaluation_with_all_logits_has_a_batch_that_fits(tool: str, rows: int) -> None:
    """Liger's head makes them in evaluations, although the training has its loss in chunks."""
    workload = Workload(eval_share=0.05, lengths=Lengths.constant(4096))
    knobs: dict[str, Any] = {"micro_batch_size": 64, "seq_len": 4096}
    made = recipe(
        TrainConfig(**knobs, loss="chunked"), workload=workload, model=resolve_model("llama-3.1-8b")
    )
    assert keys.eval_batch(tool, made) == rows
    full = recipe(TrainConfig(**knobs), workload=workload)
    assert keys.eval_batch(tool, full) == 64


def test_what_a_tool_cannot_evaluate_or_report_is_in_its_head() -> None:
    text = tool_file.export(evaluating("trackio"), "trl")["trl_sft.yaml"]
    assert "leaves out the last batch" in text and "draws new held-out examples" in text
    assert "evaluat" not in tool_file.export(recipe(TrainConfig()), "trl")["trl_sft.yaml"]


LOSS_KEYS = (
    "assistant_only_loss",
    "completion_only_loss",
    "train_on_inputs",
    "train_on_prompt",
    "mask_history",
)


@pytest.mark.parametrize(
    ("form", "loss_on", "expected"),
    [
        # TRL would refuse assistant_only_loss for other rows than conversations
        ("unknown", None, {}),
        ("unknown", "completion", {"llamafactory": {"mask_history": True}}),
        ("messages", None, {"trl": {"assistant_only_loss": True}}),
        (
            "messages",
            "all",
            {"axolotl": {"train_on_inputs": True}, "llamafactory": {"train_on_prompt": True}},
        ),
        ("conversations", "completion", {"llamafactory": {"mask_history": True}}),
        ("prompt_completion", None, {}),
        ("chat_completion", None, {}),
        (
            "chat_completion",
            "assistant",
            {"trl": {"assistant_only_loss": True, "completion_only_loss": False}},
        ),
        ("text", None, {}),
    ],
)
def test_the_loss_is_where_train_py_has_it(
    form: str, loss_on: str | None, expected: dict[str, Any]
) -> None:
    base = recipe(TrainConfig())
    made = replace(base, workload=replace(base.workload, form=form, loss_on=loss_on))
    for tool in ("trl", "axolotl", "llamafactory"):
        written = keys.write(tool, "data", made)
        assert {key: written[key] for key in LOSS_KEYS if key in written} == expected.get(
            tool, {}
        ), tool


@pytest.mark.parametrize(
    ("form", "kind"), [("text", "completion"), ("alpaca", "alpaca"), ("unknown", "chat_template")]
)
def test_each_form_has_its_keys(form: str, kind: str) -> None:
    base = recipe(TrainConfig())
    made = replace(base, workload=replace(base.workload, form=form))
    (dataset,) = keys.write("axolotl", "data", made)["datasets"]
    assert dataset["type"] == kind
    info = tool_file.export(made, "llamafactory")["dataset_info.json"]
    assert ('"role_tag"' in info) is (form == "unknown")
    assert keys.write("llamafactory", "adapters", made)["stage"] == (
        "pt" if form == "text" else "sft"
    )


def test_the_head_says_where_attention_differs() -> None:
    """LLaMA-Factory has no FlexAttention; TRL gives gpt-oss no masks of packed examples."""
    made = recipe(TrainConfig(attention="flex_attention", packing=True))
    gpt_oss = replace(made, model=resolve_model("openai/gpt-oss-20b"))
    heads = {
        (tool, one.model.short): " ".join(
            " ".join(tool_file.export(one, tool).values()).replace("\n# ", " ").split()
        )
        for tool in ("trl", "llamafactory")
        for one in (made, gpt_oss)
    }
    blind = "each example also attends to the examples before it in its row"
    assert [key for key, head in heads.items() if blind in head] == [("trl", gpt_oss.model.short)]
    without = "LLaMA-Factory has no FlexAttention"
    assert all((without in head) is (tool == "llamafactory") for (tool, _), head in heads.items())


def test_the_head_says_where_the_loss_differs() -> None:
    base = recipe(TrainConfig())
    heads = {}
    for form in ("unknown", "messages", "alpaca"):
        made = replace(base, workload=replace(base.workload, form=form))
        heads[form] = " ".join(
            tool_file.export(made, "trl")["trl_sft.yaml"].replace("\n# ", " ").split()
        )
    assert (
        "TRL trains on every token of messages. With assistant_only_loss: true" in heads["unknown"]
    )
    assert "its own copy of the chat template" in heads["messages"]
    assert "TRL does not read Alpaca rows" in heads["alpaca"]
