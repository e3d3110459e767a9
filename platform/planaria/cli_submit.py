"""``planaria submit`` and ``planaria stop``. Thin, like :mod:`planaria.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from planaria.cli_options import Config, Set, finish

Dashboard = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="URL",
        help="Dashboard of the Ray cluster, e.g. http://127.0.0.1:8265. "
        "Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or a cluster running on this machine.",
    ),
]


def submit(
    config: Config,
    set_: Set = None,
    address: Dashboard = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until the job has ended.")] = True,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Print the job's log while waiting.")] = True,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Environment of the job; may be repeated. Not for secrets."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Read the job file here first; not where the cluster fills its variables."
        ),
    ] = True,
    python: Annotated[str, typer.Option("--python", metavar="PATH", help="Interpreter on the head node.")] = "python",
    submission_id: Annotated[
        str | None, typer.Option("--submission-id", metavar="ID", help="Default: the run's name and a random part.")
    ] = None,
) -> None:
    """Train a job on a Ray cluster through its job API: planaria train, run there.

    Sends this version of planaria and the job file, nothing else, and installs nothing. Paths in the job file must be
    absolute and seen by all nodes. Variables that it mentions go along as they are set here.

    Exit code: the job's own; 143 if it was stopped, 2 wrong input. Ctrl-C ends the watching, not the job.

    Example: planaria submit job.yaml --address http://127.0.0.1:8265 --set train.steps=200
    """

    def action() -> int:
        from planaria.commands.submit import submit

        return submit(
            config,
            set_ or [],
            address,
            wait=wait,
            follow=follow,
            check=check,
            variables=env or [],
            python=python,
            ident=submission_id,
        )

    finish(action)


def stop(
    submission: Annotated[
        str, typer.Argument(metavar="SUBMISSION", help="Id that planaria submit printed.", show_default=False)
    ],
    address: Dashboard = None,
    wait_s: Annotated[float, typer.Option("--wait-s", min=1, help="Longest wait for the end, seconds.")] = 180.0,
) -> None:
    """End a submitted job at its next step, with a checkpoint, from which the same submission goes on.

    Prints the job's last lines, which name the checkpoint. Exit code 1 if the job has not ended in time.

    Example: planaria stop scenes-1a2b3c4d --address http://127.0.0.1:8265
    """

    def action() -> int:
        from planaria.commands.submit import stop

        return stop(submission, address, wait_s)

    finish(action)
