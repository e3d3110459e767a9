"""``planaria checkpoint export`` and ``import``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.commands.checkpoint import pick, place_of
from planaria.commands.failures import FAILED, UsageError, complain
from planaria.config import JobConfig, load, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from planaria.state.checkpoint import Checkpoint


def export(
    run_dir: str,
    to: str,
    step: int | None,
    dtype: str,
    force: bool,
    config: str | None,
    overrides: Sequence[str],
    max_file_gb: float,
    adapters: bool = False,
) -> int:
    """Write the model of a checkpoint as a Hugging Face directory; 1 if the checkpoint is damaged."""
    from planaria.exchange.adapters import export_adapters
    from planaria.exchange.contents import Contents
    from planaria.exchange.exporting import export
    from planaria.state.errors import CheckpointDamaged
    from planaria.state.vault import Vault

    if overrides and config is None:
        raise UsageError("--set goes with --config; without it, the job stored in the checkpoint is taken")
    vault = Vault(place_of(run_dir), on_problem=lambda _: None)
    number = pick(vault, run_dir, step)
    try:
        with vault.at(number) as checkpoint:
            contents = Contents(_job(checkpoint, config, overrides))
            if adapters:
                print(f"step {number}: adapters at {export_adapters(checkpoint, contents, to, force=force)}")
                return 0
            total = sum(1 for name in checkpoint.tensors if name.startswith("model/"))
            with _progress(f"exporting step {number}", total) as advance:
                done = export(
                    checkpoint,
                    contents,
                    to,
                    dtype,
                    force=force,
                    max_file_bytes=int(max_file_gb * 10**9),
                    progress=advance,
                )
    except CheckpointDamaged as error:
        complain(f"{error}\nnothing was exported. {_older(vault.list('shallow'), number)}")
        return FAILED
    from planaria.observe.text import quantity

    files = f"{done.files} file{'s' if done.files > 1 else ''}"
    print(f"step {done.step}: {done.tensors} tensors, {quantity(done.nbytes)} in {files} at {done.path}")
    return 0


def import_(
    source: str,
    config: str,
    overrides: Sequence[str],
    to: str | None,
    step: int | None,
    fresh_optimizer: bool,
    ignore: Sequence[str],
) -> int:
    """Make weights of elsewhere the first checkpoint of a run."""
    from planaria.exchange.bring import bring
    from planaria.observe.text import quantity

    job = placed(load(config, overrides), to)
    with _progress("importing", None) as advance:
        done = bring(Path(source), job, step, fresh_optimizer=fresh_optimizer, ignore=ignore, progress=advance)
    for note in done.notes:
        print(f"note: {note}")
    print(f"step {done.step}: {done.tensors} tensors, {quantity(done.nbytes)}, optimizer: {done.updates} updates")
    print(f"at {done.path}")
    where = f" --set storage={job.storage} --set name={job.name}" if to is not None else ""
    print(f"go on with: planaria train {config}{where}")
    return 0


def placed(job: JobConfig, to: str | None) -> JobConfig:
    """``job`` with absolute paths, its run directory being ``to`` if that is given."""
    from planaria.paths import absolute_paths

    if to is not None:
        folder = Path(to).expanduser().absolute()
        tree = job.model_dump(mode="json") | {"storage": str(folder.parent), "name": folder.name}
        job = parse(tree, "--to", {"name": f"--to {to}", "storage": f"--to {to}"})
    return absolute_paths(job)


def _job(checkpoint: Checkpoint, config: str | None, overrides: Sequence[str]) -> JobConfig:
    from planaria.paths import absolute_paths

    if config is not None:
        return absolute_paths(load(config, overrides))
    if "job" not in checkpoint.meta:
        raise UsageError(f"{checkpoint.path}: does not say which job it belongs to; give the job file with --config")
    return parse(checkpoint.meta["job"], f"{checkpoint.path} (the job stored there; another: --config)")


def _older(found: Sequence[object], step: int) -> str:
    sound = [info.step for info in found if info.intact and info.step != step]  # type: ignore[attr-defined]
    older = max((number for number in sound if number < step), default=max(sound, default=None))
    if older is None:
        return "The run holds no other checkpoint that looks intact."
    return f"Step {older} looks intact; to export that one, add --step {older}"


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} tensors"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)
