"""Codecs: a flat tensor of floats to fewer bytes and back. Pure arithmetic.

Encoded pieces can be put one behind the other and decoded together where each is a multiple of ``block`` long.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

UNIT_BF16 = 2.0**-8
"""Largest relative error of rounding to bfloat16, which keeps 8 bits (to nearest, ties to even)."""
LEVELS = 127
"""Largest code of int8; -128 is not used, so that codes are symmetric."""


class Codec(Protocol):
    """Encodes floats; what it loses is bounded as its class says."""

    block: int
    """Elements that are encoded together; lengths must be multiples of it."""

    def encode(self, x_N: Tensor) -> Tensor:
        """N floats, as bytes."""
        ...

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """The floats of :meth:`encode`, in dtype and on the device of ``like``."""
        ...


class Bf16:
    """Rounds to bfloat16: half the bytes of float32.

    ``|x' - x| <= 2^-8 |x|`` in its normal range, which is that of float32; below ``2^-126`` the error is at most
    ``2^-134``.
    """

    block = 1

    def encode(self, x_N: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        return x_N.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """See :meth:`Codec.decode`."""
        return data.view(torch.bfloat16).to(like.dtype)


class Int8:
    """Rounds to 255 levels between minus and plus the greatest magnitude of each block of 256.

    A block is sent as a float32 scale and 256 codes: 260 bytes for 1024 of float32. ``|x' - x|`` is at most half a
    level, ``max|x| / 254``, of the block (and a rounding error of float32). A block with a value that is not finite
    comes back with one, so that the step is skipped.
    """

    block = 256

    def encode(self, x_N: Tensor) -> Tensor:
        """See :meth:`Codec.encode`."""
        x_BK = x_N.view(-1, self.block)
        scale_B1 = (x_BK.abs().amax(1, keepdim=True) / LEVELS).to(torch.float32)
        # By what is sent, and not by what it was rounded from. A block of zeros has the scale zero.
        step_B1 = torch.where(scale_B1 == 0, torch.ones_like(scale_B1), scale_B1).to(x_N.dtype)
        code_BK = (x_BK / step_B1).round_().clamp_(-LEVELS, LEVELS).nan_to_num_(0.0).to(torch.int8)
        return torch.cat([scale_B1.view(torch.uint8), code_BK.view(torch.uint8)], dim=1).view(-1)

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """See :meth:`Codec.decode`."""
        data_BW = data.view(-1, 4 + self.block)
        scale_B1 = data_BW[:, :4].contiguous().view(torch.float32).to(like.dtype)
        return (data_BW[:, 4:].view(torch.int8).to(like.dtype) * scale_B1).view(-1)
