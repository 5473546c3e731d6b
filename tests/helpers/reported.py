"""Public reports of people who fine-tune, each as small input files, steps and the correct result.

The files are our own and imitate the reported ones. `CASES` has one case for each report; `unmet`
runs its steps and returns the expectations that they do not meet.
"""

import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from autotune.cli import app
from tests.helpers.tokenizers import byte_level, template

PLAN = "plan --model qwen3-0.6b --gpu rtx-4090 --seq-len 512 --dataset {} --tokenizer {}"
# The texts of Python's own exceptions, which are no reason for a user.
EXCEPTION = re.compile(r"Traceback|\b[A-Z][A-Za-z]+(Error|Exception)\b|NoneType|error: unexpected ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line of autotune, its exit code, and patterns that its output has or lacks.

    `begins` is a pattern of the first line of stdout. A slow command counts the memory of several
    configurations in a process of its own.
    """

    line: str
    code: int = 0
    slow: bool = False
    begins: str = ""
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def unmet(self) -> Iterator[str]:
        """Run the command in this process, and yield the faults of its output."""
        details = " --details" if self.line.startswith("check ") else ""
        code, out, errors = run_command(self.line + details)
        said = errors + out
        if code != self.code:
            yield f"{self.line}: exit code {code}, not {self.code}: {errors[-300:]}"
        if not re.match(self.begins, out):
            first = out.partition("\n")[0]
            yield f"{self.line}: the first line is {first!r}, not {self.begins!r}"
        for pattern in self.has:
            if not re.search(pattern, said):
                yield f"{self.line}: it does not say {pattern!r}: {errors[-300:]}"
        for pattern in self.lacks:
            if re.search(pattern, said):
                yield f"{self.line}: it says {pattern!r}"
        if found := EXCEPTION.search(said):
            yield f"{self.line}: it says {found[0]!r}"
        if code and (said.count("error: "), said.count("  try: ")) != (1, 1):
            yield f"{self.line}: not one error and one remedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The rendered examples of a file, with the trained text in [[...]], by a chat template.

    A template followed by `+bos` is used with a tokenizer that adds its beginning-of-text token.
    A text that begins with `...` is the end of an example, and all text before it is only read.
    """

    file: str
    template: str
    rendered: tuple[str, ...]
    slow: bool = False

    def unmet(self) -> Iterator[str]:
        """Yield each example that is not rendered as it should be."""
        from autotune.trainer.examples import Encoder
        from autotune.trainer.reading import BadDataset, read_rows

        tokenizer = tokenizer_of(self.template)
        try:
            examples = list(Encoder(tokenizer, None).encode(read_rows(Path(self.file))))
        except BadDataset as error:
            yield f"{self.file} with {self.template}: refused: {error}"
            return
        made = [rendered(tokenizer, example) for example in examples]
        for one, wanted in itertools.zip_longest(made, self.rendered, fillvalue=""):
            before, dots, end = wanted.rpartition("...")
            agrees = (
                one.endswith(end) and "[[" not in one.removesuffix(end) if dots else one == wanted
            )
            if not agrees or before:
                yield f"{self.file} with {self.template}: {one!r}, not {wanted!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A report: its sources, the correct result in words, its files and its steps.

    The files are texts, or lists of rows. `tokenizers` are templates whose tokenizers the commands
    read from folders of their names.
    """

    name: str
    sources: str
    right: str
    steps: tuple[Command | Masks, ...]
    files: dict[str, str | list[dict[str, Any]]] = field(default_factory=dict)
    tokenizers: tuple[str, ...] = ()

    def write_files(self) -> None:
        """Write the files of the case and its tokenizers into the working directory."""
        for name, content in self.files.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = isinstance(content, list)
            path.write_text("\n".join(map(json.dumps, content)) if rows else str(content))
        for name in self.tokenizers:
            tokenizer_of(name).save_pretrained(name)


def unmet(case: Case, folder: Path, *, slow: bool = True) -> list[str]:
    """Run a case in an empty folder and return its expectations that are not met.

    Without `slow`, slow commands are left out.
    """
    with contextlib.chdir(folder):
        case.write_files()
        steps = [step for step in case.steps if slow or not step.slow]
        return [one for step in steps for one in step.unmet()]


def run_command(line: str) -> tuple[int, str, str]:
    """Run a command line of autotune in this process; return its exit code, stdout and stderr."""
    out = io.StringIO()
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["autotune", *line.split()]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            app.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return code, out.getvalue(), errors.getvalue()


def tokenizer_of(name: str) -> Any:
    """Return a tokenizer with one of TRL's chat templates."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level(template(name.removesuffix("+bos")))
    if name.endswith("+bos"):
        start = ("<s>", tokenizer.bos_token_id)
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[start]
        )
    return tokenizer


def rendered(tokenizer: Any, example: list[int]) -> str:
    """Return the text of an example with its trained parts in [[...]]."""
    text = ""
    for place, token in enumerate(example):
        is_trained = token >= 0
        was_trained = place > 0 and example[place - 1] >= 0
        text += "[[" * (is_trained and not was_trained) + "]]" * (was_trained and not is_trained)
        text += tokenizer.decode([token if is_trained else -1 - token])
    return text + "]]" * (bool(example) and example[-1] >= 0)


def _yaml(**keys: Any) -> str:
    return yaml.safe_dump(keys, sort_keys=False)


def _trl(**keys: Any) -> str:
    return _yaml(dataset_name="mine", dtype="bfloat16", **keys)


def _axolotl(**keys: Any) -> str:
    datasets = [{"path": "mine.jsonl", "type": "chat_template"}]
    return _yaml(datasets=datasets, bf16=True, gradient_checkpointing=True, **keys)


def _factory(**keys: Any) -> str:
    given = {"stage": "sft", "do_train": True, "dataset": "mine", "bf16": True, "output_dir": "out"}
    return _yaml(**given, **keys)


def _chat(*messages: tuple[str, str], **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in messages], **columns}


def _sharegpt(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in messages]}


# --- checks of other tools' files

LLAMA_8B = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "finetuning_type": "lora",
    "lora_target": "all",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}
FSDP_1 = {
    "fsdp_offload_params": True,
    "fsdp_use_orig_params": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
FSDP_2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
}
ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 5e8,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
}

CHECKS = (
    Case(
        name="01-check-dies-when-it-fits",
        sources="LLaMA-Factory 7997, Axolotl 1570 and 2720",
        right="A verdict with its need in GiB for embeddings that are trained beside adapters.",
        files={
            "factory.yaml": _factory(**LLAMA_8B, additional_target="embed_tokens,lm_head"),
            "trl.yaml": _trl(
                model_name_or_path="Qwen/Qwen3-4B",
                use_peft=True,
                lora_r=16,
                lora_target_modules="all-linear",
                lora_modules_to_save=["embed_tokens"],
                max_length=2048,
                per_device_train_batch_size=1,
            ),
        },
        steps=(
            Command(
                line="check factory.yaml --gpu h100-sxm",
                begins=r"fits: needs 2[678]\.\d of 73\.3 GiB",
                has=("with-embedding_and_head",),
            ),
            Command(
                line="check trl.yaml --gpu rtx-4090",
                begins=r"fits: needs 1[123]\.\d of 21\.5 GiB",
                has=("with-embedding ",),
            ),
        ),
    ),
    Case(
        name="02-fsdp-qlora-70b",
        sources="Axolotl 1522",
        right="No out of memory: FSDP shares the nf4 base, 14 GB a GPU were reported at 2 x 24 GB.",
        files={
            "qlora.yaml": _axolotl(
                base_model="NousResearch/Llama-2-70b-chat-hf",
                adapter="qlora",
                load_in_4bit=True,
                sequence_len=512,
                pad_to_sequence_len=True,
                lora_r=32,
                lora_target_linear=True,
                gradient_accumulation_steps=4,
                micro_batch_size=1,
                optimizer="paged_adamw_8bit",
                flash_attention=True,
                fsdp=["full_shard", "auto_wrap"],
                fsdp_config=FSDP_1,
            )
        },
        steps=(
            Command(
                line="check qlora.yaml --gpu rtx-3090 --gpus 2",
                begins=r"fits: needs [56]\.\d of 21\.5 GiB on each of 2 rtx-3090",
                has=(
                    "The offloaded tensors take 36\\.7 GiB of the host's memory",
                    "The 4-bit weights are sharded, because they are stored as floats",
                    "With tensors in the host.s memory, the memory of four ranks",
                ),
            ),
            Command(
                line="plan --model llama-2-70b --gpu rtx-3090 --gpus 1,2 --space qlora --seq-len"
                " 512 --details",
                begins=r"2 rtx-3090 with fsdp2, offloaded train Llama-2-70b-hf",
                has=("GiB of the host's memory",),
            ),
        ),
    ),
    Case(
        name="03-zero3-moe",
        sources="ms-swift 5615",
        right="No out of memory: the run trains on 4 x 24 GB with ZeRO 3.",
        files={
            "moe.yaml": _factory(
                model_name_or_path="Qwen/Qwen3-30B-A3B-Thinking-2507",
                finetuning_type="lora",
                lora_target="all",
                lora_rank=8,
                deepspeed="examples/deepspeed/ds_z3_config.json",
                template="qwen3",
                cutoff_len=3000,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=8,
            )
        },
        steps=(
            Command(
                line="check moe.yaml --gpu rtx-4090 --gpus 4",
                begins=r"too close to tell: needs 22\.\d to 25\.\d of 21\.5 GiB on each of 4",
                has=(
                    "the lower end of the memory has no adapters on experts",
                    "With tensors in the host.s memory, the memory of four ranks",
                ),
            ),
        ),
    ),
    Case(
        name="04-zero3-offload",
        sources="LMFlow 213",
        right="No out of memory from a sum that leaves the offload out.",
        files={
            "offload.yaml": _factory(
                model_name_or_path="Qwen/Qwen2.5-7B-Instruct",
                finetuning_type="full",
                deepspeed="examples/deepspeed/ds_z3_offload_config.json",
                template="qwen",
                cutoff_len=1024,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=8,
            )
        },
        steps=(
            *(
                Command(
                    line=f"check offload.yaml --gpu {gpus}",
                    begins=rf"fits: needs {needs} of 21\.5 GiB",
                    has=(
                        "The offloaded tensors take 127\\.7 GiB of the host's memory",
                        "With tensors in the host.s memory, the memory of four ranks",
                    ),
                )
                for gpus, needs in (("rtx-4090", r"4\.\d"), ("rtx-3090 --gpus 2", r"5\.\d"))
            ),
        ),
    ),
    Case(
        name="07-renamed-key-new-special-tokens",
        sources="LLaMA-Factory 6285",
        right="New tokens train the embeddings and the head: out of memory on 24 GB with the key.",
        files={
            "with.yaml": _factory(**LLAMA_8B, new_special_tokens="<open_tag>,<close_tag>"),
            "renamed.yaml": _factory(**LLAMA_8B, add_special_tokens="<open_tag>,<close_tag>"),
            "without.yaml": _factory(**LLAMA_8B),
        },
        steps=(
            *(
                Command(
                    line=f"check {file} --gpu h100-sxm",
                    begins=r"fits: needs 2[678]\.\d of 73\.3 GiB",
                    has=("with-embedding_and_head",),
                )
                for file in ("with.yaml", "renamed.yaml")
            ),
            Command(
                line="check with.yaml --gpu rtx-4090",
                code=4,
                begins=r"out of memory: needs 2[678]\.\d of 21\.5 GiB",
                slow=True,
            ),
            Command(
                line="check without.yaml --gpu rtx-4090",
                begins=r"fits: needs (19|20)\.\d of 21\.5 GiB",
                lacks=("with-embedding",),
            ),
        ),
    ),
    Case(
        name="08-unknown-keys",
        sources="LLaMA-Factory 7412",
        right="The unknown keys are named with the nearest known ones; there is no silent default.",
        files={
            "factory.yaml": _factory(
                model_name_or_path="Qwen/Qwen2.5-7B-Instruct",
                finetuning_type="lora",
                lora_targets="all",
                lora_rnak=128,
                template="qwen",
                cutoff_lenn=16384,
                per_device_train_batchsize=8,
            ),
            "trl.yaml": _trl(
                model_name_or_path="Qwen/Qwen3-8B", use_peft=True, lora_rank=128, max_len=16384
            ),
            "axolotl.yaml": _axolotl(
                base_model="Qwen/Qwen3-8B", adapter="lora", lora_r=8, sequence_lenn=2048
            ),
        },
        steps=(
            Command(
                line="check factory.yaml --gpu rtx-4090",
                code=2,
                has=(
                    r"factory\.yaml:\d+: lora_targets: LLaMA-Factory [\d.]+ has no such key",
                    "did you mean 'lora_target'",
                    "'lora_rnak'; did you mean 'lora_rank'",
                    "'cutoff_lenn'; did you mean 'cutoff_len'",
                    "'per_device_train_batchsize'; did you mean 'per_device_train_batch_size'",
                ),
            ),
            Command(
                line="check trl.yaml --gpu rtx-4090",
                code=2,
                has=(r"lora_rank: TRL [\d.]+ has no such key", "'lora_r'", "'max_len'"),
            ),
            Command(
                line="check axolotl.yaml --gpu rtx-4090",
                has=(r"ignored by Axolotl [\d.]+: 'sequence_lenn'; did you mean 'sequence_len'",),
            ),
        ),
    ),
    Case(
        name="10-accelerate-config-path",
        sources="TRL's accelerate_config",
        right="The FSDP file beside the run's is read: 4 processes, FSDP 2.",
        files={
            "fsdp.yaml": _yaml(
                compute_environment="LOCAL_MACHINE",
                distributed_type="FSDP",
                fsdp_config=FSDP_2,
                mixed_precision="bf16",
                num_machines=1,
                num_processes=4,
            ),
            "run.yaml": _trl(
                model_name_or_path="meta-llama/Llama-3.1-8B",
                accelerate_config="./fsdp.yaml",
                max_length=2048,
                bf16=True,
                per_device_train_batch_size=1,
            ),
        },
        steps=tuple(
            Command(
                line=f"check run.yaml --gpu h100-sxm{gpus}",
                begins=r"fits: needs 3\d\.\d of 73\.3 GiB on each of 4 h100-sxm",
                has=("4-gpus fsdp2",),
            )
            for gpus in ("", " --gpus 4")
        ),
    ),
    Case(
        name="11-eval-batch-trl",
        sources="unsloth PR 5168, FAI-RL PR 109",
        right="The evaluation is named: its batch is larger, and its logits are whole.",
        files={
            "run.yaml": _trl(
                model_name_or_path="Qwen/Qwen3-8B",
                use_peft=True,
                lora_r=16,
                lora_target_modules="all-linear",
                load_in_4bit=True,
                max_length=4096,
                per_device_train_batch_size=1,
                per_device_eval_batch_size=32,
                eval_strategy="steps",
                eval_steps=50,
            )
        },
        steps=(
            Command(
                line="check run.yaml --gpu rtx-3090",
                code=4,
                begins=r"out of memory: needs 24\.\d of 21\.5 GiB on rtx-3090 in an evaluation",
                has=(
                    "The evaluation, not the training, sets the memory peak: 32 examples at a time",
                ),
            ),
        ),
    ),
    Case(
        name="13-deepspeed-file-absent",
        sources="LLaMA-Factory 6752",
        right="A note names the absent file; with it, 5e8 buckets leave the verdict open.",
        files={
            name: _factory(
                model_name_or_path="Qwen/Qwen2.5-3B-Instruct",
                finetuning_type="full",
                deepspeed=deepspeed,
                template="qwen",
                cutoff_len=512,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=4,
            )
            for name, deepspeed in (
                ("absent.yaml", "elsewhere/zero2.json"),
                ("present.yaml", "deepspeed/zero2.json"),
            )
        }
        | {"deepspeed/zero2.json": json.dumps(ZERO_2)},
        steps=(
            Command(
                line="check absent.yaml --gpu rtx-3090 --gpus 4",
                has=(r"The file 'elsewhere/zero2\.json' was found neither .*defaults are assumed",),
            ),
            Command(
                line="check present.yaml --gpu rtx-3090 --gpus 4",
                begins=r"too close to tell",
                lacks=("was not found",),
            ),
        ),
    ),
    Case(
        name="31-other-tools-yaml",
        sources="LLaMA-Factory 9618",
        right="Files of torchtune and of ms-swift 2 are identified as such.",
        files={
            "tune.yaml": _yaml(
                model={"_component_": "torchtune.models.phi3.lora_phi3_mini", "lora_rank": 8},
                tokenizer={"_component_": "torchtune.models.phi3.phi3_mini_tokenizer"},
                batch_size=2,
                dtype="bf16",
            ),
            "swift.yaml": _yaml(
                model_id_or_path="Qwen/Qwen3-8B",
                sft_type="lora",
                dtype="bf16",
                lora_target_modules="ALL",
                dataset=["mine.jsonl"],
            ),
        },
        steps=(
            Command(
                line="check tune.yaml --gpu rtx-4090",
                code=2,
                has=(r"tune\.yaml is a file of torchtune, which is not supported",),
            ),
            Command(
                line="check swift.yaml --gpu rtx-4090",
                code=2,
                has=(r"swift\.yaml is a file of ms-swift 2, which is not supported",),
            ),
        ),
    ),
)


# --- datasets of other tools

CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
CHATML_ANSWER = "<|im_start|>assistant\n[[<think>\n\n</think>\n\n{}<|im_end|>\n]]"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
LLAMA_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n[[{}<|eot_id|>]]"
QWEN3_Q1_A1 = CHATML.format("user", "Q1") + CHATML_ANSWER.format("A1")
LLAMA_Q1_A1 = "<s>" + LLAMA.format("user", "Q1") + LLAMA_ANSWER.format("A1")
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSS_CALL = (
    "<|start|>assistant[[ to=functions.weather<|channel|>commentary json"
    '<|message|>{{"city": "{}"}}<|call|>]]'
    '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
)
OSS_Q1 = "...<|start|>user<|message|>Q1<|end|>"
OSS_A1 = "<|start|>assistant[[<|channel|>final<|message|>A1<|return|>]]"
OSS_THOUGHT_A1 = (
    "<|start|>assistant[[<|channel|>analysis<|message|>T3<|end|>"
    "<|start|>assistant<|channel|>final<|message|>A1<|return|>]]"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
        },
    },
}
Q1 = {"role": "user", "content": "Q1"}
A1 = {"role": "assistant", "content": "A1"}


def _call(city: str, **more: Any) -> dict[str, Any]:
    """Return the assistant's call of the tool, as OpenAI's files have it."""
    function = {"name": "weather", "arguments": {"city": city}}
    call = {"id": "0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "0", "content": text}


def _with_flags(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    later = [{"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"} | second]
    return [{"messages": [Q1, A1 | first, *later]}]


def _words(number: int) -> str:
    return " ".join(["another question about numbers"] * number)


def _pairs(**prompt: str) -> list[dict[str, Any]]:
    return [{**prompt, "chosen": "a better answer", "rejected": "an answer"}] * 40


def _plan(file: str, tokenizer: str, *has: str) -> Command:
    return Command(line=PLAN.format(file, tokenizer) + " --json", has=has)


def _refusal(file: str, tokenizer: str, *has: str) -> Command:
    has = (rf"--dataset: {file}:1: ", *has)
    return Command(line=PLAN.format(file, tokenizer), code=2, has=has)


CALLED = {"messages": [Q1, _call("Rome"), _result("sunny"), A1], "tools": [TOOL]}
LENGTHS = ('"source": "counted"', '"mean": 118.0', '"longest": 196')  # of 1 to 40 repetitions
DATASETS = (
    Case(
        name="14-unknown-roles",
        sources="LLaMA-Factory 2381",
        right="Known names of roles are mapped; an unknown role is refused by its name and line.",
        files={
            "developer.jsonl": [_chat(("developer", "S1"), ("user", "Q1"), ("assistant", "A1"))],
            "names.jsonl": [
                _chat(("User", "Q1"), ("Assistant", "A1")),
                _chat(("user", "Q1"), ("model", "A1")),
                _sharegpt(("human", "Q1"), ("chatgpt", "A1")),
                _sharegpt(("prompter", "Q1"), ("bot", "A1")),
            ],
            "unknown.jsonl": [_sharegpt(("hummany", "Q1"), ("gpt", "A1"))] * 200,
        },
        tokenizers=("qwen3", "phi3"),
        steps=(
            Masks(
                file="developer.jsonl",
                template="qwen3",
                rendered=(CHATML.format("system", "S1") + QWEN3_Q1_A1,),
            ),
            Masks(
                file="developer.jsonl",
                template="llama3",
                rendered=("<s>" + LLAMA.format("system", "S1") + LLAMA_Q1_A1.removeprefix("<s>"),),
            ),
            Masks(file="names.jsonl", template="qwen3", rendered=(QWEN3_Q1_A1,) * 4),
            Masks(file="names.jsonl", template="llama3", rendered=(LLAMA_Q1_A1,) * 4),
            _refusal("unknown.jsonl", "qwen3", "message 1 has the unknown role 'hummany'", "human"),
            _refusal("unknown.jsonl", "phi3", "message 1 has the unknown role 'hummany'", "human"),
            Command(
                line="run --gpu cpu --model demo-3m --dataset unknown.jsonl --tokenizer qwen3",
                code=2,
                has=(r"unknown\.jsonl:1: message 1 has the unknown role 'hummany'",),
            ),
        ),
    ),
    Case(
        name="15-text-in-parts",
        sources="NeMo Automodel 3143",
        right="The text parts of a message are joined, and each example has its own length.",
        files={
            "parts.jsonl": [
                {
                    "messages": [
                        Q1 | {"content": [{"type": "text", "text": "Q1", "image": None}]},
                        A1 | {"content": [{"type": "text", "text": one} for one in ("A", "1")]},
                    ]
                }
            ],
            "long.jsonl": [
                {
                    "messages": [
                        Q1 | {"content": [{"type": "text", "text": _words(5)}]},
                        A1 | {"content": [{"type": "text", "text": _words(number)}]},
                    ]
                }
                for number in range(1, 41)
            ],
            "plain.jsonl": [
                _chat(("user", _words(5)), ("assistant", _words(number))) for number in range(1, 41)
            ],
        },
        tokenizers=("qwen3",),
        steps=(
            Masks(file="parts.jsonl", template="qwen3", rendered=(QWEN3_Q1_A1,)),
            Masks(file="parts.jsonl", template="llama3", rendered=(LLAMA_Q1_A1,)),
            _plan("long.jsonl", "qwen3", *LENGTHS),
            _plan("plain.jsonl", "qwen3", *LENGTHS),
        ),
    ),
    Case(
        name="17-tool-calls-vanish",
        sources="renderers 134, slime PR 330",
        right="A tool call that the template has no place for is refused, and never an empty"
        " answer.",
        files={
            "calls.jsonl": [CALLED],
            "null.jsonl": [
                CALLED | {"messages": [Q1, _call("Rome", content=None), _result("sunny"), A1]}
            ],
        },
        tokenizers=("llama3", "lfm2"),
        steps=(
            *(
                _refusal(file, name, "leaves out the tool call in message 2")
                for file in ("calls.jsonl", "null.jsonl")
                for name in ("llama3", "lfm2")
            ),
            *(
                Masks(
                    file=file,
                    template="qwen3",
                    rendered=(
                        "..."
                        + CHATML.format("user", "Q1")
                        + f"<|im_start|>assistant\n[[{CALL_TEXT}<|im_end|>\n]]"
                        + CHATML.format("user", "<tool_response>\nsunny\n</tool_response>")
                        + CHATML_ANSWER.format("A1"),
                    ),
                )
                for file in ("calls.jsonl", "null.jsonl")
            ),
        ),
    ),
    Case(
        name="20-loss-flags",
        sources="LLaMA-Factory PR 10471, Axolotl PR 1703",
        right="Messages with loss or train false, or with weight 0, are read and not trained on.",
        files={
            "loss.jsonl": _with_flags({"loss": False}, {"loss": True}),
            "train.jsonl": _with_flags({"train": False}, {"train": True}),
            "weight.jsonl": _with_flags({"weight": 0}, {"weight": 1}),
        },
        steps=tuple(
            Masks(file=f"{name}.jsonl", template=template, rendered=(text,))
            for name in ("loss", "train", "weight")
            for template, text in (
                (
                    "qwen3",
                    CHATML.format("user", "Q1")
                    + CHATML.format("assistant", "A1")
                    + CHATML.format("user", "Q2")
                    + CHATML_ANSWER.format("A2"),
                ),
                (
                    "qwen3_training",
                    CHATML.format("user", "Q1")
                    + CHATML.format("assistant", "<think>\n\n</think>\n\nA1")
                    + CHATML.format("user", "Q2")
                    + CHATML_ANSWER.format("A2"),
                ),
                (
                    "llama3",
                    "<s>"
                    + LLAMA.format("user", "Q1")
                    + LLAMA.format("assistant", "A1")
                    + LLAMA.format("user", "Q2")
                    + LLAMA_ANSWER.format("A2"),
                ),
            )
        ),
    ),
    Case(
        name="21-dpo-prompt-dropped",
        sources="LLaMA-Factory 5455",
        right="The prompt of a pair is counted in each of its forms.",
        files={
            "alpaca.jsonl": _pairs(instruction=_words(100), input=_words(1)),
            "prompt.jsonl": _pairs(prompt=_words(100) + "\n" + _words(1)),
            "system.jsonl": _pairs(system=_words(50), instruction=_words(50), input=_words(1)),
        },
        tokenizers=("qwen3",),
        steps=tuple(
            Command(line=PLAN.format(file, "qwen3") + " --objective dpo --json", has=has)
            for file, has in (
                ("alpaca.jsonl", ('"source": "counted"', '"mean": 431.0')),
                ("prompt.jsonl", ('"source": "counted"', '"mean": 416.0')),  # without a template
                ("system.jsonl", ('"source": "counted"', '"mean": 441.0')),
            )
        ),
    ),
    Case(
        name="23-double-bos",
        sources="Soup PR 788, OpenRLHF 393",
        right="Each example has one beginning-of-text token.",
        files={
            "rendered.jsonl": [
                {"text": "<s>Q1 A1"},
                {"text": "Q1 A1"},
                {"prompt": "<s>Q1", "completion": " A1"},
                {"messages": [Q1, A1]},
            ]
        },
        steps=(
            Masks(
                file="rendered.jsonl",
                template="llama3+bos",
                rendered=("[[<s>Q1 A1</s>]]",) * 2 + ("<s>Q1[[ A1</s>]]", LLAMA_Q1_A1),
            ),
        ),
    ),
    Case(
        name="24-gpt-oss-reasoning-and-tools",
        sources="torchtune 2405, slime 1073",
        right="gpt-oss renders thoughts, calls and results, so they are read.",
        files={
            "one.jsonl": [
                {"messages": [Q1, _call("Rome", **{key: "T1"}), _result("R1"), A1], "tools": [TOOL]}
                for key in ("thinking", "reasoning_content")
            ],
            "two.jsonl": [
                {
                    "messages": [
                        Q1,
                        _call("Rome", thinking="T1"),
                        _result("R1"),
                        _call("Oslo", thinking="T2"),
                        _result("R2"),
                        A1 | {"thinking": "T3"},
                    ],
                    "tools": [TOOL],
                }
            ],
        },
        steps=(
            Masks(
                file="one.jsonl",
                template="gptoss",
                rendered=(OSS_Q1 + OSS_CALL.format("Rome", "R1") + OSS_A1,) * 2,
            ),
            Masks(
                file="two.jsonl",
                template="gptoss",
                rendered=(
                    OSS_Q1
                    + OSS_CALL.format("Rome", "R1")
                    + OSS_CALL.format("Oslo", "R2")
                    + OSS_THOUGHT_A1,
                ),
            ),
        ),
    ),
    Case(
        name="29-unclear-refusals",
        sources="LLaMA-Factory 9618",
        right="A refusal names the wrong column and the expected value, in plain words.",
        files={
            "roles.jsonl": [_sharegpt(("hummany", "a long question"), ("bot", "an answer"))] * 120,
            "null.jsonl": [{"messages": [Q1, A1 | {"content": None}]}],
            "mixed.jsonl": [{"prompt": [Q1], "completion": "A1"}],
            "columns.json": json.dumps(
                {"conversations": {"0": [], "1": []}, "id": {"0": "x", "1": "y"}}
            ),
            "call.jsonl": [_sharegpt(("human", "Q1"), ("function_call", "f(a=1)"), ("gpt", "A1"))],
            "legacy.jsonl": [
                {
                    "messages": [
                        Q1,
                        A1
                        | {
                            "content": None,
                            "function_call": {"name": "weather", "arguments": "{}"},
                        },
                        {"role": "function", "name": "weather", "content": "sunny"},
                        A1,
                    ]
                }
            ],
            "texts.jsonl": [
                {
                    "messages": [
                        Q1,
                        A1 | {"tool_calls": json.dumps(_call("Rome")["tool_calls"])},
                        _result("sunny"),
                        A1,
                    ],
                    "tools": [json.dumps(TOOL)],
                }
            ],
            "one.json": json.dumps({"messages": [Q1, A1]}, indent=1),
            "pretty.json": "\n".join([json.dumps({"messages": [Q1, A1]}, indent=1)] * 2),
        },
        tokenizers=("qwen3",),
        steps=(
            _refusal("roles.jsonl", "qwen3", "message 1 has the unknown role 'hummany'"),
            _refusal("null.jsonl", "qwen3", "message 2 has no content"),
            _refusal(
                "mixed.jsonl", "qwen3", "one of prompt and completion is text, and the other is"
            ),
            _refusal(
                "columns.json", "qwen3", "a table by columns, not by rows", "orient='records'"
            ),
            _refusal(
                "call.jsonl", "qwen3", r"the call in message 2 is 'f\(a=1\)', which is not JSON"
            ),
            *(
                _plan(file, "qwen3", f'"examples": {number}')
                for file, number in (
                    ("legacy.jsonl", 1),
                    ("texts.jsonl", 1),
                    ("one.json", 1),
                    ("pretty.json", 2),
                )
            ),
        ),
    ),
)


# --- plans and studies

CARD = "memory=24,bf16_tflops=165,bandwidth_gb_s=1008,tdp_w=450"
STUDY = (
    "run --gpu cpu --model demo-3m --memory-gib 0.55 --seq-len 256 --budget 5m --trials 1"
    " --study nothing --tokens-per-example 256 --set checkpointing=none --set micro_batch_size=32"
)
STUDIES = (
    Case(
        name="27-fastest-of-unknown",
        sources="torchtune 2264, unsloth 1",
        right="The fastest and the cheapest of GPU counts say that some speeds are unknown.",
        steps=(
            Command(
                line=f"plan --model phi-3-mini --gpu {CARD} --gpus 1,2,4 --details",
                has=(
                    "(?m)^fastest of those with a known speed: 1 GPU",
                    "(?m)^cheapest of those with a known speed: 1 GPU",
                ),
                lacks=("(?m)^(fastest|cheapest): ",),
            ),
            Command(
                line=f"plan --model phi-3-mini --gpu {CARD},link_gb_s=12 --gpus 1,2,4 --details",
                has=("(?m)^fastest: 4 GPUs", "(?m)^cheapest: 1 GPU"),
                lacks=("with a known speed",),
            ),
            Command(
                line=f"plan --model llama-3.1-8b --gpu {CARD} --gpus 1,2,4 --examples 100000"
                " --within 3h --details",
                code=4,
                has=("cheapest within 3 h of those with a known speed: none is known",),
            ),
        ),
    ),
    Case(
        name="28-nothing-fits-leaves-no-study",
        sources="optuna-dashboard 68 and 206",
        right="A study without a fitting configuration is stored with its tries.",
        steps=(
            Command(line=STUDY, code=4, has=("nothing in the search space fits",)),
            Command(
                line="oom nothing --details",
                begins=r"# 1 of 1 trials ran out of memory: \w+ hold",
                has=("First change: ", r"\| oom \| forward \|"),
            ),
            Command(line="status nothing", has=("nothing",)),
            Command(line="list", has=("nothing",)),
            Command(line="report nothing"),
        ),
    ),
)
CASES = tuple(sorted(CHECKS + DATASETS + STUDIES, key=lambda case: case.name))
