"""What every test takes for granted about its environment, also when pytest is called directly."""

from __future__ import annotations

import os

# Before Ray or torch are imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
