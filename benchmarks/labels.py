"""Compare the tokens and labels of `train.py` with the output of other trainers' own code, token by
token.

Rows of each form are made at random. Each tool tokenises them with its own functions and collator,
set as the exported files set it, in a process of its own: TRL as it is installed; Axolotl and
LLaMA-Factory from the folders of `--axolotl` and `--llamafactory`, into which their wheels were
unpacked (`pip download
--no-deps`, `unzip`), without being installed. Their imports beyond text (images, sound, telemetry)
are replaced by empty modules.

A row of the result is a form with a tool. `said` is true if the head of the exported file says that
its labels differ.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import Mode, finish, run_program, run_python

from tests.helpers.tokenizers import WORDS, byte_level, template

NUMBER = 200  # rows of each form
# that are not needed for text
ABSENT = {"PIL", "av", "fastapi", "gradio", "librosa", "posthog", "torchaudio"}
VERSIONS = {"axolotl": "0.19.0", "llamafactory": "0.9.5"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "the weather", "parameters": {}},
    }
]
# The form of the rows, the chat template, and whether that tool's head says that its labels differ.
CASES: dict[str, tuple[str, str, dict[str, bool]]] = {
    "text": ("text", "llama3", {"trl": False, "axolotl": False}),
    "prompt_completion": (
        "prompt_completion",
        "llama3",
        {"trl": False, "axolotl": False, "llamafactory": True},
    ),
    "chat_completion": ("chat_completion", "llama3", {"trl": False}),
    "messages": ("messages", "llama3", {"trl": False, "axolotl": False, "llamafactory": False}),
    "messages, ChatML": (
        "messages",
        "qwen3_instruct_2507",
        {"trl": False, "axolotl": True, "llamafactory": False},
    ),
    "messages, Gemma": (
        "messages",
        "gemma",
        {"trl": False, "axolotl": True, "llamafactory": False},
    ),
    "messages, Qwen 2.5": (
        "messages",
        "qwen2_5",
        {"trl": True, "axolotl": True, "llamafactory": False},
    ),
    "tools": ("tools", "qwen3_instruct_2507", {"trl": False, "axolotl": True}),
    "conversations": ("conversations", "llama3", {"axolotl": False, "llamafactory": False}),
    "alpaca": ("alpaca", "llama3", {"llamafactory": False}),
    "alpaca, no template": ("alpaca", "", {"axolotl": False}),
    "parts": ("parts", "llama3", {"axolotl": False}),
    "flags": ("flags", "llama3", {"axolotl": False}),
    "system column": ("system", "llama3", {"axolotl": False, "llamafactory": False}),
    "roles": ("roles", "llama3", {"axolotl": False}),
    "two answers": ("two_answers", "llama3", {"trl": False, "axolotl": False}),
    "calls, ShareGPT": ("sharegpt_calls", "qwen3_instruct_2507", {"llamafactory": False}),
    "parallel calls, GLM": ("tools", "glm4moe_training", {"trl": False}),
    "thoughts": ("thoughts", "qwen3_training", {"trl": False}),
    "thoughts and calls, gpt-oss": ("thoughts_and_calls", "gptoss_training", {"trl": False}),
    "pairs of text": ("pairs", "llama3", {"trl": False}),
    "pairs of messages": ("chat_pairs", "llama3", {"trl": False}),
    "pairs of alpaca": ("alpaca_pairs", "llama3", {"llamafactory": False}),
}
EOS = {
    "llama3": "<|eot_id|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "gptoss_training": "<|return|>",
    "glm4moe_training": "<|user|>",
}
PAIRS = ("pairs", "chat_pairs", "alpaca_pairs")  # each row has two examples
IGNORED = -100

Labelled = list[tuple[list[int], list[int]]]  # tokens and labels of each row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rows": sum(row["rows"] for row in rows),
        "tools": len({row["tool"] for row in rows}),
        "mismatches": sum(row["mismatches"] for row in rows if not row["said"]),
        "mismatches_said": sum(row["mismatches"] for row in rows if row["said"]),
        "rows_said": sum(row["rows"] for row in rows if row["said"]),
    }


def compared(
    tool: str, ours: dict[str, Labelled], theirs: dict[str, Labelled]
) -> list[dict[str, Any]]:
    rows = []
    for case, labelled in theirs.items():
        # The label of the first token is never used, because no token precedes it.
        pairs = [
            [(a, b) for a, b in ((us[0], them[0]), (us[1][1:], them[1][1:]))]
            for us, them in zip(ours[case], labelled, strict=True)
        ]
        rows.append(
            {
                "tool": tool,
                "version": VERSIONS.get(tool) or version(tool),
                "case": case,
                "rows": len(pairs),
                "tokens": sum(len(tokens) for tokens, _ in ours[case]),
                "trained": sum(label != -100 for _, labels in ours[case] for label in labels),
                "mismatches": sum(any(a != b for a, b in row) for row in pairs),
                "mismatched_tokens": sum(
                    abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False))
                    for row in pairs
                    for a, b in row
                ),
                "said": CASES[case][2][tool],
            }
        )
    return rows


# --- the rows, and how train.py labels them


def make_cases(folder: Path) -> dict[str, Labelled]:
    """Write rows and tokenizer of each case, and label them as train.py does."""
    from autotune.core.objective import Objective
    from autotune.problem.dataset import rows_of
    from autotune.trainer import rows as runtime
    from autotune.trainer.examples import Encoder
    from autotune.trainer.token_cache import tokenise

    labelled = {}
    for number, (case, (form, chat_template, _)) in enumerate(CASES.items()):
        chosen = random.Random(number)
        made = [MAKERS[form](chosen) for _ in range(NUMBER)]
        (folder / f"{case}.jsonl").write_text("\n".join(map(json.dumps, made)))
        tokenizer = byte_level(
            template(chat_template) if chat_template else None, EOS.get(chat_template, "</s>")
        )
        tokenizer.save_pretrained(folder / f"{case} tokenizer")
        if form in PAIRS:
            answers = [row for one in made for pair in rows_of(Objective.DPO, one) for row in pair]
            examples = Encoder(tokenizer, None).encode((case, row) for row in answers)
            labelled[case] = [unmasked(example) for example in examples]
            continue
        stored = runtime.StoredExamples(tokenise(folder / f"{case}.jsonl", tokenizer))
        batches = [runtime.collate([[example]], [], False) for example in stored]
        labelled[case] = [
            (batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches
        ]
    return labelled


def unmasked(example: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens and the labels of an example."""
    tokens = [token if token >= 0 else -1 - token for token in example]
    return tokens, [token if token >= 0 else IGNORED for token in example]


def words(chosen: random.Random) -> str:
    text = " ".join(
        chosen.choices(
            [*WORDS.split(), "naïve", "日本", "x=1;", "(a)", "12.5"], k=chosen.randint(1, 30)
        )
    )
    return chosen.choice(["", "A: "]) + text + chosen.choice(["", ".", "?", "\n\nand more"])


def conversation(chosen: random.Random) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * chosen.randint(1, 4)
    return [{"role": role, "content": words(chosen)} for role in roles]


def with_calls(chosen: random.Random) -> dict[str, Any]:
    call = {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": words(chosen)}},
    }
    asked, answered = conversation(chosen)[:2]
    called = {"role": "assistant", "content": "", "tool_calls": [call] * chosen.randint(1, 2)}
    results = [
        {"role": "tool", "name": "weather", "content": words(chosen)} for _ in called["tool_calls"]
    ]
    return {"messages": [asked, called, *results, answered, *conversation(chosen)], "tools": TOOLS}


def chat_completion(chosen: random.Random) -> dict[str, Any]:
    messages = conversation(chosen)
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def sharegpt(chosen: random.Random) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    return {
        "conversations": [
            {"from": names[one["role"]], "value": one["content"]} for one in conversation(chosen)
        ]
    }


def in_parts(chosen: random.Random) -> dict[str, Any]:
    messages = conversation(chosen)
    for one in messages:
        one["content"] = [
            {"type": "text", "text": text} for text in (one["content"], " " + words(chosen))
        ]
    return {"messages": messages}


def with_roles(chosen: random.Random) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    messages = conversation(chosen)
    return {"messages": [one | {"role": names[one["role"]]} for one in messages]}


def with_two_answers(chosen: random.Random) -> dict[str, Any]:
    messages = conversation(chosen)
    answer = {"role": "assistant", "content": words(chosen)}
    place = chosen.randrange(2, len(messages) + 1, 2)
    return {"messages": [*messages[:place], answer, *messages[place:]]}


def sharegpt_calls(chosen: random.Random) -> dict[str, Any]:
    asked, answered = sharegpt(chosen)["conversations"][:2]
    call = {"name": "weather", "arguments": {"city": words(chosen)}}
    called = {"from": "function_call", "value": json.dumps(call, ensure_ascii=False)}
    result = {"from": "observation", "value": words(chosen)}
    more = sharegpt(chosen)["conversations"]
    # Without a system message, LLaMA-Factory writes two more line breaks before the tools.
    system = {"from": "system", "value": words(chosen).strip()}
    messages = [system, asked, called, result, answered, *more]
    return {"conversations": messages, "tools": json.dumps(TOOLS)}


def with_flags(chosen: random.Random) -> dict[str, Any]:
    messages = conversation(chosen)
    for answer in messages[1::2]:
        answer["train"] = chosen.random() < 0.5
    messages[-1]["train"] = True
    return {"messages": messages}


def with_thoughts(chosen: random.Random) -> dict[str, Any]:
    messages = conversation(chosen)
    for answer in messages[1::2]:
        if chosen.random() < 0.5:
            answer["reasoning_content"] = words(chosen).strip()
    return {"messages": messages}


def with_thoughts_and_calls(chosen: random.Random) -> dict[str, Any]:
    """A question, calls with thoughts and their results, and the answer with a thought."""
    messages = conversation(chosen)[:1]
    for _ in range(chosen.randint(1, 2)):
        call = {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": words(chosen)}},
        }
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [call], "thinking": words(chosen)}
        )
        messages.append({"role": "tool", "name": "weather", "content": words(chosen)})
    answer = {"role": "assistant", "content": words(chosen), "thinking": words(chosen)}
    return {"messages": [*messages, answer], "tools": TOOLS}


def chat_pairs(chosen: random.Random) -> dict[str, Any]:
    prompt = conversation(chosen)[:-1]
    answers = ([{"role": "assistant", "content": words(chosen)}] for _ in range(2))
    return {"prompt": prompt, "chosen": next(answers), "rejected": next(answers)}


MAKERS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "text": lambda chosen: {"text": words(chosen)},
    "prompt_completion": lambda chosen: {
        "prompt": words(chosen),
        "completion": " " + words(chosen),
    },
    "chat_completion": chat_completion,
    "messages": lambda chosen: {"messages": conversation(chosen)},
    "tools": with_calls,
    "conversations": sharegpt,
    "parts": in_parts,
    "flags": with_flags,
    "roles": with_roles,
    "two_answers": with_two_answers,
    "sharegpt_calls": sharegpt_calls,
    "system": lambda chosen: {"system": words(chosen).strip(), "messages": conversation(chosen)},
    "thoughts": with_thoughts,
    "thoughts_and_calls": with_thoughts_and_calls,
    "pairs": lambda chosen: {
        "prompt": words(chosen),
        "chosen": " " + words(chosen),
        "rejected": " " + words(chosen),
    },
    "chat_pairs": chat_pairs,
    "alpaca_pairs": lambda chosen: {
        "instruction": words(chosen),
        "input": chosen.choice(["", words(chosen)]),
        "chosen": words(chosen),
        "rejected": words(chosen),
    },
    "alpaca": lambda chosen: {
        "instruction": words(chosen),
        "input": chosen.choice(["", words(chosen)]),
        "output": words(chosen),
    },
}


# --- the tools, each in a process of its own


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that a tool imports and does not use here."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in ABSENT
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def label_with(tool: str, folder: Path) -> None:
    """Tokenise the rows of a tool's cases with its own code,
    and write the result to <tool>.json.
    """
    from transformers import AutoTokenizer

    sys.path[:0] = json.loads((folder / "path.json").read_text())
    sys.meta_path.append(Absent())  # after all others: what is installed is taken
    found = {}
    for case, (form, chat_template, tools) in CASES.items():
        if tool in tools:
            lines = (folder / f"{case}.jsonl").read_text().splitlines()
            tokenizer = AutoTokenizer.from_pretrained(folder / f"{case} tokenizer")
            batches = LABEL[tool](
                [json.loads(line) for line in lines], tokenizer, form, chat_template, folder
            )
            if form in PAIRS:
                found[case] = list(batches)
                continue
            found[case] = [
                (batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches
            ]
    (folder / f"{tool}.json").write_text(json.dumps(found))


def with_trl(
    rows: list[dict[str, Any]], tokenizer: Any, form: str, chat_template: str, folder: Path
) -> Iterator[Any]:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    shape = LlamaConfig(vocab_size=len(tokenizer), **sizes)
    common = {"output_dir": str(folder / "trl"), "max_length": None, "use_cpu": True, "bf16": False}
    if form in PAIRS:
        pairs = DPOTrainer(
            model=LlamaForCausalLM(shape),
            ref_model=LlamaForCausalLM(shape),
            args=DPOConfig(**common, report_to="none"),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        for row in pairs.train_dataset:
            for answer in (row["chosen_ids"], row["rejected_ids"]):
                yield row["prompt_ids"] + answer, [IGNORED] * len(row["prompt_ids"]) + answer
        return

    on_answers = form not in ("text", "prompt_completion", "chat_completion")
    # As a column of JSON, since a table would give each mapping the keys of all.
    trainer = SFTTrainer(
        model=LlamaForCausalLM(shape),
        args=SFTConfig(**common, assistant_only_loss=on_answers, report_to="none"),
        train_dataset=Dataset.from_list(
            [row | ({"tools": json.dumps(TOOLS)} if "tools" in row else {}) for row in rows]
        ),
        processing_class=tokenizer,
    )
    yield from (trainer.data_collator([row]) for row in trainer.train_dataset)


def with_axolotl(
    rows: list[dict[str, Any]], tokenizer: Any, form: str, chat_template: str, folder: Path
) -> Iterator[Any]:
    from axolotl.utils.collators import DataCollatorForSeq2Seq
    from axolotl.utils.dict import DictDefault

    tokenizer.pad_token = tokenizer.eos_token
    cfg = DictDefault(
        {"train_on_inputs": False, "sequence_len": 4096, "chat_template": "tokenizer_default"}
    )
    module, options = {
        "text": ("completion", {}),
        "alpaca": ("alpaca_instruct", {}),
        "prompt_completion": ("user_defined", None),
        "conversations": (
            "chat_template",
            {
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
        ),
        "flags": ("chat_template", {"message_field_training": "train"}),
    }.get(form, ("chat_template", {}))
    loaded = importlib.import_module(f"axolotl.prompt_strategies.{module}")
    if module == "user_defined":
        options = loaded.UserDefinedDatasetConfig(
            field_instruction="prompt",
            field_output="completion",
            format="{instruction}",
            no_input_format="{instruction}",
        )
    strategy = (
        loaded.load(tokenizer, cfg)
        if module == "alpaca_instruct"
        else loaded.load(tokenizer, cfg, options)
    )
    collate = DataCollatorForSeq2Seq(tokenizer)
    for row in rows:
        made = strategy.tokenize_prompt(
            {name: [value] for name, value in row.items()} if form == "text" else row
        )
        yield collate(
            [{name: value[0] for name, value in made.items()} if form == "text" else made]
        )


def with_llamafactory(
    rows: list[dict[str, Any]], tokenizer: Any, form: str, chat_template: str, folder: Path
) -> Iterator[Any]:
    from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.pairwise import PairwiseDatasetProcessor
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer

    attributes = DatasetAttr("file", "rows")
    messages = {
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
    attributes.join(
        {
            "messages": messages,
            "system": messages | {"columns": {"messages": "messages", "system": "system"}},
            "alpaca_pairs": {
                "ranking": True,
                "columns": {
                    "prompt": "instruction",
                    "query": "input",
                    "chosen": "chosen",
                    "rejected": "rejected",
                },
            },
            "conversations": {"formatting": "sharegpt", "columns": {"messages": "conversations"}},
            "sharegpt_calls": {
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "tools": "tools"},
            },
            "prompt_completion": {"columns": {"prompt": "prompt", "response": "completion"}},
            "alpaca": {},
        }[form]
    )
    by_template = {
        "llama3": "llama3",
        "gemma": "gemma",
        "qwen2_5": "qwen",
        "qwen3_instruct_2507": "qwen3_nothink",
    }
    name = "empty" if form == "prompt_completion" else by_template[chat_template]
    data = SimpleNamespace(
        template=name,
        cutoff_len=4096,
        train_on_prompt=False,
        mask_history=False,
        tool_format=None,
        default_system=None,
        enable_thinking=True,
        preserve_thinking=False,
        media_dir=".",
        neat_packing=False,
    )
    written = get_template_and_fix_tokenizer(tokenizer, data)
    convert = get_dataset_converter(attributes.formatting, attributes, data)
    if form in PAIRS:
        pairwise = PairwiseDatasetProcessor(
            template=written, tokenizer=tokenizer, processor=None, data_args=data
        )
        for row in rows:
            made = pairwise.preprocess_dataset(
                {key: [value] for key, value in convert(row).items()}
            )
            for answer in ("chosen", "rejected"):
                yield made[f"{answer}_input_ids"][0], made[f"{answer}_labels"][0]
        return

    processor = SupervisedDatasetProcessor(
        template=written, tokenizer=tokenizer, processor=None, data_args=data
    )
    collate = SFTDataCollatorWith4DAttentionMask(
        template=written, tokenizer=tokenizer, label_pad_token_id=-100
    )
    for row in rows:
        converted = {key: [value] for key, value in convert(row).items()}
        made = processor.preprocess_dataset(converted)
        yield collate([{key: value[0] for key, value in made.items()}])


LABEL: dict[str, Callable[..., Iterator[Any]]] = {
    "trl": with_trl,
    "axolotl": with_axolotl,
    "llamafactory": with_llamafactory,
}


def run(args: argparse.Namespace) -> None:
    """Label the rows with each tool and compare."""
    if args.child:
        label_with(args.child[0], Path(args.child[1]))
        return
    folders = {"trl": None, "axolotl": args.axolotl, "llamafactory": args.llamafactory}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours = make_cases(folder)
        rows = []
        for tool, code in folders.items():
            if tool != "trl" and code is None:
                continue
            path = [str(one.absolute()) for one in (code, args.more) if one]
            (folder / "path.json").write_text(json.dumps(path))
            run_python([str(Path(__file__).absolute()), "--child", tool, str(folder)], folder)
            rows += compared(tool, ours, json.loads((folder / f"{tool}.json").read_text()))
    finish(
        args,
        None,
        rows,
        ["tool", "case", "rows", "tokens", "mismatches", "mismatched_tokens", "said"],
    )


MODES = {
    "": Mode(
        run=run,
        result="labels",
        summarize=summarize,
        options={
            "--axolotl": {
                "type": Path,
                "metavar": "DIR",
                "help": "the folder of its unpacked wheel",
            },
            "--llamafactory": {
                "type": Path,
                "metavar": "DIR",
                "help": "the folder of its unpacked wheel",
            },
            "--more": {
                "type": Path,
                "metavar": "DIR",
                "help": "pure Python packages that these two import",
            },
            "--child": {"nargs": 2, "help": argparse.SUPPRESS},
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
