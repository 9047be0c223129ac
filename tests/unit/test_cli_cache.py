"""`luce cache` over a directory of snapshots."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from luce.cli.main import main
from luce.kvcache.disk.files import open_directory
from luce.kvcache.disk.fingerprint import Fingerprint, write_about
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.store import Store
from tests.support.snapshots import MODEL, conversation_of, sound, write


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Three turns of a conversation."""
    store = Store(tmp_path, MODEL, 0)
    for turn in conversation_of(3):
        write(store, turn)
    return tmp_path


def cache(directory: Path, *arguments: str) -> int:
    return main(["cache", *arguments, "--kv-cache-dir", str(directory)])


def test_ls(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(filled, "ls") == 0
    shown = capsys.readouterr().out
    assert shown.count(MODEL[:8]) == 3 and "3 snapshots" in shown
    # What it shows of an id is enough to name it, also where lines are short.
    for line in shown.splitlines()[1:4]:
        assert cache(filled, "show", line.split()[0]) == 0
    capsys.readouterr()
    assert cache(filled, "ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted(snapshot["length"] for snapshot in listed) == [100, 200, 300]


def test_ls_names_models(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "f" * 32
    write(Store(filled, other, 0), conversation_of(1)[0])
    with open_directory(filled, LAYOUT, MODEL) as directory:
        # As the file of a stranger may have it: no escape sequence reaches the terminal, no markup is interpreted.
        write_about(directory, Fingerprint("weights", {}, "Tiny [bold]\x1b[31m\n" + 1000 * "x"))
    assert cache(filled, "ls") == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line for line in lines if re.search(rf" Tiny \[bold\]\[31m x+ \({MODEL[:8]}\)$", line.rstrip())]
    assert len(named) == 3 and len({len(line) for line in named}) == 1 and len(named[0]) < 160
    # Without a name, as versions before wrote it, the fingerprint stands there.
    assert sum(line.rstrip().endswith(f"  {other[:8]}") for line in lines) == 1
    assert cache(filled, "ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {snapshot["model"]: snapshot["name"][:4] for snapshot in listed} == {MODEL: "Tiny", other: ""}


def test_show_takes_the_beginning_of_an_id(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = Store(filled, MODEL, 0).find(conversation_of(3)[1])[0]
    assert cache(filled, "show", snapshot.manifest.id[:12]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["key"] == snapshot.manifest.key and shown["path"] == str(snapshot.path)
    assert snapshot.manifest.page_keys not in json.dumps(shown)
    with open_directory(snapshot.path.parent) as directory:
        write_about(directory, Fingerprint("weights", {"--cache-type-k": "q8_0"}, "Tiny"))
    assert cache(filled, "show", snapshot.manifest.id) == 0
    assert json.loads(capsys.readouterr().out) == {**shown, "name": "Tiny", "settings": {"--cache-type-k": "q8_0"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show",), "luce cache show: name a snapshot: "),
        (("rm",), "luce cache rm: name a snapshot"),
        (("rm", "nobody"), "no snapshot id starts with 'nobody'"),
        (("show", ""), "3 snapshot ids start with ''"),
        (("ls", "a"), "luce cache ls a: takes no ID"),
        (("gc", "a", "--all"), "luce cache gc a: takes no ID; luce cache gc: --all is for rm"),
        (("rm", "a", "--all"), "luce cache rm --all a: give either IDs or --all"),
        (("verify", "--json"), "luce cache verify: --json is for ls and show"),
        (("rm", "--al"), "--al: unknown; did you mean --all? (luce cache --help tells more)"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str, filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(filled, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"luce: {message}") and printed.err.count("\n") == 1
    assert sound(filled, conversation_of(3)) == 3


def test_show_without_an_id_lists_the_ids(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(filled, "show") == 2
    listed = capsys.readouterr().err.strip().partition("snapshot: ")[2].split(", ")
    assert cache(filled, "ls", "--json") == 0
    assert listed == [facts["id"][:8] for facts in json.loads(capsys.readouterr().out)]


def test_verify_finds_a_flipped_bit(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(filled, "verify") == 0
    assert capsys.readouterr().out.count(": ok") == 3
    snapshot = Store(filled, MODEL, 0).find(conversation_of(3)[0])[0]
    path = snapshot.path / snapshot.manifest.state[0].name
    data = bytearray(path.read_bytes())
    data[40] ^= 4
    path.write_bytes(data)
    assert cache(filled, "verify") == 1
    shown = capsys.readouterr().out
    assert shown.count(": ok") == 2 and f"{snapshot.manifest.id}: damaged: " in shown
    assert cache(filled, "verify", snapshot.manifest.id) == 1


def test_rm_leaves_pages_that_others_continue(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = conversation_of(3)
    first = Store(filled, MODEL, 0).find(conversation[0])[0].manifest.id
    assert cache(filled, "rm", first) == 0
    assert "except for the pages" in capsys.readouterr().out
    assert sound(filled, conversation) == 2
    assert cache(filled, "rm", "--all") == 0
    assert not Store(filled, MODEL, 0).snapshots


def test_ids_may_follow_flags(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [snapshot.manifest.id for snapshot in Store(filled, MODEL, 0).snapshots]
    assert main(["cache", "verify", "--kv-cache-dir", str(filled), *ids[:2]]) == 0
    assert main(["cache", "verify", ids[0], "--kv-cache-dir", str(filled), ids[1]]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ids[:2] * 2


@pytest.mark.parametrize("arguments", [("rm", "--all"), ("rm",)])
def test_rm_reports_a_snapshot_that_it_cannot_remove(
    arguments: tuple[str, ...], filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    last = Store(filled, MODEL, 0).find(conversation_of(3)[2])[0].manifest.id
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert cache(filled, *arguments, *([] if "--all" in arguments else [last])) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"luce: --kv-cache-dir {filled}: [Errno 13] Permission denied\n"
    assert sound(filled, conversation_of(3)) == 3


def test_verify_tolerates_snapshots_that_a_server_changes(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Store.verify

    def busy(store: Store, snapshot: Snapshot) -> None:
        Store(filled, MODEL, 0).clear()
        check(store, snapshot)

    monkeypatch.setattr(Store, "verify", busy)
    assert cache(filled, "verify") == 0
    assert capsys.readouterr().out.count(": removed or replaced meanwhile\n") == 3


def test_gc_removes_quarantined_snapshots_and_enforces_the_budget(filled: Path) -> None:
    store = Store(filled, MODEL, 0)
    other = write(store, np.arange(500, 900, dtype=np.int32))
    assert other is not None
    store.quarantine(other, "a test")
    assert list((store.root / "trash").iterdir())
    assert cache(filled, "gc") == 0
    assert not list((store.root / "trash").iterdir())
    assert sound(filled, conversation_of(3)) == 3
    for _ in range(300):
        write(store, np.random.default_rng(_).integers(0, 1000, 200).astype(np.int32))
    assert store.nbytes > 1 << 20
    assert cache(filled, "gc", "--kv-cache-budget", "1") == 0
    assert Store(filled, MODEL, 0).nbytes <= 1 << 20


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing"
    assert cache(nothing, "ls") == 2
    assert capsys.readouterr() == ("", f"luce: --kv-cache-dir {nothing}: no such directory\n")
    (tmp_path / "empty").mkdir()
    assert cache(tmp_path / "empty", "ls") == 0
    assert "no snapshots" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    assert main(["cache", "ls", "--kv-cache-dir", "off"]) == 2
    assert cache(tmp_path / "empty", "ls", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert cache(tmp_path / "nothing", "verify", "abc") == 2
    (tmp_path / "file").touch()
    assert cache(tmp_path / "file", "ls") == 2
    file = tmp_path / "file"
    assert capsys.readouterr().err.endswith(f"luce: --kv-cache-dir {file}: {file} is not a directory\n")
