"""What an import reads from."""

from __future__ import annotations

from typing import Protocol

import torch


class Source(Protocol):
    """Named tensors, read one at a time.

    Attributes:
        label: the place, for messages.
    """

    label: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its name there."""
        ...

    def read(self, key: str) -> torch.Tensor:
        """One whole tensor on the CPU, in the dtype that it has there.

        Raises:
            ExchangeError: it cannot be read; names the file.
        """
        ...
