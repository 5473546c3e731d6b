# -*- coding: utf-8 -*-
"""The settings of a training run, stored in train_config.json. This module needs no torch."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# torch 2.9 renamed this variable to PYTORCH_ALLOC_CONF, but still reads the old name. Older
# versions of torch know only the old name.
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATORS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}
# Forces a way to compute the grouped matrix products of experts on a GPU (`grouped_lora._way`).
PRODUCT_VARIABLE = "AUTOTUNE_GROUPED_PRODUCT"
# Liger's losses stay off, because `loss` is a separate setting.
LIGER_KERNELS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
# Checkpoints of these formats are trained in 16 bits: transformers dequantises the weights when it
# loads them.
DEQUANTISED = ("fp8", "mxfp4")
# The endings of the paths of experts' parameters. Each parameter holds one projection of all
# experts of a layer. Experts without a gate have `up_proj` instead of `gate_up_proj`.
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
# transformers makes the masks of these model types without positions, so packed examples would
# attend to each other. The trainer makes the masks itself.
BLIND_TO_POSITIONS = ("gpt_oss",)
# A model whose size is at most this fraction of a GPU's memory limit is built unsharded on the GPU,
# and then sharded. A larger model is built as shards from the beginning. The other 10 % of the
# limit is for the shards, which exist beside the unsharded model for a while.
UNSHARDED_SHARE = 0.9
# Tokens in a chunk of the chunked loss. With a vocabulary of 128,000, the logits of 1,024 tokens,
# their fp32 copy and its gradient take about 1.2 GiB.
CHUNK_TOKENS = 1024


def chunk_tokens(tokens: int) -> int:
    """Return the number of tokens in a chunk of the chunked loss, for a micro batch of `tokens`.

    A micro batch that would fit into one chunk is split into two chunks, because a run with small
    micro batches usually has little memory.
    """
    return min(tokens, CHUNK_TOKENS // 2 if tokens <= CHUNK_TOKENS else CHUNK_TOKENS)


def quantization_of(config: dict[str, Any]) -> Any:
    """Return the `quantization_config` in a config.json, or None if the weights are not quantised.

    A model that wraps a text model may have this entry in the config of its text model.
    """
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    return config.get("quantization_config") or nested or None


def is_expert_parameter(name: str) -> bool:
    """Return whether this end of a path names a parameter of experts."""
    return f".{name}".endswith(tuple(f".{one}" for one in EXPERT_PARAMETERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Describes how to build the model."""

    base_dtype: str  # torch's name of the dtype of the base weights
    # The attention implementation: a name of transformers, or a name that `patches` registers.
    attention: str
    quantization: str  # the format of quantised base weights: fp8, int8, nf4, or none
    double_quant: bool  # quantise the scales of nf4 as well
    kbit_preparation: bool  # keep in fp32 all weights of the base that are not quantised
    lora_rank: int | None  # the adapters' rank, or None in full fine-tuning
    lora_alpha: int | None  # the numerator of the adapters' scale
    # Names of the modules and of the experts' parameters that get adapters, or None if every linear
    # layer but the head gets adapters
    lora_targets: list[str] | None
    # Modules whose path ends in one of these names are trained without adapters, with all their
    # weights
    modules_to_save: list[str] | None
    dora: bool  # use DoRA adapters
    rslora: bool  # use rank-stabilised LoRA
    lora_dropout: float  # the dropout probability of the adapters' inputs
    adapters_in_fp32: bool  # keep the adapters in fp32, even if the base is in 16 bits or fewer
    # Recompute every n-th layer in the backward pass, or no layer if this is None
    checkpoint_every: int | None
    offload: bool  # move the inputs of recomputed layers to the host's memory
    # The fraction of its activations that a compiled layer keeps for the backward pass
    activation_budget: float = 1.0
    tiled: bool = False  # compute norms, projections and MLPs over tiles of tokens
    # Compute the adapters inside the matrix products of the base (see `joined_lora`)
    joined: bool = False
    # Compute the adapters of all experts in grouped matrix products (see `grouped_lora`)
    grouped: bool = False
    # The scales of 8-bit products in full fine-tuning: tensorwise or rowwise; or none for products
    # in 16 bits (see `float8_training`)
    fp8_products: str = "none"
    quantize_experts: bool = False  # store the routed experts of the model in nf4, too
    # Number of values that the head returns for a row, or None for one value for each token of
    # the vocabulary
    num_labels: int | None = None
    vision: str = "frozen"  # whether the vision tower and its projector are frozen or trained

    def lora_arguments(self) -> dict[str, Any] | None:
        """Return the keyword arguments of peft's LoraConfig, or None in full fine-tuning."""
        if self.lora_rank is None:
            return None

        names = self.lora_targets or []
        modules = [name for name in names if not is_expert_parameter(name)]
        parameters = [name for name in names if is_expert_parameter(name)]
        return {
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": "all-linear" if self.lora_targets is None else modules,
            **({"target_parameters": parameters} if parameters else {}),
            "modules_to_save": self.modules_to_save,
            "task_type": "CAUSAL_LM" if self.num_labels is None else "SEQ_CLS",
            "use_dora": self.dora,
            "use_rslora": self.rslora,
        }

    def bitsandbytes_arguments(self) -> dict[str, Any] | None:
        """Return the keyword arguments of transformers' BitsAndBytesConfig.

        The result is None if bitsandbytes stores no weight.
        """
        if self.quantization == "nf4":
            return {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": self.double_quant,
                "bnb_4bit_compute_dtype": self.base_dtype,
            }

        if self.quantization == "int8":
            return {"load_in_8bit": True}
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Holds the content of train_config.json."""

    about: list[str]  # measured numbers and their device, for people who read the file
    # Versions of the packages used in the measurement, for people who read the file.
    versions: dict[str, str]
    model: str  # a Hub name or a directory of weights
    has_published_weights: bool  # whether the Hub has weights of this model
    use_cpu: bool  # train on the CPU even if there are GPUs
    model_settings: ModelSettings  # how to build the model
    method: str  # lora or full, for people who read the file
    precision: str  # the precision of matrix products, for example bf16_mixed
    micro_batch_size: int  # rows in a micro batch on each GPU
    accumulation: int  # micro batches on each GPU in an optimizer step
    seq_len: int  # the largest number of tokens in a row
    packing: bool  # put several examples into a row
    objective: str  # sft (the next token) or classification
    # The tokens to train on (see `examples.Encoder`), or None if each row decides
    loss_on: str | None
    trained_share: float  # the fraction of each random row's tokens to train on
    padding: str  # how rows are padded: longest, masked, bucket or max_length
    # Rows are padded to the next larger of these lengths. If the list is empty, rows are padded to
    # the longest row of their micro batch.
    padded_lengths: list[int]
    group_by_length: bool  # put rows of similar length into a micro batch
    # Group rows by length only within each optimizer step, so that each step trains on the same
    # rows.
    dealt: bool
    optimizer: str  # the name of the optimizer in transformers
    optimizer_in_backward: bool  # update each parameter as soon as its gradient exists
    loss: str  # how the loss is computed, for example chunked
    kernels: str  # liger: Liger's kernels replace transformers' code
    compile: str  # per_layer: each decoder layer is compiled
    loader_workers: int  # number of processes that load rows
    allocator: str  # whether the memory segments of torch's allocator are expandable or fixed
    num_gpus: int  # number of processes that share the training
    sharding: str  # how the processes share the training, for example fsdp2
    copies: int  # number of groups of processes; each group holds all shards
    sync_each_batch: bool  # reduce gradients after each micro batch
    offload: bool  # keep the model and the optimizer in the host's memory
    is_larger_than_gpu: bool  # the whole model does not fit into one GPU, so it is built as shards
    epochs: int  # number of passes over the examples
    learning_rate: float  # a common default, which was not tuned for this dataset
    warmup_steps: int  # steps until the full learning rate is reached
    save_steps: int  # optimizer steps between two checkpoints
    save_total_limit: int  # number of checkpoints to keep
    checkpoints_gib: float | None  # disk space of the kept checkpoints; None if unknown
    eval_share: float  # the fraction of the examples to hold out for evaluation
    eval_steps: int  # optimizer steps between two evaluations
    report_to: str  # the experiment tracker, for example wandb, or none
    run_name: str  # the name of this run in the tracker
    examples: int  # number of random rows in a run that only measures speed
    lengths: list[int]  # lengths of the random rows in tokens; the list repeats if it is too short
    # The images of the random rows, one list for each of `lengths`; empty for a model that takes
    # text only
    images: list[list[dict[str, Any]]]
    dataset: str | None = None  # the dataset of the study: a path, or a name on the Hub
    split: str | None = None  # the part of `dataset` to train on
    cuda_graphs: str = "none"  # micro_batch: micro batches are replayed as CUDA graphs

    def to_json(self) -> str:
        """Return the text of train_config.json in ASCII, with each list of numbers on one line."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        return re.sub(
            r"\[\n\s+((?:\d+,?\s+)+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text
        )

    @classmethod
    def read(cls, path: Path) -> "RunSettings":
        """Read a train_config.json.

        Raises OSError, ValueError and TypeError if the file is not a train_config.json.
        """
        values = json.loads(path.read_text(encoding="utf-8"))
        values["model_settings"] = ModelSettings(**values["model_settings"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Holds the validated options of the command line."""

    model: str  # a Hub name or a directory of weights
    dataset: str | None  # the data to train on, or None for random weights and random rows
    split: str | None  # the part of the dataset to train on
    lengths: str | None  # a file with the lengths of random rows
    max_steps: int  # stop after this number of optimizer steps, if it is positive
    # The number of examples at the end of the data to evaluate before and after the training. The
    # training does not use these examples.
    held_out: int
    held_out_tokens: int  # the length at which held-out examples are truncated
    output_dir: str  # the directory for checkpoints and the result
    saves: bool  # whether the run saves checkpoints and its result
    checkpoint: str | None  # the checkpoint to continue from
    progress: str | None  # a file that gets a line of JSON after each step
    report_to: str  # the experiment tracker, for example wandb, or none
    ask: str | None = None  # a prompt to answer before and after the training


def one_gpu(visible: str) -> dict[str, str]:
    """Return the environment variables that hide all GPUs but the first of `visible` from torch.

    `visible` is a value of CUDA_VISIBLE_DEVICES. transformers' Trainer would split each batch over
    all GPUs that it sees. The variables also make CUDA number GPUs as nvidia-smi does, because
    CUDA's own order starts with the fastest GPU.
    """
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible.split(",")[0].strip(),
    }


def prepare_environment(settings: RunSettings) -> None:
    """Set the variables that torch reads at its import: the visible GPUs and the allocator."""
    os.environ.setdefault(ALLOCATOR_VARIABLE, ALLOCATORS[settings.allocator])
    if settings.use_cpu or settings.num_gpus == 1:
        visible = "" if settings.use_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ.update(one_gpu(visible))


def deepspeed_settings(stage: int, layer_params: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for a stage of ZeRO, in the form of DeepSpeed's config file.

    The Trainer replaces each "auto" with its own value. By default, ZeRO's third stage keeps up to
    1e9 gathered parameters, so a small model would stay gathered completely. With these settings,
    only the next layer, of `layer_params` parameters, is gathered while a layer computes.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
    }

    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": layer_params,
            "stage3_max_live_parameters": 2 * layer_params,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }

    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return dict.fromkeys((*batch, "gradient_clipping"), "auto") | {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        # DeepSpeed counts torch's AdamW as tested, but no 8-bit optimizer. Without this setting,
        # DeepSpeed would refuse an untested optimizer.
        "zero_allow_untested_optimizer": True,
    }
