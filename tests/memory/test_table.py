"""Tables: offsets, parts of a snapshot that travel together, and the way over the wire."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import Case, cases

from planaria.memory.table import ALIGNMENT, Table


@given(cases())
def test_slices_are_aligned_and_do_not_overlap(case: Case) -> None:
    for table in case.tables():
        end = 0
        for entry in table.entries:
            assert entry.offset >= end and entry.offset % ALIGNMENT == 0
            end = entry.offset + entry.nbytes
        assert end <= table.nbytes < end + ALIGNMENT


@given(cases(), st.data())
def test_the_runs_of_a_choice_are_the_bytes_of_its_subset(case: Case, data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(case.tables()))
    chosen = [at for at in range(len(table.entries)) if data.draw(st.booleans())]
    source = os.urandom(table.nbytes)
    packed = b"".join(source[start:stop] for start, stop in table.runs(chosen))
    part = table.subset(chosen)
    assert len(packed) == part.nbytes
    for at, entry in zip(chosen, part.entries, strict=True):
        whole = table.entries[at]
        assert (entry.tensor, entry.box) == (whole.tensor, whole.box)
        expected = source[whole.offset : whole.offset + whole.nbytes]
        assert packed[entry.offset : entry.offset + entry.nbytes] == expected


@given(cases())
def test_runs_are_as_few_as_possible(case: Case) -> None:
    for table in case.tables():
        runs = table.runs(range(len(table.entries)))
        assert len(runs) <= 1
        scattered = table.runs([at for at, entry in enumerate(table.entries) if entry.primary])
        assert all(stop < start for (_, stop), (start, _) in pairwise(scattered))


@given(cases())
def test_a_table_survives_the_way_to_another_process(case: Case) -> None:
    for table in case.tables():
        for other in (Table.decode(table.encoded), pickle.loads(pickle.dumps(table))):
            assert other == table
            assert other.digest == table.digest


@given(cases())
def test_equal_digests_mean_equal_tables(case: Case) -> None:
    by_digest = {table.digest: table for table in case.tables()}
    for table in case.tables():
        assert by_digest[table.digest] == table
