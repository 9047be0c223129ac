"""Links in the place of every name that the disk cache touches, directories of others, and what only looks like a
file."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.errors import LuceError
from luce.kvcache.disk import files
from luce.kvcache.disk.directory import Directory
from luce.kvcache.disk.files import OpenDirectory, UnsafeDirectoryError, open_directory
from luce.kvcache.disk.fingerprint import RECORD, Fingerprint, content_digest, read_about, recorded_digest, write_about
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.store import Store, StoreFullError
from tests.support import snapshots
from tests.support.cached_engine import ids as prompt_of
from tests.support.disk_tier import rig
from tests.support.recorded_files import recorded, same_names
from tests.support.snapshots import MODEL, conversation_of, ids

ABOUT = Fingerprint("weights", {"--cache-type-k": "f16"})


def filled(root: Path) -> None:
    """A directory as servers leave it: snapshots, garbage of those that were killed, damaged ones, earlier formats."""
    store = Store(root, MODEL, 0)
    for turn in conversation_of(3):
        snapshots.write(store, turn)
    damaged = snapshots.write(store, ids(90, seed=1))
    assert damaged is not None
    store.quarantine(damaged, "a test")
    for name in (f"{LAYOUT}/tmp/4194303-aa", f"{LAYOUT}/trash/left", "luce-v1/model"):
        (root / name / "inner").mkdir(parents=True, mode=0o700)
        (root / name / "inner" / "tokens.part").write_bytes(b"garbage")
    with open_directory(root, LAYOUT, MODEL) as directory:
        write_about(directory, ABOUT)
    content_digest([Path(__file__)], root)


def test_names_are_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    # Of directories that earlier versions wrote.
    assert ABOUT.model == "a65d8b92fee039ed44997f63e2f62e49"
    named = Fingerprint(ABOUT.contents, ABOUT.settings, "a name")
    assert named.model == ABOUT.model
    with open_directory(tmp_path) as directory:
        (tmp_path / "about.json").write_text('{"contents":"weights","settings":{"--cache-type-k":"f16"}}')
        assert read_about(directory) == ABOUT
        write_about(directory, named)
        assert read_about(directory) == named


def everything(root: Path) -> None:
    """All that servers and `luce cache` do with a directory; what fails is left out."""

    def identify() -> None:
        assert recorded_digest([Path(os.__file__)], root) is None
        content_digest([Path(os.__file__)], root)

    def describe() -> None:
        with open_directory(root, LAYOUT, MODEL) as directory:
            write_about(directory, Fingerprint("others", {}))
            read_about(directory)

    def use() -> None:
        store = Store(root, MODEL, 0)
        steps: list[Callable[[], object]] = [lambda: store.holds(".dkv"), describe, lambda: store.tidy(-1.0)]
        first, second, third = conversation_of(3)
        new = conversation_of(4)[3]
        steps += [lambda: snapshots.write(store, ids(80, seed=2)), lambda: snapshots.write(store, new)]
        steps += [lambda: [store.evict(store.find(second)[0]), snapshots.write(store, second)]]
        steps += [lambda text=text: reads(store, text) for text in (first, second, third, new)]
        steps += [lambda: store.quarantine(store.find(new)[0], "a test"), store.rescan, lambda: squeeze(store)]
        steps += [store.collect_garbage, store.clear, lambda: Store(root, MODEL, 0)]
        for step in steps:
            with contextlib.suppress(OSError, LuceError, IndexError):
                step()

    known: set[Path] = set()

    def reads(store: Store, text: snapshots.Int32) -> None:
        # A conversation's snapshots are found for each of its texts; once each is read.
        unread = [snapshot for snapshot in store.find(text) if snapshot.path not in known]
        known.update(snapshot.path for snapshot in unread)
        for snapshot in unread:
            snapshots.check(store, snapshot, text[: snapshot.manifest.length])
            store.mark_used(snapshot)
            store.verify(snapshot)
            store.changed(snapshot)

    def squeeze(store: Store) -> None:
        store.budget = store.nbytes
        with contextlib.suppress(StoreFullError):
            store.make_room(1)
        store.budget = 0

    for task in (identify, use):
        with contextlib.suppress(OSError):
            task()


def contents(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a path and itself that a change would change."""
    found = {}
    for place in (path, *sorted(path.rglob("*"))):
        status = place.lstat()
        data = place.read_bytes() if place.is_file() else b""
        found[str(place.relative_to(path))] = (
            (status.st_ino, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink),
            data,
        )
    return found


def names_touched(root: Path) -> list[str]:
    with recorded(root) as calls:
        everything(root)
    return sorted(name for name in calls.names if name not in (".", "..") and not name.startswith("../"))


@pytest.mark.parametrize("victim", ["directory", "file", "nothing"])
def test_no_link_leads_out_of_the_directory(victim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    template, root, outside = tmp_path / "template", tmp_path / "root", tmp_path / "outside"
    filled(template)
    shutil.copytree(template, root)
    names = names_touched(root)
    assert {LAYOUT, f"{LAYOUT}/tmp", f"{LAYOUT}/trash", f"{LAYOUT}/{MODEL}", f"{LAYOUT}/lock", RECORD, "luce-v1"} <= {
        *names
    }
    assert len(names) > 100
    for name in names:
        for place in (root, outside):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, root)
        outside.mkdir(mode=0o700)
        link, target = root / name, outside / "target"
        # Behind the link is what was in its place: nothing but the link looks wrong.
        if (link.is_dir() and victim == "directory") or (link.is_file() and victim == "file"):
            shutil.move(link, target)
        elif link.exists() and victim != "nothing":
            continue
        elif victim == "directory":
            shutil.copytree(template / LAYOUT / MODEL, target)
        elif victim == "file":
            target.write_bytes(b"a file of its user")
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        if not link.parent.is_dir():
            link.parent.mkdir(parents=True, mode=0o700)
        link.symlink_to(target)
        before = contents(outside)
        with same_names():
            everything(root)
        assert contents(outside) == before, name


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    snapshots.write(Store(tmp_path / "cache", MODEL, 0), ids(100))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [".", LAYOUT, f"{LAYOUT}/tmp", f"{LAYOUT}/trash", f"{LAYOUT}/{MODEL}"])
@pytest.mark.parametrize("how", ["mode", "owner", "link"])
def test_a_directory_of_others_is_refused(
    how: str, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = cache / name
    expected = {"mode": "everybody may write to it (mode 0707)", "owner": "owns it, and Luce runs as", "link": "a link"}
    if how == "mode":
        place.chmod(0o707)
    elif how == "owner":
        inode, fstat, stat = place.stat().st_ino, os.fstat, os.stat

        def other(call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
            def patched(*given: object, **more: object) -> os.stat_result:
                found = call(*given, **more)
                return os.stat_result((*found[:4], 4711, *found[5:])) if found.st_ino == inode else found

            return patched

        monkeypatch.setattr(os, "fstat", other(fstat))
        monkeypatch.setattr(os, "stat", other(stat))
    else:
        place.rename(cache.with_name("elsewhere"))
        place.symlink_to(cache.with_name("elsewhere"))
    if how == "link" and name == ".":
        # Its user wrote it: the directory may lie on another disk.
        assert len(Store(cache, MODEL, 0).snapshots) == 1
        return
    with pytest.raises(UnsafeDirectoryError, match=expected[how].partition("(")[0]) as found:
        Store(cache, MODEL, 0)
    assert str(found.value).count("\n") == 0 and str(place) in str(found.value)
    if name in (".", f"{LAYOUT}/tmp"):
        assert main(["cache", "ls", "--kv-cache-dir", str(cache)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith(f"luce: --kv-cache-dir {cache}: ") and expected[how] in printed.err


def test_a_link_of_another_user_is_not_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(cache.with_name("elsewhere"))
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result((*lstat(path)[:4], 4711, *lstat(path)[5:])))
    with pytest.raises(UnsafeDirectoryError, match="is a link that belongs to user 4711"):
        Store(cache, MODEL, 0)


def test_serving_goes_on_without_a_refused_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LAYOUT).mkdir(mode=0o700)
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / LAYOUT / "trash").symlink_to(tmp_path / "victim")
    with rig(tmp_path) as r:
        assert r.ask(prompt_of(100), 3)[0] == r.backend.reply(prompt_of(100), 3)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{tmp_path / LAYOUT / 'trash'} is a link, not a directory" in warning and "--kv-cache-dir" in warning


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)


#: what may have the name of a file: how it is made, and what the log calls it
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (make_fifo, "is a FIFO, not a file"),
    "socket": (make_socket, "is a socket, not a file"),
    "directory": (lambda path: path.mkdir(), "is a directory, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a link, not a file"),
}
each_kind_of_file = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def hanging_fails(path: Path) -> Iterator[None]:
    """What waits for the other end of a FIFO gets one after a while, and the test fails."""
    over = threading.Event()
    late: list[bool] = []

    def watch() -> None:
        if not over.wait(20):
            late.append(True)
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    watching = threading.Thread(target=watch)
    watching.start()
    yield
    over.set()
    watching.join()
    assert not late


@each_kind_of_file
def test_a_record_that_is_no_file_is_a_reason_to_read_the_model(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = KINDS[kind]
    paths = [Path(__file__)]
    expected = content_digest(paths, tmp_path)
    assert recorded_digest(paths, tmp_path) == expected
    (tmp_path / RECORD).unlink()
    make(tmp_path / RECORD)
    with hanging_fails(tmp_path / RECORD):
        assert recorded_digest(paths, tmp_path) is None
        assert content_digest(paths, tmp_path) == expected
    assert f"{RECORD} is not used: {tmp_path / RECORD} {reason}" in caplog.text
    # It gives way to a record, unless it is a directory.
    assert recorded_digest(paths, tmp_path) == (None if kind == "directory" else expected)


@each_kind_of_file
@pytest.mark.parametrize("file", ["manifest.json", "tokens.part", "pages-000-001.part"])
def test_a_snapshot_of_what_is_no_file_takes_no_other_with_it(
    file: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = KINDS[kind]
    store, texts = Store(tmp_path, MODEL, 0), [ids(100, seed) for seed in range(2)]
    written = [snapshots.write(store, text) for text in texts]
    assert written[0] is not None
    path = written[0].path / file
    path.unlink()
    make(path)
    with hanging_fails(path):
        again = Store(tmp_path, MODEL, 0)
    assert [len(again.find(text)) for text in texts] == [0, 1]
    snapshots.check(again, again.find(texts[1])[0], texts[1])
    assert again.quarantines == 1 and (reason if file == "manifest.json" else f"{file} is no file of") in caplog.text
    # The server that has it open sees it when it reads it.
    with pytest.raises((UnsafeDirectoryError, FileNotFoundError)):
        store.open(written[0])


@each_kind_of_file
def test_a_lock_that_is_no_file_is_an_error(kind: str, tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    KINDS[kind][0](tmp_path / LAYOUT / "lock")
    with pytest.raises(OSError, match=KINDS[kind][1]), Directory(tmp_path, MODEL).lock():
        pass
    store.budget = 1000
    with pytest.raises((OSError, StoreFullError)):
        snapshots.write(store, ids(100))


@pytest.mark.parametrize(
    ("become", "error"),
    [
        (os.mkfifo, "has just become a FIFO"),
        (lambda place: place.symlink_to(place.parent / "secret"), "Too many levels of symbolic links"),
    ],
    ids=["FIFO", "link"],
)
def test_a_file_that_becomes_something_else_is_not_read(
    become: Callable[[Path], None], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = tmp_path / "file", os.open
    place.write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"y")

    def late(name: str, *given: int, **more: int) -> int:
        if name == "file":
            place.unlink()
            become(place)
        return real(name, *given, **more)

    with open_directory(tmp_path) as directory:
        monkeypatch.setattr(os, "open", late)
        with pytest.raises(OSError, match=error):
            directory.open("file")


def test_every_operation_on_a_link_leaves_its_target(tmp_path: Path) -> None:
    # A link that is planted after the look at the directory.
    outside, root = tmp_path / "outside", tmp_path / "root"
    for directory in (outside, root):
        directory.mkdir(mode=0o700)
    (outside / "file").write_bytes(b"a file of its user")
    before = contents(outside)
    operations: list[Callable[[OpenDirectory], object]] = [
        lambda directory: directory.touch("link", 1.0),
        lambda directory: directory.replace("link", b"new"),
        lambda directory: directory.write("link", b"new"),
        lambda directory: directory.move("link", directory, "moved"),
        lambda directory: directory.unlink("link"),
        lambda directory: directory.remove("link"),
        lambda directory: directory.enter("link"),
        lambda directory: directory.read("link", 100),
        lambda directory: directory.size_of("link"),
    ]
    for operation in operations:
        for target in ("file", "", "nothing"):
            shutil.rmtree(root)
            root.mkdir(mode=0o700)
            (root / "link").symlink_to(outside / target)
            with open_directory(root) as directory, contextlib.suppress(OSError):
                operation(directory)
            assert contents(outside) == before


def test_deep_directories_take_few_descriptors(tmp_path: Path) -> None:
    # As deep as a path can name it, and deeper: twice 1500 levels.
    bottom = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=bottom)
        deeper = os.open("d", os.O_RDONLY, dir_fd=bottom)
        os.close(bottom)
        bottom = deeper
    os.close(bottom)
    opened: list[int] = []
    with recorded(tmp_path) as calls, open_directory(tmp_path) as directory:
        directory.remove("d")
        opened.append(calls.most_open)
    assert not list(tmp_path.iterdir()) and opened == [2]


#: functions of `os` that touch no name below the directory: others are in luce.kvcache.disk.files, where tests see them
NAMELESS = {"close", "cpu_count", "fstat", "getpid", "pread", "preadv"}
MODULES = sorted(Path(files.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_only_one_module_names_files(path: Path) -> None:
    if path.name in ("files.py", "fingerprint.py"):  # the other one reads the model's files
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr in NAMELESS, f"line {node.lineno}: os.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"line {node.lineno}"
        if isinstance(node, ast.Import):
            assert "shutil" not in [alias.name for alias in node.names], f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in (
                "read_bytes",
                "write_bytes",
                "read_text",
                "write_text",
                "glob",
                "iterdir",
                "exists",
            )
