"""Bodies that would build too much are noticed before anything is built."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.errors import RequestError, TooLargeError
from luce.server import json_size, schema
from luce.server.json_size import too_many
from luce.server.schema import ChatRequest, CompletionRequest, decode

JSON = st.recursive(
    st.integers() | st.text('ab"\\[]{},:\n é', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[{,:', max_size=5), inner, max_size=4),
    max_leaves=20,
)


def containers(value: Any) -> int:
    """Objects and lists of a value."""
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


def keys(value: Any) -> int:
    """Keys of the objects of a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(keys, value.values()))
    return sum(map(keys, value)) if isinstance(value, list) else 0


@given(JSON, st.integers(0, 12), st.sampled_from([1, 2, 3, 5, 64]))
def test_containers_and_keys_are_counted_outside_strings(value: Any, limit: int, step: int) -> None:
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "STEP", step)
        # Nothing else counts beside the one kind.
        for name, counted in (("objects and lists", containers(value)), ("keys", keys(value))):
            limits = {**dict.fromkeys(json_size.LIMITS, 1 << 40), name: limit + 0.5}
            patch.setattr(json_size, "LIMITS", limits)
            assert bool(too_many(body)) == (counted > limit)


@pytest.mark.parametrize(
    "body, what",
    [
        (b'{"x":[' + b"[]," * 500_000 + b"1]}", "objects and lists: 500000"),
        (b'{"tools":[' + b'{"a":{}},' * 170_000 + b"{}]}", "keys: 200000"),
        (b"[" * 600_000, "objects and lists: 500000"),
        (b'{"prompt":[' + b"1," * 1_000_001 + b"1]}", "values: 1000000"),
        (b'{"user":"' + rb"\n" * 5_000_001 + b'"}', "backslashes: 5000000"),
        (b'{"chat_template_kwargs":{' + b",".join(b'"%x":1' % i for i in range(190_000)) + b"}}", "keys: 200000"),
        # Strings of many bytes leave less time for the rest.
        (b'{"prompt":[' + b"1," * 600_000 + b'"' + b"a" * (60 << 20) + b'"]}', "values: 1000000"),
    ],
)
def test_bodies_that_would_build_too_much(body: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "json_decoder", None)
    with pytest.raises(TooLargeError, match=f"too many {what}"):
        decode(body, ChatRequest)


@pytest.mark.parametrize("text", ['a"[[', '\\"[[', '\\\\"[[', "[[\\", '"'])
def test_a_step_may_end_anywhere_in_a_string(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_size, "LIMITS", {**dict.fromkeys(json_size.LIMITS, 1 << 40), "objects and lists": 1.5})
    for step in range(1, 20):
        monkeypatch.setattr(json_size, "STEP", step)
        assert not too_many(json.dumps([text, text]).encode())
        assert too_many(json.dumps([text, []]).encode())


def test_text_with_as_many_brackets_is_no_matter() -> None:
    text = '[{,"\\' * 900_000
    request, _ = decode(json.dumps({"prompt": text}).encode(), CompletionRequest)
    assert request.prompt == text


def test_unknown_fields_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def live() -> int:
        gc.collect()
        return len(gc.get_objects())

    body = b'{"prompt":"a","x":[' + b'{"a":[]},' * 1000 + b"1]}"
    before = live()
    request, unknown = decode(body, CompletionRequest)
    assert live() < before + 500 and unknown == 1 and request.prompt == "a"


def test_the_collector_is_off_meanwhile_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = schema.CompletionRequest

    class Spy:
        def decode(self, body: bytes) -> Any:
            seen.append(gc.isenabled())
            return real(prompt="a")

    monkeypatch.setattr(schema, "json_decoder", lambda kind: Spy())
    assert gc.isenabled()
    decode(b"{}", CompletionRequest)
    assert seen == [False] and gc.isenabled()
    with pytest.raises(RequestError):
        decode(b"{", CompletionRequest)
    assert gc.isenabled()
