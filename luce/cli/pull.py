"""`luce pull MODEL`: download a model if needed, and print its path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from luce.cli.arguments import add_model
from luce.errors import ModelError
from luce.hub import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the path of the model file on standard output, and progress on standard error."""
    path = fetch(arguments.model)
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    print(path)
    return 0


def fetch(name: str) -> Path:
    """The file of a model, downloaded first if needed, with a progress bar on standard error."""
    try:
        return resolve_model(name, download=False)
    except ModelError:
        print(f"luce: {name} is not on this machine yet; downloading it into the user's cache", file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(f"downloading {name}", total=None)

            def unpacking(done: int, total: int) -> None:
                progress.update(task, description=f"unpacking {name}", completed=done, total=total)

            return resolve_model(name, progress=unpacking)
