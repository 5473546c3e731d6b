"""Compare the rate that `autotune learn` chooses with a sweep of twelve rates from three seeds, on
three data sets.

First a model of 17 M parameters is trained on the source of Python's standard library, so that it
has something to forget. It is then fine-tuned with LoRA on three kinds of text that lie on this
machine too: C++ headers of torch, descriptions and licences of installed packages, and docstrings
to be written for a signature. All runs of the sweep are as long as the full run, and are judged by
the same examples, which neither they nor the search train on. `loss_over_best` is the mean loss of
the chosen rate divided by the loss of the best rate, minus 1. `default_over_best` is the same for
the fixed default. `cost_share` is the number of optimizer steps of the search divided by the steps
of the sweep. Adapters of other ranks are trained at the chosen
rate: `ranks_diverged` counts the diverged ones.
"""

import argparse
import ast
import json
import math
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import Mode, Rows, finish, run_program, scratch

import autotune
from autotune.core.serialization import to_data
from autotune.export import script
from autotune.export.run.learn import Learner, learn
from autotune.export.run.process import write_files
from autotune.study.learning import Attempt
from autotune.study.summary import Recipe

SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
VOCABULARY, ROW = 4096, 256  # tokens
RATES = [2e-4 * 2.0**power for power in range(-3, 9)]
SEEDS = (0, 1, 2)
RANKS = (8, 64, 256)
STEPS_ON_CPU = 8  # of a trial run
EXAMPLES, HELD_OUT, CHARACTERS = 1600, 200, 900
LIBRARY, TORCH = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
COLUMNS = [
    "data",
    "chosen",
    "loss",
    "best",
    "best_loss",
    "loss_over_best",
    "default_over_best",
    "cost_share",
]


# --- text that lies on every machine


def files(folder: Path, *patterns: str) -> Iterator[str]:
    """The texts of the files of a folder, in an order that is always the same."""
    paths = sorted(path for pattern in patterns for path in folder.rglob(pattern))
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="ignore")


def pieces(texts: Iterator[str]) -> Iterator[dict[str, str]]:
    """Yield examples of CHARACTERS characters, in their order."""
    for text in texts:
        for begin in range(0, min(len(text), 20 * CHARACTERS) - CHARACTERS, CHARACTERS):
            yield {"text": text[begin : begin + CHARACTERS]}


def docstrings() -> Iterator[dict[str, str]]:
    """Functions of installed packages: the signature, and the docstring that is to be written for
    it.
    """
    for text in files(TORCH, "*.py"):
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in nodes:
            if (
                isinstance(node, ast.FunctionDef)
                and (said := ast.get_docstring(node))
                and len(said) > 80
            ):
                arguments = ast.unparse(node.args)[:200]
                yield {
                    "prompt": f"def {node.name}({arguments}):\n",
                    "completion": said[:CHARACTERS],
                }


TEXTS = {
    "headers": lambda: pieces(files(TORCH / "include", "*.h")),
    "descriptions": lambda: pieces(files(TORCH.parent, "METADATA", "LICENSE*", "*.rst", "*.md")),
    "docstrings": docstrings,
}


# --- the model


def pretrain(folder: Path, args: argparse.Namespace) -> float:
    """Train a model and its tokenizer on the standard library; the mean loss of the last steps."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    texts = list(files(LIBRARY, "*.py"))
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet
    )
    plain.train_from_iterator(texts[:300], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    encoded = plain.encode_batch(texts if args.gpu != "cpu" else texts[:20])
    tokens = torch.tensor([token for one in encoded for token in one.ids])
    on_gpu = args.gpu != "cpu"
    device, size = torch.device("cuda" if on_gpu else "cpu"), 64 if on_gpu else 4
    torch.manual_seed(0)
    shape = (
        SHAPE
        if on_gpu
        else SHAPE | {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=VOCABULARY, **shape)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, began = list[float](), time.monotonic()
    while (passed := (time.monotonic() - began) / args.pretrain_s) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, len(losses) / 50) * (1 - passed)
        begins = torch.randint(0, len(tokens) - ROW, (size,))
        rows = torch.stack([tokens[begin : begin + ROW] for begin in begins.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    del model, optimizer
    if on_gpu:
        torch.cuda.empty_cache()
    return statistics.fmean(losses[-20:])


# --- the comparison


@dataclass(frozen=True)
class Tuned:
    """A study's winner, its examples, and the examples of the sweep.

    The last ones of the sweep judge.
    """

    name: str
    recipe: Recipe
    data: Path
    with_judges: Path


def tuned(name: str, folder: Path, args: argparse.Namespace) -> Tuned:
    examples = [example for example, _ in zip(TEXTS[name](), range(3 * EXAMPLES), strict=False)]
    number = EXAMPLES if args.gpu != "cpu" else EXAMPLES // 3
    chosen = random.Random(0).sample(examples, min(number + HELD_OUT, len(examples)))
    data, both = folder / f"{name}.jsonl", folder / f"{name}-all.jsonl"
    data.write_text("\n".join(map(json.dumps, chosen[:-HELD_OUT])) + "\n")
    both.write_text("\n".join(map(json.dumps, chosen)) + "\n")
    pins = {
        "seq_len": ROW,
        "micro_batch_size": 32,
        "lora_rank": 16,
        "quantization": "none",
        "packing": False,
    }
    study = autotune.tune(
        str(folder / "model"),
        gpu=args.gpu,
        dataset=str(data),
        epochs=2,
        budget=args.budget,
        pins=pins,
        study=name,
        out=str(folder / name),
        storage=f"sqlite:///{folder / 'studies.db'}",
    )
    return Tuned(name, study.recipe, data, both)


def compare(one: Tuned, args: argparse.Namespace) -> dict[str, Any]:
    """A row: the search, the sweep, and other ranks at the chosen rate.

    A process for each seed, and for each rank.
    """
    recipe = one.recipe
    steps = recipe.winner.cost.num_steps if args.gpu != "cpu" else STEPS_ON_CPU
    began = time.monotonic()
    learning = learn(
        recipe, one.data, one.data.with_suffix(""), print, lambda: False, share=args.share
    )
    chosen, default = learning.learning_rate, recipe.default_learning_rate
    rates = sorted({*(RATES if args.gpu != "cpu" else RATES[::3]), chosen, default})
    print(f"{one.name}: searched for {time.monotonic() - began:.0f} s", flush=True)
    with ThreadPoolExecutor() as pool:
        by_seed = [
            pool.submit(sweep, recipe, one, [(rate, steps, seed) for rate in rates])
            for seed in SEEDS
        ]
        by_rank = {
            rank: pool.submit(sweep, with_rank(recipe, rank), one, [(chosen, steps, 0)])
            for rank in RANKS
        }
        swept = [attempt for job in by_seed for attempt in job.result()]
        ranks = {rank: job.result()[0].loss for rank, job in by_rank.items()}
    print(f"{one.name}: all done after {time.monotonic() - began:.0f} s", flush=True)
    means = {
        rate: statistics.fmean(loss_of(run) for run in swept if run.learning_rate == rate)
        for rate in rates
    }
    best = min(means, key=lambda rate: means[rate])
    own, usual = means[chosen], means[default]
    return {
        "data": one.name,
        "config": recipe.config.label(),
        "run_steps": steps,
        "chosen": chosen,
        "is_sure": learning.is_sure,
        "loss": own,
        "best": best,
        "best_loss": means[best],
        "loss_over_best": own / means[best] - 1,
        "default_over_best": usual / means[best] - 1,
        "cost_share": learning.steps / (len(swept) * steps),
        "search_steps": learning.steps,
        "search_s": learning.seconds,
        "sweep_s": sum(run.seconds for run in swept),
        "diverged": sum(math.isinf(mean) for mean in means.values()),
        "over_5_percent_worse": sum(mean > 1.05 * means[best] for mean in means.values()),
        "losses": {
            f"{rate:.3g}": mean if math.isfinite(mean) else None for rate, mean in means.items()
        },
        "ranks": ranks,
        "fingerprint": to_data(recipe.fingerprint),
    }


def with_rank(recipe: Recipe, rank: int) -> Recipe:
    return replace(
        recipe, winner=replace(recipe.winner, config=replace(recipe.config, lora_rank=rank))
    )


def sweep(recipe: Recipe, one: Tuned, runs: list[tuple[float, int, int]]) -> list[Attempt]:
    """Full runs at these rates, steps and seeds, each judged by the last examples."""
    folder = Path(tempfile.mkdtemp(dir=one.data.parent))
    write_files(folder, script.export(recipe))
    arguments = [
        str(folder),
        "--dataset",
        str(one.with_judges),
        "--output-dir",
        "",
        "--report-to",
        "none",
    ]
    arguments += ["--held-out", str(HELD_OUT), str(ROW)]
    with Learner(arguments, folder / "log", lambda: False) as learner:
        return [learner.train(rate, steps, seed, 600.0) for rate, steps, seed in runs]


def loss_of(attempt: Attempt) -> float:
    return math.inf if attempt.loss is None else attempt.loss


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data_sets": len(rows),
        "loss_over_best_max": max(row["loss_over_best"] for row in rows),
        "default_over_best_max": max(row["default_over_best"] for row in rows),
        "cost_share_max": max(row["cost_share"] for row in rows),
        "diverged_min": min(row["diverged"] for row in rows),
        "over_5_percent_worse_min": min(row["over_5_percent_worse"] for row in rows),
        "ranks_diverged": sum(loss is None for row in rows for loss in row["ranks"].values()),
    }


def run(args: argparse.Namespace) -> None:
    """Pretrain a model, tune it on each data set, and compare the rates."""
    rows = Rows.of(args)
    folder = scratch()
    began = time.monotonic()
    pretrained_loss = pretrain(folder / "model", args)
    print(
        f"pretrained to a loss of {pretrained_loss:.3f} in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    # while one study searches, the trainings of the study before run
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(compare, tuned(name, folder, args), args) for name in args.data]
        for one in found:
            rows.add(one.result() | {"pretrained_loss": pretrained_loss})
    finish(args, rows.all[-1]["fingerprint"], rows.all, COLUMNS)


MODES = {
    "": Mode(
        run=run,
        result="learn",
        summarize=summarize,
        options={
            "--gpu": "auto",
            "--pretrain-s": 25.0,
            "--budget": "15s",
            "--share": {"default": 4.5, "help": "multiple of the full run that a search may take"},
            "--data": {"nargs": "*", "default": list(TEXTS), "choices": list(TEXTS)},
            "--rows": None,
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
