"""Real Ray nodes, real faults; and a check that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.left_behind import nothing_left_behind, temp_folder

__all__ = ["nothing_left_behind", "temp_folder"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cluster" in str(item.path):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def emoji() -> Path:
    """The folder of real image-caption pairs beside the repository."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "emoji"
    if not folder.is_dir():
        pytest.skip(f"no real image-caption pairs at {folder.name} beside the repository")
    return folder
