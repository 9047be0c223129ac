"""Conversations with servers: Luce itself, and scripted ones of other shapes."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.cli.repl.server_client import ServerClient, base_url
from luce.cli.repl.server_replier import ServerReplier
from luce.errors import ServerError, UsageError
from tests.support.http_server import running
from tests.support.other_server import OtherServer, delta
from tests.support.scripted_chat import ScriptedModel
from tests.support.talk import Keys, Talk


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[OtherServer]:
    server = OtherServer()
    yield server
    server.close()


@pytest.fixture
def luce() -> Iterator[str]:
    """The address of Luce's own server, which runs on a thread: Ctrl+C of a chat needs the main one."""
    urls: queue.SimpleQueue[str] = queue.SimpleQueue()
    over = threading.Event()

    async def serve() -> None:
        async with running() as here:
            urls.put(here.url)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield urls.get()
    over.set()
    thread.join()


def test_luce_itself(luce: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = ServerClient(luce, "")
    keys = Keys("/set max_tokens 5", "/set temperature 0", "hi", "/set verbose", "again", "/show cache")
    done = Talk(ScriptedModel(), keys, replier=ServerReplier(client, None))
    client.close()
    assert done.status == 0, done.notes
    messages = done.session.conversation.for_template()
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert "5 tok · " in done.notes and "(cut at max_tokens)" in done.notes
    assert "tokens were cached" in done.notes
    assert done.session.replier.context


def test_a_server_without_usage(server: OtherServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = delta(role="assistant") + delta(content="Hel") + delta(content="lo") + delta("stop")
    talk = server.talk("/set verbose", "hi", "/show info")
    assert capsys.readouterr().out == "Hello\n"
    assert talk.notes.splitlines()[1].startswith("2 tok · ") and "ctx" not in talk.notes
    assert server.requests[0]["model"] == "first"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert server.requests[0].keys() == {"model", "messages", "stream", "stream_options"}
    assert "100 tokens" in talk.notes


@pytest.mark.parametrize(
    "deltas",
    [
        delta(reasoning_content="hm") + delta(content="yes"),
        delta(reasoning="hm", content="") + delta(content="yes"),
        delta(content="<thi") + delta(content="nk>hm</think>yes"),
    ],
    ids=["reasoning_content", "reasoning", "in the text"],
)
def test_reasoning(server: OtherServer, deltas: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = deltas + delta("stop") + b"data: [DONE]\n\n"
    talk = server.talk("hi", "more")
    assert capsys.readouterr().out == "yes\nyes\n"
    assert talk.session.conversation.messages[1].reasoning == "hm"
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "yes"}


def test_a_server_that_does_not_stream(server: OtherServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.kind = "application/json"
    server.body = json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}).encode()
    server.talk("hi")
    assert capsys.readouterr().out == "yes\n"


def test_settings_are_fields_of_the_request(server: OtherServer) -> None:
    server.body = delta("stop", content="{}")
    server.talk(
        "/set format json",
        "/set think off",
        "/set seed 3",
        "one",
        "/set think low",
        "two",
        "/set think 9",
        "3",
        key="secret",
    )
    first, second, third = server.requests
    assert first["response_format"] == {"type": "json_object"} and first["seed"] == 3
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert second["reasoning_effort"] == "low" and "chat_template_kwargs" not in second
    assert third["thinking_token_budget"] == third["thinking_budget_tokens"] == 9 and "reasoning_effort" not in third
    assert server.keys == ["Bearer secret"] * 3


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b'{"error": {"message": "wrong\\nkey"}}', "401: wrong key"),
        (422, b'{"detail": [{"loc": ["x"]}]}', '422: [{"loc":["x"]}]'),
        (502, b"<html>\n" + b"x" * 1000, "502: <html> xxx"),
        (200, delta(content="a") + b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (200, delta(content="a"), "the reply is not complete"),
        (200, b"data: {\n\n", "the response is not JSON: {"),
    ],
)
def test_errors_are_one_line_and_lose_nothing(server: OtherServer, status: int, body: bytes, message: str) -> None:
    server.status, server.body = status, body
    talk = server.talk("hi")
    assert message in talk.notes and talk.notes.count("\n") == 1 and len(talk.notes) < 400
    assert talk.session.conversation.messages == []
    assert talk.status == ServerError.exit_code


def test_a_server_that_refuses_stream_options(server: OtherServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refused = ("stream_options",)
    server.body = delta("stop", content="yes")
    talk = server.talk("one", "two")
    assert capsys.readouterr().out == "yes\nyes\n" and talk.status == 0
    assert ["stream_options" in request for request in server.requests] == [True, False, False]
    server.refused = ("stream_options", "stream")
    assert "400: Unrecognized request argument: stream" in server.talk("one").notes
    assert len(server.requests) == 5


def test_template_and_devices_of_a_server(server: OtherServer, luce: str) -> None:
    client = ServerClient(luce, "")
    done = Talk(ScriptedModel(), Keys("/show template", "/show devices"), replier=ServerReplier(client, None))
    client.close()
    assert "{%" in done.notes and "cpu:0" in done.notes and "luce:" not in done.notes
    shard = {"device": "\x1b[31mgpu:0", "layers": [0, 3], "weights": 1 << 20, "state": 0}
    server.props = {"chat_template": "{{ messages }}\x07", "runtime": {"target_sharding": [shard]}}
    notes = server.talk("/show template", "/show devices").notes
    assert "{{ messages }}\n" in notes and "[31mgpu:0  0..3    1.0 MiB" in notes and "\x1b" not in notes
    for wrong in ([], {"chat_template": 1, "runtime": {"target_sharding": [{}]}}):
        server.props = wrong
        assert server.talk("/show template", "/show devices").notes == (
            "luce: /show template: the server's /props has no chat_template\n"
            "luce: /show devices: the server's /props has no runtime.target_sharding\n"
        )


def test_what_a_server_does_not_tell(server: OtherServer) -> None:
    server.models = {"data": [{"id": "first"}]}
    notes = server.talk("/show template", "/show devices", "/show cache").notes.splitlines()
    assert [line.split(":")[1].strip() for line in notes] == ["/show template", "/show devices", "/show cache"]


def test_no_model(server: OtherServer) -> None:
    server.models = []
    with pytest.raises(UsageError, match="MODEL: missing"):
        server.talk("hi")


def test_addresses() -> None:
    assert base_url("http://h:1") == base_url("http://h:1/") == "http://h:1/v1"
    assert base_url("https://h/api/v1/") == "https://h/api/v1"
    for text in ("h:1", "ftp://h", "http://", "http://h:x"):
        with pytest.raises(UsageError, match="--server: expected a URL such as"):
            base_url(text)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--server", "http://127.0.0.1:9"], 7, "luce: http://127.0.0.1:9/v1: Connection refused\n"),
        (
            ["--server", "nowhere"],
            2,
            "luce: --server: expected a URL such as http://127.0.0.1:8080/v1, got 'nowhere'\n",
        ),
        (
            ["--server", "http://h", "--max-ctx", "9"],
            2,
            "luce: --max-ctx: not with --server, which has its own settings\n",
        ),
        (["--api-key", "x", "smollm2"], 2, "luce: --api-key: requires --server\n"),
        (["--server", "http://h", "--dry-run"], 2, "luce: --dry-run: not with --server, which has its own settings\n"),
        ([], 2, "luce: MODEL: missing; give a model, or --server\n"),
        (["--dry-run"], 2, "luce: MODEL: missing\n"),
    ],
)
def test_command_line(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *arguments]) == status
    assert capsys.readouterr().err == message
