"""The values that a training is built from, and the file that holds them: train_config.json. No torch here."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# torch 2.9 renamed the variable to PYTORCH_ALLOC_CONF and still reads this name, the only one that older ones know.
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATORS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}
# Liger's losses stay off: how the loss is computed is a setting of its own.
LIGER_KERNELS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
# What a whole model may take of a GPU's limit and still be shared out there: shards of its layers come beside it.
UNSHARDED_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How the model is built.

    `base_dtype` is torch's name of the base weights' dtype. `quantization` is none, fp8, int8 or nf4. `lora_rank` is
    None in full fine-tuning. `lora_targets` are the names of the modules with adapters, None for every linear layer but
    the head; modules that end in a name of `modules_to_save` are trained whole. `adapters_in_fp32` keeps adapters in
    fp32 on a base of fewer bits; they drop the share `lora_dropout` of their inputs. `kbit_preparation` has the part of
    the base that is not quantised in fp32. Every `checkpoint_every`-th layer is recomputed in the backward pass, none
    where it is None; `offload` moves what layers are recomputed from to the host's memory. Compiled layers keep the
    share `activation_budget` of what they would for the backward pass. `tiled` has norms, projections and MLPs computed
    over tiles of tokens, `joined` products of adapters together with the base's. `num_labels` is the number of values
    that the head gives for a row; None where it gives one for each token of the vocabulary. `vision` says whether a
    vision tower, and what projects its features, are trained too: frozen or trained.
    """

    base_dtype: str
    attention: str
    quantization: str
    double_quant: bool
    kbit_preparation: bool
    lora_rank: int | None
    lora_alpha: int | None
    lora_targets: list[str] | None
    modules_to_save: list[str] | None
    dora: bool
    rslora: bool
    lora_dropout: float
    adapters_in_fp32: bool
    checkpoint_every: int | None
    offload: bool
    activation_budget: float = 1.0
    tiled: bool = False
    joined: bool = False
    num_labels: int | None = None
    vision: str = "frozen"

    def lora_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of peft's LoraConfig; None in full fine-tuning."""
        if self.lora_rank is None:
            return None
        return {
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": "all-linear" if self.lora_targets is None else self.lora_targets,
            "modules_to_save": self.modules_to_save,
            "task_type": "CAUSAL_LM" if self.num_labels is None else "SEQ_CLS",
            "use_dora": self.dora,
            "use_rslora": self.rslora,
        }

    def bitsandbytes_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of transformers' BitsAndBytesConfig; None where bitsandbytes stores nothing."""
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
    """All that train_config.json says.

    `about` and `versions` only inform: what was measured, where, and with which packages. `model` is a Hub name or a
    directory of weights. `use_cpu` leaves GPUs alone. A micro batch has `micro_batch_size` rows of up to `seq_len`
    tokens, an optimizer step `accumulation` micro batches. Rows are padded to the next of `padded_lengths`, or to the
    longest of their micro batch where there are none: `padding` is the name of that. `group_by_length` puts rows of
    nearly the same length into a micro batch; `dealt` does so within each optimizer step, whose rows stay the same.
    `examples` and `lengths` (in tokens, repeated in turn) describe the random rows of a run that only measures the
    speed, and `images` those of each length; it is empty where the model takes text alone. `optimizer_in_backward`
    steps each parameter when its gradient is there. `num_gpus` processes share out the training by `sharding`, in
    `copies` groups that each hold all of it, and take `micro_batch_size` rows each; they divide gradients after each
    micro batch with `sync_each_batch`, and keep model and optimizer in the host with `offload`; `is_larger_than_gpu`
    says that no GPU holds the model as a whole, so that it is built as shards. `objective` is sft, the next token, or
    classification. `loss_on` says what is trained on (`examples.Encoder`); None goes by each row; `trained_share` of
    the random tokens are. The learning rate is a common default: it was not tuned. `eval_share` of the examples is held
    out and evaluated every `eval_steps` optimizer steps. `report_to` is none, or the tracker that knows this run as
    `run_name`. Checkpoints take up to `checkpoints_gib` of the disk, None where that is not known. `cuda_graphs` is
    none, or micro_batch where these are replayed.
    """

    about: list[str]
    versions: dict[str, str]
    model: str
    has_published_weights: bool
    use_cpu: bool
    model_settings: ModelSettings
    method: str
    precision: str
    micro_batch_size: int
    accumulation: int
    seq_len: int
    packing: bool
    objective: str
    loss_on: str | None
    trained_share: float
    padding: str
    padded_lengths: list[int]
    group_by_length: bool
    dealt: bool
    optimizer: str
    optimizer_in_backward: bool
    loss: str
    kernels: str
    compile: str
    loader_workers: int
    allocator: str
    num_gpus: int
    sharding: str
    copies: int
    sync_each_batch: bool
    offload: bool
    is_larger_than_gpu: bool
    epochs: int
    learning_rate: float
    warmup_steps: int
    save_steps: int
    save_total_limit: int
    checkpoints_gib: float | None
    eval_share: float
    eval_steps: int
    report_to: str
    run_name: str
    examples: int
    lengths: list[int]
    images: list[list[dict[str, Any]]]
    cuda_graphs: str = "none"

    def to_json(self) -> str:
        """The text of train_config.json, in ASCII, with each list of numbers on one line."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        return re.sub(r"\[\n\s+((?:\d+,?\s+)+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)

    @classmethod
    def read(cls, path: Path) -> "RunSettings":
        """The settings in a train_config.json. Raises OSError, ValueError and TypeError on any other file."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["model_settings"] = ModelSettings(**values["model_settings"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line, checked.

    Without `dataset` the rows and the weights are random; `split` is the part of it to train on. `lengths` is a file of
    lengths for random rows. `held_out` examples at the end of the data, cut at `held_out_tokens`, are only evaluated,
    before the training and after it. `saves` is whether the run leaves checkpoints and what it trained in
    `output_dir`, and `checkpoint` the one that it continues from. `report_to` is a tracker, or none.
    """

    model: str
    dataset: str | None
    split: str | None
    lengths: str | None
    max_steps: int
    held_out: int
    held_out_tokens: int
    output_dir: str
    saves: bool
    checkpoint: str | None
    progress: str | None
    report_to: str


def one_gpu(visible: str) -> dict[str, str]:
    """Environment variables that show torch the first GPU of `visible` (a CUDA_VISIBLE_DEVICES) alone.

    transformers' Trainer would split each batch over all GPUs that it sees. GPUs are counted as nvidia-smi counts
    them, not as CUDA does by itself, the fastest first.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible.split(",")[0].strip()}


def prepare_environment(settings: RunSettings) -> None:
    """Set what torch reads when it is imported: the GPUs, or none, and how the allocator holds its memory."""
    os.environ.setdefault(ALLOCATOR_VARIABLE, ALLOCATORS[settings.allocator])
    if settings.use_cpu or settings.num_gpus == 1:
        os.environ.update(one_gpu("" if settings.use_cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0")))


def deepspeed_settings(stage: int, layer_params: int) -> dict[str, Any]:
    """The settings of DeepSpeed for a stage of ZeRO, as its file has them; "auto" is the Trainer's to fill in.

    By its own defaults the third stage keeps up to 1e9 parameters gathered, all of a small model. Here it gathers the
    next layer, of `layer_params` parameters, while one computes.
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
        "zero_allow_untested_optimizer": True,  # DeepSpeed knows torch's AdamW, and not those in 8 bits
    }
