"""The training: build the model, make rows, train, save, and print one line of JSON with what was measured."""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.utils.data import Subset
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from . import model_builder, rows
from .chunked_loss import chunked_loss
from .clock import Clock
from .examples import label_names
from .image_rows import SeenRows, collate_seen, random_seen
from .joined_lora import Joined
from .labels import LabelEncoder, collate_labels, label_loss
from .lean_trainer import (
    LeanTrainer,
    compile_layers,
    run_layers_eagerly,
    shard_outline,
    sharing_arguments,
    training_arguments,
)
from .malloc import KEPT_BYTES, return_from
from .patches import choose_attention, load_attention
from .reading import BadDataset, read_rows
from .settings import Options, RunSettings
from .token_cache import CannotKeep, tokenise
from .varlen import VARLEN

CLASSIFICATION = "classification"  # an objective
SEED = 0
RECOMPILE_LIMIT = 64  # every shape that was compiled in the measurement is compiled here: nothing falls back to eager
COUNTED_ROWS = 64  # whose tokens stand for those of all rows with images
RANDOM_EXAMPLES = 64  # different ones, at least; a longer run repeats them


def main(settings: RunSettings, options: Options, model_config: Path) -> nn.Module:
    """Train, and return the trained model. `model_config` is a file with the shape of a model of random weights."""
    device = device_of(settings)
    set_seed(SEED)
    if device.type == "cpu":
        return_from(KEPT_BYTES)
    if settings.images:
        return train_on_images(settings, options, model_config, device)
    if options.dataset:
        # First, since a bad row ends the run; one process tokenises, and the others read what it keeps.
        with PartialState().main_process_first() if settings.num_gpus > 1 else nullcontext():
            examples = read_examples(settings, options)
        base = load(settings, options, device)
    else:
        base = build(settings, json.loads(model_config.read_text(encoding="utf-8")), device)
        examples = random_examples(settings, options, base.config.vocab_size)
    examples, drawn = rows.hold_out(examples, held_out_share(settings, options), settings.seq_len)
    trained, held_out = rows.split(examples, settings.seq_len, options.held_out, options.held_out_tokens)
    train_rows, eval_rows = make_rows(settings, trained), held_out or make_rows(settings, drawn)
    if len(train_rows) < (size := settings.micro_batch_size):
        sys.exit(f"train.py: error: {len(train_rows)} rows do not fill a micro batch of {size}: give more examples")

    return train(settings, options, base, device, train_rows, eval_rows, trained, bool(held_out))


def train_on_images(settings: RunSettings, options: Options, model_config: Path, device: torch.device) -> nn.Module:
    """Train on rows with images, and return the trained model. Images are read as the run needs them.

    What is held out is not cut, since images are never.
    """
    if options.lengths:
        sys.exit("train.py: error: rows with images have lengths of their own: leave --lengths out")
    if options.dataset:
        base = load(settings, options, device)
        processor = AutoProcessor.from_pretrained(options.model, trust_remote_code=False)
        how: dict[str, Any] = {"split": options.split, "loss_on": settings.loss_on, "seq_len": settings.seq_len}
        try:
            seen: Any = SeenRows(Path(options.dataset), processor, **how)
        except (BadDataset, ImportError) as error:
            sys.exit(f"train.py: error: {error}")
    else:
        base = build(settings, json.loads(model_config.read_text(encoding="utf-8")), device)
        seen = random_seen(settings, base.config)
    number = len(seen) - options.held_out
    if number < (size := settings.micro_batch_size):
        sys.exit(f"train.py: error: {number} rows do not fill a micro batch of {size}: give more examples")
    some = [seen[index][0] for index in range(min(number, COUNTED_ROWS))]
    train_rows, eval_rows = Subset(seen, range(number)), Subset(seen, range(number, len(seen)))
    return train(settings, options, base, device, train_rows, eval_rows, some, options.held_out > 0)


def train(
    settings: RunSettings,
    options: Options,
    base: PreTrainedModel,
    device: torch.device,
    train_rows: Any,
    eval_rows: Any,
    trained: Sequence[torch.Tensor],
    evaluates: bool,
) -> nn.Module:
    """Train the base on these rows, save, and print what was measured. `trained` are examples in the rows.

    With `evaluates` the loss of `eval_rows` is computed before the training and after it.
    """
    choose_attention(any_length=settings.padding == "longest")
    if settings.padding == "masked":
        load_attention(base, device)
    model_builder.set_checkpointing(base, settings.model_settings)
    model = add_adapters(base, settings, torch.device("cpu") if from_one(settings, options) else device)
    if settings.model_settings.tiled:
        model_builder.compute_in_tiles(base)
    joined = Joined(base, model_builder.decoder_layers(model)) if settings.model_settings.joined else None
    loss = loss_of(settings, base)  # with the head that is trained
    clock = Clock(options.saves, options.progress)
    trainer = make_trainer(settings, options, model, loss, clock, train_rows, eval_rows, joined)

    if model_builder.is_outline(model) and not from_one(settings, options):
        shard_outline(trainer, torch.device("cpu") if settings.offload else device)
    # What shards a model does so once, for the training.
    losses = [trainer.evaluate()["eval_loss"]] if evaluates and settings.sharding in ("none", "ddp") else []
    layers = model_builder.decoder_layers(model)
    if settings.compile == "per_layer":
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        if settings.model_settings.lora_rank is not None:
            model_builder.require_input_gradients(base)
        compile_layers(layers, settings.model_settings.activation_budget)
    torch.cuda.empty_cache()
    num_steps = trainer.train(resume_from_checkpoint=options.checkpoint).global_step
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    clock.exit_if_stopped()
    run_layers_eagerly(layers)
    if joined is not None:
        joined.undo()
    if options.saves:
        trainer.save_model(options.output_dir)
    if evaluates:
        losses.append(trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        num_rows = len(trained) if settings.images else len(train_rows)
        print(json.dumps(summary(settings, clock, num_steps, trained, num_rows) | {"held_out_loss": losses}))
    if dist.is_initialized():
        dist.destroy_process_group()
    return model


def device_of(settings: RunSettings) -> torch.device:
    """The device of this process, which joins the others of its world. Ends the process where there are too few."""
    if settings.cuda_graphs != "none" and not torch.cuda.is_available():
        sys.exit("train.py: error: CUDA graphs need an NVIDIA GPU: set cuda_graphs to none in train_config.json")
    if settings.num_gpus == 1:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) != settings.num_gpus:
        count = settings.num_gpus
        sys.exit(f"train.py: error: it trains on {count} GPUs: leave torchrun out, or give it --nproc-per-node={count}")
    if settings.offload:  # the norm of gradients is added up where they are
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cuda:nccl,cpu:gloo")
    return PartialState(cpu=not torch.cuda.is_available()).device


def from_one(settings: RunSettings, options: Options) -> bool:
    """Whether one rank has the weights in the host's memory, and sends the others their shards."""
    return settings.is_larger_than_gpu and options.dataset is not None


def load(settings: RunSettings, options: Options, device: torch.device) -> PreTrainedModel:
    """The base with its weights: on the device, or in the host's memory where that is too small for it."""
    if from_one(settings, options):
        return model_builder.load_in_first_rank(options.model, settings.model_settings)
    if settings.objective == CLASSIFICATION:
        return load_classifier(settings, options, device)
    return model_builder.load(options.model, settings.model_settings, device)


def build(settings: RunSettings, shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """The base with random weights, which it gets once it is sharded where the device is too small for it."""
    config = model_builder.config_of(shape)
    base = model_builder.outline(config, settings.model_settings, device, 0.0) if settings.is_larger_than_gpu else None
    return base or model_builder.build(config, settings.model_settings, device)


def held_out_share(settings: RunSettings, options: Options) -> float:
    """The share of the examples to evaluate during the training; 0 where others are held out, or all are random."""
    return settings.eval_share if options.dataset and not options.held_out else 0.0


def make_rows(settings: RunSettings, examples: Sequence[torch.Tensor]) -> rows.Rows:
    """The examples in rows: packed, or each in one of its own."""
    if not settings.packing:
        return rows.Rows(examples)
    return rows.Rows(examples, rows.pack([len(example) for example in examples], settings.seq_len))


def read_examples(settings: RunSettings, options: Options) -> Sequence[torch.Tensor]:
    """The examples of the dataset, tokenised. No code of a model's repository is run."""
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    assert options.dataset is not None
    dataset = Path(options.dataset)
    try:
        of_labels = None
        if settings.objective == CLASSIFICATION:
            of_labels = LabelEncoder(tokenizer, label_names(read_rows(dataset, options.split)), settings.seq_len)
        folder = tokenise(
            dataset,
            tokenizer,
            encoder=of_labels,
            split=options.split,
            loss_on=settings.loss_on,
            say=lambda text: print(text, file=sys.stderr),
        )
    except (BadDataset, CannotKeep, ImportError) as error:
        sys.exit(f"train.py: error: {error}")
    return rows.Stored(folder)


def load_classifier(settings: RunSettings, options: Options, device: torch.device) -> PreTrainedModel:
    """The base with a new head over the dataset's labels, which knows their names and how rows are padded."""
    names = label_names(read_rows(Path(str(options.dataset)), options.split))
    base = model_builder.load(options.model, replace(settings.model_settings, num_labels=len(names)), device)
    base.config.id2label = {number: str(name) for number, name in enumerate(names)}
    base.config.label2id = {str(name): number for number, name in enumerate(names)}
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    base.config.pad_token_id = padding or 0  # before which the head finds the last token of a row
    return base


def loss_of(settings: RunSettings, base: PreTrainedModel) -> Callable[..., torch.Tensor] | None:
    """The `compute_loss_func` of the Trainer; None leaves the loss to the model."""
    if settings.objective == CLASSIFICATION:
        return label_loss
    return chunked_loss(base) if settings.loss == "chunked" else None


def random_examples(settings: RunSettings, options: Options, vocab_size: int) -> list[torch.Tensor]:
    """As many examples as the run has, of random tokens, with the lengths that were measured or those of a file."""
    lengths = rows.read_lengths(options.lengths, settings.seq_len) if options.lengths else settings.lengths
    lengths = lengths * max(1, RANDOM_EXAMPLES // len(lengths))
    share = settings.trained_share
    if settings.objective == CLASSIFICATION:
        texts = [-1 - torch.randint(0, vocab_size, (length,)) for length in lengths]
        num_labels = settings.model_settings.num_labels or 2
        examples = [torch.cat([text[1:], torch.randint(0, num_labels, (1,))]) for text in texts]
    else:
        examples = [rows.with_prompt(torch.randint(0, vocab_size, (length,)), share) for length in lengths]
    repeats = settings.examples // len(examples) + 1
    return (examples * repeats)[: settings.examples]


def add_adapters(base: PreTrainedModel, settings: RunSettings, device: torch.device) -> nn.Module:
    """The model to train: the base with adapters, or the base itself in full fine-tuning."""
    model = model_builder.to_train(base, settings.model_settings, device)
    if settings.model_settings.lora_rank is not None:
        # The Trainer loads adapters in this way when it continues from a checkpoint: they keep their dtype.
        in_fp32 = settings.model_settings.adapters_in_fp32
        model.load_adapter = functools.partial(model.load_adapter, autocast_adapter_dtype=in_fp32)
    return model


def make_trainer(
    settings: RunSettings,
    options: Options,
    model: nn.Module,
    loss: Callable[..., torch.Tensor] | None,
    clock: TrainerCallback,
    train_rows: Any,
    eval_rows: Any,
    joined: Joined | None = None,
) -> LeanTrainer:
    """The Trainer of this run. Only a run on a dataset saves checkpoints, and not where it stops after some steps."""
    evaluates = held_out_share(settings, options) > 0
    checkpoints = options.saves and options.dataset is not None and options.max_steps < 1
    by_length = settings.group_by_length or settings.dealt
    on_cpu = not torch.cuda.is_available()
    arguments = training_arguments(settings, accumulation=settings.accumulation, on_cpu=on_cpu)
    if settings.num_gpus > 1:
        layers = model_builder.decoder_layers(model)
        arguments |= sharing_arguments(settings, layers, from_one=from_one(settings, options))
    arguments |= {"report_to": options.report_to}
    return LeanTrainer(
        model,
        TrainingArguments(
            output_dir=options.output_dir or tempfile.mkdtemp(),
            max_steps=options.max_steps,
            num_train_epochs=settings.epochs,
            lr_scheduler_type="cosine",
            warmup_steps=settings.warmup_steps,
            save_strategy="steps" if checkpoints else "no",
            save_steps=settings.save_steps,
            save_total_limit=settings.save_total_limit,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=settings.eval_steps,
            per_device_eval_batch_size=settings.micro_batch_size if evaluates else 1,
            prediction_loss_only=True,
            run_name=settings.run_name,
            **arguments,
        ),
        make_collator(settings, model),
        train_rows,
        eval_rows,
        compute_loss_func=loss,
        callbacks=[clock],
        row_lengths=[rows.num_tokens(row) for row in train_rows] if by_length else None,
        dealt=settings.dealt,
        optimizer_in_backward=settings.optimizer_in_backward,
        cuda_graphs=settings.cuda_graphs == "micro_batch",
        joined=joined,
    )


def make_collator(settings: RunSettings, model: nn.Module) -> Callable[[list[Any]], dict[str, Any]]:
    """What makes a batch of rows."""
    lengths, masked = settings.padded_lengths, settings.padding == "masked"
    if settings.images:
        return functools.partial(collate_seen, config=model.config, padded_lengths=lengths, masked=masked)
    if settings.objective == CLASSIFICATION:
        padding = int(model.config.pad_token_id)
        return functools.partial(collate_labels, padded_lengths=lengths, padding=padding, masked=masked)
    by_segments = settings.model_settings.attention == VARLEN
    return functools.partial(
        rows.collate, padded_lengths=lengths, packing=settings.packing, masked=masked, varlen=by_segments
    )


def summary(
    settings: RunSettings, clock: Clock, num_steps: int, trained: Sequence[torch.Tensor], num_rows: int
) -> dict[str, Any]:
    """What was measured: the clock's values, the number of steps, and tokens per second, padding not counted.

    `trained_share` is the share of these tokens that was trained on.
    """
    measured = clock.measured()
    seconds = measured["seconds_per_step"]
    tokens = sum(len(example) for example in trained)
    rows_per_step = settings.micro_batch_size * settings.accumulation * settings.num_gpus
    tokens_per_step = rows_per_step * tokens / num_rows
    return measured | {
        "steps": num_steps,
        "tokens_per_second": tokens_per_step / seconds if seconds else None,
        "trained_share": sum(int((example >= 0).sum()) for example in trained) / tokens,
    }
