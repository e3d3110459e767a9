"""``python -m planaria.dashboards DIR``: write all dashboards; ``--grid`` shows how their panels lie instead."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.dashboards.boards import BOARDS, file_name
from planaria.dashboards.write import as_json, grid


def main() -> None:
    """Write the files, and remove those of dashboards that are no more."""
    asked = argparse.ArgumentParser(prog="python -m planaria.dashboards", description=__doc__)
    asked.add_argument("folder", type=Path, nargs="?", default=Path("dashboards/grafana/dashboards"))
    asked.add_argument("--grid", action="store_true", help="draw the places of the panels")
    options = asked.parse_args()
    if options.grid:
        print("\n\n".join(grid(board) for board in BOARDS))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    made = {file_name(board): as_json(board) for board in BOARDS}
    for old in options.folder.glob("*.json"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (options.folder / name).write_text(text, encoding="utf-8")
        print(options.folder / name)


if __name__ == "__main__":
    main()
