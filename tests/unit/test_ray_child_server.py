"""`luce serve` as the child of a replica: who can read its keys, and what is left of it."""

from __future__ import annotations

import json
import queue
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from luce.errors import ServerError
from luce.ray.child_server import ChildServer
from luce.ray.cluster_config import ClusterConfig, parse_config
from luce.ray.process_guard import Nursery

LISTENS = """
import json, os, signal, sys, time
print(json.dumps({"argv": sys.argv, "key": os.environ["LUCE_API_KEY"]}), file=open(FOLDER + "/seen", "w"), flush=True)
print(json.dumps({"event": "listening", "url": "http://127.0.0.1:7"}), flush=True)
time.sleep(600)
"""


def config(folder: Path, code: str, **more: Any) -> ClusterConfig:
    """A configuration whose interpreter runs this code instead."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nFOLDER = {str(folder)!r}\n{code}")
    python.chmod(0o700)
    content = {"model": "m.gguf", "luce_python": {"cpu": str(python)}, "replica": {"drain": 1, "flags": ["--flag"]}}
    return parse_config(content | more)


def test_keys_are_in_files_of_this_user_and_in_no_command_line(tmp_path: Path) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    server = ChildServer(Nursery(), config(tmp_path, LISTENS), ["cpu:1"], ended.put, b"pair")
    try:
        assert server.url(60) == "http://127.0.0.1:7" and server.runs()
        seen = json.loads((tmp_path / "seen").read_text())
        argv = seen["argv"]
        assert seen["key"] == server.admin and server.admin != server.client
        assert server.admin not in str(argv) and server.client not in str(argv)
        assert argv[argv.index("--target-devices") + 1] == "cpu:1" and argv[-1] == "--flag" and "m.gguf" in argv
        keys, pair = (Path(argv[argv.index(flag) + 1]) for flag in ("--api-key-file", "--shard-key-file"))
        # The client's key is no admin's.
        assert keys.read_text() == f"client:{server.client}\n" and pair.read_bytes() == b"pair"
        for path, mode in ((keys, 0o600), (pair, 0o600), (keys.parent, 0o700)):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        server.close()
    assert not server.runs() and not keys.parent.exists() and ended.empty()
    server.close()


def test_clients_with_keys_of_their_own_get_none(tmp_path: Path) -> None:
    server = ChildServer(Nursery(), config(tmp_path, LISTENS, api_key_file="/etc/keys"), ["cpu:0"], lambda status: None)
    try:
        server.url(60)
        argv = json.loads((tmp_path / "seen").read_text())["argv"]
        assert server.client == "" and argv[argv.index("--api-key-file") + 1] == "/etc/keys"
        assert "--shard-key-file" not in argv
    finally:
        server.close()


def test_a_child_that_ends_is_told_and_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    server = ChildServer(Nursery(), config(tmp_path, code), ["cpu:0"], ended.put)
    try:
        assert ended.get(timeout=60) == 3
        with pytest.raises(ServerError, match="luce serve does not start: no such model"):
            server.url(60)
    finally:
        server.close()
