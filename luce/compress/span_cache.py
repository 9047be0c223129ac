"""The kept tokens of earlier prompts, so that the small model reads a prompt once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Protocol

import numpy as np

from luce.compress.selection import RATIO_UNIT, Keep, PromptTokens, Spans

# Bytes of a span in memory, with its tuple and integers, and of an entry without its spans.
_SPAN_BYTES = 128
_ENTRY_BYTES = 256


class SpanStore(Protocol):
    """Spans that outlive the process: luce.kvcache.disk.spans.SpanFiles. It raises nothing."""

    def get(self, key: bytes) -> Spans | None:
        """The spans of a key; None if there are none that can be read."""

    def put(self, key: bytes, spans: Spans) -> None:
        """Store the spans of a key."""


class SpanCache:
    """Spans by prompt; the least recently used ones go first. Not thread-safe.

    `identity` names all that spans depend on beside the prompt: the small model and the algorithm. `store` gets all
    spans too, and is asked for those that are not in memory.
    """

    def __init__(self, identity: str, most_bytes: int, store: SpanStore | None = None) -> None:
        self._identity = identity.encode()
        self._store = store
        self._most = most_bytes
        self._spans: OrderedDict[bytes, Spans] = OrderedDict()
        self._bytes = 0

    def key(self, prompt: PromptTokens, keep: Keep, most: int) -> bytes:
        """The key of a prompt of which so much is kept, with at most `most` kept tokens."""
        digest = hashlib.blake2b(self._identity, digest_size=16)
        share, largest = round(keep.share * RATIO_UNIT), round(keep.most * RATIO_UNIT)
        digest.update(np.array([len(prompt), share, keep.mass, largest, most], np.int64).tobytes())
        digest.update(prompt.ids.tobytes())
        digest.update(np.packbits(prompt.protected).tobytes())
        digest.update(prompt.cut_ranks.tobytes())
        return digest.digest()

    def get(self, key: bytes) -> Spans | None:
        """The spans of a prompt; None if they are not stored."""
        spans = self._spans.get(key)
        if spans is not None:
            self._spans.move_to_end(key)
            return spans
        if self._store is not None and (spans := self._store.get(key)) is not None:
            self._keep(key, spans)
        return spans

    def put(self, key: bytes, spans: Spans) -> None:
        """Store spans under a key that is not stored yet. The memory never takes more than its most bytes."""
        self._keep(key, spans)
        if self._store is not None:
            self._store.put(key, spans)

    def _keep(self, key: bytes, spans: Spans) -> None:
        self._spans[key] = spans
        self._bytes += _size(spans)
        while self._bytes > self._most:
            _, oldest = self._spans.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(spans: Spans) -> int:
    return _ENTRY_BYTES + _SPAN_BYTES * len(spans)
