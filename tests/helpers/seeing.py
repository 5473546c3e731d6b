"""Configs of tiny models that take images, one of each family."""

from typing import Any

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_TEXT |= {"vocab_size": 512, "max_position_embeddings": 4096}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def seeing(model_type: str, num_layers: int = 8) -> dict[str, Any]:
    """A model of this type with so many text layers.

    An image of 112x56 takes 8, 16 or 27 tokens, and those beside.
    """
    text = _TEXT | {"num_hidden_layers": num_layers}
    if model_type == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
        return {
            "model_type": model_type,
            "image_token_id": 500,
            "video_token_id": 501,
            "vision_start_token_id": 502,
            "vision_end_token_id": 503,
            "text_config": text | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope},
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
        }
    if model_type == "gemma3":
        window = {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        }
        return {
            "model_type": model_type,
            "image_token_index": 500,
            "boi_token_index": 501,
            "eoi_token_index": 502,
            "mm_tokens_per_image": 16,
            "text_config": text | window | {"model_type": "gemma3_text", "head_dim": 32},
            "vision_config": _VISION
            | {"image_size": 112, "patch_size": 14, "vision_use_head": False},
        }
    return {
        "model_type": model_type,
        "image_token_id": 500,
        "scale_factor": 2,
        "pad_token_id": 0,
        "text_config": text | {"model_type": "llama", "pad_token_id": 0},
        "vision_config": _VISION | {"image_size": 56, "patch_size": 14},
    }


FAMILIES = ("qwen2_5_vl", "gemma3", "idefics3", "smolvlm")
