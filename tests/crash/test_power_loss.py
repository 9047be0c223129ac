"""When the power goes, what was reported as saved is there, and nothing that is not whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE, Int32
from tests.support import snapshots
from tests.support.power_loss import Tree, found_after, write_tree
from tests.support.recorded_files import Call, recorded
from tests.support.snapshots import MODEL, conversation_of, ids

TEXTS: dict[str, Int32] = {
    **dict(zip(("first", "second", "third"), conversation_of(3, step=PAGE + 10), strict=True)),
    "other": ids(PAGE + 1, seed=1),
}


def recorded_calls(root: Path) -> list[Call]:
    """Everything that makes a snapshot last, and everything that may take one away."""
    root.mkdir()
    with recorded(root) as calls:
        # An earlier process has made these, and was killed before it synchronised them.
        for name in (LAYOUT, f"{LAYOUT}/tmp", f"{LAYOUT}/{MODEL}"):
            calls.mkdir(root / name, 0o700)
        store = Store(root, MODEL, 0)

        def save(name: str) -> None:
            assert snapshots.write(store, TEXTS[name]) is not None
            calls.mark(f"+{name}")

        def evict(name: str) -> None:
            calls.mark(f"-{name}")
            snapshot = store.exact(TEXTS[name])
            assert snapshot is not None
            store.evict(snapshot)

        for name in TEXTS:
            save(name)
        # Its pages stay, for the third one; then its state comes back.
        evict("second")
        save("second")
        evict("other")
        evict("third")
        save("third")
        # Somebody removes all of it; Luce makes the directories again.
        for name in TEXTS:
            calls.mark(f"-{name}")
        calls.rename(root / LAYOUT, root / "gone")
        store.rescan()
        save("first")
    return calls.calls


def reported(calls: Sequence[Call]) -> set[str]:
    """The names of the texts that were saved, and that nobody began to evict."""
    saved: set[str] = set()
    for call in calls:
        if call.name == "saved":
            saved = saved | {call.path[1:]} if call.path[0] == "+" else saved - {call.path[1:]}
    return saved


def without_garbage(tree: Tree) -> Tree:
    """What a start looks at: it removes what is in tmp/ and trash/."""
    layout = tree.get(LAYOUT)
    return (
        {LAYOUT: {name: inner for name, inner in layout.items() if len(name) == 32}} if isinstance(layout, dict) else {}
    )


def first_loss(calls: Sequence[Call], directory: Path, begin: int = 0) -> str:
    """What is lost, or not whole, after the power went between two calls; "" if nothing ever is."""
    for number, state in found_after(calls, begin, without_garbage):
        shutil.rmtree(directory, ignore_errors=True)
        write_tree(state, directory)
        try:
            snapshots.sound(directory, list(TEXTS.values()))
        except Exception as error:
            return f"after call {number}: {error}"
        store = Store(directory, MODEL, 0)
        for name in reported(calls[:number]):
            found = store.exact(TEXTS[name])
            if found is None or not found.manifest.resumable:
                return f"after call {number}: {name} was saved and is lost"
    return ""


def test_what_is_saved_outlasts_the_power(tmp_path: Path) -> None:
    calls = recorded_calls(tmp_path / "recorded")
    assert first_loss(calls, tmp_path / "found") == ""
    assert len([call for call in calls if call.name == "fsync"]) > 40


def role(calls: Sequence[Call], number: int) -> tuple[str, ...]:
    """What an fsync synchronises, and what comes before and behind it: without numbers and random names."""
    near = calls[max(0, number - 1) : number + 2]
    return tuple(re.sub(r"[0-9a-f]{8,}(-\d+)?", "X", f"{call.name} {call.path} {call.new_path}") for call in near)


def garbage(path: str, later: Sequence[Call]) -> bool:
    """Whether a file or directory below tmp/ is removed there: the state of a snapshot moves without its tokens."""
    return any(call.path == path and call.name in ("unlink", "rmdir") for call in later) and "/tmp/" in path


def needs(later: Call, sync: Call) -> bool:
    """Whether a call is one that an fsync comes before: it reports, or it makes or removes a name that counts."""
    names = later.name == "rename" or (later.name == "unlink" and "/tmp/" not in later.path)
    # Of the directories of all snapshots it matters only that they are there.
    return later.name == "saved" or (names and sync.path not in (".", LAYOUT))


def renamed(path: str, call: Call) -> str:
    """What a path is called after a call."""
    inside = call.name == "rename" and f"{path}/".startswith(f"{call.path}/")
    return call.new_path + path[len(call.path) :] if inside else path


@pytest.mark.parametrize("how", ["missing", "late"])
def test_every_synchronisation_and_its_place_matter(how: str, tmp_path: Path) -> None:
    calls = recorded_calls(tmp_path / "recorded")
    tried: set[tuple[str, ...]] = set()
    for number, call in enumerate(calls):
        if call.name != "fsync" or garbage(call.path, calls[number:]) or (mine := role(calls, number)) in tried:
            continue
        tried.add(mine)
        changed = [*calls[:number], *calls[number + 1 :]]
        if how == "late":
            place = next(i for i in range(number, len(changed)) if needs(changed[i], call))
            changed.insert(place + 1, Call("fsync", renamed(call.path, changed[place])))
        assert first_loss(changed, tmp_path / "found", number), f"nothing is lost without {mine}"
    assert len(tried) > 12
