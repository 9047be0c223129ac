"""A server of OpenAI's API with scripted responses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from luce.cli.repl.server_client import ServerClient
from luce.cli.repl.server_replier import ServerReplier
from tests.support.scripted_chat import ScriptedModel
from tests.support.talk import Keys, Talk


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': fields, 'finish_reason': finish}]})}\n\n".encode()


class OtherServer:
    """Answers every POST with `status` and `body`, or `hangs` behind the body until the client leaves; records the
    requests and their keys. One with a field of `refused` gets 400, which names the first of them."""

    def __init__(self) -> None:
        self.hangs, self.left = False, threading.Event()
        self.refused: tuple[str, ...] = ()
        self.props: Any = None
        self.status, self.body, self.kind = 200, b"", "text/event-stream"
        self.models: Any = {"data": [{"id": "first", "max_model_len": 100}, {"id": "second"}]}
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/props":
                    self.answer(404 if own.props is None else 200, json.dumps(own.props).encode(), "application/json")
                    return
                self.answer(200, json.dumps(own.models).encode(), "application/json")

            def do_POST(self) -> None:
                own.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                own.keys.append(self.headers["Authorization"])
                for name in filter(own.requests[-1].__contains__, own.refused):
                    error = {"error": {"message": f"Unrecognized request argument: {name}"}}
                    self.answer(400, json.dumps(error).encode(), "application/json")
                    return
                self.answer(own.status, own.body, own.kind)

            def answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                if not own.hangs or kind != own.kind:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if own.hangs and kind == own.kind:
                    self.connection.recv(1)
                    own.left.set()

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
