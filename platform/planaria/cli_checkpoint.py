"""The ``planaria checkpoint`` commands. Thin, like :mod:`planaria.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from planaria.cli_options import HELP, Set, VaultDir, finish

checkpoints = typer.Typer(
    help="List, show, verify, export and import checkpoints.", no_args_is_help=True, context_settings=HELP
)


@checkpoints.command("ls")
def checkpoint_ls(run_dir: VaultDir) -> None:
    """List the checkpoints of a run, newest first, with layout, size and state.

    Example: planaria checkpoint ls runs/scenes
    """

    def action() -> int:
        from planaria.commands.checkpoint import ls

        return ls(run_dir)

    finish(action)


@checkpoints.command("show")
def checkpoint_show(
    run_dir: VaultDir,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Checkpoint of this step. Default: the newest.")
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor", metavar="PATTERN", help="Only tensors whose name contains this, or matches this glob."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Show the tensors of a checkpoint, totals by kind, and files.

    Example: planaria checkpoint show runs/scenes --tensor 'model/*lm_head*'
    """

    def action() -> int:
        from planaria.commands.checkpoint_show import show

        return show(run_dir, step, tensor, as_json)

    finish(action)


@checkpoints.command("verify")
def checkpoint_verify(
    run_dir: VaultDir,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only the checkpoint of this step.")] = None,
) -> None:
    """Read back every slice and compare it with its checksum.

    Names file and slice of any damage; the exit code is then 1.

    Example: planaria checkpoint verify runs/scenes --step 200
    """

    def action() -> int:
        from planaria.commands.checkpoint import verify

        return verify(run_dir, step)

    finish(action)


@checkpoints.command("export")
def checkpoint_export(
    run_dir: VaultDir,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory to make.", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Checkpoint of this step. Default: the newest.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="fp32|bf16|fp16", help="Dtype of the weights.")] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="Replace an exported model that is there.")] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="CONFIG", help="Job file, in place of the job stored in the checkpoint."),
    ] = None,
    set_: Set = None,
    max_file_gb: Annotated[
        float, typer.Option("--max-file-gb", min=0.000001, help="Largest weights file, in 10^9 bytes.")
    ] = 5.0,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the adapters (model.lora), as peft saves them; else merged.")
    ] = False,
) -> None:
    """Write the model as a Hugging Face directory that from_pretrained loads.

    Checks every slice as it is read. A damaged checkpoint is an error (exit code 1): no other step is taken for it.

    Example: planaria checkpoint export runs/scenes --to scenes-hf --dtype bf16
    """

    def action() -> int:
        from planaria.commands.exchange import export

        return export(run_dir, to, step, dtype, force, config, set_ or [], max_file_gb, adapters)

    finish(action)


@checkpoints.command("import")
def checkpoint_import(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face directory, or one saved by torch.distributed.checkpoint.",
            show_default=False,
        ),
    ],
    config: Annotated[
        str, typer.Option("--config", metavar="CONFIG", help="Job file (YAML) that shall go on.", show_default=False)
    ],
    set_: Set = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="RUN_DIR", help="Default: the job's storage and name.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Steps that count as done. Default: what SOURCE says; 0 for Hugging Face."),
    ] = None,
    fresh_optimizer: Annotated[
        bool, typer.Option("--fresh-optimizer", help="Leave the optimizer's state out.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="Pass over such tensors of SOURCE; may be repeated."),
    ] = None,
) -> None:
    """Make weights of elsewhere the first checkpoint of a run, from which planaria train goes on.

    Takes no code from SOURCE. All that is missing, has no place or another shape is listed, and nothing is written.

    Example: planaria checkpoint import torchtitan/step-500 --config job.yaml
    """

    def action() -> int:
        from planaria.commands.exchange import import_

        return import_(source, config, set_ or [], to, step, fresh_optimizer, ignore or [])

    finish(action)
