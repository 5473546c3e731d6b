"""ModelSpec: the shape of a model, by catalogue name, local directory or Hub id. Code of a model is never run.

Only the config is read; whether transformers knows its `model_type` shows when a probe builds it.
"""

import copy
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalog.flops import flops_per_token
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import load_data, read_regular, refuse_special_files
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

_PARTS = ("text_config", "vision_config", "audio_config")  # of models that take more than text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`config` is keyword arguments of the transformers config, `model_type` among them.

    `params` is the exact total, tied weights counted once, None when the model is not catalogued. `weights` is a
    directory with safetensors, None for random weights; `tokenizer` a directory with the model's tokenizer.
    """

    name: str
    config: dict[str, Any]
    params: int | None = None
    weights: str | None = None
    tokenizer: str | None = None
    license: str | None = None
    source: str | None = None
    as_of: str | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str) or not self.config["model_type"]:
            raise UsageError(f"the config of {self.name} has no model_type", remedy="add it, for example llama")
        for keys in (_LAYERS, _HIDDEN, _VOCAB):
            if self.size(*keys) is None:
                raise UsageError(
                    f"the config of {self.name} has no positive integer {keys[0]}",
                    remedy="pass the config.json of a causal language model",
                )

    @property
    def short(self) -> str:
        """The name without its organisation."""
        return self.name.rsplit("/", 1)[-1]

    @property
    def digest(self) -> str:
        """Twelve hex digits, equal for models of the same shape."""
        return digest_of(self.config)

    def size(self, *keys: str) -> int | None:
        """The first of these keys of the config that holds a size: a positive integer that can be."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE:
                return value
        return None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.size(*_LAYERS) or 0

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.size(*_HIDDEN) or 0

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.size(*_VOCAB) or 0

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence the positions allow, in tokens; None when the config does not say."""
        return self.size(*_CONTEXT)

    def flops_per_token(self, method: str, seq_len: int) -> float | None:
        """Necessary FLOPs a trained token; see `flops.flops_per_token`."""
        return None if self.params is None else flops_per_token(self.config, self.params, method, seq_len)


def list_models() -> tuple[ModelSpec, ...]:
    """Every catalogued model. The configs are copies: transformers completes rope_parameters in place."""
    return tuple(
        ModelSpec(**{**row, "aliases": tuple(row["aliases"]), "config": copy.deepcopy(row["config"])})
        for row in load_data("autotune.catalog", "data/models")["models"]
    )


def resolve_model(name: str) -> ModelSpec:
    """A catalogue name or alias in any case; else a local directory with a config.json; else a Hub id.

    Raises UsageError for none of these, and for a config that cannot be used.
    """
    known = {key.lower(): spec for spec in list_models() for key in (spec.name, *spec.aliases)}
    if name.lower() in known:
        return known[name.lower()]
    path = os.path.expanduser(name)
    if name and os.path.isdir(path):
        return _from_directory(Path(path).resolve())
    hint = did_you_mean(name, known)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        return _from_hub(name, hint)
    raise UsageError(
        f"unknown model {name!r}: neither in the catalogue nor a directory{hint}",
        remedy="autotune models lists them; or pass a directory with a config.json, or a Hub id like org/name",
    )


def _from_directory(path: Path) -> ModelSpec:
    refuse_special_files(path)
    # model*.safetensors is what transformers loads; other checkpoints there (adapters, consolidated) are not the model.
    has_weights = any(path.glob("model*.safetensors"))
    return ModelSpec(
        name=path.name,
        config=_read_config(path / "config.json"),
        weights=str(path) if has_weights else None,
        tokenizer=str(path) if (path / "tokenizer.json").is_file() else None,
        source="local directory",
    )


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
    shown = shown or str(path)
    try:
        # As transformers writes infinity into JSON, and reads it.
        config = json.loads(read_regular(path), parse_constant=lambda name: {"__float__": name})
    except OSError as error:
        raise UsageError(
            f"cannot read {shown}: {error.strerror or error}", remedy="pass a directory with a config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown} is not valid JSON: {error}", remedy="download it again") from None
    if not isinstance(config, dict):
        raise UsageError(f"{shown} is not a JSON object", remedy="pass the config.json of a transformers model")
    _refuse_unsupported(config, shown)
    shape: dict[str, Any] = _shape_of(config)
    return shape


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
    if config.get("is_encoder_decoder") is True:
        raise UsageError(f"{shown} is of an encoder-decoder model", remedy="pass a causal language model")
    if parts := [name for name in _PARTS if isinstance(config.get(name), dict)]:
        raise UsageError(
            f"{shown} is of a model that takes more than text ({', '.join(parts)}); models of text alone are supported",
            remedy="to try its text part, save what AutoConfig.from_pretrained(NAME).get_text_config() returns in a "
            "directory with save_pretrained, and pass the directory; transformers may have no causal model of it",
        )
    encoders = load_data("autotune.catalog", "data/models")["not_causal"]
    if config.get("model_type") in encoders and config.get("is_decoder") is not True:
        raise UsageError(
            f"{shown} is of a {config['model_type']} model, in which a token sees those after it",
            remedy="pass a causal language model",
        )


def _shape_of(value: Any) -> Any:
    """`value` without private keys and those of `_NOT_SHAPE`, at every depth."""
    if isinstance(value, dict):
        kept = {key for key in value if key == "__float__" or (key[:1] != "_" and key not in _NOT_SHAPE)}
        return {key: _shape_of(item) for key, item in value.items() if key in kept}
    return value
