"""The figures at the top: what somebody wants to know who has ten seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from planaria.observe.report.accounts import lost_s, total
from planaria.observe.report.episodes import Span
from planaria.observe.report.history import History
from planaria.observe.report.training import counted
from planaria.observe.text import duration, number, quantity, score_text

QUIET_S = 60.0
"""A run that is not over and has written nothing for this long may have crashed."""


def headline(history: History, spans: Sequence[Span]) -> list[tuple[str, str, str]]:
    """(what, value, note) triples."""
    steps = counted(history)
    done = int(steps.step[-1]) + 1 if len(steps) else 0
    train = history.job.get("train") if isinstance(history.job.get("train"), dict) else {}
    assert isinstance(train, dict)
    wanted, batch = train.get("steps"), train.get("global_batch")
    found: list[tuple[str, str, str]] = []
    share = f"of {wanted:,} ({100 * done / wanted:.0f}%)" if isinstance(wanted, int) and wanted > 0 else ""
    found.append(("steps", f"{done:,}", share))
    if isinstance(batch, int):
        found.append(("samples", quantity(float(len(steps) * batch)), f"{batch} per step"))
    known = steps["loss"][np.isfinite(steps["loss"])]
    first = f"from {number(float(known[0]))}" if len(known) else ""
    found.append(("final loss" if history.over else "loss", number(float(known[-1])) if len(known) else "-", first))
    account = total(history.accounts, history.starts)
    if account is not None:
        found.append(("goodput", f"{100 * account['goodput']:.1f}%", f"of {duration(account['wall'])}"))
        found.append(("time not productive", duration(lost_s(account)), "start-up and waiting included"))
    came = [span for span in spans if span.fault]
    took = [span.recovery.seconds for span in came if span.recovery and span.recovery.seconds is not None]
    found.append(("recoveries", str(len(came)), f"longest {duration(max(took))}" if took else ""))
    newest = history.kind("checkpoint")[-1:]
    found.append(("newest checkpoint", f"step {newest[0].get('step', '-')}" if newest else "none", ""))
    return found


def verdict(history: History) -> tuple[str, str]:
    """(the state in a word, what a reader should make of it)."""
    if not history.events and not len(history.steps):
        return "unknown", "The folder holds no record of a run."
    summary = history.summary or {}
    if history.state == "failed":
        told = history.kind("failed")[-1:]
        reason = summary.get("error") or (told[0].get("text") if told else None)
        return "failed", str(reason or "The reason is not on record.")
    if history.over:
        said = [str(row.get("text", "")) for row in history.kind("stopped")[-1:] if history.state == "stopped"]
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # of another version, or written by hand
            if score := score_text(summary.get("evaluation")):
                said.append(f"held out: {score}")
        return history.state, "; ".join(said)
    quiet = history.now - history.ended
    if quiet > QUIET_S:
        return history.state, f"Nothing was written for {duration(quiet)}: it has crashed or hangs."
    return history.state, f"The run goes on; its last line was written {duration(max(0.0, quiet))} before this report."
