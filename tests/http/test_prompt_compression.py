"""Compressed prompts over HTTP, with a scripted small model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from luce.compress.compression_options import CompressionOptions
from luce.compress.compressor import Compressor
from luce.errors import DeviceError
from luce.server.props import compression_props
from tests.support.http_server import running
from tests.support.scorers import ScriptedScorer

DOCUMENT = "".join(np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz "), 3500))
QUESTION = "WHAT IS 17?"
MESSAGES = [{"role": "user", "content": DOCUMENT}, {"role": "user", "content": QUESTION}]
CONTEXT = 8192


def compressor(scorer: ScriptedScorer | None = None, **options: Any) -> Compressor:
    found = scorer or ScriptedScorer()
    settings = CompressionOptions(**{"mode": "always", "keep_ratio": 0.25, **options})
    return Compressor(settings, lambda: found, identity="a", facts={"file": "/models/a.gguf", "device": "cpu:0"})


def server(compresses: Compressor | None, context: int = CONTEXT) -> Any:
    return running(model={"compressor": compresses, "context": context})


def result(reply: Any) -> Any:
    return reply["choices"][0]["finish_details"].get("prompt_compression")


async def test_a_long_first_turn_is_compressed() -> None:
    scorer = ScriptedScorer()
    async with server(compressor(scorer)) as here:
        reply = await here.chat(messages=MESSAGES, return_token_ids=True)
        again = await here.chat(messages=MESSAGES)
        metrics = (await here.get("/metrics"))[1]
        props = (await here.get("/props"))[1]["prefill_compression"]
    facts = result(reply)
    whole, read = reply["usage"]["prompt_tokens"], len(reply["prompt_token_ids"])
    assert facts["result"] == "compressed" and facts["original_tokens"] == whole and not facts["reused"]
    assert reply["usage"]["prompt_tokens_details"]["effective_tokens"] == facts["effective_tokens"] == read < whole / 2
    assert facts["kept"] == round(read / whole, 4)
    assert bytes(token for token in reply["prompt_token_ids"] if token < 256).endswith(
        f"{QUESTION}\nassistant\n".encode()
    )
    assert reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] == read
    assert result(again)["reused"] and result(again)["drafter_ms"] == 0 and scorer.read == [whole]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert f'luce_compression_tokens_total{{kind="original"}} {2 * whole}.0' in metrics
    assert f'luce_compression_tokens_total{{kind="kept"}} {2 * read}.0' in metrics
    assert 'luce_compression_prompts_total{result="compressed"} 2.0' in metrics
    assert props["enabled"] and props["state"] == "on" and props["reused"] == 1 and props["device"] == "cpu:0"
    assert props["prompts"] == {"compressed": 2} and props["effective_tokens"] == 2 * read


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "compressed"),
        ({"prefill_compression": "auto"}, "short"),
        ({"prefill_compression": "off"}, None),
        ({"keep_ratio": 1}, "unchanged"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "a"}, MESSAGES[1]]}, "continuation"),
    ],
)
async def test_which_requests_are_compressed(fields: dict[str, Any], expected: str | None) -> None:
    async with server(compressor()) as here:
        facts = result(await here.chat(**{"messages": MESSAGES, **fields}))
    assert (facts and facts["result"]) == expected


@pytest.mark.parametrize("spread", [True, False])
async def test_a_session_has_a_keep_ratio_of_its_own(spread: bool) -> None:
    """Where the scores are spread, a larger share covers more; where one chunk has nearly all of them, it does not."""
    scores = ScriptedScorer(weight=lambda tokens: np.ones(len(tokens)) if spread else 1e-6 + (tokens == ord("Z")))
    made = compressor(scores, by_session=True, keep_ratio=1)
    # So long, and of so many letters, that no anchor takes the place of the best chunk.
    letters = "".join(np.random.default_rng(1).choice(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"), 6000))
    document = f"{letters[:2000]}ZZZZ{letters[2000:]}"
    async with server(made) as here:
        found = []
        for number in range(3):
            messages = [{"role": "user", "content": document}, {"role": "user", "content": f"{QUESTION} {number}"}]
            facts = [result(await here.chat(messages=messages, **more)) for more in ({"session_id": "a"}, {})]
            assert facts[1]["result"] == "unchanged" and 0 < facts[0]["covered"] < 1
            found.append(facts[0]["effective_tokens"])
        fixed = result(await here.chat(messages=messages, session_id="a", keep_ratio=0.5))
    assert (found == sorted(found)) is spread and found[0] != found[2] < fixed["effective_tokens"]
    assert made.sessions is not None and made.sessions.ratio("a") == (0.13 if spread else 0.07)


async def test_older_messages_of_a_conversation_are_compressed_once() -> None:
    scorer = ScriptedScorer()
    answer = {"role": "assistant", "content": "Yes. " * 60}
    turns = [MESSAGES[1], {"role": "user", "content": DOCUMENT}, answer, MESSAGES[1]]
    async with server(compressor(scorer, freeze=True)) as here:
        opening = await here.chat(messages=turns[:2])
        first = await here.chat(messages=turns, return_token_ids=True)
        later = [*turns, {"role": "assistant", "content": "No."}, MESSAGES[1]]
        second = await here.chat(messages=later, return_token_ids=True)
        assert (await here.get("/props"))[1]["prefill_compression"]["freeze"] is True
    assert result(opening)["result"] == "first_turn"
    assert result(first)["result"] == result(second)["result"] == "frozen"
    assert scorer.read == [len(DOCUMENT.strip())] and result(second)["reused"] and not result(first)["reused"]
    one, two = first["prompt_token_ids"], second["prompt_token_ids"]
    assert len(one) < first["usage"]["prompt_tokens"] / 2
    # Up to the header of the reply the second prompt begins like the first one, which the prefix cache has.
    same = (
        next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        if one != two[: len(one)]
        else len(one)
    )
    assert same >= len(one) - len("assistant\n") and second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_conversation_without_old_messages_stays_whole() -> None:
    later = [*MESSAGES, {"role": "assistant", "content": "a"}, MESSAGES[1]]
    async with server(compressor(freeze=True)) as here:
        assert result(await here.chat(messages=later))["result"] == "continuation"


async def test_a_conversation_beyond_the_context_fits_with_older_messages_compressed() -> None:
    later = [MESSAGES[1], *MESSAGES, {"role": "assistant", "content": "a"}, MESSAGES[1]]
    async with server(compressor(freeze=True, mode="auto"), context=2048) as here:
        assert result(await here.chat(messages=later))["result"] == "frozen"
    async with server(compressor(freeze=True, mode="auto"), context=512) as here:
        status, refused, _ = await here.post("/v1/chat/completions", {"messages": later})
        assert status == 400 and refused["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("length", "expected"), [(999, "short"), (1000, "compressed")])
async def test_the_threshold(length: int, expected: str) -> None:
    async with server(compressor(mode="auto", threshold=1000)) as here:
        status, reply, _ = await here.post("/v1/completions", {"prompt": "ab" * (length // 2) + "c" * (length % 2)})
    assert status == 200 and result(reply)["result"] == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": DOCUMENT, "echo": True})],
)
async def test_prompts_that_are_needed_whole(path: str, fields: dict[str, Any]) -> None:
    async with server(compressor()) as here:
        status, reply, _ = await here.post(path, {"max_tokens": 3, **fields})
    assert status == 200 and result(reply)["result"] == "whole"
    assert reply["choices"][0]["text"].startswith(DOCUMENT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"keep_ratio": 0}, "keep_ratio"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"keep_ratio": "a"}, "keep_ratio"),
        ({"prefill_compression": "on"}, "prefill_compression"),
        ({"prefill_compression": "off", "keep_ratio": 0.5}, "keep_ratio"),
    ],
)
async def test_values_that_are_refused(fields: dict[str, Any], param: str) -> None:
    async with server(compressor()) as here:
        status, reply, _ = await here.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert status == 400 and reply["error"]["param"] == param


async def test_unknown_ids_are_refused_as_without_compression() -> None:
    bodies = [{"prompt": [97] * 50 + [id]} for id in (10**6, -1)]
    answers = []
    for compresses in (compressor(), None):
        async with server(compresses) as here:
            answers.append([(await here.post("/v1/completions", body))[:2] for body in bodies])
    assert [status for status, _ in answers[0]] == [400, 400]
    assert [reply["error"]["message"] for _, reply in answers[0]] == [r["error"]["message"] for _, r in answers[1]]


async def test_a_server_without_a_small_model_says_so() -> None:
    async with server(None) as here:
        for fields, code in (
            ({"prefill_compression": "auto"}, "unsupported_parameter"),
            ({"keep_ratio": 0.5}, "invalid_value"),
        ):
            status, reply, _ = await here.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
            assert status == 400 and reply["error"]["code"] == code
        assert result(await here.chat(prefill_compression="off")) is None
        assert (await here.get("/props"))[1]["prefill_compression"] == {"enabled": False}


async def test_a_prompt_beyond_the_context_is_compressed_until_it_fits() -> None:
    async with server(compressor(mode="auto", keep_ratio=0.9), context=2048) as here:
        reply = await here.chat(messages=MESSAGES)
        assert result(reply)["original_tokens"] > 2048 > result(reply)["effective_tokens"]
        later = [*MESSAGES, {"role": "assistant", "content": "a"}, MESSAGES[1]]
        for messages, fields in ((later, {}), (MESSAGES, {"prefill_compression": "off"})):
            status, refused, _ = await here.post("/v1/chat/completions", {"messages": messages, **fields})
            assert status == 400 and refused["error"]["code"] == "context_length_exceeded"


async def test_a_failure_costs_no_request_that_fits() -> None:
    broken = compressor(ScriptedScorer(lambda text: DeviceError("cuda:0: lost /secret/path")))
    async with server(broken) as here:
        for i in range(4):
            facts = result(await here.chat(messages=[{"role": "user", "content": DOCUMENT + str(i)}]))
            assert facts["result"] == "failed" and facts["effective_tokens"] == facts["original_tokens"]
        props = (await here.get("/props"))[1]["prefill_compression"]
        assert not props["enabled"] and props["state"].startswith("off after 3 failures")
        assert "luce_compression_enabled 0.0" in (await here.get("/metrics"))[1]
    shown, hidden = (compression_props(broken, paths=paths) for paths in (True, False))
    assert shown["file"] == "/models/a.gguf" and "/secret/path" in shown["state"]
    assert "file" not in hidden and hidden["state"] == "off after 3 failures"
    async with server(compressor(ScriptedScorer(lambda text: DeviceError("lost"))), context=2048) as here:
        status, reply, headers = await here.post("/v1/chat/completions", {"messages": MESSAGES})
        assert status == 503 and reply["error"]["code"] == "compression_failed" and "Retry-After" in headers
        assert (await here.chat())["choices"]


async def test_other_apis() -> None:
    body = {"messages": [{"role": "user", "content": DOCUMENT + QUESTION}], "max_tokens": 3}
    async with server(compressor()) as here:
        counted = (await here.post("/v1/messages/count_tokens", body))[1]["input_tokens"]
        usage = (await here.post("/v1/messages", body))[1]["usage"]
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == counted
        refused = await here.post("/v1/messages", {**body, "keep_ratio": 2})
        assert refused[0] == 400 and "keep_ratio" in refused[1]["error"]["message"]
        reply = (await here.post("/v1/responses", {"input": DOCUMENT + QUESTION, "keep_ratio": 0.3}))[1]
        assert reply["usage"]["input_tokens"] == counted
        native = (await here.post("/completion", {"prompt": DOCUMENT, "n_predict": 3}))[1]
        assert native["tokens_evaluated"] < len(DOCUMENT) / 2
        assert (await here.get("/props"))[1]["prefill_compression"]["prompts"] == {"compressed": 3}
