"""Train the exported train.py on a chat set, and TRL's SFTTrainer on the same rows in the same
order from one seed.

The rows are made here, with a fixed seed: conversations of several turns with short sums, so that a
small model of random weights learns something of them in one pass. Both report the loss of answers
that are held out, before and after.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bench import (
    Mode,
    fingerprint_of,
    finish,
    run_program,
    run_python,
    run_study,
    scratch,
    set_options,
)

NUM_ROWS, HELD_OUT, SEED = 3_000, 256, 22
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content']"
    " }}<|end|>{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<pad>"]
THINGS = ["apples", "books", "coins", "stones", "boats", "lamps", "keys", "birds", "maps", "cups"]
PINS = {
    "micro_batch_size": "8",
    "seq_len": "512",
    "packing": "false",
    "padding": "longest",
    "compile": "none",
}
PINS |= {"checkpointing": "none", "loss": "full", "optimizer": "adamw_torch_fused"}
COLUMNS = ["tool", "before", "after", "steps", "seconds"]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours, theirs = rows
    return {
        "loss_before": ours["before"],
        "loss_after": ours["after"],
        "trl_difference": ours["after"] - theirs["after"],
        "trl_difference_before": ours["before"] - theirs["before"],
    }


def made_conversations(number: int) -> list[list[dict[str, str]]]:
    """Conversations of one to four questions, each a sum of things; the answer says the sum."""
    generator = random.Random(SEED)
    made = []
    for _ in range(number):
        messages = (
            [{"role": "system", "content": "You count things."}] if generator.random() < 0.5 else []
        )
        for _ in range(generator.randint(1, 4)):
            first, second, thing = (
                generator.randint(1, 20),
                generator.randint(1, 20),
                generator.choice(THINGS),
            )
            question = (
                f"I have {first} {thing} and find {second} {thing}. How many {thing} are there?"
            )
            answer = (
                f"There are {first + second} {thing}, since {first} and {second} make"
                f" {first + second}."
            )
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        made.append(messages)
    return made


def make_model(
    folder: Path, conversations: list[list[dict[str, str]]], layers: int, hidden: int
) -> None:
    """Save a small Llama of random weights, and a tokenizer for these conversations with a chat
    template.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        (turn["content"] for messages in conversations for turn in messages), trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=1024,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train_with_trl(folder: Path) -> dict[str, Any]:
    """Train the same rows in the same order with TRL's SFTTrainer, by the values of the exported
    train_config.json.
    """
    import torch
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    settings = json.loads((folder / "out/export/train_config.json").read_text())
    rows = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    set_seed(0)
    trainer = SFTTrainer(
        model=str(folder / "model"),
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=settings["micro_batch_size"],
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=settings["accumulation"],
            optim=settings["optimizer"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=settings["warmup_steps"],
            num_train_epochs=settings["epochs"],
            bf16=settings["precision"] == "bf16_mixed",
            max_length=settings["seq_len"],
            gradient_checkpointing=False,
            dataloader_drop_last=True,
            max_grad_norm=1.0,
            use_cpu=not torch.cuda.is_available(),
            assistant_only_loss=True,
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows[:-HELD_OUT]),
        eval_dataset=Dataset.from_list(rows[-HELD_OUT:]),
    )
    before = trainer.evaluate()["eval_loss"]
    done = trainer.train()
    return {
        "before": before,
        "after": trainer.evaluate()["eval_loss"],
        "steps": done.global_step,
        "seconds": done.metrics["train_runtime"],
    }


def run(args: argparse.Namespace) -> None:
    """Train with train.py and with TRL, and compare the losses."""
    if args.trl:
        print(json.dumps(train_with_trl(args.trl)))
        return
    folder = scratch()
    data, model = folder / "chat.jsonl", folder / "model"
    conversations = made_conversations(args.rows + HELD_OUT)
    data.write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    )
    make_model(model, conversations, args.layers, args.hidden)
    options = [
        "--gpu",
        args.gpu,
        "--model",
        str(model),
        "--dataset",
        str(data),
        "--space",
        "full",
        "--trials",
        "1",
    ]
    options += ["--budget", "90s", "--examples", str(args.rows), "--out", "out"]
    study = run_study(folder, *options, *set_options(PINS | {"precision": args.precision}))
    script = [
        "out/export/train.py",
        "--model",
        str(model),
        "--dataset",
        str(data),
        "--output-dir",
        "",
    ]
    ours = json.loads(
        run_python([*script, "--held-out", str(HELD_OUT), "512"], folder).splitlines()[-1]
    )
    theirs = json.loads(
        run_python([str(Path(__file__).absolute()), "--trl", str(folder)], folder).splitlines()[-1]
    )
    rows = [
        {"tool": "train.py", "before": ours["held_out_loss"][0], "after": ours["held_out_loss"][-1]}
        | {"steps": ours["steps"], "tokens_per_s": ours["tokens_per_second"]},
        {"tool": "trl", **theirs},
    ]
    finish(args, fingerprint_of(study), rows, COLUMNS, rows=args.rows, held_out=HELD_OUT)


MODES = {
    "": Mode(
        run=run,
        result="chat_training",
        summarize=summarize,
        options={
            "--gpu": "h200",
            "--rows": {
                "default": NUM_ROWS,
                "type": int,
                "help": "number of conversations",
                "metavar": "N",
            },
            "--layers": 8,
            "--hidden": 512,
            "--precision": "bf16_mixed",
            "--trl": {"type": Path, "help": argparse.SUPPRESS},
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
