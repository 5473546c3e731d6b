"""ModelSpec: the shape of a model, by catalogue name, local directory or Hub id. Code of a model is never run.

Only the config is read; whether transformers knows its `model_type` shows when a probe builds it.
"""

import copy
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from autotune.catalog.model_names import ModelNames
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import load_data, read_regular, refuse_special_files
from autotune.core.images import sees_images
from autotune.core.json_view import also
from autotune.core.train_config import digest_of

# The same size under the names that model families gave it.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_VOCAB = ("vocab_size",)
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
MAX_SIZE = 2**31  # no model has as much of anything

# Keys of a config.json that say how it was saved or is to be run, not what the model is. An attention implementation
# may name a Hub repository whose kernels transformers would then download and run.
_NOT_SHAPE = frozenset(
    {"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "name_or_path"}
    | {"attn_implementation", "experts_implementation"}
)

# Heads with losses of their own, by the end of a class's name.
_OTHER_HEADS = re.compile(
    r"(For\w*Classification|ForQuestionAnswering|ForMultipleChoice|ForMaskedLM|RewardModel)$"
)

_PARTS = ("text_config", "vision_config", "audio_config")  # of models that take more than text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`config` is keyword arguments of the transformers config, `model_type` among them.

    `params` is the exact total, tied weights counted once, None when the model is not catalogued. `weights` is a
    directory with safetensors, None for random weights; `tokenizer` a directory with the model's tokenizer.
    `processor` says how its images are scaled, as a preprocessor_config.json does.
    """

    JSON: ClassVar = also("num_layers", "hidden_size", "vocab_size", "max_seq_len")

    name: str
    config: dict[str, Any]
    params: int | None = None
    weights: str | None = None
    tokenizer: str | None = None
    processor: dict[str, Any] | None = None
    license: str | None = None
    source: str | None = None
    as_of: str | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str) or not self.config["model_type"]:
            raise UsageError(
                f"the config of {self.name} has no model_type", remedy="add it, for example llama"
            )
        for keys in (_LAYERS, _HIDDEN, _VOCAB):
            if self.size(*keys) is None:
                raise UsageError(
                    f"the config of {self.name} has no positive integer {keys[0]}",
                    remedy="pass the config.json of a causal language model",
                )

    def __hash__(self) -> int:  # a config is a dict, which has no hash
        return hash((self.name, self.params))

    @property
    def short(self) -> str:
        """The name without its organisation."""
        return self.name.rpartition("/")[2]

    @property
    def digest(self) -> str:
        """Twelve hex digits, equal for models of the same shape."""
        return digest_of(self.config)

    def size(self, *keys: str) -> int | None:
        """The first of these keys that holds a size, a positive integer that can be; text_config goes first."""
        text = self.config.get("text_config")
        for value in (
            part.get(key) for part in (text, self.config) if isinstance(part, dict) for key in keys
        ):
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE:
                return value
        return None

    def with_overrides(self, overrides: dict[str, Any]) -> "ModelSpec":
        """A model with other values of these keys of its config, and random weights.

        As of anybody's config.json, what says how it is run is left out. Raises UsageError for what cannot be trained,
        and for a key that neither its config nor any of the catalogue has: it would change nothing.
        """
        config = self.config | overrides
        _refuse_unsupported(config, f"{self.name} with these overrides")
        shape = _shape_of(config)
        known = set(_paths(self.config)).union(*(_paths(model.config) for model in list_models()))
        if unknown := set(_paths(_shape_of(overrides))) - known:
            key = min(unknown)
            raise UsageError(
                f"no config of a model that is known here has {key!r}{did_you_mean(key, known)}",
                remedy="correct the key, or name a directory with such a config.json as the model",
            )
        return replace(self, config=shape, params=None, weights=None)

    def _needed(self, keys: tuple[str, ...]) -> int:
        size = self.size(*keys)
        assert size is not None
        return size

    @property
    def sees_images(self) -> bool:
        """Whether it takes images beside text."""
        return sees_images(self.config)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the language model."""
        return self._needed(_LAYERS)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self._needed(_HIDDEN)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._needed(_VOCAB)

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence the positions allow, in tokens; None when the config does not say."""
        return self.size(*_CONTEXT)

    def flops_per_token(self, method: str, seq_len: int) -> float | None:
        """Necessary FLOPs a trained token; see the function of this name."""
        return (
            None
            if self.params is None
            else flops_per_token(self.config, self.params, method, seq_len)
        )


def list_models() -> tuple[ModelSpec, ...]:
    """Every catalogued model. The configs are copies: transformers completes rope_parameters in place."""
    return tuple(map(_spec, _rows()))


def resolve_model(name: str) -> ModelSpec:
    """A catalogue name or alias in any case; else a local directory with a config.json; else a Hub id.

    A Hub id that shares its shape with a row by its name (`model_names`) is that row under its own name, without asking
    the Hub: the shape is the row's, the weights of a run are those that were asked for. Raises UsageError for none of
    these, and for a config that cannot be used.
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
    hint = did_you_mean(name, known)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        return _from_hub(name, hint)
    raise UsageError(
        f"unknown model {name!r}: neither in the catalogue nor a directory{hint}",
        remedy="autotune models lists them; or pass a directory with a config.json, or a Hub id like org/name",
    )


def shaped_like(name: str) -> ModelSpec | None:
    """The row that a name of any organisation, or a path, shares its shape with; None where no name says so."""
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
    # model*.safetensors is what transformers loads; other checkpoints there (adapters, consolidated) are not the model.
    has_weights = any(path.glob("model*.safetensors"))
    if (path / "adapter_config.json").exists():
        raise UsageError(
            f"{path} has adapters beside the model (adapter_config.json), which would be loaded with it",
            remedy="merge them into the weights, or move the files adapter_* away",
        )
    return ModelSpec(
        name=path.name,
        config=_read_config(path / "config.json"),
        weights=str(path) if has_weights else None,
        tokenizer=str(path) if (path / "tokenizer.json").is_file() else None,
        processor=_processor_in(path),
        source="local directory",
    )


def _processor_in(path: Path) -> dict[str, Any] | None:
    """What a model's directory says of how images are scaled: in a file of its own, or in that of the processor."""
    if (file := path / "preprocessor_config.json").is_file():
        return _read_object(file)
    if (file := path / "processor_config.json").is_file():
        found = _read_object(file).get("image_processor")
        return found if isinstance(found, dict) else None
    return None


def _from_hub(name: str, hint: str) -> ModelSpec:
    """Fetch config.json alone."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        if not isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
            # One try, which fails at once: hf_hub_download alone retries for 23 s when the Hub cannot be reached.
            hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
        path = hub.hf_hub_download(repo_id=name, filename="config.json")
    except Exception as error:
        raise UsageError(
            f"model {name!r} is neither in the catalogue nor a directory, and the Hugging Face Hub could not be"
            f" reached, has no such model or wants a login ({type(error).__name__}){hint}",
            remedy="pass a local directory with the model's config.json, or a name that autotune models lists",
        ) from None
    return ModelSpec(name=name, config=_read_config(Path(path), name), source="Hugging Face Hub")


def _read_config(path: Path, shown: str | None = None) -> dict[str, Any]:
    """The shape in a config.json that somebody else wrote. `shown` is what messages call it."""
    config = _read_object(path, shown)
    shown = shown or str(path)
    _refuse_unsupported(config, shown)
    if sees_images(config):
        defaults = load_data("autotune.catalog", "data/models")["text_defaults"].get(
            config["model_type"]
        )
        if defaults is not None and isinstance(text := config.get("text_config"), dict):
            config = config | {"text_config": defaults | text}
    shape: dict[str, Any] = _shape_of(config)
    return shape


def _read_object(path: Path, shown: str | None = None) -> dict[str, Any]:
    shown = shown or str(path)
    try:
        # As transformers writes infinity into JSON, and reads it.
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
            remedy="if transformers has this model_type built in, remove auto_map from a local copy of config.json",
        )
    if "quantization_config" in config:
        raise UsageError(
            f"{shown} is of a checkpoint that is already quantised",
            remedy="pass the unquantised model; the knob `quantization` quantises it",
        )
    named = config.get("architectures")
    others = (
        [name for name in named if _OTHER_HEADS.search(str(name))]
        if isinstance(named, list)
        else []
    )
    if others:
        raise UsageError(
            f"{shown} is of a {others[0]}, whose head no probe trains: trainings begin with causal language models",
            remedy="pass the model that it was made from, with --objective classification or reward for a new head; "
            "or remove architectures from a local copy",
        )
    if config.get("is_encoder_decoder") is True:
        raise UsageError(
            f"{shown} is of an encoder-decoder model", remedy="pass a causal language model"
        )
    parts = [name for name in _PARTS if isinstance(config.get(name), dict)]
    if parts and not (sees_images(config) and "vision_config" in parts):
        raise UsageError(
            f"{shown} is of a model that takes more than text ({', '.join(parts)}), of a type that is not supported",
            remedy="to try its text part, save what AutoConfig.from_pretrained(NAME).get_text_config() returns in a "
            "directory with save_pretrained, and pass the directory; transformers may have no causal model of it",
        )
    encoders = load_data("autotune.catalog", "data/models")["not_causal"]
    if config.get("model_type") in encoders and config.get("is_decoder") is not True:
        raise UsageError(
            f"{shown} is of a {config['model_type']} model, in which a token sees those after it",
            remedy="pass a causal language model",
        )


def _paths(config: dict[str, Any], within: str = "") -> Iterator[str]:
    """Each key at every depth: 'rope_parameters', 'rope_parameters.rope_theta'."""
    for key, value in config.items():
        yield f"{within}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{within}{key}.")


def _shape_of(value: Any) -> Any:
    """`value` without private keys and those of `_NOT_SHAPE`, at every depth."""
    if isinstance(value, dict):
        kept = {
            key for key in value if key == "__float__" or (key[:1] != "_" and key not in _NOT_SHAPE)
        }
        return {key: _shape_of(item) for key, item in value.items() if key in kept}
    return value


# --- floating point operations of a training step, the numerator of model FLOPs utilisation (MFU)

# A multiply-add is 2 FLOPs. A parameter costs 2 forward, 2 for its input's gradient and 2 for its own; a
# frozen one has no third part.
FLOPS_PER_PARAMETER = {"lora": 4, "full": 6}

# The families whose matrix products are known, by whether their head is tied to the embedding by default.
_TIED = ("gemma", "gemma2", "gpt2")
_UNTIED = ("gpt_neox", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


def flops_per_token(config: dict[str, Any], params: int, method: str, seq_len: int) -> float | None:
    """FLOPs a token of a training step at `seq_len`; None for a family that is not known here.

    After PaLM, appendix B: what the mathematics of the step needs, so nothing that checkpointing computes again. Left
    out are LoRA's own matrices (0.9 % of the step at rank 16 on all linear layers of a 7B); norms and biases, far less,
    are counted as if they were matrices.

    Causal attention: a token meets c others on average; each costs 2 FLOPs a head dimension in QK^T and 2 in PV. The
    backward pass costs twice the forward, under LoRA too, whose adapters below need the gradients of q, k and v. That
    is 12 c heads head_dim a layer; over the causal half of the square c = seq_len / 2, so 6 seq_len heads head_dim.
    """
    if config.get("model_type") not in _TIED + _UNTIED:
        return None
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    head_dim = config.get("head_dim") or hidden // heads
    context = sum(_mean_context(seq_len, window) for window in _windows(config))
    return float(
        FLOPS_PER_PARAMETER[method] * _multiplied(config, params) + 12 * context * heads * head_dim
    )


def _multiplied(config: dict[str, Any], params: int) -> int:
    """Parameters that a token is multiplied by. An embedding is looked up; tied to the head, it is multiplied there."""
    family = config["model_type"]
    if not config.get("tie_word_embeddings", family in _TIED):
        params -= config["vocab_size"] * config["hidden_size"]
    if family == "gpt2":
        params -= config["n_positions"] * config["n_embd"]
    if family == "mixtral":
        params -= _idle(
            config, config["num_hidden_layers"], "num_local_experts", "intermediate_size"
        )
    if family == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        layers = [
            i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0
        ]
        params -= _idle(config, len(layers), "num_experts", "moe_intermediate_size")
    return params


def _idle(config: dict[str, Any], layers: int, experts: str, width: str) -> int:
    """Parameters of the experts a token does not visit; an expert is three matrices."""
    idle = config[experts] - config["num_experts_per_tok"]
    return int(layers * idle * 3 * config["hidden_size"] * config[width])


def _mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, on average over a sequence: half of it, or less with a window."""
    reach = seq_len if window is None else min(window, seq_len)
    return reach * (1 - reach / (2 * seq_len))


def _windows(config: dict[str, Any]) -> list[int | None]:
    """The sliding window of each layer, None for full attention; the rules are those of the transformers configs."""
    family = config["model_type"]
    layers = range(config.get("num_hidden_layers") or config["n_layer"])
    window = config.get("sliding_window", 4096 if family == "gemma2" else None)
    if window is None or not config.get("use_sliding_window", not family.startswith("qwen")):
        return [None for _ in layers]
    if "layer_types" in config:
        return [window if config["layer_types"][i] == "sliding_attention" else None for i in layers]
    if family == "gemma2":  # every other layer, the first one included
        return [window if i % 2 == 0 else None for i in layers]
    if family.startswith("qwen"):
        return [window if i >= config.get("max_window_layers", 28) else None for i in layers]
    return [window for _ in layers]
