"""What of the workers' words counts."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import pytest

from planaria.config import parse
from planaria.control.chronicle import Chronicle
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.status import Status
from planaria.layout import Layout
from planaria.objectives.evaluate import Scores
from planaria.objectives.retrieval import RetrievalScores
from planaria.observe.record import RunRecord, finite, read_lines
from planaria.planner.plan import Plan

JOB = parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 9, "global_batch": 2}})


def step(gen: int, number: int, rank: int = 0) -> dict[str, Any]:
    return {
        "t": "step",
        "gen": gen,
        "rank": rank,
        "step": number,
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "targets": 3,
        "skipped": False,
        "overflow": False,
        "loss_scale": None,
        "data_wait_s": 0.0,
        "step_s": 0.1,
        "compute_s": 0.25,
        "snapshot_s": 0.0,
    }


def share(gen: int, number: int, rank: int) -> dict[str, Any]:
    return {"t": "share", "gen": gen, "rank": rank, "step": number, "ids": [10 * number + rank], "tokens": 5, "bad": []}


class Book:
    def __init__(self, folder: Any) -> None:
        self.generations: list[Generation] = []
        self.begun: list[int] = []
        self.status = Status(total_steps=9)
        self.folder = folder
        self.chronicle = Chronicle(
            JOB, RunRecord(folder), self.status, self.generations, lambda: self.begun.append(len(self.generations))
        )

    def form(self) -> None:
        plan = Plan(Layout(dp_shard=2), ("worker-0", "worker-1"), (), "")
        self.generations.append(Generation(len(self.generations) + 1, plan, "start", True, 0))

    def rows(self, name: str) -> list[tuple[int, int]]:
        return [(row["gen"], row["step"]) for row in read_lines(self.folder / f"{name}.jsonl")]


@pytest.fixture
def book(tmp_path) -> Book:
    found = Book(tmp_path)
    found.form()
    return found


def test_a_step_is_recorded_once_it_is_done_and_all_ranks_have_told_their_shares(book: Book) -> None:
    book.chronicle.take("worker-0", share(1, 0, rank=0))
    book.chronicle.take("worker-0", step(1, 0, rank=0))
    assert book.rows("ledger") == []
    book.chronicle.take("worker-1", share(1, 0, rank=1))
    assert book.rows("ledger") == [(1, 0)]
    assert book.rows("metrics") == [(1, 0)]
    assert book.begun == [1]
    assert read_lines(book.folder / "ledger.jsonl")[0]["ids"] == [0, 1]
    book.chronicle.take("worker-1", share(1, 1, rank=1))
    book.chronicle.take("worker-0", share(1, 1, rank=0))
    assert book.rows("ledger") == [(1, 0)], "step 1 is not done yet"


def test_a_step_that_counts_though_its_first_rank_died_before_the_report_is_on_record(book: Book) -> None:
    for number in (0, 1):
        for rank in (0, 1):
            book.chronicle.take(f"worker-{rank}", share(1, number, rank))
    book.chronicle.take("worker-0", step(1, 0))
    book.chronicle.take("worker-1", step(1, 0, rank=1))
    book.chronicle.take("worker-1", step(1, 1, rank=1))
    book.chronicle.settle(book.generations[0], 2)
    assert book.rows("metrics") == book.rows("ledger") == [(1, 0), (1, 1)]


def test_a_share_that_was_never_told_is_marked_as_missing(book: Book) -> None:
    book.chronicle.take("worker-0", share(1, 0, rank=0))
    book.chronicle.take("worker-0", step(1, 0))
    book.chronicle.take("worker-0", share(1, 1, rank=0))  # this step is redone
    book.chronicle.settle(book.generations[0], 1)
    (row,) = read_lines(book.folder / "ledger.jsonl")
    assert (row["step"], row["ids"], row["missing"]) == (0, [0], [1])


def test_what_is_said_again_to_a_controller_that_returned_is_not_recorded_twice(book: Book) -> None:
    sizes = RunRecord(book.folder).sizes()
    said = [share(1, 0, 0), share(1, 0, 1), step(1, 0), share(1, 1, 0), share(1, 1, 1), step(1, 1)]
    for message in said[:4]:
        book.chronicle.take(f"worker-{message['rank']}", message)
    book.generations[:] = []
    book.form()
    later = Chronicle(JOB, RunRecord(book.folder), Status(total_steps=9), book.generations, lambda: None)
    later.returned(sizes)
    for message in said:
        later.take(f"worker-{message['rank']}", message)
    assert book.rows("metrics") == book.rows("ledger") == [(1, 0), (1, 1)]


def test_a_late_word_of_an_earlier_generation_is_no_news_of_this_one(book: Book) -> None:
    book.form()
    book.chronicle.take("worker-0", step(1, 5))
    assert book.begun == []
    assert book.status.step == 0
    assert book.rows("metrics") == []


def test_a_member_that_was_given_up_is_not_heard(book: Book) -> None:
    book.generations[0].lost["worker-0"] = "silent for 20 s"
    book.chronicle.take("worker-0", step(1, 5))
    assert book.rows("metrics") == []


def test_steps_evaluation_and_skipped_steps_reach_the_account(book: Book) -> None:
    book.chronicle.take("worker-0", {"t": "ready", "gen": 1, "rank": 0, "step": 0, "phases": {"form": 0.1}})
    book.chronicle.take("worker-0", step(1, 0))
    book.chronicle.take("worker-1", step(1, 0, rank=1))
    productive = book.status.goodput["productive"]
    assert 0 < productive <= book.status.goodput["wall"]
    assert [row["productive"] for row in read_lines(book.folder / "goodput.jsonl")] == [round(productive, 4)]
    book.chronicle.take("worker-0", step(1, 1) | {"skipped": True})
    assert book.status.goodput["productive"] == productive
    phase = {"t": "phase", "gen": 1, "rank": 0, "step": 2, "phase": "evaluate"}
    book.chronicle.take("worker-0", phase)
    book.chronicle.take("worker-1", phase | {"rank": 1, "phase": "data"})
    time.sleep(0.01)
    scores = {"samples": 4, "exact_match": 1.0, "questions": 4, "accuracy": 1.0, "chance": 0.5}
    book.chronicle.take("worker-0", {"t": "eval", "gen": 1, "rank": 0, "step": 2, **scores})
    spent = book.chronicle.account.view(time.monotonic() + 100)
    assert 0.01 <= spent["evaluation"] < 50 < 99 < spent["under_way"]
    assert book.chronicle.evaluation == {"step": 2, **scores}


def test_whatever_was_scored_is_told(book: Book) -> None:
    told = {
        "chance is 50.0%": Scores(4, 1.0, 4, 1.0, 0.5),
        "references reproduced": Scores(4, 0.5, 0, 0.0, 0.0),
        "not a number of 4 questions": Scores(4, 1.0, 4, math.nan, 0.5),
        "recall at 1 / 5 / 10 among 20 pairs": RetrievalScores(20, *(0.5,) * 6),
    }
    for scores in told.values():
        book.chronicle.take("worker-0", {"t": "eval", "gen": 1, "rank": 0, "step": 2, **finite(asdict(scores))})
    texts = [row["text"] for row in read_lines(book.folder / "events.jsonl") if row["event"] == "evaluation"]
    for text, part in zip(texts, told, strict=True):
        assert text.startswith("held out: ") and part in text


def test_a_skipped_step_says_whether_a_loss_scale_was_too_large(book: Book) -> None:
    book.chronicle.take("worker-0", step(1, 0) | {"skipped": True, "overflow": True, "loss_scale": 65536.0})
    book.chronicle.take("worker-0", step(1, 1) | {"skipped": True})
    overflow, fault = (row for row in read_lines(book.folder / "events.jsonl") if row["event"] == "skipped")
    assert (overflow["step"], overflow["overflow"]) == (0, True) and "loss scale 65536" in overflow["text"]
    assert (fault["step"], fault["overflow"]) == (1, False) and "not finite" in fault["text"]


def test_the_account_survives_the_controller(book: Book) -> None:
    sizes = RunRecord(book.folder).sizes()
    book.chronicle.take("worker-0", step(1, 0))
    spent = book.status.goodput
    later = Chronicle(JOB, RunRecord(book.folder), Status(total_steps=9), book.generations, lambda: None)
    later.returned(sizes)
    again = later.account.view(time.monotonic())
    assert again["productive"] == pytest.approx(spent["productive"], abs=1e-3)
    assert again["startup"] == pytest.approx(spent["startup"], abs=1e-3)
    assert again["under_way"] + again["other"] > 0


def test_every_ranks_work_is_on_record_in_whatever_order_it_is_told(book: Book) -> None:
    for number in range(3):
        for rank in (0, 1):
            book.chronicle.take(f"worker-{rank}", share(1, number, rank))
        for rank in (0, 1):  # the first rank tells first, so that the step is recorded when the other one does
            book.chronicle.take(f"worker-{rank}", step(1, number, rank))
    book.chronicle.settle(book.generations[0], 3)
    (row,) = read_lines(book.folder / "ranks.jsonl")
    assert row["gen"] == 1 and row["ranks"] == {"0": [3, 3, 0.75, 0.0, 3], "1": [3, 3, 0.75, 0.0, 3]}


def test_too_many_damaged_samples_end_the_job_with_a_table_of_reasons(book: Book) -> None:
    causes = [
        "the caption is not UTF-8 (byte 0xbd at 0)",
        "the caption is not UTF-8 (byte 0xfe at 7)",
        "there is no image",
    ]
    bad = [{"position": n, "index": n, "attempt": 0, "key": f"a.tar/{n}", "cause": c} for n, c in enumerate(causes)]
    with pytest.raises(JobFailed, match=r"a\.tar/0") as failure:
        book.chronicle.take("worker-0", share(1, 0, rank=0) | {"bad": [bad[2], bad[0]]})
    assert str(failure.value).splitlines()[1:] == [
        "       1  there is no image",
        "       1  the caption is not UTF-8 (byte N at N)",
    ]
