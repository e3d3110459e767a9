"""A look at a data set before it is trained on: what it is, what its samples are like, and every problem found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planaria.config import DataConfig
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File
from planaria.data.formats import FileDataset, Format, files_of, open_as
from planaria.data.rows import TableDataset
from planaria.data.sample import Sample
from planaria.recipe import BadSample

SPREAD = (0.0, 0.05, 0.5, 0.95, 1.0)
"""Quantiles by which a spread is told."""
_VARYING = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|\S*[/\\]\S+|\d+")


@dataclass
class Problem:
    """One kind of trouble."""

    where: str
    """File, or key of the first sample that has it."""
    what: str
    """As it was told there."""
    count: int = 1


@dataclass
class Findings:
    """What was found. Figures are about the samples that were checked and are sound."""

    path: str
    format: Format | None = None
    files: list[tuple[File, int]] = field(default_factory=list)
    """Each with its number of samples."""
    samples: int = 0
    checked: int = 0
    bad: int = 0
    columns: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, kind, and what it is used for, if anything."""
    errors: list[Problem] = field(default_factory=list)
    """Files that cannot be used."""
    skipped: list[Problem] = field(default_factory=list)
    """Samples that would be skipped, by reason; the most frequent first."""
    spreads: dict[str, list[int]] = field(default_factory=dict)
    """Of each measure, one value per sample or picture."""
    turns: Counter[int] = field(default_factory=Counter)
    """Samples by how many questions they have."""
    pictures: Counter[int] = field(default_factory=Counter)
    """Samples by how many pictures they have."""
    first: list[Sample] = field(default_factory=list)
    """Sound samples to show."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file, _ in self.files)

    def usable(self, max_bad_fraction: float) -> bool:
        """Whether a run with this limit on damaged samples could use it all."""
        return not self.errors and self.samples > 0 and self.bad <= max_bad_fraction * self.checked


def quantiles(values: Sequence[int]) -> list[int]:
    """The values at :data:`SPREAD`, of at least one value."""
    ordered = sorted(values)
    return [ordered[round(share * (len(ordered) - 1))] for share in SPREAD]


def inspect(
    path: str,
    config: DataConfig,
    check: int | None,
    show: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Open the files at ``path`` and read samples.

    Args:
        path: what ``data.path`` would be.
        config: how to read it.
        check: samples that are read, evenly spaced over the set; None: all.
        show: sound samples that are kept.
        progress: called with samples read and to read.
    """
    found = Findings(path)
    try:
        dataset = _opened(path, config, found)
        if dataset is not None:
            _look(dataset, check, show, found, progress)
            dataset.close()
    except DataUnreachable as error:  # nothing else can be said of it
        found.errors.append(Problem(path, str(error)))
    return found


def _look(
    dataset: FileDataset, check: int | None, show: int, found: Findings, progress: Callable[[int, int], None]
) -> None:
    found.samples = len(dataset)
    counts: Counter[File] = Counter()
    for shard in dataset.shards:  # of which one file may hold several
        counts[shard.file] += shard.samples
    found.files = list(counts.items())
    if isinstance(dataset, TableDataset):
        chosen = dataset.columns
        roles = {name: role for role, name in vars(chosen).items() if name is not None}
        found.columns = [(name, kind, roles.get(name, "")) for name, kind in dataset.rows.kinds.items()]
    total = found.samples if check is None else min(check, found.samples)
    reasons: dict[str, Problem] = {}
    for done in range(total):
        _read(dataset, done * found.samples // total, found, reasons, show)
        found.checked = done + 1
        progress(done + 1, total)
    found.skipped = sorted(reasons.values(), key=lambda problem: -problem.count)
    found.bad = sum(problem.count for problem in found.skipped)


def _opened(path: str, config: DataConfig, found: Findings) -> FileDataset | None:
    try:
        files, found.format = files_of(path, config)
    except DataError as error:
        found.errors.append(_problem(error))
        return None
    try:
        return open_as(found.format, files, path, config)
    except DataError as error:
        if found.format in ("hf", "mds") or len(files) == 1:  # one file describes the others
            found.errors.append(_problem(error))
            return None
    sound: list[File] = []
    for file in files:
        try:
            open_as(found.format, [file], file.path, config).close()
            sound.append(file)
        except DataError as error:
            if "no samples" in error.what:
                sound.append(file)  # no fault beside others
            else:
                found.errors.append(_problem(error))
    try:
        return open_as(found.format, sound, path, config) if sound else None
    except DataError as error:  # files that do not go together
        found.errors.append(_problem(error))
        return None


def _problem(error: DataError) -> Problem:
    return Problem(error.where, f"{error.what}; {error.remedy}")


def _read(dataset: FileDataset, index: int, found: Findings, reasons: dict[str, Problem], show: int) -> None:
    try:
        sample = dataset[index]
    except BadSample as error:
        _count(reasons, error.key, error.cause)
        return
    except DataUnreachable:
        raise
    except (OSError, DataError) as error:
        _count(reasons, f"sample {index}", str(error))
        return
    found.turns[len(sample.conversation)] += 1
    found.pictures[len(sample.images)] += 1
    for image in sample.images:
        found.spreads.setdefault("picture width, px", []).append(image.shape[1])
        found.spreads.setdefault("picture height, px", []).append(image.shape[0])
    questions = sum(len(piece.strip()) for turn in sample.conversation for piece in turn.prompt)
    found.spreads.setdefault("question, characters", []).append(questions)
    answers = sum(len(turn.answer) for turn in sample.conversation)
    found.spreads.setdefault("answer, characters", []).append(answers)
    if len(found.first) < show:
        found.first.append(sample)


def _count(reasons: dict[str, Problem], where: str, what: str) -> None:
    """Reasons that differ in names and numbers only are one."""
    problem = reasons.setdefault(_VARYING.sub("_", what), Problem(where, what, 0))
    problem.count += 1
