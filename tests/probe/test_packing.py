"""Packed rows in real models: no example attends to another,
and seams and padding are not learned.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec
from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested_pairs
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from tests.helpers.probing import MODEL

EXAMPLES = (20, 13, 7)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def supported(setting: str, context: str) -> tuple[str, ...]:
    """Return the model types or attentions in which a setting is tested."""
    (pair,) = (
        pair for pair in untested_pairs() if (pair.setting, pair.context) == (setting, context)
    )
    return pair.tested


def lacks(model_type: str, attention: str) -> bool:
    return ModelSpec(name="small", config=SHAPE | {"model_type": model_type}).lacks(attention)


# On a CPU, transformers' FlexAttention has no attention sinks. tests/probe/test_flex.py covers its
# masks.
WITH_SINKS = ("gpt_oss", "flex_attention")
PACKED = product(supported("packing", "model_type"), supported("packing", "attention"))


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute FlexAttention without its kernels, which would have to be compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    monkeypatch.setattr(
        "transformers.integrations.flex_attention.compile_friendly_flex_attention",
        lambda *args, training=False, **kwargs: flex_attention(*args, **kwargs),
    )
    monkeypatch.setattr(
        "transformers.masking_utils.create_block_mask",
        lambda **kwargs: create_block_mask(**kwargs | {"_compile": False}),
    )


@pytest.mark.probe
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *(pair for pair in PACKED if pair != WITH_SINKS and not lacks(*pair)),
        *((model_type, "varlen") for model_type in supported("packed_attention", "model_type")),
    ],
)
def test_nobody_sees_a_neighbour(model_type: str, attention: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from autotune.probe.harness import random_rows
    from autotune.trainer.patches import register_attentions, separate_examples
    from autotune.trainer.varlen import join_rows

    register_attentions()
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.requires_grad_(False)  # FlexAttention has no gradients on a CPU
    separate_examples(model)
    kind = MicroBatch(rows=(EXAMPLES, EXAMPLES), length=48, share=1.0)
    batch = join_rows(random_rows(kind, 128, torch.Generator().manual_seed(0), packing=True))
    segments = {"segments": batch["segments"]} if attention == "varlen" else {}
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], **segments
    ).logits
    model.set_attn_implementation("sdpa" if attention == "varlen" else attention)
    for row in (0, 1):
        for index, example in enumerate(batch["input_ids"][row].split([*EXAMPLES, 8])[:3]):
            start = sum(EXAMPLES[:index])
            alone = model(input_ids=example[None]).logits[0]
            torch.testing.assert_close(
                logits[row, start : start + len(example)], alone, atol=1e-5, rtol=1e-4
            )


@pytest.mark.probe
# Dynamo reads it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# Inductor's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("compiled", "checkpointing"), [(False, "none"), (False, "full"), (True, "full")]
)
def test_what_is_learned_is_the_same_with_a_mask_and_without(
    compiled: bool, checkpointing: str
) -> None:
    """Micro batches with other numbers of other examples are not compiled anew."""
    import torch

    from autotune.probe.harness import random_rows
    from autotune.probe.model_settings import model_settings
    from autotune.trainer.lean_trainer import compile_layers
    from autotune.trainer.model_builder import build, config_of, decoder_layers, set_checkpointing
    from autotune.trainer.varlen import join_rows

    generator = torch.Generator().manual_seed(0)
    each = (((20, 13, 7), (9, 30, 5)), ((40,), (9, 30, 5, 4)), ((1,) * 6 + (20,), (48,)))
    kinds = [MicroBatch(rows=rows, length=48, share=1.0) for rows in each]
    batches = [join_rows(random_rows(kind, 128, generator, packing=True)) for kind in kinds]

    def learned(attention: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        settings = model_settings(
            TrainConfig(method="full", precision="fp32", checkpointing=checkpointing), "mistral"
        )
        model = build(
            config_of(SHAPE | {"model_type": "mistral", "num_hidden_layers": 2}),
            replace(settings, attention=attention),
            torch.device("cpu"),
        )
        set_checkpointing(model, settings)
        model.requires_grad_(True).train()
        if compiled:
            compile_layers(decoder_layers(model))
        found = []
        for batch in batches:
            model.zero_grad()
            loss = model(
                **{key: batch[key] for key in batch if key != "segments" or attention == "varlen"}
            ).loss
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
        return found

    once = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    # The operations call torch's own code: g++ would take long to compile that of two graphs.
    with torch._inductor.config.patch(fallback_by_default=True):
        torch._dynamo.reset()
        expected = learned("sdpa")
        torch._dynamo.reset()
        with once:
            found = learned("varlen")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.probe
def test_the_seams_and_the_padding_of_a_packed_row_are_not_learned() -> None:
    import torch

    from autotune.probe.harness import random_rows

    kind = MicroBatch(rows=((3, 2),), length=8, share=1.0)
    (row,) = random_rows(kind, 128, torch.Generator().manual_seed(0), packing=True)
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    ids = row["input_ids"].tolist()
    assert row["labels"].tolist() == [-100, ids[1], ids[2], -100, ids[4], -100, -100, -100]
    (row,) = random_rows(
        kind, 128, torch.Generator().manual_seed(0), packing=True, trained_share=0.4
    )
    assert row["input_ids"].tolist() == ids  # only the ends of the examples are trained on
    assert row["labels"].tolist() == [-100, -100, ids[2], -100, ids[4], -100, -100, -100]


@pytest.mark.probe
def test_a_packed_probe_is_a_probe_and_leaves_no_trace(
    prober: WorkerProber, tmp_path: Path
) -> None:
    workload = Workload(
        lengths=Lengths.of([20] * 50 + [70] * 20 + [128] * 3, "counted"), global_batch=8
    )

    def request(packing: bool, **knobs: Any) -> ProbeRequest:
        values = {"precision": "fp32", "checkpointing": "full", "packing": packing} | knobs
        config = TrainConfig(micro_batch_size=2, seq_len=128, **values)
        kinds = workload.micro_batches(config)
        # How many steps are timed depends on how well they agree, and so would the last loss.
        short: dict[str, Any] = {
            "min_timed_s": 0.0,
            "min_timed_micros": 1,
            "max_timed_steps": 1,
            "evaluate": True,
        }
        return ProbeRequest(
            config=config, model=MODEL, device="cpu", memory_gib=2.0, micro_batches=kinds, **short
        )

    prober.fingerprint  # noqa: B018 (the worker is up from here on)
    starts = prober.starts
    results = [
        prober.probe(request(on), tmp_path / f"{index}.log")
        for index, on in enumerate((False, True, False))
    ]
    assert prober.starts == starts
    before, packed, after = (result.measurement for result in results)
    assert before and packed and after
    assert packed.micro_step_s and packed.loss_first != before.loss_first
    assert (before.loss_first, before.loss_last) == pytest.approx(
        (after.loss_first, after.loss_last), rel=1e-6
    )
    assert results[0].request_digest != results[1].request_digest
    in_16_bits = [
        prober.probe(
            request(True, precision="bf16_mixed", packed_attention=how), tmp_path / f"{how}.log"
        ).measurement
        for how in ("mask", "varlen")
    ]
    masked, alone = in_16_bits
    assert masked and alone and prober.starts == starts
    assert alone.losses[:2] == pytest.approx(masked.losses[:2], rel=1e-3)
