"""train.py as it is exported, really run: it trains the model that is probed, on real rows, packed
as was planned.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from autotune.study.summary import Recipe
from tests.unit.export.test_script import demo, recipe, run, write

# Run instead of a train.py: trains in each folder, and then says what was trained.
# Each script has a process of its own, which branches off once the libraries are loaded: that takes
# longer than to train.
_DRIVER = """
import importlib.util, json, os, pathlib, sys, traceback
import accelerate, peft, torch, torch._inductor.compile_fx
import torch.distributed.fsdp, torch.distributed.tensor
import transformers.trainer, transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
get_checkpoint_conversion_mapping("llama")  # 900 regular expressions, which the library keeps
if importlib.util.find_spec("torchao"):
    import torchao.quantization
if importlib.util.find_spec("bitsandbytes"):
    import bitsandbytes

def train(folder):
    for name, number in ("out", 1), ("err", 2):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.path.insert(0, str(folder))
    from runtime.command_line import parse_options
    from runtime.lean_trainer import LeanTrainer
    from runtime.settings import RunSettings
    from runtime.train import main
    import torch
    # Graphs call torch's own code: g++ would compile some twenty kernels for a layer.
    torch._inductor.config.fallback_by_default = True
    fed, losses, joined, train_on = [], [], [], LeanTrainer.training_step
    def feed(trainer, model, batch, *others):
        trained = [1 + int((row >= 0).sum()) for row in batch["labels"]]
        fed.append([batch["input_ids"].shape[1], trained])
        loss = train_on(trainer, model, batch, *others)
        losses.append(float(loss))
        joined.append(trainer.joined is not None)
        return loss
    LeanTrainer.training_step = feed
    settings = RunSettings.read(folder / "train_config.json")
    arguments = (folder / "arguments").read_text().splitlines()
    model = main(settings, parse_options(settings, arguments), folder / "model_config.json").model
    (folder / "fed.json").write_text(json.dumps(fed))
    (folder / "losses.json").write_text(json.dumps(losses))
    (folder / "joined.json").write_text(json.dumps(joined))
    (folder / "cudnn").write_text(str(torch.backends.cuda.cudnn_sdp_enabled()))
    print(json.dumps([[type(module).__name__, getattr(module, "gradient_checkpointing", None),
        [[name, list(p.shape), str(p.dtype), p.requires_grad]
         for name, p in module.named_parameters(recurse=False)]]
        for module in model.modules()]), flush=True)

for folder in sorted(pathlib.Path(__file__).parent.glob("[0-9]*/")):
    if os.fork() == 0:
        try:
            train(folder)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""

_TRAINED: list[dict[str, Any]] = [
    {"precision": "bf16_mixed", "checkpointing": "every_2", "dora": True, "rslora": True},
    {"method": "full", "precision": "fp32", "checkpointing": "full"},
    {"precision": "bf16_pure", "quantization": "nf4", "double_quant": True},
    {
        "quantization": "nf4",
        "kbit_preparation": True,
        "modules_to_save": "embedding_and_head",
        "loss": "chunked",
    },
]
_COMPILED = {"compile": "per_layer", "padding": "bucket", "checkpointing": "none"}
_TRAINED += [_COMPILED, _COMPILED | {"lora_kernels": "joined"}]
_PADDED: list[dict[str, Any]] = [
    {"padding": "bucket", "micro_batch_size": 1},  # eight lengths: some must be padded
    {"padding": "max_length"},
    {"padding": "longest", "group_by_length": True},
    {"padding": "masked"},
]
_TOKENS = [2, 3, 5, 9, 16, 4, 2, 2] * 4  # of texts, with </s>; the longest are cut
_PACKED = [("--random-weights",), ("--dataset", "rows.jsonl")]
_LENGTHS = [3, 5, 8, 11, 15, 19, 24, 30]  # two steps of four rows


def _small(knobs: dict[str, Any]) -> Recipe:
    return demo(
        TrainConfig(**{"micro_batch_size": 2, "seq_len": 32, "optimizer": "adamw_torch"} | knobs)
    )


def _uneven(knobs: dict[str, Any]) -> Recipe:
    workload = Workload(
        examples=len(_LENGTHS), lengths=Lengths.of(_LENGTHS, "counted"), global_batch=4
    )
    return replace(_small({"precision": "fp32"} | knobs), workload=workload)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """demo-3m with random weights as safetensors, and a tokenizer of a few words."""
    return _save_demo(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def packed(weights: Path) -> Recipe:
    config = TrainConfig(
        micro_batch_size=2, seq_len=16, precision="fp32", optimizer="adamw_torch", packing=True
    )
    workload = Workload(
        examples=len(_TOKENS), lengths=Lengths.of(_TOKENS, "counted"), global_batch=12
    )
    return recipe(
        config, model=replace(resolve_model("demo-3m"), weights=str(weights)), workload=workload
    )


def forked(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run train.py as launch.sh does, in a process that has loaded the libraries."""
    return subprocess.run(
        [sys.executable, str(directory / "train.py"), *arguments],
        cwd=directory.parent,
        env=os.environ
        | {"HOME": str(directory), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, packed: Recipe) -> Path:
    """A folder for each of _TRAINED, _PADDED and _PACKED by its place, with what the driver says of
    it in `out`.
    """
    directory = tmp_path_factory.mktemp("trained") / "out"
    write(export_all(demo(TrainConfig()), ["train"]) | {"train.py": _DRIVER}, directory)
    texts = [{"text": "a " * (tokens - 1 + 9 * (tokens == 16))} for tokens in _TOKENS]
    (directory.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    saved = ("--output-dir", str(directory.parent / "saved"))
    runs = [
        (made, ("--max-steps", "2", *saved))
        for made in [*map(_small, _TRAINED), *map(_uneven, _PADDED)]
    ]
    runs += [(packed, (*source, "--max-steps", "3", *saved)) for source in _PACKED]
    for place, (made, arguments) in enumerate(runs):
        write(
            export_all(made, ["train"]) | {"arguments": "\n".join(arguments)},
            directory / str(place),
        )
    done = forked(directory)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


@pytest.mark.probe
# PEFT asks with a name from before transformers 5.23
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "knobs", _TRAINED, ids=lambda knobs: "-".join(str(value) for value in knobs.values())
)
def test_train_py_trains_the_model_that_is_probed(knobs: dict[str, Any], trained: Path) -> None:
    if knobs.get("quantization"):
        pytest.importorskip("bitsandbytes")
    import torch

    from autotune.probe.model_settings import model_settings
    from autotune.probe.resident import attach, build_resident
    from autotune.trainer.model_builder import set_checkpointing

    made = _small(knobs)
    config = made.winner.config
    folder = trained / str(_TRAINED.index(knobs))
    said = (folder / "out").read_text().strip().splitlines()
    assert len(said) >= 2, (folder / "err").read_text()[-2000:]
    result, modules = map(json.loads, said[-2:])
    assert result["steps"] == 2
    assert result["seconds_per_step"] > 0
    assert result["peak_reserved_gib"] is None
    assert result["tokens_per_second"] == pytest.approx(2 * 2 * 32 / result["seconds_per_step"])

    device = torch.device("cpu")
    request = ProbeRequest(config=config, model=made.model.config, device="cpu", memory_gib=1.0)
    resident = build_resident(request, device)
    set_checkpointing(resident.base, model_settings(config, resident.base.config.model_type))
    expected = [
        [
            type(module).__name__,
            getattr(module, "gradient_checkpointing", None),
            [
                [name, list(p.shape), str(p.dtype), p.requires_grad]
                for name, p in module.named_parameters(recurse=False)
            ],
        ]
        for module in attach(resident, config, device, seed=0).modules()
    ]
    assert modules == expected


@pytest.mark.probe
def test_train_py_trains_joined_adapters_to_the_losses_of_pefts(trained: Path) -> None:
    peft, joined = (trained / str(len(_TRAINED) - n) for n in (2, 1))
    of_peft, of_joined = (
        json.loads((folder / "losses.json").read_text()) for folder in (peft, joined)
    )
    assert len(of_joined) >= 4 and of_joined == pytest.approx(of_peft, rel=2e-3)
    assert not any(json.loads((peft / "joined.json").read_text()))
    assert all(json.loads((joined / "joined.json").read_text()))


@pytest.mark.probe
@pytest.mark.parametrize("knobs", _PADDED, ids=lambda knobs: "-".join(map(str, knobs.values())))
def test_train_py_feeds_batches_of_the_lengths_that_were_planned(
    knobs: dict[str, Any], trained: Path
) -> None:
    """A run without dataset has the examples of the plan, each once in a pass."""
    made = _uneven(knobs)
    folder = trained / str(len(_TRAINED) + _PADDED.index(knobs))
    assert (folder / "fed.json").exists(), (folder / "err").read_text()[-2000:]
    fed = [(length, tokens) for length, tokens in json.loads((folder / "fed.json").read_text())]
    assert sorted(row for _, tokens in fed for row in tokens) == _LENGTHS
    # cuDNN makes a plan for each length that is new.
    assert (folder / "cudnn").read_text() == str(made.config.padding != "longest")
    planned = made.workload.padded_lengths(made.config)
    expected = [
        next((length for length in planned if length >= max(tokens)), max(tokens))
        for _, tokens in fed
    ]
    assert [length for length, _ in fed] == expected
    result = json.loads((folder / "out").read_text().strip().splitlines()[-2])
    second_step = expected[len(expected) // 2 :]  # the first is not timed
    assert result["padded_tokens_per_step"] == made.config.micro_batch_size * sum(second_step)
    # as many examples as a step takes are sorted, the longest first
    if made.config.group_by_length:
        assert all(min(long) >= max(short) for (_, long), (_, short) in (fed[:2], fed[2:]))


@pytest.mark.probe
def test_train_py_trains_real_weights_on_each_kind_of_row(tmp_path: Path, weights: Path) -> None:
    config = TrainConfig(micro_batch_size=2, seq_len=16, precision="fp32", optimizer="adamw_torch")
    made = demo(config)
    made = replace(made, model=replace(made.model, weights=str(weights)))
    directory = write(export_all(made, ["train"]), tmp_path / "out")
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    rows = [
        {"text": "a b c"},
        {"prompt": "a", "completion": " b c"},
        {"messages": chat},
        {"text": "a " * 50},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 2)) + "\n")
    # relative to where it is started
    done = run(directory, "--dataset", "rows.jsonl", "--output-dir", "trained")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["steps"] == 2
    lengths = [4, 4, 9, 16]  # </s> ends a row; the longest is cut
    tokens = 2 * 2 * sum(lengths) / len(lengths)
    assert result["tokens_per_second"] == pytest.approx(tokens / result["seconds_per_step"])
    assert (tmp_path / "trained" / "adapter_model.safetensors").exists()

    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    done = forked(directory, "--dataset", "rows.jsonl", "--output-dir", "trained", "--resume")
    assert done.returncode == 1
    assert (
        "error: give another --output-dir: trained/checkpoint-2 was trained on rows.jsonl ("
        in done.stderr
    )


@pytest.mark.probe
@pytest.mark.parametrize("source", _PACKED, ids=lambda source: source[0])
def test_train_py_packs_as_it_was_planned(
    source: tuple[str, ...], packed: Recipe, trained: Path
) -> None:
    config, workload = packed.winner.config, packed.workload
    # 43 tokens in 3 rows, 4 times: 12 examples are 4 or 5 rows
    assert workload.run_shape(config).accumulation == 2
    folder = trained / str(len(_TRAINED) + len(_PADDED) + _PACKED.index(source))
    said = (folder / "out").read_text().strip().splitlines()
    assert len(said) >= 2, (folder / "err").read_text()[-2000:]
    result = json.loads(said[-2])
    tokens = 2 * 2 * workload.useful_tokens_per_row(config)
    assert result["tokens_per_second"] == pytest.approx(
        tokens / result["seconds_per_step"], rel=0.05
    )


def _save_demo(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """demo-3m with random weights as safetensors, and a tokenizer of a few words.

    Another model takes its place if its transformers config is given.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = dict(config or resolve_model("demo-3m").config)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(shape.pop("model_type"), **shape)
    ).save_pretrained(directory)
    words = ["<unk>", "</s>", "a", "b", "c", "user", "assistant", ":"]
    words_only = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_only, unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    return directory
