"""Probes of tiny models that take images: what trains, what is
kept, and what two depths predict.
"""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from autotune.core.images import picture_of
from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import extrapolate
from autotune.probe.harness import random_image_rows
from autotune.probe.model_settings import model_settings
from autotune.probe.supervisor import WorkerProber
from autotune.study.evaluator import truncate_request
from autotune.trainer import images, varlen
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    set_checkpointing,
    trainable_model,
)
from tests.helpers.probing import measured
from tests.helpers.seeing import FAMILIES, seeing

pytestmark = pytest.mark.probe
CPU = torch.device("cpu")
VISION_PATHS = r"(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector)(\..*)?"
TEXT = 64  # tokens of a row beside its image


def request(
    model_type: str,
    *,
    rows: int = 4,
    text: int = TEXT,
    vision: str = "frozen",
    num_layers: int = 8,
    **knobs: Any,
) -> ProbeRequest:
    """Rows of an image of 224x112 and some text."""
    model = seeing(model_type, num_layers)
    picture = picture_of(model, 224, 112)
    length = picture.length + text
    kind = MicroBatch(
        rows=((length,),) * rows, length=length, share=1.0, images=((picture,),) * rows
    )
    values = {
        "micro_batch_size": rows,
        "seq_len": length,
        "precision": "fp32",
        "checkpointing": "none",
    }
    return ProbeRequest(
        config=TrainConfig(**values | knobs),
        model=model,
        device="cpu",
        memory_gib=4.0,
        min_timed_s=0.0,
        min_timed_micros=1,
        micro_batches=(kind,),
        vision=vision,
        evaluate=True,
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_probe_trains_on_images_in_each_way(prober: WorkerProber, model_type: str) -> None:
    """The tower trains where that was asked for; quantised, in chunks, recomputed and masked the
    loss stays about.
    """
    shape = prober.describe(seeing(model_type))
    assert shape is not None and shape.num_layers == 8 and shape.plain_head
    plain = partial(request, model_type, num_layers=2)
    frozen = measured(prober, plain())
    assert frozen.losses and all(map(math.isfinite, frozen.losses))
    for other in (
        plain(loss="chunked", checkpointing="full", padding="masked"),
        plain(method="full"),
        plain(vision="trained"),
    ):
        found = measured(prober, other)
        assert found.losses[0] == pytest.approx(frozen.losses[0], rel=1e-5), other.config
        more = other.vision == "trained" or other.config.method == "full"
        assert (found.trainable_params > frozen.trainable_params) is more
    whole = measured(prober, plain(method="full", vision="trained"))
    assert whole.trainable_params == whole.total_params
    assert measured(prober, plain()).losses == frozen.losses
    assert measured(prober, plain(quantization="nf4")).losses[0] == pytest.approx(
        frozen.losses[0], rel=0.05
    )


@pytest.mark.parametrize(
    ("model_type", "vision"),
    [
        *(("qwen2_5_vl", "frozen"), ("gemma3", "trained"), ("idefics3", "trained")),
        pytest.param("qwen2_5_vl", "trained", marks=pytest.mark.families),
        pytest.param("gemma3", "frozen", marks=pytest.mark.families),
        pytest.param("idefics3", "frozen", marks=pytest.mark.families),
    ],
)
def test_two_depths_predict_what_images_need(
    prober: WorkerProber, model_type: str, vision: str
) -> None:
    """The tower stays whole at any depth."""
    asked = request(model_type, rows=16, text=192, vision=vision)
    asked = replace(asked, evaluate=False)  # only a confirmation evaluates
    low, high, whole = (
        measured(prober, truncate_request(asked, depth) if depth else asked)
        for depth in (2, 4, None)
    )
    predicted = extrapolate([(2, low), (4, high)], 8).measurement
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)
    assert predicted.model_gib == pytest.approx(whole.model_gib, rel=1e-3)


def test_layers_of_the_language_model_are_compiled(prober: WorkerProber) -> None:
    eager, compiled = (
        measured(prober, request("qwen2_5_vl", num_layers=2, compile=how))
        for how in ("none", "per_layer")
    )
    assert compiled.losses[0] == pytest.approx(eager.losses[0], rel=1e-4)


def test_a_tower_computes_its_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its features are those of transformers, which computes one window after another."""
    by_sdpa, by_eager = (
        build(config_of(seeing("qwen2_5_vl", 2)), model_settings(config, "qwen2_5_vl"), CPU)
        for config in (TrainConfig(precision="fp32", attention=how) for how in ("sdpa", "eager"))
    )
    (kind,) = request("qwen2_5_vl", rows=2).kinds
    batch = images.join_rows(
        random_image_rows(kind, by_sdpa.config, torch.Generator().manual_seed(0))
    )
    by_eager.load_state_dict(by_sdpa.state_dict())
    at_once: list[int] = []

    def takes(query: torch.Tensor) -> bool:
        at_once.append(query.shape[2])
        return True

    monkeypatch.setattr(varlen, "_supports_flash", takes)
    torch.testing.assert_close(by_sdpa(**batch).loss, by_eager(**batch).loss, atol=1e-6, rtol=1e-5)
    # in each layer of the tower, the patches of all rows
    assert at_once == [len(batch["pixel_values"])] * 2


# PEFT asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("vision", "method"), [("frozen", "lora"), ("trained", "lora"), ("frozen", "full")]
)
def test_a_tower_that_is_frozen_is_not_differentiated(
    model_type: str, vision: str, method: str
) -> None:
    """transformers and PEFT have the tower's inputs require
    gradients where layers are recomputed.
    """
    config = TrainConfig(precision="fp32", checkpointing="full", method=method)
    settings = model_settings(config, model_type, vision=vision)
    base = build(config_of(seeing(model_type, 2)), settings, CPU)
    set_checkpointing(base, settings)
    model = trainable_model(base, settings, CPU)
    set_checkpointing(base, settings)  # as for the next probe of a warm worker
    assert len(decoder_layers(model)) == 2
    (kind,) = request(model_type, rows=2).kinds
    batch = images.join_rows(random_image_rows(kind, base.config, torch.Generator().manual_seed(0)))
    entered: list[bool] = []
    base.get_decoder().register_forward_pre_hook(
        lambda module, inputs, named: entered.append(
            named["inputs_embeds"].grad_fn.next_functions[1][0] is not None
        ),
        with_kwargs=True,
    )
    model.train()
    model(**batch).loss.backward()
    # the second input of masked_scatter: the features of the images
    assert entered == [vision == "trained"]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    in_tower = {name for name in trained if re.fullmatch(VISION_PATHS, name)}
    assert bool(in_tower) is (vision == "trained")
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )


def test_rows_of_other_numbers_of_images_share_a_micro_batch() -> None:
    """Tiles are filled up with empty ones, which the model leaves out; random words are never
    placeholders.
    """
    model = seeing("idefics3", 2)
    wide, square = picture_of(model, 224, 112), picture_of(model, 56, 56)
    rows = ((wide, square), (square,), ())
    length = 200
    kind = MicroBatch(rows=((length,),) * 3, length=length, share=1.0, images=rows)
    config = config_of(model)
    batch = images.join_rows(
        random_image_rows(kind, config, torch.Generator().manual_seed(0), trained_share=0.5)
    )
    placeholders = (batch["input_ids"] == config.image_token_id).sum(1).tolist()
    assert placeholders == [wide.tokens + square.tokens, square.tokens, 0]
    assert (batch["labels"] >= 0).sum(1).tolist() == [
        length - wide.length - square.length,
        length - square.length,
        100,
    ]
    assert not ((batch["labels"] == config.image_token_id).any())
    assert batch["pixel_values"].shape[:2] == batch["pixel_attention_mask"].shape[:2] == (3, 9 + 17)
    settings = model_settings(TrainConfig(precision="fp32"), "idefics3")
    assert math.isfinite(build(config, settings, CPU)(**batch).loss)


def test_images_without_room_are_refused() -> None:
    picture = picture_of(seeing("gemma3"), 9, 9)
    with pytest.raises(
        ValueError, match="the images of an example take 20 tokens, but the example has 21"
    ):
        images.random_example(21, [picture], config_of(seeing("gemma3")), None, 1.0)


def test_probes_of_other_images_are_other_probes() -> None:
    first = request("qwen2_5_vl")
    (kind,) = first.kinds
    (row, *others) = kind.images
    smaller = picture_of(first.model, 112, 112)
    changed = replace(kind, images=((smaller,), *others))
    assert replace(first, micro_batches=(changed,)).digest != first.digest
    assert replace(first, micro_batches=(replace(kind, images=()),)).digest != first.digest
    assert replace(first, vision="trained").digest != first.digest
    assert (
        replace(first, micro_batches=(replace(kind, images=(row, *others)),)).digest == first.digest
    )
