"""Finds a model by catalogue name, local directory or Hub id, and returns it as a ModelSpec.

Only the config is read, and a model's own code is never run. A `model_type` that transformers does
not know causes an error only later, when a probe builds the model.
"""

import contextlib
import copy
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from autotune.catalog.checkpoint import Checkpoint, num_mtp_layers, read_checkpoint
from autotune.catalog.fast_kernels import kernel_packages
from autotune.catalog.model_names import ModelNames
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import load_data, read_regular, refuse_special_files
from autotune.core.images import sees_images
from autotune.core.installed import NotInstalled, is_installed
from autotune.core.json_view import keys
from autotune.core.model_types import text_type
from autotune.core.train_config import digest_of
from autotune.trainer.settings import DEQUANTISED, quantization_of

# The keys for each size of a model. Model families use different keys in their configs.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYER_LISTS = ("layers_block_type", "layer_types")  # lists with one entry per layer
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_VOCAB = ("vocab_size",)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS = (*_NUM_EXPERTS, "moe_intermediate_size")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
MAX_SIZE = 2**31  # a larger size in a config is an error

# Keys of a config.json that say how the model was saved or how to run it, but not its shape. An
# attention implementation may name a Hub repository, and transformers would download and run its
# kernels.
_NOT_SHAPE = frozenset(
    {"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "name_or_path"}
    | {"attn_implementation", "experts_implementation", "quantization_config"}
)

# The end of the class name of a model whose head computes a loss of its own.
_OTHER_HEADS = re.compile(
    r"(For\w*Classification|ForQuestionAnswering|ForMultipleChoice|ForMaskedLM|RewardModel)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a model, and the files to load for it.

    `config` has the keyword arguments of the transformers config, including `model_type`. `params`
    is the exact number of parameters, with tied weights counted once. For a model outside the
    catalogue, the number comes from the headers of the weight files, and is None without these
    files. `weights` is a directory with safetensors files, or None for random weights. `tokenizer`
    is a directory with the model's tokenizer. `processor` is the content of the model's
    preprocessor_config.json, which sets the size of images. `stored_as` is the format of a
    quantised checkpoint. Weights in 'fp8' or 'mxfp4' are dequantised to 16 bits before training.
    Weights in 'int8', 'nf4' or 'nf4-double' stay quantised, and only adapters are trained.
    `checkpoint` describes the weight files on this machine. `mtp_layers` is the number of the
    checkpoint's layers for multi-token prediction.
    """

    JSON: ClassVar = keys(
        *("name", "config", "params", "weights", "tokenizer", "processor", "license", "source"),
        *("as_of", "aliases", "num_layers", "hidden_size", "vocab_size", "max_seq_len"),
    )

    name: str
    config: dict[str, Any]
    params: int | None = None
    weights: str | None = None
    tokenizer: str | None = None
    processor: dict[str, Any] | None = None
    stored_as: str | None = None
    checkpoint: Checkpoint | None = None
    mtp_layers: int = 0
    license: str | None = None
    source: str | None = None
    as_of: str | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str) or not self.config["model_type"]:
            raise UsageError(
                f"the config of {self.name} has no model_type", remedy="add it, for example llama"
            )
        for names in (_LAYERS, _HIDDEN, _VOCAB):
            if self.size(*names) is None:
                raise UsageError(
                    f"the config of {self.name} has no positive integer {names[0]}",
                    remedy="pass the config.json of a causal language model",
                )

    def __hash__(self) -> int:  # the config is a dict, which has no hash
        return hash((self.name, self.params))

    @property
    def short(self) -> str:
        """The name without its organisation."""
        return self.name.rpartition("/")[2]

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal for models of the same shape."""
        return digest_of(self.config)

    def size(self, *keys: str) -> int | None:
        """Return the value of the first of these keys that holds a valid size.

        A valid size is a positive integer up to `MAX_SIZE`. Keys in text_config come first. If all
        keys are missing, the result is the default of transformers for the model's type.
        """
        text = self.config.get("text_config")
        parts = [part for part in (text, self.config) if isinstance(part, dict)]
        values = [part[key] for part in parts for key in keys if key in part]
        if keys is _LAYERS and not values:
            values = [len(part[key]) for part in parts for key in _LAYER_LISTS if key in part]
        if not values:
            values = [self._default_size(parts, keys[0])]
        for value in values:
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE:
                return value
        return None

    def _default_size(self, parts: list[dict[str, Any]], key: str) -> int | None:
        defaults = load_data("autotune.catalog", "data/default_sizes")["sizes"]
        types = [part.get("model_type") for part in parts]
        sizes: dict[str, int] = next((defaults[one] for one in types if one in defaults), {})
        size: int | None = sizes.get(key)
        return size

    def with_overrides(self, overrides: dict[str, Any]) -> "ModelSpec":
        """Return a model with random weights whose config has these values for these keys.

        `overrides` may hold keys that say how to run a model, such as `dtype`; they are ignored, as
        in a config.json. Raises UsageError if a model with the new config cannot be trained. Also
        raises UsageError for a key that is in no config of the catalogue and not in the model's,
        because an unknown key would have no effect.
        """
        config = self.config | overrides
        shown = f"{self.name} with these overrides"
        _refuse_unsupported(config, shown)
        if "quantization_config" in config:
            raise UsageError(
                f"{shown} has a quantization_config, which describes the files of a checkpoint",
                remedy="set `quantization` instead",
            )
        shape = _shape_of(config)

        known = set(_paths(self.config)).union(*(_paths(model.config) for model in list_models()))
        if unknown := set(_paths(_shape_of(overrides))) - known:
            key = min(unknown)
            raise UsageError(
                f"no model config known to autotune has the key {key!r}{did_you_mean(key, known)}",
                remedy="correct the key, or give a model directory whose config.json has the key",
            )

        return replace(self, config=shape, params=None, weights=None, checkpoint=None)

    def _required_size(self, keys: tuple[str, ...]) -> int:
        size = self.size(*keys)
        assert size is not None
        return size

    @property
    def sees_images(self) -> bool:
        """Whether the model takes images in addition to text."""
        return sees_images(self.config)

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any((self.size(key) or 0) > 1 for key in _EXPERTS)

    @property
    def num_experts(self) -> int | None:
        """The number of routed experts in a layer of a mixture, or None if it is unknown."""
        numbers = (self.size(key) or 0 for key in _NUM_EXPERTS)
        return next((number for number in numbers if number > 1), None)

    @property
    def text_type(self) -> str:
        """The `model_type` of the language model, also if it is one part of an image-text model."""
        return text_type(self.config)

    def lacks(self, attention: str) -> bool:
        """Return whether transformers lacks this attention implementation for the model."""
        types = load_data("autotune.catalog", "data/attentions")["lacking"].get(attention, ())
        return self.config["model_type"] in types or self.text_type in types

    @property
    def kernel_packages(self) -> dict[str, str]:
        """The packages with fast kernels for the model's layers: {imported name: name on PyPI}."""
        return kernel_packages(self.config, self.text_type)

    @property
    def num_layers(self) -> int:
        """The number of decoder layers of the language model."""
        return self._required_size(_LAYERS)

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states."""
        return self._required_size(_HIDDEN)

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        return self._required_size(_VOCAB)

    @property
    def max_seq_len(self) -> int | None:
        """The most tokens that the position embeddings allow in a sequence, or None if unknown."""
        return self.size(*_CONTEXT)

    def flops_per_token(self, method: str, seq_len: int) -> float | None:
        """Return the FLOPs of training on one token, or None if they cannot be computed."""
        if self.params is None:
            return None
        return flops_per_token(self.config, self.params, method, seq_len)


def list_models() -> tuple[ModelSpec, ...]:
    """Return every model of the catalogue.

    The configs are copies, because transformers completes rope_parameters in place.
    """
    return tuple(map(_spec, _rows()))


def resolve_model(name: str) -> ModelSpec:
    """Return the model for a catalogue name or alias, a local directory, or a Hub id.

    Case is ignored, and a name without an organisation may be spelled in several ways
    (`ModelNames.find_respelled`). A directory needs a config.json. If the name in a Hub id matches
    a row of the catalogue (`model_names`), no request is sent to the Hub. The result then has the
    row's shape, and the Hub id as its name. A run loads the weights from the Hub under this id.
    Raises UsageError for other names, and for an unusable config.
    """
    known = _names().exact
    if name.lower() in known:
        spec = _spec(_rows()[known[name.lower()]])
        return (
            spec
            if "/" not in name or name.lower() == spec.name.lower()
            else replace(spec, name=name, aliases=())
        )

    path = os.path.expanduser(name)
    if name and os.path.isdir(path):
        return _from_directory(Path(path).resolve())
    if (match := _names().find(name)) is not None:
        spec = _spec(_rows()[match.row])
        return spec if match.published is None else replace(spec, name=match.published, aliases=())
    if "/" not in name and (row := _names().find_respelled(name)) is not None:
        return _spec(_rows()[row])

    hint = did_you_mean(name, known)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        return _from_hub(name, hint)
    if path.endswith("config.json") and os.path.isfile(path):
        raise UsageError(
            f"model {name!r} is a file",
            remedy=f"pass its directory: {os.path.dirname(path) or '.'}",
        )
    raise UsageError(
        f"unknown model {name!r}: neither in the catalogue nor a directory{hint}",
        remedy="`autotune models` lists them; or pass a directory with a config.json,"
        " or a Hub id like org/name",
    )


def find_model_shape(name: str) -> ModelSpec | None:
    """Return the catalogue's model with the shape of a named model, or None if no name matches.

    `name` may be a path, or a name with any organisation.
    """
    match = _names().find(re.sub(r"\\", "/", name).rstrip("/"), any_organisation=True)
    return None if match is None else _spec(_rows()[match.row])


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = load_data("autotune.catalog", "data/models")["models"]
    return rows


@functools.cache
def _names() -> ModelNames:
    return ModelNames(_rows())


def _spec(row: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        **{**row, "aliases": tuple(row["aliases"]), "config": copy.deepcopy(row["config"])}
    )


def _from_directory(path: Path) -> ModelSpec:
    refuse_special_files(path)
    # transformers loads model*.safetensors. Other checkpoints in the directory (adapters,
    # consolidated) are not the model.
    has_weights = any(path.glob("model*.safetensors"))
    if (path / "adapter_config.json").exists():
        raise UsageError(
            f"{path} has adapters beside the model (adapter_config.json),"
            " which transformers would load with the model",
            remedy="merge them into the weights, or move the files adapter_* away",
        )

    model = _read_model(path / "config.json", path.name)
    return replace(
        model,
        weights=str(path) if has_weights else None,
        tokenizer=str(path) if (path / "tokenizer.json").is_file() else None,
        processor=_processor_in(path),
        source="local directory",
    )


def _processor_in(path: Path) -> dict[str, Any] | None:
    """Return the settings for the processing of images from a model's directory.

    The settings are in preprocessor_config.json, or else in processor_config.json.
    """
    if (file := path / "preprocessor_config.json").is_file():
        return _read_object(file)
    if (file := path / "processor_config.json").is_file():
        settings = _read_object(file).get("image_processor")
        return settings if isinstance(settings, dict) else None
    return None


def _from_hub(name: str, hint: str) -> ModelSpec:
    """Return the model for a Hub id. Only its config.json is fetched."""
    if not is_installed("huggingface_hub"):
        raise NotInstalled(
            f"model {name!r} is not in the catalogue{hint}, and asking the Hugging Face Hub",
            otherwise="pass a local directory with the model's config.json",
        )
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        reach_hub(name, "config.json")
        path = hub.hf_hub_download(repo_id=name, filename="config.json")
    except Exception as error:
        raise UsageError(
            f"model {name!r} is neither in the catalogue nor a directory, and the Hugging Face Hub"
            " could not be reached, has no such model or wants a login"
            f" ({type(error).__name__}){hint}",
            remedy="pass a local directory with the model's config.json,"
            " or a name that `autotune models` lists",
        ) from None
    return replace(_read_model(Path(path), name, shown=name), source="Hugging Face Hub")


def reach_hub(name: str, *files: str) -> None:
    """Raise an error at once if the Hub is unreachable and the cache lacks all of `files`.

    Without this check, each download of huggingface_hub retries for 23 s. A file that is not on the
    Hub causes no error here.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if not any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in files):
        with contextlib.suppress(EntryNotFoundError):
            hub.get_hf_file_metadata(hub.hf_hub_url(name, files[0]))


def _read_model(path: Path, name: str, shown: str | None = None) -> ModelSpec:
    """Return the model of a user's config.json, with the sizes of the weight files beside it.

    `shown` is the config's name in messages.
    """
    config = _read_object(path, shown)
    shown = shown or str(path)

    _refuse_unsupported(config, shown)
    model = ModelSpec(
        name=name,
        config=_shape_of(config),
        stored_as=_stored_as(config, shown),
        mtp_layers=num_mtp_layers(config),
    )
    quantised = quantization_of(config)
    bits = quantised.get("bits") if isinstance(quantised, dict) else None
    checkpoint = read_checkpoint(
        path.parent,
        model.config,
        model.num_layers,
        (model.vocab_size, model.hidden_size),
        bits if bits in (2, 4, 8) else 4,
    )
    if checkpoint is None:
        return model
    return replace(model, checkpoint=checkpoint, params=checkpoint.params)


def _stored_as(config: dict[str, Any], shown: str) -> str | None:
    """Return the format of a quantised checkpoint.

    Raises UsageError if probes cannot train a checkpoint in this format.
    """
    found = quantization_of(config)
    if found is None:
        return None
    quantised = found if isinstance(found, dict) else {}

    method = quantised.get("quant_method")
    if method in DEQUANTISED:
        return str(method)
    reason = f"by the method {method!r}, which probes do not support"
    if method == "bitsandbytes":
        # A dynamic quantisation keeps some layers in 16 bits, and no knob says which layers.
        layer = re.search(r"\w[\w.]*\.\d+[\w.]*", str(quantised.get("llm_int8_skip_modules")))
        if layer:
            reason = f"except for single layers ({layer[0]}), which no probe can reproduce"
        elif quantised.get("load_in_8bit"):
            return "int8"
        elif quantised.get("bnb_4bit_quant_type") == "nf4":
            return "nf4-double" if quantised.get("bnb_4bit_use_double_quant") else "nf4"
        else:
            reason = "to fp4, which probes do not support"
    raise UsageError(
        f"{shown} describes a checkpoint that is already quantised {reason}",
        remedy="pass the unquantised model; `--set quantization=...` quantises it",
    )


def _read_object(path: Path, shown: str | None = None) -> dict[str, Any]:
    shown = shown or str(path)
    try:
        # transformers writes and reads infinity in JSON as {"__float__": "Infinity"}.
        config = json.loads(read_regular(path), parse_constant=lambda name: {"__float__": name})
    except OSError as error:
        raise UsageError(
            f"cannot read {shown}: {error.strerror or error}",
            remedy="pass a directory with a config.json",
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{shown} is not valid JSON: {error}", remedy="download it again"
        ) from None

    if not isinstance(config, dict):
        raise UsageError(
            f"{shown} is not a JSON object", remedy="pass the config.json of a transformers model"
        )
    return config


def _refuse_unsupported(config: dict[str, Any], shown: str) -> None:
    if "auto_map" in config:
        raise UsageError(
            f"{shown} asks for code of its own (auto_map); remote code is never run",
            remedy="if transformers has this model_type built in,"
            " remove auto_map from a local copy of config.json",
        )
    # Probes do not train the head of a model whose class has a loss of its own.
    named = config.get("architectures")
    others = (
        [name for name in named if _OTHER_HEADS.search(str(name))]
        if isinstance(named, list)
        else []
    )
    if others:
        raise UsageError(
            f"{shown} describes a {others[0]}, whose head no probe trains:"
            " probes train only causal language models, or new heads on them",
            remedy="pass its base model, with --objective classification or reward for a new head;"
            " or remove the key architectures from a local copy of config.json",
        )

    if config.get("is_encoder_decoder") is True:
        raise UsageError(
            f"{shown} describes an encoder-decoder model", remedy="pass a causal language model"
        )

    encoders = load_data("autotune.catalog", "data/models")["not_causal"]
    if config.get("model_type") in encoders and config.get("is_decoder") is not True:
        raise UsageError(
            f"{shown} describes a {config['model_type']} model, whose tokens attend to later ones",
            remedy="pass a causal language model",
        )


def _paths(config: dict[str, Any], within: str = "") -> Iterator[str]:
    """Yield the dotted path of each key: 'rope_parameters', 'rope_parameters.rope_theta'."""
    for key, value in config.items():
        yield f"{within}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{within}{key}.")


def _shape_of(value: Any) -> Any:
    """Return `value` without private keys and without the keys in `_NOT_SHAPE`, at every depth."""
    if not isinstance(value, dict):
        return value
    return {
        key: _shape_of(item)
        for key, item in value.items()
        if key == "__float__" or (key[:1] != "_" and key not in _NOT_SHAPE)
    }


# --- Floating point operations of a training step, the numerator of model FLOPs utilisation (MFU).

# A multiply-add is 2 FLOPs. For each token, a parameter costs 2 FLOPs in the forward pass, 2 for
# the gradient of its input, and 2 for its own gradient. A frozen parameter has no gradient of its
# own.
FLOPS_PER_PARAMETER = {"lora": 4, "full": 6}

# The model families whose matrix products are known. If the config does not say it, a tied family
# uses the same weights for head and embedding, and an untied family does not.
_TIED = ("gemma", "gemma2", "gpt2")
_UNTIED = ("gpt_neox", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


def flops_per_token(config: dict[str, Any], params: int, method: str, seq_len: int) -> float | None:
    """Return the FLOPs per token of a training step on rows of `seq_len` tokens, or None.

    The result is None if the family's matrix products or the config's sizes are not known.

    As in appendix B of the PaLM paper, only operations that the mathematics needs are counted. So
    recomputation for activation checkpointing is left out. LoRA's own matrices are left out too
    (0.9 % of the step at rank 16 on all linear layers of a 7B model). Norms and biases are counted
    like matrices, because their number of parameters is negligible.

    Causal attention: each token attends to c tokens on average. Each of the c tokens costs 2 FLOPs
    per head dimension in QK^T and 2 in PV. The backward pass costs twice the forward pass, under
    LoRA too, because adapters in lower layers need the gradients of q, k and v. Per layer, the sum
    is 12 * c * heads * head_dim. Without a sliding window, c = seq_len / 2, so the sum per layer is
    6 * seq_len * heads * head_dim.
    """
    if config.get("model_type") not in _TIED + _UNTIED:
        return None

    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if heads is None or hidden is None:  # the config.json leaves a size out
        return None
    head_dim = config.get("head_dim") or hidden // heads
    context = sum(_mean_context(seq_len, window) for window in _windows(config))
    products = FLOPS_PER_PARAMETER[method] * _multiplied_params(config, params)
    return float(products + 12 * context * heads * head_dim)


def _multiplied_params(config: dict[str, Any], params: int) -> int:
    """Return the number of parameters that a token is multiplied by.

    An embedding is only looked up, so it does not count. An embedding that is tied to the head
    counts, because the head multiplies by its weights.
    """
    family = config["model_type"]
    if not config.get("tie_word_embeddings", family in _TIED):
        params -= config["vocab_size"] * config["hidden_size"]
    if family == "gpt2":
        params -= config["n_positions"] * config["n_embd"]

    if family == "mixtral":
        params -= _idle_params(
            config, config["num_hidden_layers"], "num_local_experts", "intermediate_size"
        )
    if family == "qwen3_moe":
        step = config.get("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or []
        layers = [
            i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0
        ]
        params -= _idle_params(config, len(layers), "num_experts", "moe_intermediate_size")
    return params


def _idle_params(config: dict[str, Any], layers: int, experts: str, width: str) -> int:
    """Return the number of parameters in experts that a token skips; an expert has 3 matrices."""
    idle = config[experts] - config["num_experts_per_tok"]
    return int(layers * idle * 3 * config["hidden_size"] * config[width])


def _mean_context(seq_len: int, window: int | None) -> float:
    """Return the mean number of tokens that a token attends to under a sliding window."""
    reach = seq_len if window is None else min(window, seq_len)
    return reach * (1 - reach / (2 * seq_len))


def _windows(config: dict[str, Any]) -> list[int | None]:
    """Return the sliding window of each layer, or None for full attention.

    The rules are the same as in the configs of transformers.
    """
    family = config["model_type"]
    layers = range(config.get("num_hidden_layers") or config["n_layer"])
    window = config.get("sliding_window", 4096 if family == "gemma2" else None)
    if window is None or not config.get("use_sliding_window", not family.startswith("qwen")):
        return [None for _ in layers]
    if "layer_types" in config:
        return [window if config["layer_types"][i] == "sliding_attention" else None for i in layers]
    if family == "gemma2":  # layers 0, 2, 4 and so on have the sliding window
        return [window if i % 2 == 0 else None for i in layers]
    if family.startswith("qwen"):
        return [window if i >= config.get("max_window_layers", 28) else None for i in layers]
    return [window for _ in layers]
