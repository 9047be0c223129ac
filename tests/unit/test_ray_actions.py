"""`luce ray` without Ray: its arguments, what it reads and refuses, and what it says of replicas."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luce.cli.main import main
from luce.cli.ray import report_lines
from luce.errors import UsageError
from luce.ray.actions import differences, resources
from luce.ray.child_server import listening_url
from luce.ray.cluster_config import parse_config, plain_content
from luce.ray.node import Node, read_token
from luce.ray.node_resources import unlike_versions
from luce.ray.private_folder import private_folder
from luce.ray.request_facts import PROMPTS, body_limit, group_salt, lost_event, request_text
from luce.ray.shared_routing import SharedRouting, routing_of
from luce.server.cached_blocks import JOBS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words, says",
    [
        (["down", "--node", "10.0.0.2"], "luce ray down: --node is for up and keys"),
        (["status", "--resources", "{}"], "luce ray status: --resources is for up"),
        (["up", "--json"], "luce ray up: --json is for status"),
        (["up", "--node", "box"], "box: expected the IP address"),
        (["up", "--node", "0.0.0.0"], "0.0.0.0: expected the IP address"),
        (["up", "--resources", "[1]"], "--resources [1]: expected JSON"),
        (["up", "--resources", '{"luce_cpu": 0}'], "expected JSON"),
    ],
)
def test_misuse_is_named(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ray.toml"
    path.write_text(f'model = "x"\n[luce_python]\ncpu = "{sys.executable}"\n')
    assert main(["ray", words[0], str(path), *words[1:]]) == 2
    assert says in capsys.readouterr().err


def test_an_environment_without_ray_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ray.toml"
    path.write_text(f'model = "x"\n[luce_python]\ncpu = "{sys.executable}"\n')
    for action in ("up", "down", "status"):
        assert main(["ray", action, str(path)]) == 2
        assert "luce-llm[ray]" in capsys.readouterr().err


def test_resources_are_asked_of_each_kinds_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    devices = [{"device": name, "works": True} for name in ("cuda:0", "cuda:1", "cpu:0")]
    python.write_text(f"#!/bin/sh\necho '{json.dumps({'devices': devices})}'\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    config = {"model": "x", "luce_python": {"cuda": str(python), "hip": str(python), "cpu": str(python)}}
    # The interpreter for AMD GPUs finds none, whatever other devices it finds.
    assert resources(parse_config(config)) == {"luce_cuda": 2, "luce_cpu": 1}
    with pytest.raises(UsageError, match=r"luce_python\.cpu: /nonexistent does not run"):
        resources(parse_config({"model": "x", "luce_python": {"cpu": "/nonexistent"}}))


def test_a_token_is_made_once_and_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "token"
    with pytest.raises(UsageError, match="No such file or directory; copy that of the head"):
        read_token(path, make=False)
    text = read_token(path, make=True).read_text()
    assert len(text) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path, make=True).read_text() == text
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"other users can read it \(mode 0640\)"):
        read_token(path, make=False)


def test_a_configuration_crosses_as_plain_content() -> None:
    content = {
        "model": "x",
        "luce_python": {"cpu": "/p", "hip": "/q"},
        "replica": {"shards": ["hip"], "flags": ["--max-ctx", "8k"]},
    }
    config = parse_config(content)
    assert parse_config(json.loads(json.dumps(plain_content(config)))) == config


def test_where_ray_and_luce_disagree() -> None:
    app = {"deployments": {"replica": {"RUNNING": 1}}}
    nodes = [{"address": "10.0.0.1", "alive": True}, {"address": "10.0.0.2", "alive": True}]
    replicas: list[dict[str, Any]] = [
        {"replica": "a", "answers": True, "node": "10.0.0.2"},
        {"replica": "b", "answers": False},
    ]
    found: dict[str, Any] = {"application": app, "nodes": nodes, "replicas": replicas}
    assert differences(found) == ["replica b: Ray has it running, Luce is silent"]
    replicas[1] = {"replica": "b", "answers": True, "node": "10.0.0.1"}
    assert differences(found) == ["2 replicas answer, Ray has 1 running"]
    assert differences({"application": None, "nodes": nodes, "replicas": []}) == []
    app["deployments"]["replica"]["RUNNING"] = 2
    nodes[1]["alive"] = False
    assert differences(found) == ["replica a: it answers, Ray has its node 10.0.0.2 dead"]
    # A machine that was lost and is back is there twice.
    nodes.append({"address": "10.0.0.2", "alive": True})
    assert differences(found) == []


def test_what_people_are_shown_has_places_versions_and_what_finds_none() -> None:
    replica = {"replica": "a", "answers": True, "node": "10.0.0.2", "devices": ["cpu:0", "tcp://10.0.0.3:7/cpu:0"]}
    load = {"luce": "0.1.0", "life": "0123456789abcdef", "requests": 1, "parallel": 4, "blocks": 3}
    found = {
        "ray": "2.60.0",
        "python": "3.11.7",
        "nodes": [{"address": "10.0.0.2", "alive": False, "resources": {"luce_cpu": 2.0}}],
        "application": {"status": "RUNNING", "message": "", "deployments": {"replica": {"RUNNING": 1}}},
        "replicas": [{**replica, **load}, {"replica": "b", "answers": False}],
        "pending": [{"seconds": 75.2, "lacks": "no node has 1 luce_cuda"}],
        "differences": ["replica b: Ray has it running, Luce is silent"],
    }
    assert list(report_lines(found)) == [
        "Ray 2.60.0, Python 3.11.7",
        "node 10.0.0.2: dead; 2 luce_cpu",
        "application: running; replicas: 1 running",
        "replica a: node 10.0.0.2; cpu:0, tcp://10.0.0.3:7/cpu:0; Luce 0.1.0; life 01234567; 1 of 4 requests, 3 blocks "
        "cached",
        "replica b: silent",
        "a replica finds no place since 75 s; it lacks no node has 1 luce_cuda",
        "replica b: Ray has it running, Luce is silent",
    ]


def test_only_like_versions_join() -> None:
    def unlike(ray: str, python: str) -> str:
        return unlike_versions({"head": {"ray": "2.60.0", "python": "3.11.7"}, "here": {"ray": ray, "python": python}})

    assert unlike("2.60.0", "3.11.7") == unlike("2.60.0", "3.11.2") == ""
    assert unlike("2.61.0", "3.11.7").startswith(
        "the head runs Ray 2.60.0 and Python 3.11.7, this environment has Ray 2.61.0"
    )
    assert "has Ray 2.60.0 and Python 3.12.7" in unlike("2.60.0", "3.12.7")


def test_what_a_node_has_written_goes_with_it_but_for_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    node = Node(parse_config({"model": "x", "luce_python": {"cpu": sys.executable}}), None)
    folder = tmp_path / "node"
    for name in ("session_1", "other"):
        (folder / name / "logs").mkdir(parents=True)
        (folder / name / "logs" / "raylet.out").write_text(name)
    (folder / "session_latest").symlink_to("session_1")
    node.state.mkdir(parents=True)
    for text in ("first", "second"):
        (node.state / "folder").write_text(str(folder))
        assert node.stop() == 0
        assert not folder.exists() and not (node.state / "folder").exists()
        assert (node.state / "logs" / "raylet.out").read_text() == ("session_1" if text == "first" else text)
        (folder / "session_2" / "logs").mkdir(parents=True)
        (folder / "session_2" / "logs" / "raylet.out").write_text("second")


def test_folders_of_processes_that_are_gone_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = private_folder()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    # Another process with this one's id, long ago; and what is nobody's folder of keys.
    gone, others = tmp_path / f"luce-process-{os.getpid()}-1-abc", tmp_path / "luce-process-x"
    gone.mkdir()
    others.mkdir()
    (gone / "keys").write_text("secret")
    assert sorted(tmp_path.iterdir()) == sorted([mine, gone, others])
    another = private_folder()
    assert sorted(tmp_path.iterdir()) == sorted([mine, another, others])


def test_the_address_of_a_child_is_in_its_log() -> None:
    line = json.dumps({"level": "info", "event": "listening", "url": "http://127.0.0.1:3"})
    assert listening_url(line) == "http://127.0.0.1:3"
    for other in ('{"event": "ready"}', "listening url=http://x", "3", '["listening"]'):
        assert listening_url(other) == ""


def test_an_ingress_takes_what_a_server_with_these_flags_takes() -> None:
    assert body_limit([]) == body_limit(["--max-ctx", "8k"]) == 64 << 20
    assert body_limit(["--threads", "1", "--max-body-mib", "2"]) == body_limit(["--max-body-mib=2"]) == 2 << 20


def test_groups_do_not_share_keys() -> None:
    salts = [
        group_salt("luce", {}),
        group_salt("other", {}),
        group_salt("luce", {"authorization": "Bearer a"}),
        group_salt("luce", {"authorization": "Bearer b"}),
        group_salt("luce", {"x-api-key": "a"}),
    ]
    assert len(set(salts)) == len(salts)
    assert group_salt("luce", {"api-key": "a"}) == group_salt("luce", {"x-api-key": "a"})


def test_the_text_of_a_later_turn_begins_like_the_earlier_one() -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}]
    first = request_text(json.dumps({"model": "m", "messages": messages}).encode())
    later = request_text(
        json.dumps({"messages": [*messages, {"role": "user", "content": "b"}], "stream": True}).encode()
    )
    assert first.rstrip("]") and later.startswith(first.rstrip("]"))
    assert request_text(b"\xff") == request_text(b"[]") == ""
    assert "x" in request_text(b'{"prompt": "x"}')


def test_the_endpoints_with_prompts_are_those_that_a_server_has_keys_for() -> None:
    assert set(PROMPTS) == set(JOBS)


def test_a_lost_reply_ends_with_an_event() -> None:
    event = lost_event("gone")
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["message"] == "gone"


def test_the_routing_state_is_shared_by_name() -> None:
    routing = routing_of("one")
    assert routing is routing_of("one") and routing is not routing_of("two")
    routing = SharedRouting()
    routing.keep(["a", "b"])
    assert sorted(routing.names()) == ["a", "b"] and routing.followed("a") == ("", -1) == routing.followed("c")
    report = {"life": "x", "since": -1, "sequence": 4, "added": [b"k"], "removed": [], "running": 0, "waiting": 0}
    assert routing.apply("a", {**report, "parallel": 2, "prefill_seconds": 0.1, "reply_seconds": 1.0})
    assert routing.followed("a") == ("x", 4)
    assert routing.ranked([b"k"], ["a", "b"]) == ["a", "b"] and routing.ranked([b"k"], ["b"]) == ["b"]
    routing.asked("call")
    routing.began("call", "a", [b"k"])
    assert routing.loads()["a"] == {"life": "x", "requests": 1, "parallel": 2, "blocks": 1}
    for _ in range(2):
        routing.ended("call")
        assert routing.loads()["a"]["requests"] == 0
    # The client leaves while the router's thread sends its request: its blocks would be taken for cached for ever.
    routing.asked("left")
    routing.ended("left")
    routing.began("left", "b", [b"other"])
    assert routing.loads()["b"]["requests"] == 0 and routing.ranked([b"k", b"other"], ["a", "b"]) == ["a", "b"]


def test_the_parts_that_run_with_ray_need_no_other_package() -> None:
    # Ray's environment has what Ray needs, and what luce-llm[ray] adds; a router has no NumPy and no model.
    modules = ["actions", "routing_state", "shared_routing", "group_keys", "child_server", "node_resources", "guarded"]
    code = "import sys\n" + "".join(f"import luce.ray.{name}\n" for name in modules) + "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"numpy", "msgspec", "aiohttp", "ray", "jinja2"} & set(done.stdout.split())
