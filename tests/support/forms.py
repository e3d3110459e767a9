"""Tests whose short form runs in CI, and those that wait for somebody who has the time."""

from __future__ import annotations

import os

import pytest

long_form = pytest.mark.skipif(not os.environ.get("PLANARIA_LONG"), reason="takes long: make soak runs it")
