"""The Console for tables on standard output, and tables for narrow terminals."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

#: wider than any table
_UNLIMITED = 10_000


def output() -> Console:
    """As wide as the terminal; elsewhere, such as in a pipe, tables take the width that they need."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)


def folded(table: Table) -> Table:
    """The same table; a word that is wider than its column, such as a path, goes on in the next line instead of being
    cut."""
    for column in table.columns:
        column.overflow = "fold"
    return table
