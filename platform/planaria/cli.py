"""The ``planaria`` command. Thin: each command is a function of :mod:`planaria.commands`, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from planaria.cli_checkpoint import checkpoints
from planaria.cli_data import data
from planaria.cli_options import HELP, Config, RunDir, Set, finish
from planaria.cli_submit import stop, submit

app = typer.Typer(
    name="planaria",
    help="Elastic, fault-tolerant training of vision-language models on Ray. Cut it anywhere, and it regrows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
app.add_typer(checkpoints, name="checkpoint")
app.add_typer(data, name="data")


@dataclass(frozen=True)
class Entry:
    """How the program was started."""

    package: str | None = None
    """Folder of this package where it is not installed: it is then sent to the workers."""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from planaria import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.obj is None:
        context.obj = Entry()


@app.command()
def demo(
    keep: Annotated[
        str | None,
        typer.Option("--keep", metavar="PATH", help="Keep the run directory there; without it, it is removed."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=40, help="Optimizer steps, for a quick look.")] = None,
) -> None:
    """Train a small model on four local Ray nodes, kill one, go on with three, take in a new one.

    Needs no GPU, no data and no cluster; takes a few minutes.

    Example: planaria demo --keep runs
    """

    def action() -> int:
        from planaria.demo import run_demo

        return run_demo(keep, steps)

    finish(action)


@app.command()
def train(
    context: typer.Context,
    config: Config,
    set_: Set = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="Ray cluster to join; local starts a new one here. "
            "Default: RAY_ADDRESS, a cluster running on this machine, or a new local one.",
        ),
    ] = None,
) -> None:
    """Train a job to its end on a Ray cluster, through the loss and arrival of nodes.

    The same command goes on from the newest intact checkpoint. Ctrl-C ends the run at the next step, with a
    checkpoint; a second one at once. Exit code: 0 finished, 1 failed, 2 wrong input, 130 Ctrl-C, 143 SIGTERM.

    Example: planaria train jobs/configs/scenes.yaml --set optim.lr=3e-4 --set train.steps=200
    """
    package = context.obj.package if isinstance(context.obj, Entry) else None

    def action() -> int:
        from planaria.commands.train import train

        return train(config, set_ or [], address, package)

    finish(action)


app.command()(submit)
app.command()(stop)


@app.command()
def plan(
    config: Config,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="NODES",
            help="Cluster: 4x2 is four nodes of two workers, 2,2,1 lists them. "
            "Default: the smallest that carries elastic.max_workers.",
        ),
    ] = None,
    set_: Set = None,
) -> None:
    """Show the layout for a cluster, and for what is left when its nodes are lost one by one.

    Starts nothing.

    Example: planaria plan jobs/configs/scenes.yaml --nodes 4x2 --set layout.tp=2
    """

    def action() -> int:
        from planaria.commands.plan import plan

        return plan(config, set_ or [], nodes)

    finish(action)


@app.command()
def status(
    run_dir: RunDir,
    events: Annotated[int, typer.Option("--events", "-n", min=0, help="How many of the last events to show.")] = 8,
    picture: Annotated[str | None, typer.Option(help="Also draw the run to this SVG file.")] = None,
) -> None:
    """Show how a run stands: running, finished, stopped, failed or crashed.

    Reads the files of the run directory only, so it works from any machine that sees them.

    Example: planaria status runs/scenes --picture run.svg
    """

    def action() -> int:
        from planaria.commands.status import status

        return status(run_dir, events, picture)

    finish(action)


@app.command()
def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory, or name of a job in the cluster. Default: the only job that runs there.",
            show_default=False,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="Ray cluster. Default: RAY_ADDRESS, or one on this machine."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between looks.")] = 1.0,
) -> None:
    """Watch a running job: progress, loss, goodput, layout, workers, checkpoints, and what happened last.

    Reads the run directory, or asks the job's controller in the cluster. It only looks: leaving (Ctrl-C) ends nothing.

    Example: planaria top runs/scenes
    """

    def action() -> int:
        from planaria.commands.top import top

        return top(run, address, once, interval)

    finish(action)


@app.command()
def report(
    run_dir: RunDir,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to. Default: report.html there; -: to stdout."),
    ] = None,
) -> None:
    """Write what became of a run as one HTML page: loss, layouts, recoveries, goodput, checkpoints, data, events.

    Reads the files of the run directory only; the page needs no network. Works while the run goes on, too.

    Example: planaria report runs/scenes -o scenes.html
    """

    def action() -> int:
        from planaria.commands.report import report

        return report(run_dir, output)

    finish(action)


@app.command()
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN_DIR", help="Job file, or run directory.", show_default=False)
    ],
    set_: Set = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Checkpoint of this step. Default: the newest intact one.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Held-out samples. Default: the job's evaluate.samples.")
    ] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="How many answers to show.")] = 5,
) -> None:
    """Score a checkpoint on held-out samples, beside chance, and show some answers.

    Runs in this one process; needs no cluster.

    Example: planaria evaluate runs/scenes --examples 10
    """

    def action() -> int:
        from planaria.commands.evaluate import evaluate

        return evaluate(target, set_ or [], step, samples, examples)

    finish(action)


@app.command()
def parity(
    families: Annotated[
        str | None, typer.Option("--families", metavar="PATTERNS", help="Families, e.g. 'llava*,qwen*'. Default: all.")
    ] = None,
    layouts: Annotated[
        str | None, typer.Option("--layouts", metavar="PATTERNS", help="Layouts, e.g. 'tp*;fsdp 2*'. Default: all.")
    ] = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write the table as a page.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write every number found.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the cells that passed in the --json file.")] = False,
) -> None:
    """Compare families of models on every layout with one process in float64: gradients, and parameters after steps.

    Starts up to eight processes on this machine; needs no cluster. Exit code 1 if a cell fails.

    Example: planaria parity --families 'llava*' --layouts 'tp 2*;fsdp 2*'
    """

    def action() -> int:
        from planaria.commands.parity import parity

        return parity(families, layouts, markdown, json_file, resume)

    finish(action)


def main() -> None:
    """Entry of the console script."""
    app()


def run_command(name: str, arguments: list[str], program: str, entry: Entry) -> None:
    """Run one command (``train``, ``checkpoint export``) as a program of its own, as the scripts under ``jobs/`` do."""
    command: Any = typer.main.get_command(app)
    for part in name.split():
        command = command.get_command(typer.Context(command), part)
    command.main(args=arguments, prog_name=program, obj=entry)


if __name__ == "__main__":
    main()
