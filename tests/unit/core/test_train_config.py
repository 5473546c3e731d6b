"""A configuration is checked, canonical (what has no effect is
dropped), and known by its digest.
"""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from autotune.core.knobs import KNOBS
from autotune.core.train_config import (
    TrainConfig,
    checkpoints_some,
    digest_of,
    learning_differences,
)


def test_knobs_without_effect_are_dropped():
    full = TrainConfig(method="full", lora_rank=64, quantization="nf4", double_quant=True)
    assert (full.lora_rank, full.quantization, full.double_quant) == (None, "none", False)
    assert full == TrainConfig(method="full")
    assert TrainConfig(quantization="int8", double_quant=True) == TrainConfig(quantization="int8")
    assert TrainConfig(quantization="nf4", double_quant=True).double_quant is True
    assert TrainConfig(quantization="nf4", kbit_preparation=True).kbit_preparation is True
    assert not TrainConfig(
        quantization="nf4", kbit_preparation=True, precision="bf16_pure"
    ).kbit_preparation


def test_only_what_has_an_effect_is_in_the_digest():
    of_several = {
        "tiling",
        "cuda_graphs",
        "lora_kernels",
        "quantize_experts",
        "sharding",
        "copies",
        "sync_each_batch",
        "offload",
    }
    inactive = {
        "double_quant",
        "kbit_preparation",
        "optimizer_in_backward",
        "packed_attention",
        "fp8_products",
    } | of_several
    assert set(KNOBS) - set(TrainConfig().as_dict()) == inactive
    assert set(KNOBS) - set(TrainConfig(method="full").as_dict()) == {
        *(
            "lora_rank",
            "lora_targets",
            "modules_to_save",
            "dora",
            "lora_dropout",
            "rslora",
            "packed_attention",
            "fp8_products",
        ),
        *("quantization", "double_quant", "kbit_preparation"),
        *of_several,
    }
    absent = {"optimizer_in_backward", "packed_attention", "fp8_products"}
    of_nf4 = set(KNOBS) - absent - of_several
    assert set(TrainConfig(quantization="nf4").as_dict()) == of_nf4
    assert set(TrainConfig(packing=True).as_dict()) == set(TrainConfig().as_dict()) - {
        "padding",
        "group_by_length",
    } | {"packed_attention"}
    of_fsdp2, of_ddp = (
        TrainConfig(num_gpus=2, sharding=sharding).as_dict() for sharding in ("fsdp2", "ddp")
    )
    assert set(KNOBS) - set(of_fsdp2) == (inactive - of_several) | {
        "tiling",
        "cuda_graphs",
        "lora_kernels",
        "quantize_experts",
    }
    assert set(KNOBS) - set(of_ddp) == inactive - {"sharding"}
    # listed where it is not the default
    assert TrainConfig(tiling="tokens").as_dict()["tiling"] == "tokens"
    assert (
        TrainConfig(method="full", lora_rank=8).digest
        == TrainConfig(method="full", lora_rank=64).digest
    )


def test_every_knob_changes_the_digest():
    base = TrainConfig(quantization="nf4")
    others = {
        "method": "full",
        "micro_batch_size": 9,
        "seq_len": 1025,
        "lora_rank": 17,
        "lora_targets": "q_v",
        "modules_to_save": "head",
        "optimizer": "adafactor",
        "precision": "fp32",
        "quantization": "int8",
        "double_quant": True,
        "kbit_preparation": True,
        "checkpointing": "none",
        "attention": "eager",
        "compile": "per_layer",
        "loss": "chunked",
        "kernels": "liger",
        "packing": True,
        "padding": "max_length",
        "group_by_length": True,
        "dora": True,
        "lora_dropout": 0.05,
        "rslora": True,
        "loader_workers": 2,
        "allocator": "fixed",
        "num_gpus": 2,
        "tiling": "tokens",
        "quantize_experts": True,
    }
    few = TrainConfig(checkpointing="none", padding="bucket")
    # not a knob of layers that are recomputed
    assert replace(few, cuda_graphs="micro_batch").digest != few.digest
    layers = replace(few, compile="per_layer")
    # a knob of compiled layers alone
    assert replace(layers, lora_kernels="joined").digest != layers.digest
    pair = TrainConfig(num_gpus=2)
    assert replace(pair, sharding="fsdp2").digest != pair.digest  # not a knob of one GPU
    shards = replace(pair, sharding="fsdp2")
    of_shards = ("sync_each_batch", "offload")
    assert (
        len({replace(shards, **{name: True}).digest for name in of_shards} | {shards.digest}) == 3
    )
    packed = TrainConfig(packing=True)  # not a knob of other rows
    assert replace(packed, packed_attention="varlen").digest != packed.digest
    full = TrainConfig(method="full")
    assert replace(full, optimizer_in_backward=True).digest != full.digest  # not a knob of adapters
    compiled = replace(full, compile="per_layer", padding="bucket")  # nor of layers that are not
    assert replace(compiled, fp8_products="rowwise").digest != compiled.digest
    eight = replace(shards, num_gpus=8)
    assert len({replace(eight, copies=copies).digest for copies in (1, 2, 4)}) == 3
    apart = {
        "cuda_graphs",
        "optimizer_in_backward",
        "packed_attention",
        "sharding",
        "copies",
        *of_shards,
    }
    apart |= {"lora_kernels", "fp8_products"}
    assert {*others, *apart} == set(KNOBS) == {field.name for field in fields(TrainConfig)}
    digests = {base.digest} | {
        replace(base, **{name: value}).digest for name, value in others.items()
    }
    assert len(digests) == len(others) + 1
    assert all(len(digest) == 12 and int(digest, 16) >= 0 for digest in digests)


def test_packed_examples_attend_by_themselves_in_16_bits_and_by_fused_attention():
    packed = TrainConfig(packing=True, packed_attention="varlen")
    assert (packed.packed_attention, packed.has_mask, packed.attention_implementation) == (
        "varlen",
        False,
        "varlen",
    )
    for other in ({"packing": False}, {"precision": "fp32"}, {"attention": "eager"}):
        assert replace(packed, **other).packed_attention == "mask", other
    masked = replace(packed, packed_attention="mask")
    assert (masked.has_mask, masked.attention_implementation) == (True, "sdpa")
    assert packed.label().endswith("packed varlen") and masked.label().endswith("packed")


def test_the_digest_is_stable():
    # Stored probes are found again by it: a changed digest forgets every measurement.
    assert TrainConfig().digest == digest_of(dict(reversed(TrainConfig().as_dict().items())))
    assert digest_of({"b": 1, "a": [1, "ä"]}) == "bc83937abf39"
    assert TrainConfig().digest == "233d28a3a8fd"
    assert TrainConfig(method="full", compile="per_layer").digest == "312a9eda9656"
    assert (
        TrainConfig(
            quantization="nf4", double_quant=True, checkpointing="offload", packing=True
        ).digest
        == "9cd8f6ad9021"
    )


def test_several_gpus_share_out_the_examples_unless_more_is_asked_for():
    assert (TrainConfig().sharding, TrainConfig(sharding="fsdp2").sharding) == ("none", "none")
    pair = replace(TrainConfig(), num_gpus=2)
    assert (pair.sharding, replace(pair, num_gpus=1)) == ("ddp", TrainConfig())
    assert pair.label().endswith(" 2-gpus ddp")
    assert TrainConfig(num_gpus=8, sharding="fsdp2_keep").label().endswith(" 8-gpus fsdp2_keep")


def test_rows_are_padded_as_people_do_unless_they_are_compiled_or_packed():
    assert TrainConfig().padding == "longest"
    compiled = TrainConfig(compile="per_layer", padding="longest")
    assert compiled == TrainConfig(compile="per_layer") and compiled.padding == "bucket"
    assert TrainConfig(compile="per_layer", padding="max_length").padding == "max_length"
    packed = TrainConfig(compile="per_layer", packing=True, padding="bucket", group_by_length=True)
    assert packed == TrainConfig(compile="per_layer", packing=True)
    assert (packed.padding, packed.group_by_length) == ("max_length", False)
    assert not {"padding", "group_by_length"} & set(packed.as_dict())


def test_a_label_names_padding_only_where_it_was_chosen():
    assert (
        "pad-" not in TrainConfig(compile="per_layer").label() + TrainConfig(packing=True).label()
    )
    assert (
        TrainConfig(padding="bucket", group_by_length=True).label().endswith(" pad-bucket grouped")
    )


def test_derived_values():
    config = TrainConfig(micro_batch_size=4, seq_len=512, lora_rank=32, checkpointing="every_3")
    assert (config.tokens, config.lora_alpha, config.checkpoint_every) == (2048, 32, 3)
    assert TrainConfig(method="full").lora_alpha is None
    assert (
        TrainConfig(rslora=True, lora_rank=16).lora_alpha / 16**0.5
        == TrainConfig(lora_rank=16).lora_alpha / 16
    )  # the same scale
    assert TrainConfig(lora_rank=256).lora_alpha == 32


@pytest.mark.parametrize(
    ("method", "precision", "dtype"),
    [
        ("lora", "bf16_pure", "bfloat16"),
        ("lora", "bf16_mixed", "bfloat16"),
        ("lora", "fp16_mixed", "float16"),
        ("lora", "fp32", "float32"),
        ("full", "bf16_pure", "bfloat16"),  # the others train weights in fp32
        ("full", "bf16_mixed", "float32"),
        ("full", "fp16_mixed", "float32"),
        ("full", "fp32", "float32"),
    ],
)
def test_the_dtype_of_the_base(method, precision, dtype):
    assert TrainConfig(method=method, precision=precision).base_dtype == dtype


def test_learning_rates_are_common_defaults():
    assert (TrainConfig().learning_rate, TrainConfig(method="full").learning_rate) == (2e-4, 1e-5)


def test_differences_in_learning_come_by_importance_and_leave_speed_out():
    one = TrainConfig(
        lora_rank=64, seq_len=512, compile="per_layer", micro_batch_size=1, checkpointing="none"
    )
    assert (
        learning_differences(one, TrainConfig())
        == "lora_rank 64 instead of 16, seq_len 512 instead of 1024"
    )
    assert learning_differences(one, one) == ""


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (TrainConfig(), "lora r16 8x1024 bf16_mixed ckpt-full adamw_torch_fused"),
        (
            TrainConfig(method="full", micro_batch_size=1),
            "full 1x1024 bf16_mixed ckpt-full adamw_torch_fused",
        ),
        (
            TrainConfig(
                quantization="nf4", double_quant=True, compile="per_layer", attention="eager"
            ),
            "lora r16 nf4-double 8x1024 bf16_mixed ckpt-full adamw_torch_fused compiled eager",
        ),
        (
            TrainConfig(loss="chunked"),
            "lora r16 8x1024 bf16_mixed ckpt-full adamw_torch_fused chunked-loss",
        ),
        (
            TrainConfig(loader_workers=2),
            "lora r16 8x1024 bf16_mixed ckpt-full adamw_torch_fused loader-2",
        ),
        (TrainConfig(dora=True), "dora r16 8x1024 bf16_mixed ckpt-full adamw_torch_fused"),
        (
            TrainConfig(rslora=True, packing=True),
            "rslora r16 8x1024 bf16_mixed ckpt-full adamw_torch_fused packed",
        ),
        (
            TrainConfig(quantization="int8"),
            "lora r16 int8 8x1024 bf16_mixed ckpt-full adamw_torch_fused",
        ),
    ],
)
def test_label(config, label):
    assert config.label() == label


def test_frozen_and_by_keyword():
    with pytest.raises(FrozenInstanceError):
        TrainConfig().seq_len = 1
    with pytest.raises(TypeError):
        TrainConfig("lora")
    with pytest.raises(TypeError):
        TrainConfig(learning_rate=1e-4)


def test_rank_is_needed_by_lora_alone():
    with pytest.raises(ValueError, match="lora_rank is needed with method lora"):
        TrainConfig(lora_rank=None)
    assert TrainConfig(method="full", lora_rank=None).lora_rank is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.23.0", True),
        ("6.0.0rc1", True),
        ("5.22.9", False),
        ("4.99", False),
        ("", False),
        ("main", False),
    ],
)
def test_versions_that_recompute_some_layers_only(version, expected):
    assert checkpoints_some(version) is expected


def test_cuda_graphs_go_with_rows_of_few_shapes_that_the_host_does_not_look_at() -> None:
    graphed = TrainConfig(cuda_graphs="micro_batch", checkpointing="none", padding="bucket")
    assert graphed.cuda_graphs == graphed.as_dict()["cuda_graphs"] == "micro_batch"
    assert replace(graphed, compile="per_layer").cuda_graphs == "micro_batch"
    for other in (
        {"checkpointing": "full"},
        {"compile": "per_layer", "checkpointing": "selective_30"},
        {"padding": "longest"},
        {"padding": "masked"},
        {"packing": True},
        {"precision": "fp16_mixed"},
        {"quantization": "nf4"},
        {"attention": "flash_attention_2"},
        {"num_gpus": 2, "sharding": "ddp"},
    ):
        assert replace(graphed, **other).cuda_graphs == "none", other


def test_grouped_adapters_are_on_experts_of_any_base_compiled_or_not() -> None:
    grouped = TrainConfig(lora_kernels="grouped")
    assert grouped.lora_kernels == grouped.as_dict()["lora_kernels"] == "grouped"
    assert grouped.label().endswith(" grouped-lora")
    for other in (
        {"lora_targets": "attention"},
        {"lora_targets": "q_v"},
        {"method": "full"},
        {"lora_dropout": 0.05},
        {"dora": True},
        {"num_gpus": 2, "sharding": "zero2"},
    ):
        assert replace(grouped, **other).lora_kernels == "peft", other
    for other in (
        {"lora_targets": "attention_experts"},
        {"lora_targets": "q_proj,experts.down_proj"},
        {"compile": "per_layer", "padding": "bucket"},
        {"quantization": "nf4"},
        {"precision": "fp32"},
        {"num_gpus": 2, "sharding": "ddp"},
        {"num_gpus": 2, "sharding": "fsdp2"},
    ):
        assert replace(grouped, **other).lora_kernels == "grouped", other


def test_joined_adapters_are_of_compiled_layers_on_a_base_of_16_bits_or_fp8() -> None:
    joined = TrainConfig(lora_kernels="joined", compile="per_layer", padding="bucket")
    assert joined.lora_kernels == joined.as_dict()["lora_kernels"] == "joined"
    assert joined.label().endswith(" joined-lora")
    assert replace(joined, quantization="fp8").lora_kernels == "joined"
    for other in (
        {"compile": "none"},
        {"method": "full"},
        {"quantization": "nf4"},
        {"precision": "fp32"},
        {"precision": "fp16_mixed"},
        {"lora_dropout": 0.05},
        {"dora": True},
        {"num_gpus": 2, "sharding": "fsdp2"},
    ):
        assert replace(joined, **other).lora_kernels == "peft", other
    for other in (
        {"checkpointing": "selective_50"},
        {"rslora": True},
        {"lora_targets": "q_v"},
        {"packing": True},
        {"num_gpus": 2, "sharding": "ddp"},
    ):
        assert replace(joined, **other).lora_kernels == "joined", other


def test_selective_recomputation_is_of_compiled_layers() -> None:
    config = TrainConfig(checkpointing="selective_50", compile="none", padding="longest")
    assert (config.compile, config.padding, config.checkpoint_every) == (
        "per_layer",
        "bucket",
        None,
    )
    assert (config.activation_budget, TrainConfig(checkpointing="none").activation_budget) == (
        0.5,
        1.0,
    )
    assert config.label() == "lora r16 8x1024 bf16_mixed ckpt-selective_50 adamw_torch_fused"
    assert TrainConfig(**config.as_dict()) == config


@pytest.mark.parametrize(
    ("checkpointing", "offloads"), [("none", False), ("full", False), ("offload", True)]
)
def test_what_is_offloaded_waits_in_the_hosts_memory(checkpointing: str, offloads: bool) -> None:
    assert TrainConfig(checkpointing=checkpointing).offloads is offloads
