"""``python -m _checkpoint RANK WORLD ADDRESS STORE``: one rank process of a pool."""

from __future__ import annotations

import os
import sys

from _checkpoint.pool import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:], key=bytes.fromhex(os.environ.pop("BENCH_POOL_KEY")))
