"""Starting a node of Ray, by a program in the place of Ray's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from luce.errors import ServerError
from luce.ray.cluster_config import parse_config
from luce.ray.node import Node

# In the place of Python: Ray's program, which ends the first times that it is started, and the session, which answers
# while it runs.
_PROGRAM = """#!/bin/sh
case "$*" in
*ray.scripts.scripts*)
    echo started >> "{folder}/starts"
    [ "$(wc -l < "{folder}/starts")" -gt {fails} ] || exit 1
    touch "{folder}/running"
    exec sleep 600;;
*serve_session*)
    [ -e "{folder}/running" ] && echo "{{}}";;
esac
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    content = {"model": "x", "luce_python": {"cpu": sys.executable}, "head": {"token_file": str(tmp_path / "token")}}
    return Node(parse_config(content), None)


def start(node: Node, folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: int) -> None:
    """Start it where Ray ends so often before it runs."""
    program = folder / "python"
    program.write_text(_PROGRAM.format(folder=folder, fails=fails))
    program.chmod(0o755)
    monkeypatch.setattr("luce.ray.node.sys.executable", str(program))
    node.start({})


def starts(folder: Path) -> int:
    """How often Ray was started."""
    return len((folder / "starts").read_text().splitlines())


# Ray goes on running behind the end of `luce ray up`, which keeps no handle of it.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("fails", [0, 1])
def test_ray_that_ends_is_started_once_more(
    fails: int, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(node, tmp_path, monkeypatch, fails=fails)
    assert starts(tmp_path) == 1 + fails
    assert node.running()
    assert node.stop() == 1
    assert not node.running()


def test_ray_that_ends_twice_fails(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match=r"Ray does not start; see .*node\.log"):
        start(node, tmp_path, monkeypatch, fails=2)
    assert starts(tmp_path) == 2
    assert not node.running()
    # Nothing is left of its folders of sockets.
    assert not (node.state / "folder").exists()
