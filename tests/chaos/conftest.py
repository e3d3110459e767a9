"""Real Ray nodes, random faults; and a check that nothing is left behind."""

from __future__ import annotations

import pytest
from tests.support.left_behind import nothing_left_behind, temp_folder

__all__ = ["nothing_left_behind", "temp_folder"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_chaos.py":
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.solo)
