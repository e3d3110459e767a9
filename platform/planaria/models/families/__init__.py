"""Families of vision-language models: what differs between them, one small file each."""

from __future__ import annotations

from planaria.models.families import llava, mllama, qwen_vl, smolvlm
from planaria.models.families.family import Family

FAMILIES: dict[str, Family] = {
    "llava": llava.FAMILY,
    "smolvlm": smolvlm.FAMILY,
    "idefics3": smolvlm.FAMILY,
    "qwen2_vl": qwen_vl.QWEN2,
    "qwen2_5_vl": qwen_vl.QWEN2_5,
    "qwen3_vl": qwen_vl.QWEN3,
    "mllama": mllama.FAMILY,
}
"""By Hugging Face ``model_type``. Other classes of image-text models go by :mod:`planaria.models.families.generic`."""

__all__ = ["FAMILIES", "Family"]
