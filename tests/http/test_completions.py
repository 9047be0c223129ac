"""/v1/completions: every form of prompt, echo, scoring, and the legacy log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import pytest

from luce.text.tokenizer import NORMAL, USER_DEFINED, Tokenizer
from tests.support.http_server import Running, running
from tests.support.scripted_model import BOS, VOCAB, metadata, saying, tokenizer

PATH = "/v1/completions"
SAYS = {"script": saying(" wörld.", marker="hello")}


async def complete(here: Running, prompt: Any, **fields: Any) -> dict[str, Any]:
    status, body, _ = await here.post(PATH, {"prompt": prompt, "temperature": 0, **fields})
    assert status == 200, body
    return body


async def test_a_text_prompt() -> None:
    async with running(model=SAYS) as here:
        body = await complete(here, "hello")
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
        (choice,) = body["choices"]
        assert choice["text"] == " wörld." and choice["index"] == 0 and choice["logprobs"] is None
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == 5


async def test_sixteen_tokens_by_default() -> None:
    async with running(model={"script": saying("x", marker="hello", end=False)}) as here:
        assert (await complete(here, "hello"))["choices"][0]["text"] == "x" * 16


async def test_all_forms_of_prompt_give_the_same() -> None:
    ids = list(b"hello")
    async with running(model=SAYS) as here:
        expected = [" wörld."]
        for prompt in ("hello", ["hello"], ids, [ids]):
            assert [c["text"] for c in (await complete(here, prompt))["choices"]] == expected
        body = await complete(here, ["hello", "say hello"], n=2)
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, " wörld.") for i in range(4)]
        assert body["usage"]["prompt_tokens"] == 5 + 9


async def test_the_longest_prompt_decides_before_anything_runs() -> None:
    async with running(model={"context": 64}) as here:
        status, body, _ = await here.post(PATH, {"prompt": ["a", "a" * 200, "b"]})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert here.model.backend.steps == []


async def test_bos_is_added_unless_the_text_begins_with_it() -> None:
    async with running(model={"add_bos": True}) as here:
        for prompt in ("ab", "<|bos|>ab"):
            body = await complete(here, prompt, max_tokens=1, return_token_ids=True, echo=True)
            assert body["choices"][0]["prompt_token_ids"] == [BOS, *b"ab"]
            assert body["choices"][0]["text"].startswith(prompt)


async def test_echo_with_scores_is_the_models_own_distribution() -> None:
    async with running(chunk=3, model={"script": lambda history: None}) as here:
        ids = list("hé!".encode())
        body = await complete(here, ids, echo=True, logprobs=2, max_tokens=0)
        (choice,) = body["choices"]
        assert choice["text"] == "hé!" and choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0
        scores = choice["logprobs"]
        assert scores["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert scores["text_offset"] == [0, 1, 1, 2]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        for at in range(1, len(ids)):
            logits = [float(x) for x in here.model.backend.logits(ids[:at])]
            expected = logits[ids[at]] - math.log(sum(math.exp(x) for x in logits))
            assert scores["token_logprobs"][at] == pytest.approx(expected, abs=1e-4)
            assert scores["tokens"][at] in scores["top_logprobs"][at]
            assert len(scores["top_logprobs"][at]) in (2, 3)


async def test_logprobs_of_prompt_and_reply_join() -> None:
    async with running(model={**SAYS, "add_bos": True}) as here:
        body = await complete(here, "hello", echo=True, logprobs=1)
        (choice,) = body["choices"]
        scores = choice["logprobs"]
        assert choice["text"] == "hello wörld."
        assert len({len(column) for column in scores.values()}) == 1
        assert scores["tokens"][:2] == ["<|bos|>", "h"]
        for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<|")):
                assert choice["text"][offset] == token
        alone = (await complete(here, "hello", logprobs=1))["choices"][0]["logprobs"]
        assert alone["tokens"] == scores["tokens"][6:] and alone["text_offset"][0] == 0
        streamed = await here.events(PATH, {"prompt": "hello", "temperature": 0, "echo": True, "logprobs": 1})
        assert "".join(e["choices"][0]["text"] for e in streamed) == choice["text"]
        for key, column in scores.items():
            parts = [e["choices"][0]["logprobs"][key] for e in streamed if e["choices"][0]["logprobs"]]
            assert list(chain(*parts)) == column


async def test_alternatives_that_are_parts_of_characters_stay_apart() -> None:
    async with running(model={"script": lambda history: None}) as here:
        ids = list("naïve 🤗 媽".encode())
        body = await complete(here, "naïve 🤗 媽", echo=True, logprobs=5, max_tokens=0)
        scores = body["choices"][0]["logprobs"]
        assert scores["tokens"][6:11] == [" ", *(f"bytes:\\x{byte:02x}" for byte in "🤗".encode())]
        for at in range(1, len(ids)):
            likely = likeliest(here, ids[:at])[:5]
            row = scores["top_logprobs"][at]
            assert set(row) == {name(i) for i in (*likely, ids[at])}
            assert max(row, key=row.__getitem__) == name(likely[0])
            assert row[scores["tokens"][at]] == scores["token_logprobs"][at]


def likeliest(here: Running, history: Sequence[int]) -> list[int]:
    """All tokens behind a history, the likeliest first."""
    logits = here.model.backend.logits(history).tolist()
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def name(token: int) -> str:
    """The name of a token of the byte vocabulary in log probabilities."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}" if token < 256 else tokenizer().token_text(token)


@pytest.mark.parametrize("chosen", [259, 260])
async def test_alternatives_of_one_text_stay_apart(chosen: int) -> None:
    keys = metadata()
    keys["tokenizer.ggml.tokens"][259:] = ["é", "Ã©"]  # type: ignore[index]
    keys["tokenizer.ggml.token_type"][259:] = [USER_DEFINED, NORMAL]  # type: ignore[index]
    async with running(model={"script": lambda history: None}) as here:
        here.model.tokenizer = Tokenizer(keys)
        assert here.model.tokenizer.token_text(259) == here.model.tokenizer.token_text(260) == "é"
        prompt = next(list(p) for p in product(range(256), repeat=2) if {259, 260} <= {*likeliest(here, p)[:20]})
        bias = {str(chosen): 100}
        scores = (await complete(here, prompt, logprobs=20, max_tokens=1, logit_bias=bias))["choices"][0]["logprobs"]
        assert scores["tokens"] == ["é"] and len(scores["top_logprobs"][0]) == 20
        assert scores["top_logprobs"][0]["é"] == scores["token_logprobs"][0]
        assert f"token_id:{519 - chosen}" in scores["top_logprobs"][0]


async def test_a_stream_without_echo() -> None:
    async with running(model=SAYS) as here:
        events = await here.events(
            PATH, {"prompt": "hello", "temperature": 0, "stream_options": {"include_usage": True}}
        )
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == " wörld."
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == 5
        assert all(event["usage"] is None for event in events[:-1])


async def test_a_stream_with_echo_begins_with_the_prompt() -> None:
    async with running(model=SAYS) as here:
        events = await here.events(PATH, {"prompt": "hello", "temperature": 0, "echo": True, "return_token_ids": True})
        assert events[0]["choices"][0]["text"] == "hello"
        assert events[0]["choices"][0]["prompt_token_ids"] == list(b"hello")
        ids = [token for e in events for token in e["choices"][0].get("token_ids", [])]
        assert ids[:-1] == list(" wörld.".encode())


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": [VOCAB]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [10**30]}, "prompt", "invalid_value"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65}, "prompt", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_value"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens", "invalid_value"),
        ({"prompt": "a", "guided_regex": "a("}, "guided_regex", "invalid_value"),
        ({"prompt": "a", "json_schema": "{"}, "json_schema", "invalid_value"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"prompt": "a", "priority": 5}, "priority", "unsupported_parameter"),
    ],
)
async def test_mistakes_name_their_field(fields: dict[str, Any], param: str, code: str) -> None:
    async with running() as here:
        status, body, _ = await here.post(PATH, fields)
        assert status == 400
        assert (body["error"]["param"], body["error"]["code"]) == (param, code)
        assert body["error"]["type"] == "invalid_request_error" and param in body["error"]["message"]
