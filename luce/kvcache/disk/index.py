"""The snapshots of a directory, and which of them match a text. In memory: nothing here waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from luce.kvcache.disk.files import OpenDirectory, open_directory
from luce.kvcache.disk.manifest import LAYOUT, Manifest, keys, own_page_keys, page_keys, snapshot_id
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.prefix_ids import PrefixIds
from luce.runtime.step import PAGE


@dataclass(eq=False)
class Snapshot:
    """A checkpoint on the disk."""

    manifest: Manifest
    #: --kv-cache-dir
    root: Path
    #: seconds since the epoch
    last_used: float
    #: why it is not used, "" if it is
    unusable: str = ""
    #: the snapshots that continue this one
    children: set[Snapshot] = field(default_factory=set)

    @property
    def path(self) -> Path:
        """Its directory, for people: `open` reaches it without following links."""
        return self.root / LAYOUT / self.manifest.model / self.manifest.id

    def open(self) -> OpenDirectory:
        """Open its directory. Raises OSError."""
        return open_directory(self.root, LAYOUT, self.manifest.model, self.manifest.id)

    @property
    def superseded(self) -> bool:
        """Whether a longer snapshot of the same conversation replaces it: one that continues all of its pages."""
        pages = self.manifest.length // PAGE
        return self.manifest.interim and any(child.manifest.first_page == pages for child in self.children)


class Index:
    """The snapshots of all models. Only those of `model` are found; the others occupy disk space. Thread-safe."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[str, str], Snapshot] = {}
        #: by the digest of a reply's text, the snapshots with its tokens
        self._by_reply: dict[str, set[Snapshot]] = {}
        #: by page key, the snapshots that store the page
        self._by_page: dict[str, set[Snapshot]] = {}

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots of all models."""
        with self._lock:
            return list(self._snapshots.values())

    def find(self, ids: PrefixIds, longer_than: int = 0, limit: int | None = None) -> list[Snapshot]:
        """The resumable snapshots of prefixes of `ids` with more than `longer_than` tokens and at most `limit`, longest
        first. A snapshot of all of `ids` must have the logits of the last token.
        """
        end = len(ids) if limit is None else min(limit, len(ids))
        with self._lock:
            own = [s for s in self._snapshots.values() if s.manifest.model == self.model and s.manifest.resumable]
            lengths = sorted({s.manifest.length for s in own if longer_than < s.manifest.length <= end})
            found = [self._snapshots.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)]
            usable = (s for s in reversed(found) if s is not None and s.manifest.resumable and not s.unusable)
            return [s for s in usable if s.manifest.length < len(ids) or s.manifest.has_logits]

    def longest_prefix(
        self, ids: PrefixIds, longer_than: int = 0, limit: int | None = None
    ) -> tuple[Snapshot, int] | None:
        """The longest prefix of `ids` whose whole pages are stored, whatever tokens the snapshot continues with:
        (snapshot with the last of these pages, length).

        More than `longer_than` tokens, at most `limit`, and not all of `ids`.
        """
        end = len(ids) - 1 if limit is None else min(limit, len(ids) - 1)
        with self._lock:
            return self._page_holder(ids[:end], longer_than // PAGE)

    def chain(self, snapshot: Snapshot) -> list[Snapshot]:
        """A snapshot and those that it continues, shortest first. Raises DamagedError if one is missing."""
        with self._lock:
            chain = {snapshot: None}
            last = snapshot
            while (parent := last.manifest.parent) is not None:
                found = self._get(snapshot.manifest.model, parent)
                if found is None or found in chain:
                    raise DamagedError(f"{snapshot.manifest.id}: snapshot {parent}, which it continues, is gone")
                chain[last := found] = None
            return list(chain)[::-1]

    def with_descendants(self, snapshot: Snapshot) -> list[Snapshot]:
        """A snapshot and those that continue it, and those that continue these: each behind the one that it
        continues."""
        found = {snapshot: None}
        waiting = [snapshot]
        while waiting:
            new = [child for child in waiting.pop().children if child not in found]
            found |= dict.fromkeys(new)
            waiting += new
        return list(found)

    def with_reply(self, digest: str) -> Snapshot | None:
        """The newest snapshot with the tokens of a reply's text."""
        with self._lock:
            return max(self._by_reply.get(digest, ()), key=lambda snapshot: snapshot.manifest.created, default=None)

    def exact(self, ids: PrefixIds) -> Snapshot | None:
        """The snapshot of exactly these tokens."""
        ((length, key),) = keys(ids, [len(ids)])
        with self._lock:
            return self._get(self.model, snapshot_id(key, length))

    def missing(self, ids: PrefixIds) -> tuple[Snapshot | None, int] | None:
        """What a new snapshot of `ids` must store: (the snapshot that it continues, its first page). None if there is
        one already.

        If an existing one has only tokens and pages left, the result is its parent and no page.
        """
        with self._lock:
            own = [s.manifest for s in self._snapshots.values() if s.manifest.model == self.model]
            lengths = sorted({m.length for m in own if m.length <= len(ids)})
            found = {n: self._snapshots.get((self.model, snapshot_id(key, n))) for n, key in keys(ids, lengths)}
            same = found.pop(len(ids), None)
            if same is not None:
                parent = self._snapshots.get((self.model, same.manifest.parent or ""))
                return None if same.manifest.resumable else (parent, len(ids) // PAGE)
            longest = max((n for n, s in found.items() if s is not None and not s.unusable and n >= PAGE), default=0)
            return self._diverging(ids, longest // PAGE) or (found.get(longest), longest // PAGE)

    def _diverging(self, ids: PrefixIds, beyond: int) -> tuple[Snapshot, int] | None:
        """A snapshot that shares more than `beyond` whole pages with `ids` and then diverges: (snapshot, pages)."""
        found = self._page_holder(ids, beyond)
        if found is None:
            return None
        snapshot, pages, first = found[0], found[1] // PAGE, found[0].manifest.first_page
        if 2 * (pages - first) >= snapshot.manifest.length // PAGE - first:
            return snapshot, pages
        # After its eviction more unread pages would stay on the disk than shared ones.
        parent = self._get(self.model, snapshot.manifest.parent)
        return None if parent is None or first <= beyond else (parent, first)

    def _page_holder(self, ids: PrefixIds, beyond: int) -> tuple[Snapshot, int] | None:
        """The longest prefix of `ids` of more than `beyond` pages that is stored: (snapshot with its last page,
        length)."""
        found = None
        for page, key in enumerate(page_keys(ids, beyond), beyond + 1):
            usable = [snapshot for snapshot in self._by_page.get(key, ()) if not snapshot.unusable]
            # A snapshot with a page has all pages before it.
            if not usable:
                break
            found = max(usable, key=lambda snapshot: snapshot.last_used), page * PAGE
        return found

    def _get(self, model: str, id: str | None) -> Snapshot | None:
        return self._snapshots.get((model, id or ""))

    def _put(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshots[snapshot.manifest.model, snapshot.manifest.id] = snapshot
            for found, names in self._names(snapshot):
                for name in names:
                    found.setdefault(name, set()).add(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshots.pop((snapshot.manifest.model, snapshot.manifest.id), None)
            for found, names in self._names(snapshot):
                for name in names:
                    others = found.get(name, set())
                    others.discard(snapshot)
                    if not others:
                        found.pop(name, None)
        parent = self._get(snapshot.manifest.model, snapshot.manifest.parent)
        if parent is not None:
            parent.children.discard(snapshot)

    def _names(self, snapshot: Snapshot) -> Iterator[tuple[dict[str, set[Snapshot]], list[str]]]:
        """The tables that list a snapshot, each with its names there."""
        if snapshot.manifest.model == self.model:
            reply = snapshot.manifest.reply
            yield self._by_reply, [] if reply is None else [text[0] for text in reply.texts]
            yield self._by_page, own_page_keys(snapshot.manifest)

    def _link(self) -> list[Snapshot]:
        """Set the children of all snapshots; returns the snapshots whose parent is gone, or that continue each other
        in a circle."""
        for snapshot in self._snapshots.values():
            snapshot.children = set()
        orphans, roots = [], []
        for (model, _), snapshot in self._snapshots.items():
            if snapshot.manifest.parent is None:
                roots.append(snapshot)
                continue
            parent = self._get(model, snapshot.manifest.parent)
            if parent is None or parent.manifest.length < snapshot.manifest.first_page * PAGE:
                orphans.append(snapshot)
            else:
                parent.children.add(snapshot)
        reached = set(roots)
        for root in (*roots, *orphans):
            reached.update(self.with_descendants(root))
        return orphans + [snapshot for snapshot in self._snapshots.values() if snapshot not in reached]
