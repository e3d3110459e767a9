"""``docs/metrics.md`` is in step with the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.config import MetricsConfig
from planaria.metrics.document import renewed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_is_in_step_with_the_catalogue() -> None:
    assert renewed(PAGE) == PAGE, "python -m planaria.metrics.document docs/metrics.md"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs"):
        renewed("# Metrics\n")


def test_the_page_names_the_port() -> None:
    assert f"port: {MetricsConfig().port} " in PAGE
