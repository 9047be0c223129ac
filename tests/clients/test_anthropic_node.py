"""Anthropic's package for Node against the application."""

from __future__ import annotations

from pathlib import Path

from tests.support.client_programs import node
from tests.support.http_server import running
from tests.support.scripted_model import REPLY

SCRIPTS = Path(__file__).with_name("node")


async def test_messages_streams_and_errors(tmp_path: Path) -> None:
    async with running(api_key=("secret",)) as here:
        found = await node(SCRIPTS / "anthropic.mjs", here, tmp_path)
    assert found == {
        "content": [{"type": "text", "text": REPLY}],
        "stop": "end_turn",
        "streamed": REPLY,
        "final": [{"type": "text", "text": REPLY}],
        "counted": True,
        "cached": True,
        "short": "max_tokens",
        "models": ["scripted"],
        "wrong": ["AuthenticationError", 401],
        "long": ["BadRequestError", 400, "prompt is too long: N tokens > 512 maximum"],
    }
