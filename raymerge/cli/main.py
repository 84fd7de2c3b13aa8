"""The entry point. Only what the help needs is imported here; verbs import the library when they run."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from typing import Annotated

import typer

from raymerge.cli.adapters import extract_lora
from raymerge.cli.cluster import make_cluster_app
from raymerge.cli.completion import completion, prepare, schema
from raymerge.cli.convert import convert
from raymerge.cli.diff import diff
from raymerge.cli.doctor import doctor
from raymerge.cli.evaluate import calibrate, evaluate
from raymerge.cli.init import init
from raymerge.cli.inspect import inspect
from raymerge.cli.mergekit import Verbs, command_class
from raymerge.cli.messages import guarded
from raymerge.cli.methods import methods
from raymerge.cli.plan import plan
from raymerge.cli.push import push
from raymerge.cli.report import report
from raymerge.cli.runs import logs, status, stop
from raymerge.cli.search import search
from raymerge.cli.submit import submit
from raymerge.cli.transplant import transplant
from raymerge.cli.verify import verify


def main() -> None:
    # Called last of all: without it the interpreter looks through all that torch has made, for half a second.
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file name or a terminal of another encoding must not stop a merge.
            stream.reconfigure(errors="replace")
    prepare(os.environ)
    # Verbs exit by themselves; what returns is the help or the version.
    raise SystemExit(guarded(lambda: make_app()(prog_name="raymerge") or 0))


def make_app() -> typer.Typer:
    app = typer.Typer(
        cls=Verbs,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_raymerge)
    for verb in (
        init,
        doctor,
        submit,
        search,
        status,
        logs,
        stop,
        convert,
        transplant,
        plan,
        report,
        verify,
        push,
        diff,
        evaluate,
        calibrate,
        inspect,
        methods,
        extract_lora,
        schema,
        completion,
    ):
        app.command(cls=command_class(verb.__name__))(verb)
    app.add_typer(make_cluster_app(), name="cluster")
    return app


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"raymerge {version('raymerge')}")
        raise typer.Exit


def _raymerge(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Merge large language models: verified checkpoints, bounded memory, the same bytes at any scale."""
