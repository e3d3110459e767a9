"""What every test takes for granted about its environment, also when pytest is called directly."""

from __future__ import annotations

import os

# Before Ray or torch are imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from hypothesis import settings

# Machines that share their cores stall now and then; how long an example takes says nothing.
settings.register_profile("planaria", deadline=None)
settings.load_profile("planaria")
