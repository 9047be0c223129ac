"""`luce rm MODEL`: remove models that Luce has downloaded."""

from __future__ import annotations

import argparse

from luce.errors import UsageError
from luce.hub.removal import incomplete, remove, to_remove
from luce.hub.reporting import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODELs and --incomplete."""
    parser.add_argument("models", metavar="MODEL", nargs="*", default=[], help="as `luce models` lists it, or its path")
    parser.add_argument("--incomplete", action="store_true", help="what downloads have left that did not end")
    parser.set_defaults(behind_flags="models")


def run(arguments: argparse.Namespace) -> int:
    """Remove what is named; nothing if one of the names is wrong."""
    if not arguments.models and not arguments.incomplete:
        raise UsageError("luce rm: name a model; `luce models` lists them", param="model")
    models = {model.files: model for model in map(to_remove, arguments.models)}
    for model in models.values():
        remove(model)
        print(f"{model.name}: removed, {size_text(model.size)}")
    if arguments.incomplete:
        for path in incomplete():
            size = path.stat().st_size
            path.unlink()
            print(f"{path}: removed, {size_text(size)}")
    return 0
