# -*- coding: utf-8 -*-
"""Runs the training: builds the model, makes rows, trains and saves.

At the end, the measurements are printed as one line of JSON.
"""

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
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from . import image_rows, labels, model_builder, ranks, rows
from .answers import Prompt, first_example
from .chunked_loss import chunked_loss
from .clock import Clock
from .examples import label_names
from .grouped_lora import restore_experts
from .image_rows import ImageRows, collate_image_examples, random_image_examples
from .joined_lora import JoinedLayers
from .labels import LabelEncoder, collate_labels, label_loss
from .lean_trainer import (
    LeanTrainer,
    compile_layers,
    run_layers_eagerly,
    shard_outline,
    sharing_arguments,
    training_arguments,
)
from .malloc import KEPT_BYTES, set_release_threshold
from .origin import Origin, describe, find_difference
from .patches import choose_attention, load_attention
from .reading import BadDataset, read_rows
from .settings import Options, RunSettings
from .sharded_nf4 import shard_4_bit_layers
from .token_cache import CannotKeep, tokenise
from .varlen import VARLEN

CLASSIFICATION = "classification"  # a value of `RunSettings.objective`
SEED = 0
# torch compiles a layer for at most this number of input shapes. Further shapes would run without
# compilation. The limit is above the number of shapes that the study's probe compiled.
RECOMPILE_LIMIT = 64
# The number of rows with images whose tokens are counted, as a sample of all rows.
COUNTED_ROWS = 64
# A short list of lengths is repeated as often as fits into this number of random examples. A run
# with more examples repeats these examples.
RANDOM_EXAMPLES = 64


def main(settings: RunSettings, options: Options, model_config: Path) -> LeanTrainer:
    """Train, and return the Trainer with the trained model.

    `model_config` is a file with the shape of a model, for random weights. After a run of several
    ranks, the process must end before the Trainer is freed (see `ranks.end_at_once`).
    """
    device = initialize_device(settings)
    set_seed(SEED)
    if device.type == "cpu":
        set_release_threshold(KEPT_BYTES)
    origin = check_origin(settings, options)
    if settings.images:
        return train_on_images(settings, options, model_config, device, origin)

    if options.dataset:
        # Read the examples before the model, because an invalid row ends the run. One process
        # tokenises the examples, and the other processes read the files that it writes.
        is_shared = settings.num_gpus > 1
        with PartialState().main_process_first() if is_shared else nullcontext():
            examples = read_examples(settings, options)
        base = load(settings, options, device)
    else:
        shape = json.loads(model_config.read_text(encoding="utf-8"))
        base = build(settings, shape, device)
        examples = random_examples(settings, options, base.config)

    examples, drawn = rows.hold_out(examples, held_out_share(settings, options), settings.seq_len)
    trained, held_out = rows.split(
        examples, settings.seq_len, options.held_out, options.held_out_tokens
    )
    train_rows = make_rows(settings, trained)
    eval_rows = held_out or make_rows(settings, drawn)
    check_number(len(train_rows))
    return train(
        settings, options, base, device, train_rows, eval_rows, trained, bool(held_out), origin
    )


def train_on_images(
    settings: RunSettings,
    options: Options,
    model_config: Path,
    device: torch.device,
    origin: TrainerCallback,
) -> LeanTrainer:
    """Train on rows with images, and return the Trainer with the trained model.

    Images are read when the run needs them. Held-out rows are not truncated, because images cannot
    be truncated.
    """
    if options.lengths:
        sys.exit(
            "train.py: error: examples with images have their own lengths: leave --lengths out"
        )

    examples: Any
    if options.dataset:
        base = load(settings, options, device)
        examples = read_image_rows(settings, options)
    else:
        shape = json.loads(model_config.read_text(encoding="utf-8"))
        base = build(settings, shape, device)
        examples = random_image_examples(settings, base.config)

    number = len(examples) - options.held_out
    check_number(number)
    counted = [examples[index][0] for index in range(min(number, COUNTED_ROWS))]
    train_rows = Subset(examples, range(number))
    eval_rows = Subset(examples, range(number, len(examples)))
    evaluates = options.held_out > 0
    return train(settings, options, base, device, train_rows, eval_rows, counted, evaluates, origin)


def check_origin(settings: RunSettings, options: Options) -> TrainerCallback:
    """Return the callback that stores this run's origin (see `origin`) in its checkpoints, if any.

    Ends the process if the checkpoint to continue from has another origin.
    """
    # Only the first rank saves checkpoints, so only the first rank checks the origin. If the first
    # rank ends, the other ranks end too.
    is_first = settings.num_gpus == 1 or os.environ["RANK"] == "0"
    if not options.saves or not is_first:
        return TrainerCallback()
    try:
        facts = describe(settings, options)
    except (BadDataset, ImportError) as error:
        sys.exit(f"train.py: error: {error}")
    if options.checkpoint and (difference := find_difference(options.checkpoint, facts)):
        sys.exit(f"train.py: error: {difference}")
    return Origin(facts)


def check_number(number: int) -> None:
    """End the process if there are no rows to train on."""
    if number < 1:
        sys.exit(
            "train.py: error: no example is left to train on: give more examples, or hold out fewer"
        )


def train(
    settings: RunSettings,
    options: Options,
    base: PreTrainedModel,
    device: torch.device,
    train_rows: Any,
    eval_rows: Any,
    trained: Sequence[torch.Tensor],
    evaluates: bool,
    origin: TrainerCallback,
) -> LeanTrainer:
    """Train the base on these rows, save the result, and print the measurements.

    `trained` are the examples in `train_rows`. With `evaluates`, the loss of `eval_rows` is
    computed before and after the training.
    """
    # The model
    choose_attention(cudnn=settings.padding != "longest")
    if settings.padding == "masked":
        load_attention(base, device)
    model_builder.set_checkpointing(base, settings.model_settings)
    is_loaded_in_first_rank = loads_in_first_rank(settings, options)
    adapter_device = torch.device("cpu") if is_loaded_in_first_rank else device
    model = add_adapters(base, settings, adapter_device)
    if settings.sharding.startswith("fsdp2") and settings.model_settings.quantization == "nf4":
        shard_4_bit_layers(model, device)
    if settings.model_settings.tiled:
        model_builder.compute_in_tiles(base)
    joined = model_builder.set_lora_kernels(base, settings.model_settings)

    # Make the Trainer. The loss is selected after the adapters are added, because the chunked loss
    # needs the head that is trained.
    loss = select_loss(settings, base)
    clock = Clock(options.saves, options.progress)
    filled = fill_batches(settings, train_rows)
    trainer = make_trainer(settings, options, model, loss, clock, filled, eval_rows, joined)
    trainer.add_callback(origin)
    is_outline = model_builder.is_outline(model)
    if settings.is_larger_than_gpu and (
        settings.sharding == "zero3" or (is_outline and not is_loaded_in_first_rank)
    ):
        shard_outline(trainer, torch.device("cpu") if settings.offload else device)

    # A model is sharded only once, when the training begins. A model that will be sharded is
    # therefore not evaluated before the training.
    prompt = prompt_of(options)
    answers = answer(prompt, model, trainer)
    losses = []
    if evaluates and settings.sharding in ("none", "ddp"):
        losses.append(trainer.evaluate()["eval_loss"])

    layers = model_builder.decoder_layers(model)
    if settings.compile == "per_layer":
        compile_model(base, layers, settings)
    torch.cuda.empty_cache()

    num_steps = trainer.train(resume_from_checkpoint=options.checkpoint).global_step
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    clock.exit_if_stopped()
    run_layers_eagerly(layers)
    if joined is not None:
        joined.undo()
    restore_experts(base)
    answers += answer(prompt, model, trainer)

    # The result
    if options.saves:
        trainer.save_model(options.output_dir)
    if evaluates:
        losses.append(trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        num_rows = len(trained) if settings.images else len(train_rows)
        result = summary(settings, clock, num_steps, trained, num_rows)
        asked = dict(zip(("before", "after"), answers, strict=False))
        result |= {"asked": {"prompt": options.ask, **asked}} if asked else {}
        print(json.dumps(result | {"held_out_loss": losses}))
    if dist.is_initialized():
        dist.destroy_process_group()
    return trainer


def answer(prompt: Prompt | None, model: nn.Module, trainer: LeanTrainer) -> list[str]:
    """Return a list with the model's answer, or an empty list if there is no prompt."""
    if prompt is None:
        return []
    return [prompt.answer(model, trainer.compute_loss_context_manager())]


def prompt_of(options: Options) -> Prompt | None:
    """Return the prompt to answer before and after the training, if the user gave one."""
    if options.ask is None:
        return None
    assert options.dataset is not None
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    has_template = bool(tokenizer.chat_template)
    example = first_example(Path(options.dataset), options.split, has_template=has_template)
    return Prompt(options.ask, tokenizer, example)


def compile_model(base: PreTrainedModel, layers: list[nn.Module], settings: RunSettings) -> None:
    """Compile the decoder layers of the base, separately for each shape of the run's batches."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    if settings.model_settings.lora_rank is not None:
        model_builder.require_input_gradients(base)
    compile_layers(layers, settings.model_settings.activation_budget)


def initialize_device(settings: RunSettings) -> torch.device:
    """Return the device of this process, and join the processes of the run.

    Ends the process if the number of processes is wrong, or if CUDA graphs are set without a GPU.
    """
    if settings.cuda_graphs != "none" and not torch.cuda.is_available():
        sys.exit(
            "train.py: error: CUDA graphs need an NVIDIA GPU:"
            " set cuda_graphs to none in train_config.json"
        )
    if settings.num_gpus == 1:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    count = settings.num_gpus
    if int(os.environ.get("WORLD_SIZE", "1")) != count:
        sys.exit(
            f"train.py: error: the configuration is for {count} GPUs: start without torchrun,"
            f" or give torchrun --nproc-per-node={count}"
        )
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # If the model is offloaded, gradients are on the CPU, and gloo reduces their norm there.
        backend = "cuda:nccl,cpu:gloo" if settings.offload else "nccl"
    ranks.join(backend)
    return PartialState(cpu=not torch.cuda.is_available()).device


def loads_in_first_rank(settings: RunSettings, options: Options) -> bool:
    """Return whether one rank loads the weights and sends the other ranks their shards."""
    return settings.is_larger_than_gpu and options.dataset is not None


def load(settings: RunSettings, options: Options, device: torch.device) -> PreTrainedModel:
    """Load the base with its weights: into host memory if the base is larger than the device."""
    if loads_in_first_rank(settings, options):
        return model_builder.load_in_first_rank(
            options.model,
            settings.model_settings,
            shards_by_fsdp=settings.sharding.startswith("fsdp2"),
        )
    if settings.objective == CLASSIFICATION:
        return load_classifier(settings, options, device)
    return model_builder.load(options.model, settings.model_settings, device)


def build(settings: RunSettings, shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """Build the base with random weights, or without values if it must be sharded first."""
    config = model_builder.config_of(shape)
    if settings.is_larger_than_gpu:
        base = model_builder.outline(config, settings.model_settings, device, 0.0)
        if base is not None:
            return base
    return model_builder.build(config, settings.model_settings, device)


def held_out_share(settings: RunSettings, options: Options) -> float:
    """Return the fraction of the examples to hold out and evaluate during the training.

    The fraction is 0 for random examples. With --held-out, which holds out a number of examples
    instead, the fraction is also 0.
    """
    return settings.eval_share if options.dataset and not options.held_out else 0.0


def make_rows(settings: RunSettings, examples: Sequence[torch.Tensor]) -> rows.Rows:
    """Return rows of the examples: packed, or with one example each."""
    if not settings.packing:
        return rows.Rows(examples)
    return rows.Rows(examples, rows.pack([len(example) for example in examples], settings.seq_len))


def fill_batches(settings: RunSettings, train_rows: Sequence[Any]) -> rows.WholeBatches:
    """Return the rows with blank rows that fill the last micro batch."""
    size = settings.micro_batch_size * settings.num_gpus
    if settings.images:
        return rows.WholeBatches(train_rows, size, image_rows.BLANK)
    blank = labels.BLANK if settings.objective == CLASSIFICATION else rows.BLANK
    return rows.WholeBatches(train_rows, size, [blank])


def read_examples(settings: RunSettings, options: Options) -> Sequence[torch.Tensor]:
    """Read and tokenise the examples of the dataset. Code in a model's repository does not run."""
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    assert options.dataset is not None
    dataset = Path(options.dataset)
    try:
        encoder = None
        if settings.objective == CLASSIFICATION:
            names = label_names(read_rows(dataset, options.split))
            encoder = LabelEncoder(tokenizer, names, settings.seq_len)
        folder = tokenise(
            dataset,
            tokenizer,
            encoder=encoder,
            split=options.split,
            loss_on=settings.loss_on,
            say=lambda text: print(text, file=sys.stderr),
        )
    except (BadDataset, CannotKeep, ImportError) as error:
        sys.exit(f"train.py: error: {error}")
    return rows.StoredExamples(folder)


def read_image_rows(settings: RunSettings, options: Options) -> ImageRows:
    """Read the rows of the dataset, without their images."""
    assert options.dataset is not None
    processor = AutoProcessor.from_pretrained(options.model, trust_remote_code=False)
    try:
        return ImageRows(
            Path(options.dataset),
            processor,
            split=options.split,
            loss_on=settings.loss_on,
            seq_len=settings.seq_len,
        )
    except (BadDataset, ImportError) as error:
        sys.exit(f"train.py: error: {error}")


def load_classifier(
    settings: RunSettings, options: Options, device: torch.device
) -> PreTrainedModel:
    """Load the base with a new head over the dataset's labels.

    The base's config gets the names of the labels and the padding token.
    """
    names = label_names(read_rows(Path(str(options.dataset)), options.split))
    model_settings = replace(settings.model_settings, num_labels=len(names))
    base = model_builder.load(options.model, model_settings, device)
    base.config.id2label = {number: str(name) for number, name in enumerate(names)}
    base.config.label2id = {str(name): number for number, name in enumerate(names)}

    # The head needs the padding token to find the last token of a row before the padding.
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    base.config.pad_token_id = padding or 0
    return base


def select_loss(settings: RunSettings, base: PreTrainedModel) -> Callable[..., torch.Tensor] | None:
    """Return the Trainer's `compute_loss_func`, or None if the model computes the loss."""
    if settings.objective == CLASSIFICATION:
        return label_loss
    if settings.loss != "chunked":
        return None
    return chunked_loss(base, in_head=settings.sharding == "zero3")


def random_examples(
    settings: RunSettings, options: Options, config: PreTrainedConfig
) -> list[torch.Tensor]:
    """Return random token ids as the examples of the whole run.

    The lengths represent the lengths of the study's examples, or come from the file of --lengths.
    `config` is the model's config.
    """
    vocab_size = config.get_text_config().vocab_size
    lengths = settings.lengths
    if options.lengths:
        lengths = rows.read_lengths(options.lengths, settings.seq_len)
    lengths = lengths * max(1, RANDOM_EXAMPLES // len(lengths))

    if settings.objective == CLASSIFICATION:
        texts = [-1 - torch.randint(0, vocab_size, (length,)) for length in lengths]
        num_labels = settings.model_settings.num_labels or 2
        examples = [torch.cat([text[1:], torch.randint(0, num_labels, (1,))]) for text in texts]
    else:
        share = settings.trained_share
        texts = [torch.randint(0, vocab_size, (length,)) for length in lengths]
        examples = [rows.mask_prompt(text, share) for text in texts]

    repeats = settings.examples // len(examples) + 1
    return (examples * repeats)[: settings.examples]


def add_adapters(base: PreTrainedModel, settings: RunSettings, device: torch.device) -> nn.Module:
    """Return the model to train: the base with adapters, or the base itself in full fine-tuning."""
    model = model_builder.trainable_model(base, settings.model_settings, device)
    if settings.model_settings.lora_rank is not None:
        # The Trainer loads adapters with this method when it resumes. With this argument, loaded
        # adapters keep their dtype.
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
    joined: JoinedLayers | None = None,
) -> LeanTrainer:
    """Make the Trainer of this run.

    Only a run on a dataset saves checkpoints, and only if it has no step limit.
    """
    evaluates = held_out_share(settings, options) > 0
    checkpoints = options.saves and options.dataset is not None and options.max_steps < 1
    by_length = settings.group_by_length or settings.dealt
    on_cpu = not torch.cuda.is_available()
    arguments = training_arguments(settings, accumulation=settings.accumulation, on_cpu=on_cpu)
    if settings.num_gpus > 1:
        layers = model_builder.decoder_layers(model)
        in_first_rank = loads_in_first_rank(settings, options)
        arguments |= sharing_arguments(settings, layers, first_rank_loads=in_first_rank)
    arguments |= {"report_to": options.report_to}

    return LeanTrainer(
        model,
        TrainingArguments(
            # Without a directory, the run saves no files, but the Trainer still needs an existing
            # directory.
            output_dir=options.output_dir or tempfile.gettempdir(),
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
    """Return the function that makes a batch from rows."""
    lengths = settings.padded_lengths
    masked = settings.padding == "masked"
    if settings.images:
        return functools.partial(
            collate_image_examples, config=model.config, padded_lengths=lengths, masked=masked
        )
    if settings.objective == CLASSIFICATION:
        padding = int(model.config.pad_token_id)
        return functools.partial(
            collate_labels, padded_lengths=lengths, padding=padding, masked=masked
        )
    return functools.partial(
        rows.collate,
        padded_lengths=lengths,
        packing=settings.packing,
        masked=masked,
        varlen=settings.model_settings.attention == VARLEN,
    )


def summary(
    settings: RunSettings,
    clock: Clock,
    num_steps: int,
    trained: Sequence[torch.Tensor],
    num_rows: int,
) -> dict[str, Any]:
    """Return the clock's measurements, the number of steps, and the tokens/s without padding.

    `trained_share` is the fraction of the tokens that was trained on. Padding does not count.
    """
    measurements = clock.measurements()
    seconds = measurements["seconds_per_step"]

    tokens = sum(len(example) for example in trained)
    rows_per_step = settings.micro_batch_size * settings.accumulation * settings.num_gpus
    tokens_per_step = rows_per_step * tokens / num_rows
    return measurements | {
        "steps": num_steps,
        "tokens_per_second": tokens_per_step / seconds if seconds else None,
        "trained_share": sum(int((example >= 0).sum()) for example in trained) / tokens,
    }
