"""The command line: `specformer <command>`, also as `python -m specformer <command>`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specformer import pipeline, settings
from specformer.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Profile = Annotated[str, typer.Argument(help="A folder of params/, such as cpu or smoke.")]


@app.command()
def profiles() -> None:
    """List the profiles."""
    for name in settings.profiles(pipeline.find_root()):
        print(name)


@app.command()
def check(profile: Profile) -> None:
    """Check a profile's settings, without running anything."""
    run = pipeline.open_run(profile)
    print(f"{profile}: the settings are right (base {run.settings.base.source})")


@app.command()
def plan(profile: Profile = "cpu") -> None:
    """Show the stages and what each took when it was last measured."""
    rows = pipeline.plan(profile)
    table = Table("stage", "minutes", "peak memory, GiB", "disk, GiB", title=f"profile {profile}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cost in rows:
        if cost is None:
            table.add_row(name, "not measured yet", "", "")
        else:
            memory, disk = f"{cost.peak_memory_gib:.1f}", f"{cost.disk_gib:.2f}"
            table.add_row(name, f"{cost.seconds / 60:.1f}", memory, disk)
    known = [cost for _, cost in rows if cost]
    if known:
        table.add_section()
        minutes = f"{sum(cost.seconds for cost in known) / 60:.0f}"
        memory = f"{max(cost.peak_memory_gib for cost in known):.1f}"
        table.add_row("all", minutes, memory, f"{sum(cost.disk_gib for cost in known):.2f}")
        table.caption = "as measured before; a stage that is up to date costs nothing"
    Console().print(table)


@app.command()
def stage(name: Annotated[str, typer.Argument(help="A stage of dvc.yaml.")], profile: Profile) -> None:
    """Run one stage of the pipeline; `dvc repro` calls this."""
    pipeline.run_stage(name, profile)


@app.command()
def notebooks() -> None:
    """Run the notebooks at their defaults and store their outputs in them."""
    folder = pipeline.find_root() / "notebooks"
    for name in pipeline.NOTEBOOKS.values():
        print(f"running {name}")
        pipeline.refresh_notebook(folder / f"{name}.ipynb")


def main() -> None:
    """Run the command line; errors for people end with status 2, Ctrl-C with 130."""
    # Progress must show as it comes, also through a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == 130:  # typer's answer to Ctrl-C
            print("interrupted: what was done is kept; run it again to go on", file=sys.stderr)
        raise
