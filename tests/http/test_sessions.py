"""Whose turn a request takes: a session of a key, the key, or the connection."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.support.http_server import Running, running

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def record(here: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions of sequences from now on, as the engine gets them."""
    sessions: list[str] = []
    submit = here.model.engine.submit

    def recorded(*arguments: Any, session: str, **options: Any) -> Any:
        sessions.append(session)
        return submit(*arguments, session=session, **options)

    monkeypatch.setattr(here.model.engine, "submit", recorded)
    return sessions


async def test_without_a_name_a_connection_is_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        sessions = record(here, monkeypatch)
        for _ in range(2):
            await here.post(CHAT, {**HI, "n": 2})
        async with aiohttp.ClientSession() as other:
            await (await other.post(here.url + CHAT, json=HI)).read()
        await here.post(CHAT, {**HI, "session_id": "mine"})
        await here.post(CHAT, {**HI, "user": "mine"}, headers={"x-session-id": "other"})
    one, *rest = sessions[:4]
    assert rest == [one] * 3 and len({one, *sessions[4:]}) == 4


async def test_sessions_of_different_keys_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(api_key=("first-key", "second-key")) as here:
        sessions = record(here, monkeypatch)
        for key in ("first-key", "second-key", "first-key"):
            for body in (HI, {**HI, "session_id": "same"}):
                status, _, _ = await here.post(CHAT, body, headers={"x-api-key": key})
                assert status == 200
    assert sessions[:2] == sessions[4:] and len(set(sessions)) == 4
    assert not any("key" in session for session in sessions)
