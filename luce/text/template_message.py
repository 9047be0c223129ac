"""What goes to the template's process and back: a JSON value as one line, in parts.

One call of the json module on a text of 32 MiB holds the interpreter lock for up to 1.6 s, and streams of other clients
stand still. So large values are cut, and each part is a JSON document of its own; between two of them other threads
run. The documents of a line are divided by a byte that JSON never has: the name that marks a cut value, the
value, and the parts.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

_DIVIDER = b"\x1e"
#: the most of one document, in characters; a value without characters counts as _SMALL
_MOST, _SMALL = 1 << 18, 8


def pack(value: Any) -> bytes:
    """The line of a JSON value, with its end. Raises TypeError, ValueError and RecursionError as json.dumps does."""
    # Nobody can know the mark beforehand, so no value looks like a cut one.
    mark, parts = secrets.token_hex(16), list[bytes]()
    rest, _ = _cut(value, mark, parts)
    return _DIVIDER.join((_document(mark), _document(rest), *parts)) + b"\n"


def unpack(line: bytes) -> Any:
    """The value of a line. Raises ValueError if it is none."""
    mark, rest, *parts = line.split(_DIVIDER)
    return _joined(_read(rest), _read(mark), [_read(part) for part in parts])


def _document(value: Any) -> bytes:
    # Half of a surrogate pair is a character of a JSON text too.
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _read(document: bytes) -> Any:
    return json.loads(document.decode(errors="surrogatepass"))


def _cut(value: Any, mark: str, parts: list[bytes]) -> tuple[Any, int]:
    """The value with its large parts cut out, and the size of what is left."""
    if isinstance(value, str):
        if len(value) <= _MOST:
            return value, len(value) + _SMALL
        return _moved([value[at : at + _MOST] for at in range(0, len(value), _MOST)], mark, parts)
    if isinstance(value, dict):
        items = {name: _cut(inner, mark, parts) for name, inner in value.items()}
        sizes = [len(str(name)) + size for name, (_, size) in items.items()]
        if sum(sizes) <= _MOST:
            return {name: inner for name, (inner, _) in items.items()}, sum(sizes) + _SMALL
        pairs = [(name, inner) for name, (inner, _) in items.items()]
        return _moved([dict(pairs[group]) for group in _groups(sizes)], mark, parts)
    if isinstance(value, list | tuple):
        found = [_cut(inner, mark, parts) for inner in value]
        inner, sizes = [inner for inner, _ in found], [size for _, size in found]
        if sum(sizes) <= _MOST:
            return inner, sum(sizes) + _SMALL
        return _moved([inner[group] for group in _groups(sizes)], mark, parts)
    return value, _SMALL


def _moved(pieces: list[Any], mark: str, parts: list[bytes]) -> tuple[Any, int]:
    start = len(parts)
    parts += map(_document, pieces)
    return {mark: [start, len(parts)]}, len(mark)


def _groups(sizes: list[int]) -> list[slice]:
    """Slices of neighbours that together are at most _MOST, or one item."""
    starts, total = [0], 0
    for at, size in enumerate(sizes):
        if total and total + size > _MOST:
            starts.append(at)
            total = 0
        total += size
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _joined(value: Any, mark: str, parts: list[Any]) -> Any:
    if isinstance(value, list):
        return [_joined(item, mark, parts) for item in value]
    if not isinstance(value, dict):
        return value
    if mark not in value:
        return {name: _joined(inner, mark, parts) for name, inner in value.items()}
    pieces = parts[slice(*value[mark])]
    if isinstance(pieces[0], str):
        return "".join(pieces)
    if isinstance(pieces[0], list):
        return [_joined(item, mark, parts) for piece in pieces for item in piece]
    return {name: _joined(inner, mark, parts) for piece in pieces for name, inner in piece.items()}
