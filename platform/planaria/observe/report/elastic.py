"""How the run changed shape: workers over time, generations, recoveries, and where the wall time went."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from planaria.observe.goodput import RECOVERY
from planaria.observe.report.accounts import total
from planaria.observe.report.bars import MOST_RECOVERIES, recovery_bars, share_bar
from planaria.observe.report.curves import over_time, workers
from planaria.observe.report.episodes import UNKNOWN, Span, by_phase
from planaria.observe.report.history import History
from planaria.observe.report.parts import Section, Table, count, figure
from planaria.observe.text import CLASS_NAMES, duration, goodput_rows

PHASES = (*RECOVERY, UNKNOWN)
MEANINGS = {
    "detect": "no sign of life any more, and nobody had noticed yet",
    "abort": "everybody left the broken generation",
    "plan": "a layout for who was left",
    "form": "process groups",
    "build": "the model in the new layout",
    "restore": "the state, from memory or a checkpoint",
    "first_step": "orders, the first batch, and the first step itself",
    UNKNOWN: "not divided in the record",
}
SOURCES = {"memory": "memory", "checkpoint": "a checkpoint", "start": "the initial weights"}


def shape(history: History, spans: Sequence[Span]) -> Section:
    """Workers over time, and the table of generations."""
    if not spans:
        return Section("layout", "Layout over time", ["No generation was formed."])
    edges, counts = workers(spans, history.began)
    wanted = history.job.get("elastic", {}).get("max_workers") if isinstance(history.job.get("elastic"), dict) else None
    most = float(wanted) if isinstance(wanted, int) else None
    sizes = sorted({span.workers for span in spans})
    says = f"{count(len(spans), 'generation')} of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
    says += f" workers, in {count(len({span.layout for span in spans}), 'layout')}."
    attempts = spans[-1].attempt
    if attempts > 1 or len(history.starts) > 1:
        says += f" The job was submitted {max(attempts, len(history.starts))} times."
    many = attempts > 1
    rows = []
    for at, span in enumerate(spans):
        after = spans[at + 1] if at + 1 < len(spans) else None
        held = duration(max(0.0, span.ended - span.began))
        took = "-" if span.recovery is None else duration(span.recovery.seconds)
        until = after.step if after is not None else _reached(history, span)
        did = f"{span.step + 1} to {until}" if until > span.step else "none"
        spare = f" +{span.spares} spare" if span.spares else ""
        name = f"{span.attempt}.{span.number}" if many else str(span.number)
        source = SOURCES.get(span.source, span.source)
        rows.append([name, span.layout, f"{span.workers}{spare}", span.cause, source, did, held, took])
    columns = ("generation", "layout", "workers", "why it began", "state from", "steps kept", "lasted", "recovery")
    table = Table("Generations", columns, rows, frozenset({2, 5, 6, 7}), folded=len(rows) > 12)
    draw = partial(over_time, edges=edges, values=counts, y_label="workers", most=most)
    legend = [("curve a", "workers in training")]
    legend += [("limit", f"at most {wanted}")] if most is not None else []
    return Section(
        "layout", "Layout over time", figures=figure("workers", "Workers", says, draw, legend), tables=[table]
    )


def recoveries(spans: Sequence[Span]) -> Section:
    """What every recovery and planned change took, phase by phase."""
    came = [span for span in spans if span.recovery is not None]
    faults = [span for span in came if span.fault]
    if not came:
        return Section("recoveries", "Recoveries", ["Nothing went wrong, and nothing was changed."])
    says = [_said("recovery from a fault", "recoveries from faults", faults)]
    says.append(_said("planned change", "planned changes", [span for span in came if not span.fault]))
    done = [span for span in came if span.recovery is not None and span.recovery.seconds is not None]
    shown = done
    note = "Each row is the time from the last sign of life, or the order to change, to the first new step."
    if len(done) > MOST_RECOVERIES:
        longest = sorted(done, key=lambda span: -(span.recovery.seconds or 0.0) if span.recovery else 0.0)
        shown = [span for span in done if span in longest[:MOST_RECOVERIES]]
        note += f" The {MOST_RECOVERIES} longest of {len(done)} are drawn; the table has all."
    used = [p for p in PHASES if any(span.recovery is not None and p in span.recovery.phases for span in shown)]
    legend = [(f"part {phase}", phase.replace("_", " ")) for phase in used]
    draw = partial(recovery_bars, spans=shown)
    figures = figure("recovery", "Recovery by phase", note, draw, legend, _all(came))
    phases = by_phase(span.recovery for span in came if span.recovery is not None)
    rows = [
        [name.replace("_", " "), MEANINGS[name], duration(middle), duration(most), duration(summed)]
        for name, middle, most, summed in phases
    ]
    columns = ("phase", "what happens", "median", "longest", "together")
    tables = [Table("Phases", columns, rows, frozenset({2, 3, 4}))] if rows else [_all(came)]
    return Section("recoveries", "Recoveries", [line for line in says if line], figures, tables)


def wall_time(history: History) -> Section:
    """Where the wall time went."""
    account = total(history.accounts, history.starts)
    if account is None or account["wall"] <= 0:
        return Section("goodput", "Goodput", ["No account of the wall time was written."])
    classes = {words: name for name, words in CLASS_NAMES.items()}
    rows = goodput_rows(account)
    parts = [(classes[name], name, seconds) for name, seconds, _ in rows]
    text = f"{100 * account['goodput']:.1f}% of {duration(account['wall'])} went into steps that count."
    says = [] if history.over else ["The run is not over: the account is as of its newest row."]
    table = Table(
        "Wall time by class",
        ("class", "took", "share", "of which"),
        [
            [name, duration(seconds), f"{100 * seconds / account['wall']:.1f}%", _detail(phases)]
            for name, seconds, phases in rows
        ],
        frozenset({1, 2}),
    )
    legend = [(f"part {name}", words) for name, words, _ in parts]
    figures = figure("goodput", "Wall time", text, partial(share_bar, parts=parts), legend)
    return Section("goodput", "Goodput", says, figures, [table])


def _detail(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{phase.replace('_', ' ')} {duration(took)}" for phase, took in phases.items())


def _reached(history: History, span: Span) -> int:
    mine = (history.steps.generation == span.number) & (history.steps["time"] >= span.began)
    return int(history.steps.step[mine].max()) + 1 if mine.any() else span.step


def _said(one: str, many: str, spans: Sequence[Span]) -> str:
    if not spans:
        return ""
    took = [s.recovery.seconds for s in spans if s.recovery is not None and s.recovery.seconds is not None]
    text = count(len(spans), one, many)
    if took:
        text += f": median {duration(statistics.median(took))}, longest {duration(max(took))}, together "
        text += duration(sum(took))
    if (left := len(spans) - len(took)) > 0:
        text += f"; {left} without a first step (another fault came, or the run ended)"
    return text + "."


def _all(spans: Sequence[Span]) -> Table:
    used = [p for p in PHASES if any(span.recovery is not None and p in span.recovery.phases for span in spans)]
    rows = []
    for span in spans:
        found = span.recovery
        if found is not None:
            cells = [duration(found.phases[phase]) if phase in found.phases else "-" for phase in used]
            rows.append([str(span.number), span.cause, duration(found.seconds), *cells])
    columns = ("generation", "cause", "all", *(phase.replace("_", " ") for phase in used))
    return Table("All recoveries and changes", columns, rows, frozenset(range(2, len(columns))), folded=True)
