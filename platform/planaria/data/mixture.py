"""Several data sets as one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from planaria.data.errors import DataError
from planaria.data.mixing import parts_of
from planaria.recipe import Dataset


@dataclass(frozen=True)
class Source:
    """One data set of a mixture."""

    name: str
    weight: float
    dataset: Dataset


class Mixture:
    """The sources one behind the other; see :class:`planaria.recipe.Dataset`. How they are mixed is the order's
    affair."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """
        Args:
            sources: at least one.

        Raises:
            DataError: weights that give no exact shares.
        """
        self.sources = tuple(sources)
        try:
            parts_of([source.weight for source in sources])
        except ValueError as error:
            raise DataError("data.mixture", str(error), "weights such as 0.7 and 0.3, or 7 and 3, are exact") from None
        self._ends = list(accumulate(len(source.dataset) for source in sources))

    @property
    def shards(self) -> list[Any]:
        """Those of all sources, in order."""
        return [shard for source in self.sources for shard in getattr(source.dataset, "shards", ())]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Sample ``index`` of all; raises what its data set raises, and ``IndexError`` outside of them."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self.sources[number].dataset[index - before]
