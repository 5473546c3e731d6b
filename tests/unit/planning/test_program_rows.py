"""Programs that train with transformers' Trainer: the rows that they tokenize, and its defaults."""

from pathlib import Path
from textwrap import dedent

import pytest

from autotune.core.errors import UsageError
from autotune.planning.foreign_config import read_file
from autotune.planning.run_check import check
from autotune.report.values.check import ForeignConfig

LORA = """
import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
)

checkpoint = "Qwen/Qwen2.5-0.5B"
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
adapters = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(model, adapters)
model.print_trainable_parameters()

raw = load_dataset("json", data_files="poems.jsonl")

def to_tokens(batch):
    return tokenizer(batch["text"], truncation=True, max_length=384, padding="max_length")

tokens = raw.map(to_tokens, batched=True, remove_columns=raw["train"].column_names)
tokens = tokens["train"].train_test_split(test_size=0.1)

arguments = TrainingArguments(
    output_dir="poet",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    bf16=True,
    learning_rate=2e-4,
    logging_steps=10,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=tokens["train"],
    eval_dataset=tokens["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
print(tokenizer.decode(model.generate(**tokenizer("A poem:", return_tensors="pt"))[0]))
"""
BLOCKS = """
from itertools import chain
block_size = 2 * 512
model = transformers.GPT2LMHeadModel.from_pretrained("openai-community/gpt2")
texts = load_dataset("wikitext", "wikitext-2-raw-v1")
tokens = texts.map(lambda rows: tokenizer(rows["text"]), batched=True)

def group(rows):
    joined = {key: list(chain(*rows[key])) for key in rows}
    total = len(joined["input_ids"]) // block_size * block_size
    parts = {
        key: [row[at : at + block_size] for at in range(0, total, block_size)]
        for key, row in joined.items()
    }
    return parts | {"labels": parts["input_ids"]}

rows = tokens.map(group, batched=True, num_proc=4)
Trainer(model, TrainingArguments("out"), train_dataset=rows["train"])
"""
SLICES = """
def process(example):
    longest = 384
    asked = tokenizer(f"user: {example['instruction']}", add_special_tokens=False)
    answer = tokenizer(example["output"], add_special_tokens=False)
    input_ids = asked["input_ids"] + answer["input_ids"] + [tokenizer.pad_token_id]
    labels = [-100] * len(asked["input_ids"]) + answer["input_ids"] + [tokenizer.pad_token_id]
    if len(input_ids) > longest:
        input_ids = input_ids[:longest]
        labels = labels[:longest]
    return {"input_ids": input_ids, "labels": labels}

if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
    model.enable_input_require_grads()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir="out", gradient_checkpointing=True),
        train_dataset=Dataset.from_pandas(frame).map(process),
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, padding=True),
    )
"""
NESTED = """
def train(base_model, cutoff_len=256):
    tokenizer = AutoTokenizer.from_pretrained(base_model)

    def tokenize(prompt, add_eos_token=True):
        return tokenizer(prompt, truncation=True, max_length=cutoff_len, padding=False)

    def generate_and_tokenize_prompt(row):
        return tokenize(prompter.generate_prompt(row["instruction"], row["output"]))

    data = load_dataset("json", data_files="a.json")
    train_data = data["train"].shuffle().map(generate_and_tokenize_prompt)
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(base_model),
        args=TrainingArguments(per_device_train_batch_size=2, fp16=True),
        train_dataset=train_data,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, padding=True),
    ).train()

train("huggyllama/llama-7b")
"""
DATASET = """
class Stories(torch.utils.data.Dataset):
    def __init__(self, texts, tokenizer, max_length=128):
        self.texts, self.tokenizer = texts, tokenizer
        self.max_length = max_length

    def __getitem__(self, index):
        tokens = self.tokenizer(
            self.texts[index], max_length=self.max_length, padding="max_length", truncation=True
        )
        return {"input_ids": tokens["input_ids"], "labels": tokens["input_ids"]}

train_set = Stories(texts[:900], tokenizer, max_length=512)
test_set = Stories(texts[900:], tokenizer, max_length=512)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
Trainer(model=model, args=TrainingArguments("out"), train_dataset=train_set, eval_dataset=test_set)
"""

OWN = "class Own(Trainer):\n    def "


def program(folder: Path, text: str) -> ForeignConfig:
    file = folder / "train.py"
    file.write_text(dedent(text))
    return read_file(file)


def trainer(tokenizing: str, *, trains: str = "", arguments: str = "") -> str:
    """A program whose examples go through this call of the tokenizer."""
    return (
        "tokenizer = AutoTokenizer.from_pretrained('a/b')\n"
        f"rows = load().map(lambda row: {tokenizing}, batched=True)\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b', dtype='auto')\n"
        f"Trainer(model, TrainingArguments({arguments}), train_dataset=rows{trains})\n"
    )


def test_a_program_with_transformers_trainer_is_read(tmp_path: Path) -> None:
    found = program(tmp_path, LORA)
    config = found.config
    assert (found.tool, found.model, found.ignored) == ("transformers", "Qwen/Qwen2.5-0.5B", "")
    assert (config.method, config.lora_rank, config.lora_targets) == ("lora", 16, "q_proj,v_proj")
    assert (config.seq_len, config.padding, config.packing) == (384, "max_length", False)
    assert (config.micro_batch_size, found.accumulation, found.epochs) == (4, 2, 2.0)
    assert (config.precision, config.checkpointing) == ("bf16_mixed", "none")
    # The Trainer holds the logits of all tokens, unlike TRL.
    assert (config.loss, config.kernels) == ("full", "torch")
    assert not any("in chunks" in note for note in found.notes)


def test_a_run_of_transformers_trainer_gets_an_answer(tmp_path: Path) -> None:
    program(tmp_path, LORA.replace("_batch_size=4", "_batch_size=64"))
    report = check(tmp_path / "train.py", {"gpu": "rtx-4090"})
    assert report.checked.run.tool == "transformers"
    assert any(fixed.edits == {"use_liger_kernel": True} for fixed, _ in report.fixes)


@pytest.mark.parametrize(
    ("text", "longest", "padding"),
    [
        (BLOCKS, 1024, "max_length"),
        (SLICES, 384, "masked"),
        (NESTED, 256, "masked"),
        (DATASET, 512, "max_length"),
    ],
)
def test_the_longest_row_is_found(tmp_path: Path, text: str, longest: int, padding: str) -> None:
    found = program(tmp_path, text)
    assert found.config.seq_len == longest
    assert found.config.packing is (text == BLOCKS)
    assert found.config.packing or found.config.padding == padding
    assert any("attend to one another" in note for note in found.notes) is (text == BLOCKS)


def test_data_sets_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the length of the examples is computed"):
        program(tmp_path, DATASET.replace("[900:], tokenizer, max_length=512", "[900:], tokenizer"))


@pytest.mark.parametrize(
    ("tokenizing", "words"),
    [
        ("tokenizer(row['text'])", "train.py:2: this call does not cut long examples"),
        ("tokenizer(row['text'], padding='max_length', max_length=8)", "does not cut long"),
        ("tokenizer(row['text'], truncation=True)", "the tokenizer's own limit, which is unknown"),
        (
            "tokenizer(row['text'], truncation=True, max_length=f())",
            "the length of the examples is",
        ),
        ("tokenizer(row['text'], truncation=cut(), max_length=8)", "truncation is computed when"),
        ("tokenizer(row['text'], **how)", r"the tokenizer gets arguments by \*\*"),
        (
            "tokenizer(row['a'], max_length=8) | tokenizer(row['b'], max_length=16)",
            "examples are cut at 16 tokens here, and at 8 in line 2",
        ),
        ("row", "the program does not tokenize the examples"),
    ],
)
def test_rows_of_unknown_length_are_refused_with_their_line(
    tmp_path: Path, tokenizing: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        program(tmp_path, trainer(tokenizing))


def test_the_tokenizers_own_limit_is_read(tmp_path: Path) -> None:
    cuts = trainer("tokenizer(row['text'], truncation=True)")
    loaded = cuts.replace("pretrained('a/b')\n", "pretrained('a/b', model_max_length=640)\n")
    changed = cuts.replace("rows =", "tokenizer.model_max_length = 96\nrows =")
    named = loaded.replace("=True", "=True, max_length=tokenizer.model_max_length")
    lengths = [program(tmp_path, text).config.seq_len for text in (loaded, changed, named)]
    assert lengths == [640, 96, 640]


def test_how_rows_are_padded_is_read(tmp_path: Path) -> None:
    cuts = "tokenizer(row['text'], truncation=True, max_length=64{})"
    together = program(tmp_path, trainer(cuts.format(", padding=True")))
    alone = program(tmp_path, trainer(cuts.format("")))
    notes = [" ".join(one.notes) for one in (together, alone)]
    assert ["all examples of a batch of `map`" in text for text in notes] == [True, False]
    collator = ", data_collator=DataCollatorWithPadding(tok, padding='max_length', max_length=64)"
    filled = program(tmp_path, trainer(cuts.format(""), trains=collator))
    assert (alone.config.padding, filled.config.padding) == ("masked", "max_length")
    own = program(tmp_path, trainer(cuts.format(""), trains=", data_collator=mine"))
    split = cuts.format(", return_overflowing_tokens=True")
    assert own.ignored == "not counted: data_collator"
    assert program(tmp_path, trainer(split)).ignored == "not counted: return_overflowing_tokens"


def test_the_logits_of_the_trainer_are_fused_only_with_liger(tmp_path: Path) -> None:
    cuts = "tokenizer(row['text'], truncation=True, max_length=64)"
    fused = program(tmp_path, trainer(cuts, arguments="use_liger_kernel=True"))
    assert (fused.config.loss, fused.config.kernels) == ("chunked", "liger")


def test_an_evaluation_with_metrics_keeps_its_logits(tmp_path: Path) -> None:
    cuts = "tokenizer(row['text'], truncation=True, max_length=64)"
    trains = ", compute_metrics=accuracy{}"
    evaluates = "eval_strategy='epoch'"
    kept = program(tmp_path, trainer(cuts, trains=trains.format(""), arguments=evaluates))
    reduced = trains.format(", preprocess_logits_for_metrics=best")
    small = program(tmp_path, trainer(cuts, trains=reduced, arguments=evaluates))
    assert (kept.needs_more, small.needs_more) == (True, False)
    after = program(tmp_path, trainer(cuts) + "trainer.evaluate()")
    assert after.evaluation is not None and program(tmp_path, trainer(cuts)).evaluation is None


def test_frozen_parameters_give_a_range(tmp_path: Path) -> None:
    cuts = trainer("tokenizer(row['text'], truncation=True, max_length=64)")
    note = "requires_grad is not counted: the run needs less memory than estimated."
    loop = "for one in model.parameters():\n    one.requires_grad = False"
    for freeze in (loop, "model.base.requires_grad_(False)"):
        assert note in program(tmp_path, f"{cuts}\n{freeze}").notes
    assert note not in program(tmp_path, cuts).notes


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSeq2SeqLM loads no causal"),
        ("Trainer(", f"{OWN}compute_loss(self): ...\nOwn(", "Own has its own compute_loss"),
        ("Trainer(model,", "Trainer(None,", "the model is chosen when"),
        ("TrainingArguments()", "TrainingArguments(no_such_key=1)", "transformers has no such key"),
    ],
)
def test_a_trainer_that_computes_something_else_is_refused(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = trainer("tokenizer(row['text'], truncation=True, max_length=64)")
    assert old in text
    with pytest.raises(UsageError, match=words):
        program(tmp_path, text.replace(old, new))


def test_a_trainer_of_the_program_that_changes_no_step_is_read(tmp_path: Path) -> None:
    text = trainer("tokenizer(row['text'], truncation=True, max_length=64)")
    own = text.replace("Trainer(", f"{OWN}log(self, logs): ...\nOwn(")
    assert program(tmp_path, own).config.seq_len == 64


def test_calls_that_make_no_training_example_do_not_count(tmp_path: Path) -> None:
    text = trainer("tokenizer(row['text'], truncation=True, max_length=64)")
    asked = (
        "sizes = {}\nsizes['longest'] = 3\n"
        "prompt = tokenizer('A question:', return_tensors='pt').to('cuda')\n"
    )
    assert program(tmp_path, asked + text).config.seq_len == 64
    counted = text.replace(
        "tokenizer(row", "len(tokenizer(row['text']).input_ids) and tokenizer(row"
    )
    assert program(tmp_path, counted).config.seq_len == 64
    again = text.replace("\nmodel =", "\nrows = load().map(lambda row: cut(row))\nmodel =")
    cut = "\ndef cut(row):\n    return tokenizer(row['text'], truncation=True, max_length=32)\n"
    assert program(tmp_path, cut + again).config.seq_len == 32


def test_calls_that_change_the_model_itself_are_read(tmp_path: Path) -> None:
    text = trainer("tokenizer(row['text'], truncation=True, max_length=64)").replace(
        ", dtype='auto'", ""
    )
    loads = "from_pretrained('a/b')\nTrainer("
    assert loads in text
    plain = program(tmp_path, text)
    assert (plain.config.method, plain.config.precision) == ("full", "bf16_pure")
    adapted = program(
        tmp_path,
        text.replace(
            loads,
            "from_pretrained('a/b')\nmodel.add_adapter(LoraConfig(r=4))\nTrainer(",
        ),
    )
    assert (adapted.config.method, adapted.config.lora_rank) == ("lora", 4)
    for cast in (".float()", ".to(torch.float32)", "\nmodel.float()"):
        whole = program(tmp_path, text.replace(loads, f"from_pretrained('a/b'){cast}\nTrainer("))
        assert whole.config.precision == "fp32"
        assert not any("gives no dtype" in note for note in whole.notes)
    moved = program(tmp_path, text.replace(loads, "from_pretrained('a/b').to(device)\nTrainer("))
    assert moved.config.precision == "bf16_pure"


def test_the_older_name_of_the_evaluation_strategy_is_read(tmp_path: Path) -> None:
    cuts = "tokenizer(row['text'], truncation=True, max_length=64)"
    found = program(tmp_path, trainer(cuts, arguments="evaluation_strategy='epoch'"))
    assert found.evaluation is not None
