"""How evenly the samples of a global batch are dealt to ranks: at random, and by cost."""

from __future__ import annotations

import random

from planaria.data.balance import assign, utilisation

SIDES, PATCH = (224, 336, 512, 768, 1024), 14
BATCHES, SIZE, RANKS = 100, 64, 8


def figures() -> dict[str, float]:
    """Mean utilisation (mean over maximum of the ranks' tokens) over batches of pictures of mixed resolutions and text:
    a pure computation on drawn lengths, the same on every machine."""
    draw = random.Random(0)
    ours = chance = 0.0
    for _ in range(BATCHES):
        costs = [(draw.choice(SIDES) // PATCH) ** 2 + draw.randint(10, 200) for _ in range(SIZE)]
        shuffled = draw.sample(range(SIZE), SIZE)
        ours += utilisation(costs, assign(costs, RANKS))
        chance += utilisation(costs, [shuffled[rank::RANKS] for rank in range(RANKS)])
    return {"balance_utilisation": ours / BATCHES, "balance_utilisation_random": chance / BATCHES}
