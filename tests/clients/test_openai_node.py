"""OpenAI's package for Node against the application."""

from __future__ import annotations

from pathlib import Path

from tests.support.client_programs import node
from tests.support.http_server import running
from tests.support.scripted_model import REPLY

SCRIPTS = Path(__file__).with_name("node")


async def test_replies_streams_and_errors(tmp_path: Path) -> None:
    async with running(api_key=("secret",), temperature=0.0) as here:
        found = await node(SCRIPTS / "openai.mjs", here, tmp_path)
    assert found == {
        "text": REPLY,
        "finish": "stop",
        "streamed": REPLY,
        "last": [0, True],
        "final": REPLY,
        "short": "length",
        "completion": "length",
        "models": ["scripted"],
        "wrong": ["AuthenticationError", 401, "invalid_api_key", True],
        "long": ["BadRequestError", 400, "context_length_exceeded", True],
    }
