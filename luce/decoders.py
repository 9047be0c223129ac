"""Decoders of msgspec, of which one is built at a time.

msgspec fills in what it knows of a structure while other threads see it: a thread that decoded with half of it crashed.
So whatever decodes a type gets its decoder here, and no other call names a type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")
_BUILDING = threading.Lock()
_built: dict[Any, msgspec.json.Decoder[Any]] = {}


def json_decoder(kind: type[Value]) -> msgspec.json.Decoder[Value]:
    """What decodes and checks JSON of this type; one for all threads."""
    with _BUILDING:
        if kind not in _built:
            _built[kind] = msgspec.json.Decoder(kind)
        return _built[kind]


def msgpack_decoder(kind: Any, dec_hook: Callable[[type, Any], Any] | None = None) -> msgspec.msgpack.Decoder[Any]:
    """What decodes and checks MessagePack of this type; `dec_hook` as in msgspec."""
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)
