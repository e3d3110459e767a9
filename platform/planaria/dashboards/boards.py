"""The dashboards there are, in the order in which a reader needs them."""

from __future__ import annotations

from planaria.dashboards import checkpoints, data, efficiency, overview, recovery, training
from planaria.dashboards.board import Board

BOARDS: tuple[Board, ...] = (
    overview.BOARD,
    training.BOARD,
    recovery.BOARD,
    data.BOARD,
    checkpoints.BOARD,
    efficiency.BOARD,
)


def file_name(board: Board) -> str:
    """Name of the file that ``board`` is written to."""
    return board.uid.removeprefix("planaria-") + ".json"
