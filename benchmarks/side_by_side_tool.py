"""One tool's part of `side_by_side.py`: train one model with LoRA by that tool, one configuration
after another.

It runs in a process of its own, where the packages of that tool come before all others, and imports
nothing of autotune. Each function below makes the tool's own trainer as the tool's documentation
does, for rows that are already tokens. Only what is measured is ours: one callback notes the time
and the loss of each optimizer step.

The data are as many rows as an optimizer step has, so that each step sees all of them and their
order has no effect: the first loss of all tools is the same, up to rounding, since new adapters
change nothing.
"""

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# what the tools' sources read: no network, no statistics, every layer compiled on its own
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, which caps transformers at 5.6
    "AXOLOTL_DO_NOT_TRACK": "1",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GIB = 2**30
# as the script that autotune exports has it: nothing falls back to layers that are not compiled
RECOMPILE_LIMIT = 64
WARM_STEPS = 1  # before steps count: the first compiles, and tunes kernels
VERSIONS = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "unsloth",
    "unsloth_zoo",
    "axolotl",
)
VERSIONS += ("llamafactory", "torchtune", "torchao", "liger-kernel", "datasets", "bitsandbytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train: files, and sizes in rows and tokens."""

    model: str
    rows: str  # a file: lists of token ids
    texts: str  # the same as text, a line of JSON each
    export: str | None  # the exported folder of autotune
    device: str
    rank: int
    alpha: int
    every_kind: bool  # of recomputation, also where a micro batch fits without it
    seq_len: int
    steps: int
    learning_rate: float
    micro_batches: list[int]
    seconds: float  # after which no configuration is begun

    def examples(self) -> list[list[int]]:
        rows: list[list[int]] = json.loads(Path(self.rows).read_text(encoding="utf-8"))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One configuration: rows in a micro batch, what the backward pass recomputes, and whether
    layers are compiled.
    """

    micro_batch: int
    recompute: str  # none, full, or a tool's own kind
    compile: bool = False

    def label(self) -> str:
        compiled = " compiled" if self.compile else ""
        return f"micro batch {self.micro_batch}, recomputation {self.recompute}{compiled}"


class Steps:
    """The start of each optimizer step in the device's own time, and the loss of each step."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._is_cuda = torch, device == "cuda"
        self._marks: list[Any] = []
        self.losses: list[float] = []
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def mark(self) -> None:
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def result(self, tokens: int) -> dict[str, Any]:
        """Tokens per second in the median step that counts, the peak in GiB (None on a CPU), first
        and last loss.
        """
        if self._is_cuda:
            self._torch.cuda.synchronize()
        seconds = [
            start.elapsed_time(end) / 1000 if self._is_cuda else end - start
            for start, end in itertools.pairwise(self._marks)
        ]
        counted = seconds[WARM_STEPS:]
        return {
            "outcome": "ok",
            "tokens_per_s": tokens / statistics.median(counted) if counted else None,
            "step_s": seconds,
            "peak_reserved_gib": self._torch.cuda.max_memory_reserved() / GIB
            if self._is_cuda
            else None,
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
        }


def callback(steps: Steps) -> Any:
    """`steps` as a callback of transformers' Trainer."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.mark()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            steps.mark()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
        ) -> None:
            if "loss" in logs:
                steps.losses.append(float(logs["loss"]))

    return Timer()


# --- what the tools share that train by transformers' Trainer


def arguments(task: Task, variant: Variant) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments, the same for all."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": variant.micro_batch,
        "gradient_accumulation_steps": len(task.examples()) // variant.micro_batch,
        "max_steps": task.steps,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": task.device == "cpu",
        "gradient_checkpointing": variant.recompute != "none",
        "torch_compile": variant.compile,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # it would wait for the device at every micro batch
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def load(task: Task, **settings: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    place = {"": 0} if task.device == "cuda" else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.bfloat16, device_map=place, attn_implementation="sdpa", **settings
    )


def adapters(task: Task) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=task.rank,
        lora_alpha=task.alpha,
        lora_dropout=0.0,
        target_modules=LINEAR,
        task_type="CAUSAL_LM",
    )


def tensors(task: Task) -> list[dict[str, Any]]:
    """The rows for a Trainer that takes them as they are. A mask of ones is left out."""
    import torch

    return [
        {"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in task.examples()
    ]


def token_dataset(task: Task) -> Any:
    """The rows for TRL's trainers, which skip the tokenising where the column exists."""
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": task.examples()})


def tokenizer_of(task: Task) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task.model)


Run = Callable[[Variant, Steps], None]  # trains one configuration of a loaded model


def keeping_adapters(model: Any, run: Run) -> Run:
    """`run` from the first adapters again, without gradients of a run before.

    accelerate passes over a model that it has prepared: it would not compile it.
    """
    import torch
    from accelerate.utils import extract_model_from_parallel

    first = {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }

    def again(variant: Variant, steps: Steps) -> None:
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
        model._is_accelerate_prepared = False
        model.zero_grad(set_to_none=True)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in first.items():
                parameters[name].copy_(value)
        run(variant, steps)

    return again


# --- the tools: each loads the model for one kind of recomputation


def trl(task: Task, recompute: str) -> Run:
    """TRL's SFTTrainer, with its own loss in chunks and its own dtype of adapters (that of the
    base).
    """
    from peft import get_peft_model
    from trl import SFTConfig, SFTTrainer

    # as its own `peft_config` does
    model = get_peft_model(load(task), adapters(task), autocast_adapter_dtype=False)
    data, tokenizer = token_dataset(task), tokenizer_of(task)

    def run(variant: Variant, steps: Steps) -> None:
        settings = arguments(task, variant) | {
            "max_length": task.seq_len,
            "activation_offloading": False,
        }
        if recompute == "offload":
            settings |= {"gradient_checkpointing": False, "activation_offloading": True}
        config = SFTConfig(**settings)
        SFTTrainer(
            model,
            config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[callback(steps)],
        ).train()

    return keeping_adapters(model, run)


def liger(task: Task, recompute: str) -> Run:
    """Plain transformers and PEFT with all of Liger's kernels."""
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, default_data_collator

    model, data = get_peft_model(load(task), adapters(task)), tensors(task)

    def run(variant: Variant, steps: Steps) -> None:
        config = TrainingArguments(
            **arguments(task, variant), use_liger_kernel=task.device == "cuda"
        )
        Trainer(model, config, default_data_collator, data, callbacks=[callback(steps)]).train()

    return keeping_adapters(model, run)


def axolotl(task: Task, recompute: str) -> Run:
    """Axolotl's LoRA kernels by its own patches, with the kernels of Liger that its plugin adds
    beside them.
    """
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments, default_data_collator

    found = importlib.util.find_spec("axolotl")
    assert found is not None and found.submodule_search_locations
    # itself it imports trackers; a module in it is needed
    callbacks = types.ModuleType("axolotl.utils.callbacks")
    callbacks.__path__ = [str(Path(found.submodule_search_locations[0]) / "utils" / "callbacks")]
    sys.modules[callbacks.__name__] = callbacks
    from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches, patch_self_attn_lora
    from axolotl.utils.dict import DictDefault

    settings = DictDefault(
        {
            "base_model": task.model,
            "lora_qkv_kernel": True,
            "lora_o_kernel": True,
            "lora_mlp_kernel": True,
        }
    )
    patch_self_attn_lora(settings)  # before the model is made
    if task.device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_mistral

        apply_liger_kernel_to_mistral(
            rope=True,
            rms_norm=True,
            swiglu=False,
            cross_entropy=False,
            fused_linear_cross_entropy=True,
        )
    model = apply_lora_kernel_patches(get_peft_model(load(task), adapters(task)), settings)
    data = tensors(task)

    def run(variant: Variant, steps: Steps) -> None:
        config = TrainingArguments(**arguments(task, variant))
        Trainer(model, config, default_data_collator, data, callbacks=[callback(steps)]).train()

    return keeping_adapters(model, run)


def unsloth(task: Task, recompute: str) -> Run:
    """The FastLanguageModel of unsloth, with TRL's SFTTrainer as unsloth patches it.

    It compiles what it wants to.
    """
    os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(prefix="unsloth-compiled-")
    from unsloth import FastLanguageModel  # isort: skip
    import torch
    from trl import SFTConfig, SFTTrainer

    kind: Any = {"none": False, "full": True}.get(recompute, recompute)
    model, tokenizer = FastLanguageModel.from_pretrained(
        task.model,
        max_seq_length=task.seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=task.rank,
        lora_alpha=task.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=LINEAR,
        use_gradient_checkpointing=kind,
        random_state=0,
    )
    data = token_dataset(task)

    def run(variant: Variant, steps: Steps) -> None:
        settings = arguments(task, variant) | {"max_length": task.seq_len}
        del settings["torch_compile"]
        SFTTrainer(
            model=model,
            args=SFTConfig(**settings),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[callback(steps)],
        ).train()

    return keeping_adapters(model, run)


def llamafactory(task: Task, recompute: str) -> Run:
    """LLaMA-Factory's own arguments, model and trainer, as its stage of plain text makes them, with
    Liger's kernels.
    """
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer
    from llamafactory.train.pt.trainer import CustomTrainer
    from transformers import default_data_collator

    def parsed(variant: Variant) -> Any:
        given = arguments(task, variant)
        del given["gradient_checkpointing"]  # which it asks the other way round
        return get_train_args(
            given
            | {
                "model_name_or_path": task.model,
                "stage": "pt",
                "do_train": True,
                "finetuning_type": "lora",
                "lora_rank": task.rank,
                "lora_alpha": task.alpha,
                "lora_target": "all",
                "flash_attn": "sdpa",
                "enable_liger_kernel": task.device == "cuda",
                "disable_gradient_checkpointing": recompute == "none",
                "dataset": "rows",
                "template": "default",
                "cutoff_len": task.seq_len,
            }
        )

    model_args, _, _, finetuning_args, _ = parsed(Variant(micro_batch=1, recompute=recompute))
    tokens = load_tokenizer(model_args)
    model = load_model(tokens["tokenizer"], model_args, finetuning_args, is_trainable=True)
    if task.device == "cuda":
        model.to("cuda")
    data = tensors(task)

    def run(variant: Variant, steps: Steps) -> None:
        *_, training_args, finetuning_args, _ = parsed(variant)
        CustomTrainer(
            model=model,
            args=training_args,
            finetuning_args=finetuning_args,
            data_collator=default_data_collator,
            train_dataset=data,
            callbacks=[callback(steps)],
            **tokens,
        ).train()

    return keeping_adapters(model, run)


def torchtune(task: Task, recompute: str) -> Run:
    """The recipe of torchtune for LoRA on one device as it is; the adapters are in bf16, as all of
    it.
    """
    from omegaconf import OmegaConf

    found = importlib.util.find_spec("torchtune")
    assert found is not None and found.submodule_search_locations
    path = (
        Path(found.submodule_search_locations[0]).parent
        / "recipes"
        / "lora_finetune_single_device.py"
    )
    of_recipe = importlib.util.spec_from_file_location("lora_finetune_single_device", path)
    assert of_recipe is not None and of_recipe.loader is not None
    recipe_module = importlib.util.module_from_spec(of_recipe)
    of_recipe.loader.exec_module(recipe_module)
    weights: list[dict[str, Any]] = []  # read once for all configurations

    class Recipe(recipe_module.LoRAFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
        def load_checkpoint(self, cfg_checkpointer: Any) -> dict[str, Any]:
            if not weights:
                weights.append(super().load_checkpoint(cfg_checkpointer))
            return weights[0]

        def save_checkpoint(self, epoch: int) -> None:
            """Nothing: saving is not what is measured."""

    def run(variant: Variant, steps: Steps) -> None:
        config = OmegaConf.create(torchtune_config(task, variant))
        recipe = Recipe(config)
        recipe.setup(config)

        def log(values: dict[str, Any], step: int) -> None:
            steps.losses.append(float(values["loss"]))
            steps.mark()

        recipe._metric_logger = types.SimpleNamespace(log_dict=log, close=lambda: None)
        steps.mark()
        recipe.train()
        recipe.cleanup()

    return run


def torchtune_config(task: Task, variant: Variant) -> dict[str, Any]:
    """The recipe's YAML, after mistral/7B_lora_single_device.yaml."""
    shape = json.loads((Path(task.model) / "config.json").read_text(encoding="utf-8"))
    files = sorted(path.name for path in Path(task.model).glob("*.safetensors"))
    folder = tempfile.mkdtemp()
    return {
        "output_dir": folder,
        "device": task.device,
        "dtype": "bf16",
        "seed": 0,
        "model": {
            "_component_": "torchtune.models.mistral.lora_mistral",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "apply_lora_to_output": False,
            "vocab_size": shape["vocab_size"],
            "num_layers": shape["num_hidden_layers"],
            "num_heads": shape["num_attention_heads"],
            "num_kv_heads": shape["num_key_value_heads"],
            "embed_dim": shape["hidden_size"],
            "intermediate_dim": shape["intermediate_size"],
            "max_seq_len": task.seq_len,
            "norm_eps": shape["rms_norm_eps"],
            "rope_base": int(shape["rope_parameters"]["rope_theta"]),
            "lora_rank": task.rank,
            "lora_alpha": task.alpha,
            "lora_dropout": 0.0,
        },
        "tokenizer": {"_component_": "side_by_side_tool.NoTokenizer"},
        "dataset": {
            "_component_": "side_by_side_tool.TorchtuneRows",
            "file": task.rows,
            "repeats": task.steps,
        },
        "shuffle": False,
        "collate_fn": "torchtune.data.padded_collate_sft",
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": task.model,
            "checkpoint_files": files,
            "output_dir": folder,
            "model_type": "MISTRAL",
        },
        "resume_from_checkpoint": False,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": task.learning_rate,
            "weight_decay": 0.0,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "batch_size": variant.micro_batch,
        "gradient_accumulation_steps": len(task.examples()) // variant.micro_batch,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "clip_grad_norm": 1.0,
        "compile": variant.compile,
        "enable_activation_checkpointing": variant.recompute != "none",
        "enable_activation_offloading": variant.recompute == "offload",
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }


class NoTokenizer:
    """What torchtune's recipe asks of a tokenizer for rows that are tokens."""

    pad_id = 0


class TorchtuneRows:
    """The rows in the order of the file, as often as there are steps."""

    def __init__(self, tokenizer: NoTokenizer, file: str, repeats: int) -> None:
        self._rows = json.loads(Path(file).read_text(encoding="utf-8")) * repeats

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": list(self._rows[index]), "labels": list(self._rows[index])}


def ours(task: Task, recompute: str) -> Run:
    """The script that autotune exported, as it is, but for the rate, and for the loss of every
    step.
    """
    assert task.export is not None
    sys.path.insert(0, task.export)
    settings_of = importlib.import_module("runtime.settings")
    command_line = importlib.import_module("runtime.command_line")
    settings = settings_of.RunSettings.read(Path(task.export) / "train_config.json")
    settings = replace(settings, learning_rate=task.learning_rate, warmup_steps=0)
    settings_of.prepare_environment(settings)
    train = importlib.import_module("runtime.train")
    given = [
        "--model",
        task.model,
        "--dataset",
        task.texts,
        "--max-steps",
        str(task.steps),
        "--output-dir",
        "",
    ]
    options = command_line.parse_options(settings, [*given, "--report-to", "none"])

    def run(variant: Variant, steps: Steps) -> None:
        class Timed(train.LeanTrainer):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, callbacks: list[Any], **kwargs: Any) -> None:
                super().__init__(*args, callbacks=[*callbacks, callback(steps)], **kwargs)
                self.args.logging_steps = self.state.logging_steps = 1

        train.LeanTrainer = Timed
        train.main(settings, options, Path(str(task.export)) / "model_config.json")

    return run


# --- the model, made once for all


def write_model(
    folder: Path, shape: dict[str, Any], *, rows: int, seq_len: int, device: str
) -> None:
    """Write random weights, a tokenizer with a word for each token, and rows of words that a model
    can learn.

    The last token of a row ends it. Words are drawn by Zipf's law, as those of a language are
    distributed.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = [*special, *(f"w{number}" for number in range(len(special), shape["vocab_size"]))]
    plain = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(folder / "model")
    chances = 1.0 / torch.arange(1, len(words) - len(special) + 1)
    drawn = torch.multinomial(chances, rows * (seq_len - 1), replacement=True).view(rows, -1) + len(
        special
    )
    tokens = [[*row, special.index("</s>")] for row in drawn.tolist()]
    (folder / "rows.json").write_text(json.dumps(tokens), encoding="utf-8")
    lines = [
        json.dumps({"text": " ".join(words[token] for token in row[:-1])}) + "\n" for row in tokens
    ]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    assert tokenizer(json.loads(lines[0])["text"])["input_ids"] == tokens[0][:-1]
    config = AutoConfig.for_model(
        **shape | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="4GB")


# --- the sweep

KINDS: dict[
    str, tuple[Callable[[Task, str], Run], tuple[str, ...], bool]
] = {  # recomputations, and whether it compiles
    "trl": (trl, ("none", "full", "offload"), True),
    "liger": (liger, ("none", "full"), True),
    "axolotl": (axolotl, ("none", "full"), True),
    "unsloth": (unsloth, ("none", "unsloth", "full"), False),
    "llamafactory": (llamafactory, ("none", "full"), True),
    "torchtune": (torchtune, ("none", "full", "offload"), True),
    "ours": (ours, ("exported",), False),
}


def sweep(tool: str, task: Task) -> Iterator[dict[str, Any]]:
    """A row for each configuration of a tool: every micro batch without recomputation, first as it
    is, then compiled.

    A kind of recomputation is tried with the micro batches that do not fit without it: where one
    fits, it adds work.
    """
    make, recomputations, compiles = KINDS[tool]
    until = time.monotonic() + task.seconds
    left = {
        compiled: list(task.micro_batches) for compiled in ((False, True) if compiles else (False,))
    }
    for recompute in recomputations:
        if not any(left.values()):
            return
        try:
            seed()
            run = make(task, recompute)
        except Exception as error:
            traceback.print_exc()
            yield {
                "config": f"recomputation {recompute}",
                "outcome": "failed",
                "reason": in_short(error),
            }
            continue
        for compiled, sizes in left.items():
            variants = [
                Variant(micro_batch=size, recompute=recompute, compile=compiled) for size in sizes
            ]
            for row in measure(task, run, variants, until):
                if row["outcome"] == "ok" and not task.every_kind:
                    left[compiled] = [size for size in left[compiled] if size != row["micro_batch"]]
                yield row
        del run
        free()


def measure(
    task: Task, run: Run, variants: list[Variant], until: float
) -> Iterator[dict[str, Any]]:
    """A row for each of these configurations with ever larger micro batches, until one needs too
    much memory.
    """
    import torch
    from torch._dynamo.utils import counters

    for variant in variants:
        row = {"config": variant.label(), "micro_batch": variant.micro_batch}
        if time.monotonic() > until:
            yield row | {"outcome": "no time left"}
            return
        free()
        forget_compilation()
        steps, began = Steps(task.device), time.monotonic()
        try:
            run(variant, steps)
            row |= steps.result(len(task.examples()) * task.seq_len)
        except torch.OutOfMemoryError:
            row |= {"outcome": "out of memory"}
        except Exception as error:
            traceback.print_exc()
            row |= {"outcome": "failed", "reason": in_short(error)}
        yield row | {
            "compiled_graphs": counters["stats"]["unique_graphs"],
            "seconds": time.monotonic() - began,
        }
        if row["outcome"] == "out of memory":
            return


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def seed() -> None:
    import torch

    torch.manual_seed(0)


def forget_compilation() -> None:
    """Undo what a configuration before left: compiled code, and accelerate's state, which says
    whether to compile.
    """
    import torch
    from accelerate.state import AcceleratorState
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    counters.clear()
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)


def free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=["model", *KINDS])
    parser.add_argument(
        "task", type=Path, help="a JSON file: the fields of Task, or what write_model takes"
    )
    parser.add_argument("out", type=Path, help="a file to which each row is appended")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    given = json.loads(args.task.read_text(encoding="utf-8"))
    if args.tool == "model":
        write_model(args.out, **given)
        return
    sys.modules.setdefault("side_by_side_tool", sys.modules["__main__"])
    for row in sweep(args.tool, Task(**given)):
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"versions": versions()}) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
