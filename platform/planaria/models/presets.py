"""Built-in tiny models: real Hugging Face classes at a size that trains on a CPU in minutes."""

from __future__ import annotations

from typing import Any

_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_DECODER = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    # A caption of three shapes is about 75 bytes long.
    "max_position_embeddings": 96,
}

_QWEN_TOWER = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "image_size": 32}
# The families' own special ids lie outside a small vocabulary; mllama must have some.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}
_IDS = {"bos_token_id": 1, "eos_token_id": 1}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}

PRESETS: dict[str, dict[str, Any]] = {
    # CLIP tower + Llama, the LLaVA-1.5 recipe at toy size.
    "llava-tiny": {
        "model_type": "llava",
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "text_config": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5, **_DECODER},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    # SigLIP tower + Qwen2 with grouped key/value heads and tied embeddings.
    "llava-siglip-qwen-tiny": {
        "model_type": "llava",
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "text_config": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, **_DECODER},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    },
    # SigLIP tower + Mistral, whose attention may slide.
    "llava-siglip-mistral-tiny": {
        "model_type": "llava",
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "text_config": {"model_type": "mistral", "num_key_value_heads": 2, **_DECODER},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "full",
    },
    # Four patches become one token; tied, as the small published sizes are.
    "smolvlm-tiny": {
        "model_type": "smolvlm",
        "vision_config": {**_TOWER, "patch_size": 4},
        "text_config": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True, **_DECODER},
        "scale_factor": 2,
        "tie_word_embeddings": True,
    },
    "idefics3-tiny": {
        "model_type": "idefics3",
        "vision_config": {**_TOWER, "patch_size": 4},
        "text_config": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False, **_DECODER},
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    # Positions in three dimensions; a tower for any size of picture, shown 32 pixels here.
    "qwen2-vl-tiny": {
        "model_type": "qwen2_vl",
        "vision_config": {**_QWEN_TOWER, "embed_dim": 64, "hidden_size": 96, "mlp_ratio": 2},
        "text_config": {"num_key_value_heads": 2, "rope_parameters": _MROPE, **_NO_IDS, **_DECODER},
        "tie_word_embeddings": True,
    },
    # Windowed attention in all tower layers but one.
    "qwen2.5-vl-tiny": {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **_QWEN_TOWER,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 96,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "text_config": {"num_key_value_heads": 2, "rope_parameters": _MROPE, **_NO_IDS, **_DECODER},
        "tie_word_embeddings": False,
    },
    # Query and key norms; features of an inner tower layer enter behind the first decoder layer (deepstack).
    "qwen3-vl-tiny": {
        "model_type": "qwen3_vl",
        "vision_config": {
            **_QWEN_TOWER,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 96,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1],
        },
        "text_config": {"num_key_value_heads": 2, "head_dim": 24, "rope_parameters": _MROPE, **_NO_IDS, **_DECODER},
        "tie_word_embeddings": True,
    },
    # The decoder attends to pictures in a layer of its own.
    "mllama-tiny": {
        "model_type": "mllama",
        "vision_config": {
            **{key: value for key, value in _TOWER.items() if key != "num_attention_heads"},
            "attention_heads": 4,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        "text_config": {"num_key_value_heads": 2, "cross_attention_layers": [1], **_IDS, **_DECODER},
    },
    # Two encoders of one size, trained to tell pairs apart.
    "clip-tiny": {
        "model_type": "clip",
        "vision_config": _TOWER,
        "text_config": _TEXT,
        "projection_dim": 64,
    },
    "siglip-tiny": {"model_type": "siglip", "vision_config": _TOWER, "text_config": _TEXT},
}
