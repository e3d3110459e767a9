"""``python -m _peers CONTENDER WORK_JSON``: one run of one contender in a process of its own."""

from __future__ import annotations

import importlib
import json
import sys

from _peers.work import Work

if __name__ == "__main__":
    importlib.import_module(f"_peers.{sys.argv[1]}").run(Work(**json.loads(sys.argv[2])))
