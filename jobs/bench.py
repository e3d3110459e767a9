"""Run one benchmark: python jobs/bench.py step --quick

As a job of a cluster: ray job submit --working-dir . --entrypoint-num-cpus 2 -- python jobs/bench.py step --quick
Each benchmark starts processes, or a Ray cluster, of its own on the node that it runs on.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from _entry import find_package

FOLDER = Path(__file__).resolve().parent / "bench"


def main() -> None:
    """Run the benchmark that the first argument names."""
    names = sorted(path.stem for path in FOLDER.glob("[a-z]*.py") if path.stem != "render")
    wanted = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if wanted not in names:
        print(f"{(__doc__ or '').strip()}\n\nBenchmarks: {', '.join(names)}; NAME --help shows its options.")
        sys.exit(0 if wanted in ("-h", "--help") else 2)
    find_package()
    sys.argv = [f"jobs/bench.py {wanted}", *sys.argv[2:]]
    # Where a script's own folder would be: the benchmarks import their neighbours.
    sys.path[0] = str(FOLDER)
    runpy.run_path(str(FOLDER / f"{wanted}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
