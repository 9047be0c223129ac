"""Which snapshots there are, and which of them belong to a text. In memory: nothing here waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from luce.kvcache.disk.manifest import Manifest, keys, own_prefixes, prefixes, snapshot_id
from luce.kvcache.disk.part import DamagedError
from luce.runtime.step import PAGE, Int32


@dataclass(eq=False)
class Entry:
    """A snapshot that is on the disk. `used` in seconds since the epoch; `unusable` says why it is not found."""

    manifest: Manifest
    path: Path
    used: float
    unusable: str = ""
    children: set[Entry] = field(default_factory=set)

    @property
    def dispensable(self) -> bool:
        """Whether a longer snapshot of the same conversation took its place: others continue fewer of its pages."""
        pages = self.manifest.length // PAGE
        return self.manifest.passing and any(child.manifest.first == pages for child in self.children)


class Index:
    """The snapshots of all models; those of `model` are found, the others only take room. Thread-safe."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Entry] = {}
        #: by the digest of a text, the snapshots that have its ids
        self._recalls: dict[str, set[Entry]] = {}
        #: by the prefix that ends with a page, the snapshots that store this page
        self._holders: dict[str, set[Entry]] = {}

    @property
    def entries(self) -> list[Entry]:
        """All snapshots of all models."""
        with self._lock:
            return list(self._entries.values())

    def find(self, ids: Int32, beyond: int = 0, most: int | None = None) -> list[Entry]:
        """The snapshots that `ids` begin with and that can be resumed, of more than `beyond` tokens, longest first.

        At most `most` tokens, if that is given. A snapshot of all of `ids` needs the logits of the last token.
        """
        end = len(ids) if most is None else min(most, len(ids))
        with self._lock:
            mine = [e for e in self._entries.values() if e.manifest.model == self.model and e.manifest.point]
            lengths = sorted({e.manifest.length for e in mine if beyond < e.manifest.length <= end})
            found = [self._entries.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)]
            usable = (e for e in reversed(found) if e is not None and e.manifest.point and not e.unusable)
            return [e for e in usable if e.manifest.length < len(ids) or e.manifest.logits]

    def longest(self, ids: Int32, beyond: int = 0, most: int | None = None) -> tuple[Entry, int] | None:
        """The longest beginning of `ids` that some snapshot has the whole pages of, whatever comes behind them: the one
        that stores the last of these, and the length.

        More than `beyond` tokens, at most `most` if that is given, and not all of them.
        """
        end = len(ids) - 1 if most is None else min(most, len(ids) - 1)
        with self._lock:
            return self._holder(ids[:end], beyond // PAGE)

    def chain(self, entry: Entry) -> list[Entry]:
        """A snapshot behind those that it continues, the first one first. Raises DamagedError if one is missing."""
        with self._lock:
            chain = [entry]
            while (parent := chain[-1].manifest.parent) is not None:
                found = self._entries.get((entry.manifest.model, parent))
                if found is None or found in chain:
                    raise DamagedError(f"{entry.manifest.id}: its beginning, {parent}, is gone")
                chain.append(found)
            return chain[::-1]

    def said(self, digest: str) -> Entry | None:
        """The snapshot that has the ids of a text: of several the newest."""
        with self._lock:
            return max(self._recalls.get(digest, ()), key=lambda entry: entry.manifest.created, default=None)

    def at(self, ids: Int32) -> Entry | None:
        """The snapshot of exactly these tokens."""
        ((length, key),) = keys(ids, [len(ids)])
        with self._lock:
            return self._get(self.model, snapshot_id(key, length))

    def missing(self, ids: Int32) -> tuple[Entry | None, int] | None:
        """What a snapshot of `ids` has to store: (the snapshot that it continues, its first page); None if it is there.

        Where only the tokens and pages of one are left, it is that one's parent, and no page.
        """
        with self._lock:
            mine = [e.manifest for e in self._entries.values() if e.manifest.model == self.model]
            lengths = sorted({m.length for m in mine if m.length <= len(ids)})
            found = {n: self._entries.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)}
            same = found.pop(len(ids), None)
            if same is not None:
                parent = self._entries.get((self.model, same.manifest.parent or ""))
                return None if same.manifest.point else (parent, len(ids) // PAGE)
            longest = max((n for n, e in found.items() if e is not None and not e.unusable and n >= PAGE), default=0)
            return self._parting(ids, longest // PAGE) or (found.get(longest), longest // PAGE)

    def _parting(self, ids: Int32, beyond: int) -> tuple[Entry, int] | None:
        """A snapshot that has more than `beyond` whole pages of `ids`, with those that it continues, and how many."""
        found = self._holder(ids, beyond)
        if found is None:
            return None
        entry, pages, first = found[0], found[1] // PAGE, found[0].manifest.first
        if 2 * (pages - first) >= entry.manifest.length // PAGE - first:
            return entry, pages
        # When it is given up, more pages would stay that nobody reads than are shared.
        parent = self._get(self.model, entry.manifest.parent)
        return None if parent is None or first <= beyond else (parent, first)

    def _holder(self, ids: Int32, beyond: int) -> tuple[Entry, int] | None:
        """Which snapshot stores the last page of the longest beginning of `ids` that is there, of more than `beyond`
        pages, and its length."""
        found = None
        for page, prefix in enumerate(prefixes(ids, beyond), beyond + 1):
            usable = [entry for entry in self._holders.get(prefix, ()) if not entry.unusable]
            # Whoever has a page has those before it.
            if not usable:
                break
            found = max(usable, key=lambda entry: entry.used), page * PAGE
        return found

    def _get(self, model: str, id: str | None) -> Entry | None:
        return self._entries.get((model, id or ""))

    def _put(self, entry: Entry) -> None:
        with self._lock:
            self._entries[entry.manifest.model, entry.manifest.id] = entry
            for found, names in self._names(entry):
                for name in names:
                    found.setdefault(name, set()).add(entry)

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            self._entries.pop((entry.manifest.model, entry.manifest.id), None)
            for found, names in self._names(entry):
                for name in names:
                    others = found.get(name, set())
                    others.discard(entry)
                    if not others:
                        found.pop(name, None)
        parent = self._get(entry.manifest.model, entry.manifest.parent)
        if parent is not None:
            parent.children.discard(entry)

    def _names(self, entry: Entry) -> Iterator[tuple[dict[str, set[Entry]], list[str]]]:
        """What a snapshot is found by, and where."""
        if entry.manifest.model == self.model:
            recall = entry.manifest.recall
            yield self._recalls, [] if recall is None else [text[0] for text in recall.texts]
            yield self._holders, own_prefixes(entry.manifest)

    def _link(self) -> list[Entry]:
        """Find out who continues whom; returns what continues nothing that is there."""
        for entry in self._entries.values():
            entry.children = set()
        orphans = []
        for (model, _), entry in self._entries.items():
            if entry.manifest.parent is not None:
                parent = self._get(model, entry.manifest.parent)
                if parent is None or parent.manifest.length < entry.manifest.first * PAGE:
                    orphans.append(entry)
                else:
                    parent.children.add(entry)
        return orphans
