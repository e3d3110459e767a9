"""What the workers say, turned into records and the live status."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from planaria.config import JobConfig
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.status import Status, generation_row
from planaria.observe.goodput import Account
from planaria.observe.ranks import RankLog
from planaria.observe.record import RunRecord
from planaria.observe.text import score_text

Message = dict[str, Any]
BAD_FLOOR = 1000
"""The share of bad samples is judged as if at least this many had been read."""
MOST_REASONS = 10
"""Reasons that the end of a run for damaged samples lists."""
GOODPUT_EVERY_S = 10.0
"""``goodput.jsonl`` gets a row this often while steps are done."""


class Chronicle:
    """Takes the workers' messages in; called from the controller's thread only."""

    def __init__(
        self,
        job: JobConfig,
        record: RunRecord,
        status: Status,
        generations: list[Generation],
        begun: Callable[[], None],
    ) -> None:
        self._job, self._record, self._status = job, record, status
        self._generations, self._begun = generations, begun
        self._bad: dict[tuple[int, int], str] = {}
        self.evaluation: dict[str, Any] | None = None
        self.account = Account(time.monotonic())
        """Where the wall time goes. States, faults and beginnings of generations are told by the controller."""
        self._accounted_at = -GOODPUT_EVERY_S
        self._ranks = RankLog(time.monotonic())

    @property
    def bad_samples(self) -> int:
        """Damaged samples met so far, each counted once however often its step is redone."""
        return len(self._bad)

    def take(self, ident: str, message: Message) -> None:
        """One message of a worker.

        Raises:
            JobFailed: more samples are damaged than the job allows.
        """
        # Once the next generation is formed, a late word of an earlier one could only pass for news of this one.
        if not self._generations or message.get("gen") != len(self._generations):
            return
        generation = self._generations[-1]
        if ident in generation.lost:
            return  # given up as silent or hung, and awake again
        generation.last_word_at = now = time.monotonic()
        first_rank = message["rank"] == 0
        match message["t"]:
            case "ready":
                for phase, seconds in message["phases"].items():
                    generation.phases[phase] = max(generation.phases.get(phase, 0.0), seconds)
                self.account.ready(generation.phases)
            case "phase" if first_rank:
                self.account.evaluation(message["phase"] == "evaluate", now)
            case "share":
                self._share(generation, message)
            case "step":
                self._step(generation, message)
            case "checkpoint_skipped" if first_rank:
                text = f"no checkpoint of step {message['step']}: the one before is still being written"
                self._tell("checkpoint_skipped", text, message)
            case "eval" if first_rank:
                self.account.evaluation(False, now)
                self.evaluation = {k: v for k, v in message.items() if k not in ("t", "gen", "rank")}
                self._tell("evaluation", f"held out: {score_text(self.evaluation)}", message)

    def _share(self, generation: Generation, message: Message) -> None:
        for bad in message["bad"]:
            self._bad_sample(bad)
        self._ranks.samples(message["rank"], len(message["ids"]))
        layout, rank = generation.plan.layout, message["rank"]
        if layout.coords(rank)["tp"] == 0:
            generation.shares.note(message["step"], layout.dp_rank(rank), message["ids"], message["tokens"])
            self._account_for(generation, generation.step)

    def _step(self, generation: Generation, message: Message) -> None:
        rank = message["rank"]
        generation.reports[rank] = generation.reports.get(rank, {}) | message  # some readings are not in every report
        self._ranks.step(generation.number, message["step"], rank, message["compute_s"], message["data_wait_s"])
        if rank != 0:
            if message["step"] > generation.recorded:
                generation.unheard[message["step"]] = message
            return
        first = generation.first_step_at is None
        generation.note_step(message)
        generation.unheard.pop(message["step"], None)
        if first:
            self._first_step(generation)
        self._status.note(message, generation)
        if message["step"] > generation.recorded:  # else it was said again to a controller that has returned
            self._account_step(message)
            self._record_step(generation, message)
        self._account_for(generation, message["step"] + 1, message["step_s"])

    def settle(self, generation: Generation, done: int) -> None:
        """The generation is over, and its state after ``done`` steps is what counts: steps whose first rank, or whose
        consumers, died before they could report them are done all the same."""
        for step in sorted(step for step in generation.unheard if step < done):
            if step > generation.recorded:
                self._record_step(generation, generation.unheard[step])
        self._account_for(generation, done, last=True)
        self._write_ranks(generation, time.monotonic())

    def _account_for(self, generation: Generation, done: int, step_s: float | None = None, last: bool = False) -> None:
        """Write down what the steps before ``done`` consumed, in order, each once all its consumers have told."""
        start, dp = max(generation.start_step, generation.ledgered + 1), generation.plan.layout.dp
        for step in range(start, done):
            if not last and not generation.shares.complete(step, dp):
                return
            consumed = generation.shares.take(step, dp)
            generation.ledgered = step
            if consumed.missing and not consumed.ids:
                continue  # of a step that was done before this life of the controller began to hear
            whole = self._job.ledger == "ids"
            self._record.ledger(
                step, generation.number, consumed.ids, whole=whole, missing=consumed.missing, tokens=consumed.tokens
            )
            if step_s is not None:
                self._status.note_tokens(consumed.tokens, step_s)

    def _record_step(self, generation: Generation, message: Message) -> None:
        step = generation.recorded = message["step"]
        row = {k: v for k, v in message.items() if k not in ("t", "rank")}
        self._record.metrics(row | {"layout": str(generation.plan.layout)})
        if message["skipped"]:
            scale = f" at loss scale {message['loss_scale']:g}" if message["overflow"] else ""
            cause = f"gradient overflowed{scale}" if message["overflow"] else "gradient not finite"
            fields = {"step": step, "overflow": message["overflow"]}
            self._record.event("skipped", f"step {step}: {cause}, step skipped", **fields)

    def returned(self, sizes: Mapping[str, int]) -> None:
        """The controller has come back: workers say again what may not have been heard. Know what was.

        Args:
            sizes: where this run's rows begin in the records.
        """
        numbers = {generation.number: generation for generation in self._generations}
        for row in self._record.rows("metrics", sizes["metrics"]):
            if (generation := numbers.get(row["gen"])) is not None:
                generation.recorded = max(generation.recorded, row["step"])
                generation.step = max(generation.step, row["step"] + 1)
        for row in self._record.rows("ledger", sizes["ledger"]):
            if (generation := numbers.get(row["gen"])) is not None:
                generation.ledgered = max(generation.ledgered, row["step"])
        for row in self._record.rows("events", sizes["events"]):
            if row["event"] == "bad_sample":
                self._bad[row["position"], row["attempt"]] = row["cause"]
            elif row["event"] == "evaluation":
                self.evaluation = {k: v for k, v in row.items() if k not in ("time", "event", "text", "gen")}
        self._status.bad_samples = len(self._bad)
        if accounts := self._record.rows("goodput", sizes.get("goodput", 0)):
            training = bool(self._generations) and self._generations[-1].first_step_at is not None
            self.account.resume(accounts[-1], time.time() - accounts[-1]["time"], training)

    def _account_step(self, message: Message) -> None:
        now = time.monotonic()
        self.account.step(
            message["step"],
            message["step_s"],
            message["data_wait_s"],
            message["snapshot_s"],
            now,
            counts=not message["skipped"],
        )
        self._status.goodput = self.account.view(now)
        if now - self._accounted_at >= GOODPUT_EVERY_S:
            self._accounted_at = now
            self._record.goodput(self._status.goodput)
        if self._ranks.due(now):
            self._write_ranks(self._generations[-1], now)

    def _write_ranks(self, generation: Generation, now: float) -> None:
        if (row := self._ranks.take(generation.number, now)) is not None:
            self._record.ranks(row)

    def _first_step(self, generation: Generation) -> None:
        self._begun()
        seconds = generation.recovery_s
        if seconds is not None:
            # The rest of the time: the orders' way to the workers, the first batch, and the step itself.
            generation.phases["first_step"] = max(0.0, seconds - sum(generation.phases.values()))
            self._record.event(
                "recovered",
                f"generation {generation.number}: first step {seconds:.2f} s after the "
                f"{'change' if generation.planned else 'fault'}",
                gen=generation.number,
                seconds=seconds,
                phases=generation.phases,
            )
        self._status.generations = [generation_row(item) for item in self._generations]

    def _bad_sample(self, bad: Message) -> None:
        key = (bad["position"], bad["attempt"])
        if key in self._bad:
            return
        self._bad[key] = bad["cause"]
        self._status.bad_samples = len(self._bad)
        self._record.event("bad_sample", f"sample {bad['key']} replaced: {bad['cause']}", **bad)
        read = (max(generation.step for generation in self._generations) + 1) * self._job.train.global_batch
        share = self._job.data.max_bad_fraction
        if len(self._bad) > share * max(read, BAD_FLOOR):
            raise JobFailed(
                f"{len(self._bad)} of about {read} samples are damaged, more than data.max_bad_fraction={share:g} "
                f"allows; last: {bad['key']}: {bad['cause']}. Repair the data (events.jsonl names every damaged "
                f"sample) or raise data.max_bad_fraction. By reason:\n{_reasons(self._bad.values())}"
            )

    def _tell(self, kind: str, text: str, message: Message) -> None:
        self._record.event(kind, text, **{key: value for key, value in message.items() if key not in ("t", "rank")})


def _reasons(causes: Iterable[str]) -> str:
    """How many samples each cause has spoilt, the most frequent first; numbers that differ from sample to sample are
    left out."""
    counts = Counter(re.sub(r"(?<![\w-])(0x[0-9a-fA-F]+|\d+)", "N", cause) for cause in causes)
    return "\n".join(f"{count:>8,}  {cause}" for cause, count in counts.most_common(MOST_REASONS))
