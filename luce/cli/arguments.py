"""Arguments that several verbs take, and the Config of a parsed command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from luce.config.flags import add_flags
from luce.config.resolve import resolve
from luce.config.settings import FIELDS, GROUPS, Config

#: what names a model
MODEL_HELP = "a GGUF file: its path, its URL, ORG/REPO[:QUANT] of the Hugging Face hub, or an alias (smollm2)"
#: groups of the settings that every verb with a loaded model takes
LOADED = tuple(group for group in GROUPS if group not in ("sampling", "reasoning", "server", "cluster", "log"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_reply(parser: argparse.ArgumentParser) -> None:
    """-o, -n and --seed, which luce.cli.options.parse_flags reads."""
    parser.add_argument(
        "-o", "--option", metavar="K=V", action="append", default=[], help="sampling value (repeatable)"
    )
    parser.add_argument(
        "-n", "--max-tokens", metavar="N", help="longest reply in tokens (default: until the context is full)"
    )
    parser.add_argument("--seed", metavar="N", help="seed of the random choices (default: random)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_settings(parser: argparse.ArgumentParser, groups: Iterable[str]) -> None:
    """The flags of these groups of settings. Verbs that load a model also take --dry-run."""
    if "limits" in groups:
        parser.add_argument("--dry-run", action="store_true", help="print the placement of the layers; load nothing")
    add_flags(parser, groups)


def settings(arguments: argparse.Namespace) -> Config:
    """The Config of a parsed command line. Raises UsageError that holds every problem found."""
    return resolve(given(arguments))


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags of a parsed command line give."""
    names = {*FIELDS, "config"}
    return {k: v for k, v in vars(arguments).items() if k in names}
