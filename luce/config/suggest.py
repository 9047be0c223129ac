"""What a user may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """`; did you mean NAME?` with the known name that is nearest, or nothing if none is near. `spell`: how it
    is shown."""
    found = difflib.get_close_matches(name, tuple(known), n=1, cutoff=0.6)
    return f"; did you mean {spell(found[0])}?" if found else ""
