"""What an ingress reads of a request: its target as the client has sent it, and its headers as a server would."""

from __future__ import annotations

import pytest

from luce.ray.request_facts import raw_target, text_headers


@pytest.mark.parametrize(
    "path, query, target",
    [
        (b"/v1/completions", b"", "/v1/completions"),
        (b"/v1/responses/a%2Fb%20c", b"x=%2F+%41&y", "/v1/responses/a%2Fb%20c?x=%2F+%41&y"),
        (b"/a/%2e%2e/../b//c", b"", "/a/%2e%2e/../b//c"),
        # Behind the address of a replica it must not become another host's.
        (b"@example.org/v1", b"", "/@example.org/v1"),
        (b"1", b"", "/1"),
    ],
)
def test_the_target_is_the_clients(path: bytes, query: bytes, target: str) -> None:
    assert raw_target({"path": "/decoded", "raw_path": path, "query_string": query}) == target


@pytest.mark.parametrize(
    "value, text", [("Bearer Schlüssel".encode(), "Bearer Schlüssel"), (b"Bearer k\xe9", "Bearer ké")]
)
def test_headers_are_utf8_as_for_the_server(value: bytes, text: str) -> None:
    headers = text_headers({"headers": [(b"authorization", value), (b"x-twice", b"1"), (b"x-twice", b"2")]})
    assert headers["Authorization"] == text
    assert list(headers.items())[1:] == [("x-twice", "1"), ("x-twice", "2")]
