"""References inside a JSON schema: to places, and to anchors."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from luce.text.schema_limits import bounded_int


class Target(NamedTuple):
    """What a reference leads to."""

    #: JSON pointer of its place, empty for the root
    pointer: str
    schema: Any


class References:
    """Follows the references of one schema to places in the same document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        #: the pointer of each `$anchor`; None: not looked for yet
        self._anchors: dict[str, str] | None = None

    def find(self, reference: str) -> Target | None:
        """The target of a reference: `#`, `#` and a JSON pointer (RFC 6901), or `#` and an anchor.

        None if it leads nowhere, or to another document.
        """
        if not reference.startswith("#"):
            return None
        pointer: str | None = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            pointer = self._anchor(pointer)
        found = None if pointer is None else _at(self._root, pointer)
        return None if pointer is None or found is None else Target(pointer, found)

    def _anchor(self, name: str) -> str | None:
        """The pointer of the schema with an `$anchor`."""
        if self._anchors is None:
            self._anchors = {}
            waiting: list[tuple[Any, str]] = [(self._root, "")]
            while waiting:
                value, pointer = waiting.pop()
                if isinstance(value, dict):
                    if isinstance(value.get("$anchor"), str):
                        self._anchors.setdefault(value["$anchor"], pointer)
                    escaped = {key: key.replace("~", "~0").replace("/", "~1") for key in value}
                    waiting += [(inner, f"{pointer}/{escaped[key]}") for key, inner in value.items()]
                elif isinstance(value, list):
                    waiting += [(inner, f"{pointer}/{i}") for i, inner in enumerate(value)]
        return self._anchors.get(name)


def _at(root: Any, pointer: str) -> Any:
    """What a JSON pointer leads to; None if nothing."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isascii() and key.isdigit():
            place = bounded_int(key, len(root))
            root = root[place] if place < len(root) else None
        else:
            return None
    return root
