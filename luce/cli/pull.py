"""`luce pull MODEL`: download a model, or its newest commit, and print its path."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from luce.cli import progress
from luce.cli.arguments import add_model
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.errors import ModelError, NotDownloadedError
from luce.hub.lookup import resolve_model
from luce.hub.variants import DeviceMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the path of the model file on standard output, and progress on standard error."""
    path = fetch(arguments.model, resolve({}), newest=True)
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if path.is_dir():
        raise ModelError(f"{path}: is a directory")
    print(path)
    return 0


def fetch(name: str, config: Config | None, *, newest: bool = False) -> Path:
    """The file of a model, downloaded first if needed, with a progress bar on standard error. A default quant fits the
    devices of the settings, if there are any; `newest` is as in resolve_model."""
    try:
        return resolve_model(name, fetch=False, newest=newest)
    except NotDownloadedError:
        with progress.shown(f"looking for {name}", unit="bytes", lines=True) as wait:
            memory = None if config is None else partial(_memory, config)
            return resolve_model(name, progress=wait, memory=memory, newest=newest)


def _memory(config: Config) -> DeviceMemory | None:
    # Needs the devices' libraries, which `luce pull` of a path or of a quant does without.
    from luce.assembly import device_memory

    return device_memory(config)
