"""A server that speaks the Hugging Face hub's protocol on loopback, and another one that holds the bytes, as the hub's
content delivery network does: https://huggingface.co/docs/hub/api, and what the library's own code reads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "a" * 40
NEWER = "b" * 40


@dataclass
class Answer:
    """One answer instead of the usual one, to the next request whose path contains `path`."""

    path: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request that came."""

    host: str
    method: str
    path: str
    headers: Mapping[str, str]


class HubServer:
    """Repositories of files, by ORG/REPO and name. `cuts`: after how many bytes each next download breaks off; with
    `hangs`, no more bytes come instead until the client leaves."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commit = COMMIT
        #: by path, what the other server holds beside the bytes of repositories, and the ETags
        self.files: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        #: bytes that come instead of those of a file, by its digest
        self.instead: dict[str, bytes] = {}
        self.answers: list[Answer] = []
        self.cuts: list[int] = []
        self.hangs = False
        self.ranges = True
        self.requests: list[Request] = []
        self._servers: list[ThreadingHTTPServer] = []
        #: to be closed at the end
        self.connections: list[socket.socket] = []
        self.bytes_url = self._serve(self._bytes, "bytes")
        self.url = self._serve(self._hub, "hub")

    def close(self) -> None:
        """Stop; connections are refused from now on."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def paths(self, host: str, method: str = "GET") -> list[str]:
        """The paths of the requests to a host so far."""
        return [request.path for request in self.requests if (request.host, request.method) == (host, method)]

    def _serve(self, answer: Any, host: str) -> str:
        own = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                own.connections.append(self.request)
                super().setup()

            def do_GET(self) -> None:
                own.requests.append(Request(host, self.command, self.path, dict(self.headers)))
                for special in own.answers:
                    if special.path in self.path:
                        own.answers.remove(special)
                        send(self, special.status, b"", special.headers)
                        return
                answer(self)

            do_HEAD = do_GET

            def log_message(self, *values: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    def _hub(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            self._listing(request, match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(request, match[1], match[3])
        else:
            send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})

    def _listing(self, request: BaseHTTPRequestHandler, repository: str, revision: str) -> None:
        files = self.repositories.get(repository)
        if files is None:
            send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", self.commit):
            send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": name, "size": len(data), **facts(name, data)} for name, data in files.items()]
            body = {"id": repository, "sha": self.commit, "siblings": siblings}
            send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, request: BaseHTTPRequestHandler, repository: str, name: str) -> None:
        data = self.repositories.get(repository, {}).get(name)
        if data is None:
            send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": self.commit}
        if large(name):
            digest = sha256(data)
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            send(request, 302, b"", headers | linked | {"Location": f"{self.bytes_url}/{digest}?signature=secret"})
        else:
            send(request, 200, data, headers | {"ETag": f'"{git_sha1(data)}"'})

    def _bytes(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        digest = path[1:]
        stored = {sha256(data): data for files in self.repositories.values() for data in files.values()}
        data = self.files.get(path, stored.get(digest))
        if data is None:
            send(request, 404, b"", {})
            return
        data = self.instead.get(digest, data)
        status, total, etag = 200, len(data), self.etags.get(path, f'"{digest}"')
        headers = {"ETag": etag}
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if wanted and self.ranges and request.headers.get("If-Range", etag) == etag:
            start = int(wanted[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
            data = data[start:]
        cut = self.cuts.pop(0) if self.cuts and request.command == "GET" else None
        send(request, status, data, headers, cut=cut)
        if cut is not None and self.hangs:
            with contextlib.suppress(OSError):
                request.connection.recv(1)


class Told:
    """What a download tells."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.updates: list[tuple[float, float]] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, done: float, total: float) -> None:
        self.updates.append((done, total))


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str], *, cut: int | None = None
) -> None:
    """An answer, whose body breaks off after `cut` bytes."""
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body if cut is None else body[:cut])
    if cut is not None:
        request.wfile.flush()
        request.close_connection = True


def large(name: str) -> bool:
    """Whether the hub stores a file outside git."""
    return name.endswith(".gguf")


def facts(name: str, data: bytes) -> dict[str, Any]:
    """What the hub lists of a file beside name and size."""
    if not large(name):
        return {"blobId": git_sha1(data)}
    return {"blobId": "0" * 40, "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub of this process, with empty caches. The library writes bytes in pieces of 1000."""
    from huggingface_hub import constants

    server = HubServer()
    for name, value in environment(server, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield server
    server.close()


def environment(server: HubServer, folder: Path) -> dict[str, str]:
    """Variables by which a process uses this hub, and nothing of the user's."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HOME": str(folder / "hf"),
        "CACHE_DIRECTORY": str(folder / "luce"),
        "HOME": str(folder / "home"),
        "OLLAMA_MODELS": str(folder / "ollama"),
        "NO_PROXY": "*",
    }
