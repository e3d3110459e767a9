"""``planaria report``: the record of a run as one HTML file."""

from __future__ import annotations

import time
from pathlib import Path

from planaria.commands.failures import UsageError

FILES = ("events.jsonl", "metrics.jsonl", "summary.json", "job.json")


def report(run_dir: str, output: str | None) -> int:
    """Read the run's folder and write its report.

    Args:
        run_dir: the job's storage and name.
        output: file to write; None: ``report.html`` in the run's folder; ``-``: standard output.

    Raises:
        UsageError: this is no run directory, or the file cannot be written.
    """
    from planaria.observe.report.history import read_history
    from planaria.observe.report.page import page

    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: no such folder; give a run directory, i.e. the job's storage and name")
    if not any((folder / name).is_file() for name in FILES):
        raise UsageError(f"{run_dir}: holds none of {', '.join(FILES)}, so it is not a run directory")
    text = page(read_history(folder, time.time()))
    if output == "-":
        print(text)
        return 0
    target = folder / "report.html" if output is None else Path(output)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {target}: cannot be written ({error.strerror}); choose another file") from None
    print(f"{target}: {len(text.encode()) / 1024:.0f} KiB")
    return 0
