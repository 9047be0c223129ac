"""Decoding of bodies: strings, and unknown fields."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from luce.server.schema import ChatRequest, CompletionRequest, decode

TEXT = st.text(st.characters(codec=None) | st.sampled_from('\ud800\udfff\\u"d8\0'), max_size=12)


@given(TEXT)
def test_surrogates_are_replaced_and_nuls_removed(text: str) -> None:
    # The standard library joins pairs of escaped surrogates; lone ones cannot be encoded.
    read = json.loads(json.dumps(text))
    expected = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in read if c != "\0")
    request, unknown = decode(json.dumps({"prompt": text}).encode(), CompletionRequest)
    assert request.prompt == expected and unknown == 0


@given(st.text(max_size=12))
def test_text_that_is_not_escaped_stays(text: str) -> None:
    request, _ = decode(json.dumps({"prompt": text}, ensure_ascii=False).encode(errors="replace"), CompletionRequest)
    assert request.prompt == text.replace("\0", "")


def test_unknown_fields_are_counted() -> None:
    body = {"messages": [{"role": "user", "content": "a", "strange": 1}], "x": 1, "y": {}, "n": 2}
    request, unknown = decode(json.dumps(body).encode(), ChatRequest)
    assert unknown == 2 and request.n == 2
