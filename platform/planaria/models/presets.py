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
    # Two encoders of one size, trained to tell pairs apart.
    "clip-tiny": {
        "model_type": "clip",
        "vision_config": _TOWER,
        "text_config": _TEXT,
        "projection_dim": 64,
    },
    "siglip-tiny": {"model_type": "siglip", "vision_config": _TOWER, "text_config": _TEXT},
}
