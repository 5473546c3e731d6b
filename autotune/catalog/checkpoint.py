"""Reads the sizes of a checkpoint's weights from the headers of its safetensors files.

A header has the dtype and shape of each tensor. Only headers are read, which takes milliseconds for
a checkpoint of any size, and needs no torch. Tensors are recognised by the names that published
checkpoints give them.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # in bytes; the safetensors library refuses a longer header

# Scales and other tensors that come with a quantised weight, and that do not count as parameters
_COMPANION = re.compile(
    r"[._](absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|SCB|weight_format"
    r"|scales|scale_inv|qzeros|g_idx|(weight|input|output|k|v)_scale|(weight|input)_zero_point"
    r"|weight_shape|weight_g_idx)$"
)
_PACKED = re.compile(r"(_blocks|\.qweight|\.weight_packed)$")  # each value packs several parameters
_BITS = {"U8": 8, "I8": 8, "I32": 32, "I64": 64}
_TOWER = re.compile(r"vision|visual|audio|speech|talker|image")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")

# The config's keys for the number of extra layers that predict further tokens (multi-token
# prediction)
_MTP_LAYERS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers"),
    "num_mtp_modules",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights in a checkpoint's safetensors files.

    `stored` lists pairs of a dtype and the bytes of all tensors in it, the largest number first.
    `params` is the number of parameters that transformers loads; a byte of 4-bit weights holds two
    parameters. `params` is None if the files are damaged or do not match the config; `fault` then
    names the problem.
    `mtp_params` are parameters of layers for multi-token prediction, which transformers does not
    load for training.
    """

    stored: tuple[tuple[str, int], ...] = ()
    params: int | None = None
    mtp_params: int = 0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers for multi-token prediction that a config names."""
    text = config.get("text_config")
    parts = [part for part in (text, config) if isinstance(part, Mapping)]
    values = (part[key] for part in parts for key in _MTP_LAYERS if key in part)
    return next((value for value in values if type(value) is int and value > 0), 0)


def read_checkpoint(
    folder: Path, config: Mapping[str, Any], num_layers: int, embedding: tuple[int, int], bits: int
) -> Checkpoint | None:
    """Read a model's safetensors files. Return None if the folder has no such files.

    `num_layers` and `embedding` (the sizes of vocabulary and hidden state) come from the config.
    `bits` is the number of bits of a packed weight.
    """
    try:
        names = _file_names(folder)
        if not names:
            return None
        tensors = [tensor for name in names for tensor in _read_header(folder / name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) in (OSError, ValueError) else "its header is damaged"
        return Checkpoint(fault=f"the sizes of the weights come from config.json: {reason}")

    stored: Counter[str] = Counter()
    for tensor in tensors:
        stored[tensor.dtype] += tensor.num_bytes
    mtp_layers = num_mtp_layers(config)
    mtp = {tensor.name for tensor in tensors if _is_mtp(tensor.name, num_layers, mtp_layers)}
    counts = _count_parameters(tensors, bits)
    if config.get("tie_word_embeddings") is True:
        counts.pop("lm_head.weight", None)  # transformers drops this copy of the embedding

    fault = _mismatch([one for one in tensors if one.name not in mtp], num_layers, embedding)
    params = sum(count for name, count in counts.items() if name not in mtp)
    return Checkpoint(
        stored=tuple(stored.most_common()),
        params=None if fault else params,
        mtp_params=sum(counts.get(name, 0) for name in mtp),
        fault=fault and f"the weight files do not match config.json: {fault}",
    )


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        named = json.loads(index.read_bytes())["weight_map"].values()
        names = sorted({os.path.basename(name) for name in named})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{INDEX} names {len(names)} files, and {missing[0]} is missing")
        return names
    return sorted(path.name for path in folder.glob("model*.safetensors") if path.is_file())


def _read_header(path: Path) -> Iterator[_Tensor]:
    """Yield the tensors of a safetensors file.

    The file starts with eight bytes that hold the header's length, followed by the header in JSON.
    Raises ValueError with a message for the user if the file is incomplete.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(f"{path.name} is a Git LFS pointer (run git lfs pull)")
        if len(start) < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"{path.name} is not a complete safetensors file")
        header = json.loads(file.read(length))

    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if end > size:
        raise ValueError(f"{path.name} has {size:,} of {end:,} bytes")
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        yield _Tensor(name, tensor["dtype"], tuple(tensor["shape"]), last - first)


def _is_mtp(name: str, num_layers: int, mtp_layers: int) -> bool:
    """Return whether a tensor belongs to a layer for multi-token prediction.

    Some checkpoints number these layers after the model's own layers: a model with layers 0 to 27
    has the extra layer 28.
    """
    if _MTP.search(name):
        return True
    layer = _LAYER.search(name)
    return (
        layer is not None
        and not _TOWER.search(name)
        and num_layers <= int(layer[1]) < num_layers + mtp_layers
    )


def _count_parameters(tensors: list[_Tensor], bits: int) -> dict[str, int]:
    """Return the number of parameters of each tensor, without the scales of packed tensors."""
    names = {tensor.name for tensor in tensors}
    counts = {}
    for tensor in tensors:
        if _COMPANION.search(tensor.name):
            continue
        packed = _PACKED.search(tensor.name) or f"{tensor.name}.absmax" in names
        each = _BITS.get(tensor.dtype, bits) // bits if packed else 1
        counts[tensor.name] = each * math.prod(tensor.shape)
    return counts


def _mismatch(tensors: list[_Tensor], num_layers: int, embedding: tuple[int, int]) -> str | None:
    """Return how the tensors differ from the sizes in the config, or None if they match."""
    text = [tensor for tensor in tensors if not _TOWER.search(tensor.name)]
    layers = {int(found[1]) for tensor in text if (found := _LAYER.search(tensor.name))}
    shapes = [tensor.shape for tensor in text if _EMBEDDING.search(tensor.name)]
    differences = []
    if layers and max(layers) + 1 != num_layers:
        differences.append(f"{max(layers) + 1} layers instead of {num_layers}")
    if shapes and len(shapes[0]) == 2 and shapes[0] != embedding:
        stored, expected = (f"{rows:,} x {width:,}" for rows, width in (shapes[0], embedding))
        differences.append(f"an embedding of {stored} instead of {expected}")
    return " and ".join(differences) or None
