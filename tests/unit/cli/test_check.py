"""`autotune check`: verdicts on real files of three tools, changes that make them fit, hostile
ones.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import list_models, resolve_device, resolve_model
from autotune.cli.check_text import MORE
from autotune.cli.commands.check import check_command
from autotune.core.errors import NothingFits, UsageError
from autotune.dry.prober import DryAnswer
from autotune.planning import counted_memory
from autotune.planning.device_estimate import device_limit_gib
from autotune.planning.foreign_config import read_file
from autotune.planning.observations import published_observations
from autotune.planning.run_check import check, find_model
from autotune.prediction.memory_formula import ERROR
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.report.answers import verdict
from autotune.report.values.check import CheckReport

# What the projects publish, reduced to the keys that matter (`test_foreign.py` names the files).
TRL = (
    "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\nnum_train_epochs: 1\n"
    "use_peft: true\n"
    "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nlora_r: 16\nlora_alpha: 16\n"
)
TRL_7B = TRL.replace("Qwen/Qwen2.5-0.5B", "mistralai/Mistral-7B-v0.3")
AXOLOTL = (
    "base_model: NousResearch/Meta-Llama-3-8B\nload_in_8bit: false\nload_in_4bit: true\n"
    "adapter: qlora\n"
    "datasets:\n  - path: aaditya/alpaca_subset_1\n    type: alpaca\nsequence_len: 4096\n"
    "sample_packing: true\n"
    "lora_r: 32\nlora_target_linear: true\ngradient_accumulation_steps: 4\nmicro_batch_size: 2\n"
    "num_epochs: 4\n"
    "optimizer: paged_adamw_32bit\nbf16: auto\ngradient_checkpointing: true\n"
)
AXOLOTL_FULL = (
    "base_model: NousResearch/Meta-Llama-3.1-8B\nplugins:\n"
    "  - axolotl.integrations.liger.LigerPlugin\n"
    "liger_rms_norm: true\nliger_fused_linear_cross_entropy: true\nsequence_len: 4096\n"
    "sample_packing: true\n"
    "gradient_accumulation_steps: 4\nmicro_batch_size: 2\nbf16: auto\n"
    "gradient_checkpointing: true\n"
    "fsdp:\n  - full_shard\n"
)
AXOLOTL_32B = (
    "base_model: Qwen/Qwen3-32B\nplugins:\n  -"
    " axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
    "sequence_len: 2048\nload_in_4bit: true\nadapter: qlora\nlora_r: 16\nlora_target_linear: true\n"
    "micro_batch_size: 1\noptimizer: adamw_torch_4bit\ngradient_checkpointing: offload\n"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nstage: sft\ndo_train: true\n"
    "finetuning_type: lora\n"
    "lora_rank: 8\nlora_target: all\ndataset: identity,alpaca_en_demo\ncutoff_len: 2048\n"
    "max_samples: 1000\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nnum_train_epochs: 3.0\n"
    "bf16: true\n"
)
FACTORY_FULL = FACTORY.replace("lora\n", "full\n", 1).replace(
    "bf16: true", "bf16: true\npure_bf16: false"
)


def changed(text: str, **keys: Any) -> str:
    """The file with these keys; None takes one out."""
    values = yaml.safe_load(text) | keys
    return yaml.safe_dump({key: value for key, value in values.items() if value is not None})


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., CheckReport]:
    def run(text: str, gpu: str | None = "a10", **flags: Any) -> CheckReport:
        path = tmp_path / "run.yml"
        path.write_text(text)
        return check(path, {"gpu": gpu, **flags}, observations=published_observations())

    return run


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(text: str, gpu: str = "a10", as_json: bool = False, **flags: Any) -> str:
        path = tmp_path / "run.yml"
        path.write_text(text)
        check_command(path, gpu, evidence=tmp_path / "none", json_=as_json, **flags)
        return capsys.readouterr().out

    return run


# --- verdicts


def test_a_card_of_the_users_own(printed: Callable[..., str]) -> None:
    words = "memory=24,bf16_tflops=125,bandwidth_gb_s=600,tdp_w=150,arch=ampere"
    assert "on card-24gb (as you described it)" in printed(TRL, words)
    said = json.loads(printed(TRL, words, as_json=True))
    assert (said["device"], said["own_card"]) == ("card-24gb", words)
    assert said["faster"] is None or f"--gpu {words}" in said["faster"]["command"]


@pytest.mark.parametrize(
    ("text", "gpu", "fits"),
    [
        (TRL, "a10", FITS),
        (TRL_7B, "a10", OOM),
        (changed(TRL_7B, dtype="bfloat16"), "a100-80gb-sxm", FITS),
        (AXOLOTL, "a10", OOM),
        (AXOLOTL, "h100-sxm", FITS),
        (AXOLOTL_FULL, "a100-40gb-sxm", OOM),
        (AXOLOTL_FULL, "h200-sxm", FITS),
        (AXOLOTL_32B, "t4", OOM),
        (AXOLOTL_32B, "h100-sxm", FITS),
        (FACTORY, "a10", FITS),
        (FACTORY_FULL, "a10", OOM),
        (FACTORY_FULL, "b200-sxm", FITS),
    ],
)
def test_verdicts(text: str, gpu: str, fits: str, answer: Callable[..., CheckReport]) -> None:
    found = answer(text, gpu)
    assert found.checked.state == fits
    peak = found.checked.estimate.need_gib
    assert (peak > found.limit_gib) is (fits == OOM)
    assert found.limit_gib == device_limit_gib(resolve_device(gpu), 0.05)
    assert found.faster is None or found.faster.times >= 1.05
    assert set(found.checked.run.notes) <= set(found.notes)
    assert (found.smallest_card is None) is (fits == FITS)
    assert found.fix is None or fits == OOM


def test_the_verdict_is_the_first_line(
    printed: Callable[..., str], answer: Callable[..., CheckReport]
) -> None:
    lines = printed(FACTORY).splitlines()
    assert lines[0] == verdict(answer(FACTORY))
    assert lines[0].startswith("fits: needs 1") and lines[0].endswith("%) to spare")
    labels = [line[:8].strip() for line in lines[1:-1]]
    assert labels[:6] == ["file", "memory", "speed", "run", "cost", "faster"]
    assert set(labels[6:]) == {"note"}
    for line in lines[3:6]:
        assert "estimated" in line and " to " in line
    assert "the peak is in the backward pass" in lines[2]
    assert "for 2,000 examples x 3 epochs, 750 steps" in lines[4]
    assert lines[-1] == MORE


def test_a_4_bit_base_is_not_proposed_in_bfloat16(printed: Callable[..., str]) -> None:
    """TRL loads the weights that are not in 4 bits in float32, unless dtype says otherwise."""
    text = printed(changed(TRL_7B, load_in_4bit=True, gradient_checkpointing=True))
    (faster,) = (line for line in text.splitlines() if line.startswith("  faster"))
    assert ", dtype: bfloat16; to measure it: " in faster
    assert "load_in_4bit" not in faster and "quantization=nf4" in faster


def test_the_first_screen_leaves_out_what_details_shows(
    printed: Callable[..., str], answer: Callable[..., CheckReport]
) -> None:
    """Notes on assumptions that decide the verdict stay on the first screen."""
    text = changed(FACTORY, cutoff_len=4096, enable_liger_kernel=True)
    first = printed(text).splitlines()
    details = printed(text, details=True).splitlines()
    assert first[-1] == MORE and details[-1].startswith("     how  Nothing was measured here.")
    assert set(first[:-1]) < set(details)
    more = [line for line in details if line not in first]
    assert [line[:8].strip() for line in more] == ["note", "note", "how"]
    assert "Memory is estimated for a micro batch with a sequence of 4,096" in more[0]
    assert "The cross-entropy, which is fused with the head, is counted" in more[1]
    assert any("The length of the examples was not given" in line for line in first)
    assert {line[10:] for line in details if line[:8] == "    note"} == set(answer(text).notes)


def test_single_changes_are_details(
    printed: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NothingFits):
        printed(TRL_7B)
    assert "   alone  " not in (out := capsys.readouterr().out) and "  change  " in out
    with pytest.raises(NothingFits):
        printed(TRL_7B, details=True)
    assert "   alone  load_in_4bit: true: saves" in capsys.readouterr().out


def test_a_run_that_does_not_fit(
    printed: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NothingFits, match=r"^run\.yml does not fit a10$") as caught:
        printed(TRL_7B)
    assert caught.value.exit_code == 4
    assert caught.value.remedy == "dtype: bfloat16, or a larger GPU, such as a100-40gb-pcie"
    out = capsys.readouterr().out
    assert out.startswith("out of memory: needs 3") and "too much\n" in out
    assert "  change  dtype: bfloat16: then it fits, with 1" in out
    assert "estimated, with that change" in out


def test_too_close_to_tell(
    printed: Callable[..., str],
    answer: Callable[..., CheckReport],
    capsys: pytest.CaptureFixture[str],
) -> None:
    peak = answer(FACTORY).checked.estimate.need_gib
    context = 20 - device_limit_gib(resolve_device("a10"), 0.0, 20.0)
    memory = peak * (1 + ERROR / 2) + context
    found = answer(FACTORY, memory_gib=memory, headroom=0.0)
    assert found.checked.state == TIGHT and found.fix is not None and found.fix.state == FITS
    assert verdict(found).endswith(
        f"%) to spare, and the estimate errs by up to {100 * ERROR:.0f} %"
    )
    path = Path(found.file)
    check_command(path, "a10", evidence=path.parent, memory_gib=memory, headroom=0.0)
    shown = capsys.readouterr()
    assert shown.out.startswith("too close to tell: ")
    assert shown.err == "warning: run.yml may run out of memory on a10\n"


# --- the model


def test_models_by_name() -> None:
    for name, known in {
        "mistral-7b": None,
        "mistralai/Mistral-7B-v0.3": None,
        "MISTRALAI/mistral-7b-V0.3": None,
        "NousResearch/Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
        "unsloth/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
        "google/gemma-2-9b-it": "google/gemma-2-9b",
        "Qwen/Qwen3-8B-Base": "Qwen/Qwen3-8B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": None,
        "NousResearch/Llama-2-7b-chat-hf": "meta-llama/Llama-2-7b-hf",
        "/data/models/Qwen2.5-7B-Instruct/": "Qwen/Qwen2.5-7B",
        "..\\models\\phi-4": "microsoft/phi-4",
    }.items():
        model, taken = find_model(name)
        assert model.name == (
            known or ("mistralai/Mistral-7B-v0.3" if "istral" in name.lower() else name)
        )
        assert taken == (
            f"By its name, {name} is assumed to have the shape of {known} (--model corrects this)."
            if known
            else None
        )
    for model in list_models():
        for name in (model.name, f"somebody/{model.short}-Instruct", *model.aliases):
            assert find_model(name)[0].digest == model.digest


def test_unknown_models(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., CheckReport]
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
    for name in ("nobody/Nothing-7B", "Nothing 7B", "Qwen/Qwen2.5-Math-7B"):
        with pytest.raises(UsageError) as caught:
            answer(changed(TRL, model_name_or_path=name))
        assert caught.value.exit_code == 2 and caught.value.remedy is not None
        assert caught.value.remedy.startswith("give --model with ")
    assert (
        answer(
            changed(TRL, model_name_or_path="nobody/Nothing-7B"), model="qwen2.5-0.5b"
        ).checked.state
        == FITS
    )
    monkeypatch.setattr(
        counted_memory, "dry_count", lambda *asked, **_: DryAnswer(refused="It has no layers.")
    )
    with pytest.raises(
        UsageError, match=r"no formula for gpt2 models, and .* cannot be counted: It has no layers$"
    ):
        answer(changed(TRL, model_name_or_path="gpt2"))


def test_a_local_model(answer: Callable[..., CheckReport], tmp_path: Path) -> None:
    config = resolve_model("qwen2.5-0.5b").config
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    text = changed(TRL, model_name_or_path=str(tmp_path / "mine"), dtype="bfloat16")
    peak = answer(changed(TRL, dtype="bfloat16")).checked.estimate.need_gib
    assert answer(text).checked.estimate.need_gib == pytest.approx(peak, rel=0.01)
    (tmp_path / "mine" / "config.json").write_text(
        json.dumps(config | {"model_type": "\x1b[31mevil\n"})
    )
    with pytest.raises(UsageError) as caught:
        answer(text)
    assert str(caught.value).isprintable()


def test_effects_of_the_model_and_the_card(answer: Callable[..., CheckReport]) -> None:
    gemma = answer(changed(TRL, model_name_or_path="google/gemma-2-2b"), "h100-sxm").checked
    assert gemma.run.config.attention == "eager"  # as transformers chooses for it
    assert any(note.startswith("t4 has no bf16") for note in answer(TRL, "t4").notes)
    assert not any("bf16:" in note for note in answer(changed(TRL, fp16=True), "t4").notes)
    long = answer(
        changed(TRL, max_length=65536, model_name_or_path="Qwen/Qwen2.5-0.5B"), "b200-sxm"
    )
    assert any(note.startswith("Sequences of 65,536 tokens are longer than") for note in long.notes)
    assert long.faster is None


# --- what is asked wrongly, and what is hostile


def test_which_gpu(answer: Callable[..., CheckReport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", lambda: ())
    with pytest.raises(UsageError) as caught:
        answer(TRL, None)
    assert caught.value.remedy is not None and "--gpu" in caught.value.remedy
    for gpu in ("a1000000", "cpu"):
        with pytest.raises(UsageError):
            answer(TRL, gpu)
    with pytest.raises(UsageError, match="give examples or tokens, not both"):
        answer(TRL, examples=1, tokens=1)


def test_json(printed: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(printed(FACTORY, as_json=True))
    assert (data["verdict"], data["change"], data["each_change"], data["smallest_card"]) == (
        "fits",
        None,
        [],
        None,
    )
    assert (
        data["evidence"] == "estimated"
        and data["num_gpus"] is None
        and data["format"] == "llamafactory"
    )
    assert sum(data["memory_gib"].values()) == pytest.approx(data["peak_reserved_gib"])
    assert data["duration"]["num_steps"] == 750 and data["faster"]["times"] > 1
    with pytest.raises(NothingFits):
        printed(TRL_7B, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "out of memory" and data["smallest_card"] == "a100-40gb-pcie"
    assert data["change"]["edits"] == {"dtype": "bfloat16"} and data["change"]["verdict"] == "fits"
    # what cannot run has no cost
    assert data["duration"] is None and data["change"]["duration"]["usd"] > 0
    assert {"dtype", "load_in_4bit"} <= {key for one in data["each_change"] for key in one["edits"]}


def test_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "dir"
    directory.mkdir()
    for text, problem in (
        (changed(TRL, model_name_or_path="a\x1b[31mb\n"), UsageError),
        (changed(TRL, dataset_name="a\x1b]0;title\x07"), UsageError),
        (changed(TRL, optim="\x1b[2J"), UsageError),
        (changed(TRL, model_name_or_path="a$(touch CANARY)`b`; rm -rf /"), UsageError),
        (TRL_7B, NothingFits),
        (TRL, None),
    ):
        path = directory / "run\x1b[31m\nname\u202e.yml"
        path.write_text(text)
        with pytest.raises(problem) if problem else nullcontext() as caught:
            check_command(path, "a10", evidence=tmp_path / "none")
        if problem is not None:
            assert f"{caught.value}{caught.value.remedy}".replace(str(path), "").isprintable()
        shown = capsys.readouterr()
        for line in (shown.out + shown.err).splitlines():
            assert line.isprintable()
    assert not (Path.cwd() / "CANARY").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"per_device_train_batch_size": 2**24, "gradient_accumulation_steps": 2**24},
        {"max_length": 2**24, "packing": True, "lora_r": 2**24},
        {
            "per_device_train_batch_size": 720720,
            "max_length": 2**24,
            "gradient_checkpointing": False,
            "use_dora": True,
        },
        {"max_steps": 10**15},
        {"num_train_epochs": 1e15},
        {"num_processes": 2**24},
    ],
)
def test_hostile_numbers(
    keys: dict[str, Any], printed: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json in (False, True):
        try:
            out = printed(changed(TRL_7B, **keys), as_json=as_json, examples=10**15)
        except NothingFits:
            out = capsys.readouterr().out
        assert not as_json or json.loads(out)["verdict"]


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(TRL)
    code = (
        "import sys; from pathlib import Path; from autotune.cli.commands.check import"
        " check_command\n"
        "check_command(Path(sys.argv[1]), 'a10', evidence=Path('none'))\n"
        "print({'torch', 'transformers', 'optuna', 'numpy', 'bitsandbytes'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "set()"
    assert read_file(path).model == "Qwen/Qwen2.5-0.5B"
    assert [one.name for one in tmp_path.iterdir()] == ["run.yml"]


# --- the examples that the file names

ROW = {"messages": [{"role": "user", "content": "a " * 90}, {"role": "assistant", "content": "b"}]}


def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """Write the examples as mine.jsonl, where a file of each tool names them."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for path in ("mine.jsonl", "data/mine.jsonl"):
        Path(path).write_text(text)
    Path("data/dataset_info.json").write_text(json.dumps({"own": {"file_name": "mine.jsonl"}}))


NAMING = (
    changed(TRL_7B, dataset_name="mine.jsonl", max_length=8192),
    changed(TRL_7B, dataset_name=None, datasets=[{"path": "json", "data_files": "mine.jsonl"}]),
    changed(AXOLOTL, datasets=[{"path": "mine.jsonl", "type": "x"}], sample_packing=False),
    changed(FACTORY, dataset="own", max_samples=None),
)


@pytest.mark.parametrize("text", NAMING)
def test_a_dataset_file_that_the_run_names_is_read(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[..., CheckReport],
) -> None:
    without = answer(text, "h200-sxm")
    assert without.workload.lengths.source == "assumed"
    at_home(tmp_path, monkeypatch, [ROW] * 7)
    found = answer(text, "h200-sxm")
    assert (found.workload.examples, found.workload.lengths.longest) == (7, 48)
    assert found.workload.lengths.most is not None  # of its bytes
    assert found.checked.estimate.need_gib < without.checked.estimate.need_gib
    notes = " ".join(found.notes)
    assert "The lengths of the examples are from mine.jsonl, estimated from their" in notes
    assert "Memory is estimated for sequences of 832 tokens, not " in notes
    assert "no example is longer, even with one token for each byte." in notes
    options = answer(text, "h200-sxm", tokens_per_example=512)
    assert options.workload.lengths.source == "given"


def test_memory_of_full_rows_does_not_follow_the_longest_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., CheckReport]
) -> None:
    at_home(tmp_path, monkeypatch, [ROW] * 7)
    for keys in ({"packing": True}, {"pad_to_multiple_of": 8192}):
        found = answer(changed(NAMING[0], **keys), "h200-sxm")
        full = answer(changed(NAMING[0], dataset_name="absent", **keys), "h200-sxm")
        assert found.workload.lengths.source == "characters"
        assert found.checked.bounds.bounds_gib == pytest.approx(full.checked.bounds.bounds_gib)


def test_a_dataset_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., CheckReport]
) -> None:
    at_home(tmp_path, monkeypatch, [{"question": "x"}])
    found = answer(NAMING[0], "h200-sxm")
    assert found.workload.lengths.source == "assumed"
    notes = " ".join(found.notes)
    assert "The examples of mine.jsonl could not be read: " in notes and "its columns: q" in notes
    assert "The length of the examples was not given" in notes
