"""The Console for tables on standard output."""

from __future__ import annotations

import sys

from rich.console import Console

#: wider than any table
_UNLIMITED = 10_000


def output() -> Console:
    """As wide as the terminal; elsewhere, such as in a pipe, tables take the width that they need."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)
