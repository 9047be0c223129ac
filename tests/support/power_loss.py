"""A disk that loses what was not synchronised when the power goes.

It keeps what POSIX promises and no more. The bytes of a file last from its fsync on, its name from the fsync of its
directory on. A rename is one change of the directory that gets the name; the fsync of the other one makes the old name
go. What was not synchronised may be there all the same, each change for itself: `states` draws all of it lost, all
of it kept, and of the newest changes each single one lost and each single one kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.recorded_files import Call

#: changes that are lost or kept one by one; older ones that nothing synchronises are of garbage
_NEWEST = 16

#: a directory: what its names stand for, files by their bytes
Tree = dict[str, "Tree | bytes"]


@dataclass(eq=False)
class _Node:
    """A file or a directory."""

    is_directory: bool
    #: by name, as the running system sees it
    entries: dict[str, _Node] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    #: bytes that last
    synced: bytes = b""


@dataclass(eq=False)
class _Change:
    """A change of names. `name` of `directory` stands for `node` then, None: for nothing."""

    directory: _Node
    name: str
    node: _Node | None
    #: of a rename, the name that goes
    source: tuple[_Node, str] | None = None
    lasts: bool = False
    #: whether that name stays gone
    source_lasts: bool = False


class LossyDisk:
    """Follows recorded calls."""

    def __init__(self) -> None:
        self._root = _Node(is_directory=True)
        self._changes: list[_Change] = []

    def follow(self, call: Call) -> None:
        """The next call of those that ran."""
        if call.path.startswith(".."):
            return
        if call.name == "write":
            self._node(call.path).data += call.data
        elif call.name == "fsync":
            self._sync(self._node(call.path))
        elif call.name in ("create", "mkdir"):
            self._change(call.path, _Node(is_directory=call.name == "mkdir"))
        elif call.name in ("unlink", "rmdir"):
            self._change(call.path, None)
        elif call.name == "rename":
            source = self._place(call.path)
            self._change(call.new_path, source[0].entries[source[1]], source)
            del source[0].entries[source[1]]

    def states(self) -> Iterator[Tree]:
        """What may be found when the power goes now."""
        open = [change for change in self._changes if not change.lasts]
        yield self._state([], keep_data=False)
        yield self._state(open, keep_data=True)
        yield self._state(open, keep_data=False)
        for change in open[-_NEWEST:]:
            yield self._state([change], keep_data=False)
            yield self._state([other for other in open if other is not change], keep_data=True)

    def _state(self, kept: Sequence[_Change], *, keep_data: bool) -> Tree:
        names: dict[_Node, dict[str, _Node]] = {}
        for change in self._changes:
            applies = change.lasts or change in kept
            if change.source is not None and (applies or change.source_lasts):
                names.setdefault(change.source[0], {}).pop(change.source[1], None)
            if not applies:
                continue
            mine = names.setdefault(change.directory, {})
            if change.node is None:
                mine.pop(change.name, None)
            else:
                mine[change.name] = change.node

        def tree(directory: _Node) -> Tree:
            found: Tree = {}
            for name, node in names.get(directory, {}).items():
                # Of what was not synchronised the size may be there, and none of the bytes.
                lost = node.synced + bytes(len(node.data) - len(node.synced))
                found[name] = tree(node) if node.is_directory else bytes(node.data) if keep_data else lost
            return found

        return tree(self._root)

    def _sync(self, node: _Node) -> None:
        node.synced = bytes(node.data)
        for change in self._changes:
            change.lasts |= change.directory is node
            change.source_lasts |= change.source is not None and change.source[0] is node

    def _change(self, path: str, node: _Node | None, source: tuple[_Node, str] | None = None) -> None:
        directory, name = self._place(path)
        if node is None:
            directory.entries.pop(name)
        else:
            directory.entries[name] = node
        self._changes.append(_Change(directory, name, node, source))

    def _place(self, path: str) -> tuple[_Node, str]:
        return self._node(os.path.dirname(path)), os.path.basename(path)

    def _node(self, path: str) -> _Node:
        node = self._root
        for name in path.split("/"):
            if name not in ("", "."):
                node = node.entries[name]
        return node


def found_after(calls: Sequence[Call], begin: int, relevant: Callable[[Tree], Tree]) -> Iterator[tuple[int, Tree]]:
    """(number of calls that ran, what may be found then) for every number from `begin` on; nothing twice in a row of
    calls that report the same."""
    disk, seen = LossyDisk(), set[str]()
    for number, call in enumerate(calls, 1):
        disk.follow(call)
        if call.name == "saved":
            # What was found before may lack what is reported now.
            seen.clear()
        if number < begin:
            continue
        for state in disk.states():
            state = relevant(state)
            if (text := repr(state)) not in seen:
                seen.add(text)
                yield number, state


def write_tree(tree: Tree, path: Path) -> None:
    """Make a directory of it."""
    path.mkdir(mode=0o700)
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (path / name).write_bytes(inner)
        else:
            write_tree(inner, path / name)
