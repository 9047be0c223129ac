"""Conversations with servers: Luce itself, and scripted ones of other shapes."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from luce.cli.main import main
from luce.cli.repl.server_client import ServerClient, base_url
from luce.cli.repl.server_replier import ServerReplier
from luce.errors import ServerError, UsageError
from tests.support.http_server import running
from tests.support.scripted_chat import ScriptedModel
from tests.support.talk import Keys, Talk


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': fields, 'finish_reason': finish}]})}\n\n".encode()


class OtherServer:
    """Answers every POST with `status` and `body`; records the requests and their keys."""

    def __init__(self) -> None:
        self.status, self.body, self.kind = 200, b"", "text/event-stream"
        self.models: Any = {"data": [{"id": "first", "max_model_len": 100}, {"id": "second"}]}
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, json.dumps(own.models).encode(), "application/json")

            def do_POST(self) -> None:
                own.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                own.keys.append(self.headers["Authorization"])
                self.answer(own.status, own.body, own.kind)

            def answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *values: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def talk(self, *messages: str, model: str | None = None, key: str = "") -> Talk:
        client = ServerClient(self.url, key)
        try:
            return Talk(ScriptedModel(), Keys(*messages), replier=ServerReplier(client, model))
        finally:
            client.close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


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
    server.talk("/set format json", "/set think off", "/set seed 3", "one", "/set think low", "two", key="secret")
    first, second = server.requests
    assert first["response_format"] == {"type": "json_object"} and first["seed"] == 3
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert second["reasoning_effort"] == "low" and "chat_template_kwargs" not in second
    assert server.keys == ["Bearer secret"] * 2


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
