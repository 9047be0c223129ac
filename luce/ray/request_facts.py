"""What an ingress reads from a client's request, and says itself. Pure."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from multidict import CIMultiDict

from luce.config.server_settings import ServerSettings

#: endpoints with prompts; each is also served below /v1
PROMPTS = ("/chat/completions", "/completions", "/messages", "/responses", "/completion", "/infill")


def body_limit(flags: Sequence[str]) -> int:
    """The largest body that a server with these arguments takes, in bytes: an ingress need not hold a larger one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max-body-mib", type=int, default=ServerSettings.max_body_mib)
    return int(parser.parse_known_args(flags)[0].max_body_mib) << 20


def group_salt(name: str, headers: Mapping[str, str]) -> bytes:
    """The salt of the client's group: each API key is a group, and those without a key are one. `name`: of the
    application, so that two models do not share keys."""
    key = headers.get("authorization") or headers.get("x-api-key") or headers.get("api-key") or ""
    return hashlib.sha256(f"{name}\0{key}".encode()).digest()


def raw_target(scope: Mapping[str, Any]) -> str:
    """Path and query of a request's ASGI scope as the client has sent them: `%2F` is a part of a name, `/` is not. It
    begins with `/`, so that behind a replica's address it names nothing but a path of it."""
    path, query = (bytes(scope[name]).decode("latin-1") for name in ("raw_path", "query_string"))
    return ("" if path.startswith("/") else "/") + path + (f"?{query}" if query else "")


def text_headers(scope: Mapping[str, Any]) -> CIMultiDict[str]:
    """The headers of a request's ASGI scope as a replica's server reads them: UTF-8, or Latin-1 where it is none."""
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in scope["headers"])


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def request_text(body: bytes) -> str:
    """The text of a body that begins like that of an earlier turn: its conversation, or its prompt."""
    try:
        fields = json.loads(body)
        found = [fields[name] for name in ("system", "messages", "prompt", "input") if name in fields]
    except (ValueError, TypeError):
        return ""
    return json.dumps(found) if found else ""


def lost_event(text: str) -> bytes:
    """The event that ends a stream whose replica is gone, in the form of the server's own."""
    error = {"message": text, "type": "server_error", "param": None, "code": "replica_lost"}
    return f"data: {json.dumps({'error': error})}\n\n".encode()
