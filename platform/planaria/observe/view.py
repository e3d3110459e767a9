"""What a person sees of a running job: a live panel on a terminal, plain log lines elsewhere, a closing summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planaria.observe import text as as_text

PLAIN_INTERVAL_S = 5.0
"""Log lines come this far apart while nothing happens."""
EVENT_INTERVAL_S = 1.0
"""Log lines are never closer than this."""
ROWS_SHOWN = 6
"""Generations in the live panel; the summary shows all."""
LOSSES_KEPT = 160
NARROW = 72
"""Below this width the table leaves out what matters least."""
TINY = 50
"""Below this one it shows numbers only."""
STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "stopping": "yellow",
    "recovering": "bold yellow",
}


class LiveView:
    """Shows the statuses that it is called with: ``ElasticTrainer(..., watch=view)`` inside ``with view:``.

    On a terminal it keeps one panel up to date and takes it away at the end. Elsewhere (a pipe, a file, a Ray
    job's log, ``TERM=dumb``) it writes one line every ``interval_s`` seconds or when something happened.
    """

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.console = console if console is not None else Console(highlight=False)
        self._interval, self._clock = interval_s, clock
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._seen_step = 0
        self._printed_at = -1e9
        self._printed_step = -1
        self._printed_event = ""
        self._printed_state = ""
        self._began = clock()
        self._live: Live | None = None

    @property
    def animated(self) -> bool:
        """Whether there is a terminal on which a panel can be redrawn."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def __enter__(self) -> LiveView:
        if self.animated:
            waiting = Text(f"{self.name}: starting", style="dim")
            self._live = Live(waiting, console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, status: Mapping[str, Any]) -> None:
        """Show ``status``, the controller's plain values with ``final``."""
        if status["loss"] is not None and status["step"] != self._seen_step:
            self._seen_step = status["step"]
            self._losses.append(status["loss"])
        if self._live is not None:
            self._live.update(
                status_panel(
                    self.name,
                    status,
                    list(self._losses),
                    elapsed_s=self._clock() - self._began,
                    # Room for the ^C that a terminal echoes: a wrapped line would shift what is redrawn.
                    width=self.console.width - 2,
                    plain=is_plain(self.console),
                ),
                refresh=True,
            )
        elif not self.animated:
            self._log(status)

    def _log(self, status: Mapping[str, Any]) -> None:
        since = self._clock() - self._printed_at
        news = status["last_event"] != self._printed_event or status["state"] != self._printed_state
        last_word = status.get("final") and (news or status["step"] != self._printed_step)
        if not (last_word or since >= self._interval or (news and since >= EVENT_INTERVAL_S)):
            return
        line = f"{time.strftime('%H:%M:%S')}  {status['state']:<10}  {as_text.progress_line(status)}"
        if status["last_event"] and status["last_event"] != self._printed_event:
            line += f"  | {status['last_event']}"
        self._printed_at, self._printed_step = self._clock(), status["step"]
        self._printed_event, self._printed_state = status["last_event"], status["state"]
        write_line(self.console, line)


def write_line(console: Console, line: str) -> None:
    """One line that is neither wrapped, coloured nor read as markup, and flushed at once."""
    console.print(Text(encodable(line, console.encoding)), soft_wrap=True)
    console.file.flush()


def is_plain(console: Console) -> bool:
    """Whether the terminal shows ASCII only."""
    return bool(console.options.ascii_only)


def as_cell(value: str, plain: bool) -> Text:
    """Text that is not read as markup, and that an ASCII terminal can show if ``plain``."""
    return Text(encodable(value, "ascii") if plain else value)


def overflow(plain: bool) -> Literal["crop", "ellipsis"]:
    """How a cell that is too long ends: the ellipsis is not in ASCII."""
    return "crop" if plain else "ellipsis"


def encodable(line: str, encoding: str) -> str:
    """The line, with what ``encoding`` cannot express replaced."""
    return line.encode(encoding, "replace").decode(encoding)


def status_panel(
    name: str,
    status: Mapping[str, Any],
    losses: Sequence[float],
    *,
    elapsed_s: float,
    width: int,
    plain: bool = False,
) -> RenderableType:
    """The live panel.

    Args:
        name: of the job.
        status: the controller's status.
        losses: recent losses, oldest first.
        elapsed_s: seconds since the view began.
        width: columns of the terminal.
        plain: draw with ASCII characters.
    """
    inner = max(20, width - 4)
    step, total, state = status["step"], status["total_steps"], status["state"]
    count = f" {step}/{total} {as_text.share(step, total)}"
    left = remaining_s(status)
    count += f", {as_text.duration(left)} left" if left is not None and inner >= NARROW else ""
    progress = Text(as_text.bar(step, total, max(5, inner - len(count)), plain=plain), style="green")
    progress.append(count, style="default")
    curve = as_text.sparkline(losses, max(8, min(40, inner - 24)), plain=plain)
    fields: list[tuple[str, str]] = [
        ("loss", f"{as_text.number(status['loss'])}  {curve}".rstrip()),
        ("speed", f"{as_text.quantity(status['tokens_per_s'])} tok/s, {status['step_s']:.2f} s/step"),
        ("layout", f"{status['layout'] or '-'}, generation {status['generation'] or '-'}"),
        ("workers", f"{status['workers']} active, {status['ready']} ready"),
        ("checkpoint", "none yet" if status["checkpoint_step"] is None else f"step {status['checkpoint_step']}"),
        ("bad samples", str(status["bad_samples"])),
        ("last event", status["last_event"] or "-"),
    ]
    goodput = as_text.goodput_text(status.get("goodput"))
    if goodput is not None:
        fields.insert(2, ("goodput", goodput))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, overflow="crop")
    grid.add_column(overflow=overflow(plain), no_wrap=True, max_width=max(1, inner - 14))
    for label, value in fields:
        grid.add_row(label, as_cell(value, plain))
    parts: list[RenderableType] = [progress, grid]
    rows = as_text.live_rows(status)
    if rows:
        parts.append(Text())
        hidden = len(rows) - ROWS_SHOWN
        if hidden > 0:
            parts.append(Text(f"({hidden} earlier generations not shown)", style="dim"))
        parts.append(generation_table(rows[-ROWS_SHOWN:], width=inner, plain=plain))
    title = Text.assemble((str(as_cell(name, plain)), "bold"), "  ", (state, STATE_STYLES.get(state, "cyan")))
    title.truncate(max(1, width - 6), overflow=overflow(plain))
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(as_text.duration(elapsed_s), style="dim"),
        subtitle_align="right",
        box=box.ASCII if plain else box.ROUNDED,
        border_style="dim",
        width=width,
    )


def remaining_s(status: Mapping[str, Any]) -> float | None:
    """A guess at the time to the last step; None before anything is known."""
    if not status["step_s"] or status.get("final"):
        return None
    return float((status["total_steps"] - status["step"]) * status["step_s"])


def generation_table(rows: Sequence[Mapping[str, Any]], *, width: int, plain: bool = False) -> Table:
    """One row per generation; a narrow one leaves out the workers, and shortens the cause or leaves it out, too."""
    narrow = width < NARROW
    hidden = {"workers", "why it began"} if width < TINY else {"workers"} if narrow else set()
    table = Table(
        box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", width=None
    )
    for name in as_text.COLUMNS:
        if name in hidden:
            continue
        right = name in ("gen", "workers", "steps", "recovery")
        flexible = name == "why it began"
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=True,
            overflow=overflow(plain),
            max_width=(14 if narrow else max(20, width - 58)) if flexible else None,
        )
    for cells in as_text.generation_cells(rows, plain=plain):
        shown = (cell for name, cell in zip(as_text.COLUMNS, cells, strict=True) if name not in hidden)
        table.add_row(*(as_cell(cell, plain) for cell in shown))
    return table


def goodput_table(account: Mapping[str, float], *, plain: bool = False) -> Table:
    """Where the wall time went: one row per class, the losses in order, recovery with its phases."""
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("wall time", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("of which", overflow="fold")
    for name, seconds, phases in as_text.goodput_rows(account):
        detail = ", ".join(f"{phase.replace('_', ' ')} {as_text.duration(took)}" for phase, took in phases.items())
        table.add_row(name, as_text.duration(seconds), f"{100 * seconds / account['wall']:.1f}%", detail)
    table.add_row("all", as_text.duration(account["wall"]), "100%", "", style="dim")
    return table


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) pairs of the closing summary, in order."""
    lines = [("outcome", summary["state"])]
    if summary.get("error"):
        lines.append(("reason", str(summary["error"])))
    lines.append(("steps", str(summary["steps"])))
    lines.append(("final loss", as_text.number(summary["loss"])))
    score = as_text.score_text(summary.get("evaluation"))
    if score:
        lines.append(("held out", score))
    lines.append(("duration", as_text.duration(summary["seconds"])))
    goodput = as_text.goodput_text(summary.get("goodput"))
    if goodput is not None:
        lines.append(("goodput", goodput))
    step = summary["checkpoint_step"]
    lines.append(("checkpoint", "none" if step is None else f"step {step}"))
    if summary["bad_samples"]:
        lines.append(("bad samples", f"{summary['bad_samples']}, each replaced (events.jsonl names them)"))
    held = as_text.quarantine_text(summary.get("nodes", ()))
    if held is not None:
        lines.append(("quarantined", held))
    lines.append(("run directory", str(summary["run_dir"])))
    return lines


def print_summary(console: Console, name: str, summary: Mapping[str, Any]) -> None:
    """The table of generations and what came out of the job."""
    plain = is_plain(console)
    console.print()
    if summary["generations"]:
        console.print(generation_table(summary["generations"], width=console.width, plain=plain))
        console.print()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, overflow="crop")
    grid.add_column(overflow="fold")
    for label, value in summary_lines(summary):
        style = STATE_STYLES.get(value, "") if label == "outcome" else ""
        grid.add_row(label, Text(encodable(value, console.encoding), style=style))
    console.print(Text(encodable(name, console.encoding), style="bold"))
    console.print(grid)
