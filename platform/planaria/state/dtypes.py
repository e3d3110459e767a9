"""Safetensors dtype codes and their torch dtypes."""

from __future__ import annotations

import torch

from planaria.state.errors import CheckpointError

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in TORCH.items()}


def code_of(dtype: torch.dtype) -> str:
    """The safetensors code of ``dtype``."""
    if dtype not in _CODES:
        raise CheckpointError(f"{dtype} cannot be stored; convert it to one of {', '.join(map(str, _CODES))}")
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Inverse of :func:`code_of`."""
    if code not in TORCH:
        raise CheckpointError(f"unknown dtype code {code!r}; known are {', '.join(TORCH)}")
    return TORCH[code]
