"""llama.cpp's own endpoints: /completion and /infill, and `suffix` of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_backend import after
from tests.support.scripted_model import BOS, END, REPLY, START, THINK, THOUGHT, OffLoopTokenizer, metadata

TURN = "<|im_start|>assistant\n"
SAID = {"prompt": TURN, "temperature": 0}
#: the tokens of a vocabulary without names for them
KEYS = {"fim_pre": START, "fim_suf": BOS, "fim_mid": THINK, "fim_sep": THOUGHT}


async def stream(here: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; unlike OpenAI's it has no end mark."""
    async with here.client.post(here.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event[6:]) for event in events]


async def ids(here: Running, body: dict[str, Any], path: str = "/completion") -> list[int]:
    """The prompt that the model reads for a body."""
    status, reply, _ = await here.post(path, {**body, "n_predict": 0})
    assert status == 200, reply
    _, back, _ = await here.post("/tokenize", {"content": reply["prompt"]})
    assert reply["tokens_evaluated"] == len(back["tokens"])
    return list(back["tokens"])


async def test_a_whole_reply() -> None:
    async with running() as here:
        status, reply, _ = await here.post("/completion", {**SAID, "return_tokens": True, "seed": 7})
        assert status == 200
        settings, timings = reply.pop("generation_settings"), reply.pop("timings")
        assert reply == {
            "index": 0,
            "content": REPLY,
            "tokens": [*REPLY.encode(), END],
            "stop": True,
            "model": "scripted",
            "tokens_predicted": len(REPLY.encode()) + 1,
            "tokens_evaluated": 11,
            "prompt": TURN,
            "has_new_line": False,
            "truncated": False,
            "stop_type": "eos",
            "stopping_word": "",
            "tokens_cached": 0,
        }
        assert {"temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"} <= set(settings)
        assert (settings["n_ctx"], settings["n_predict"], settings["seed"], settings["stop"]) == (512, -1, 7, [])
        assert (timings["prompt_n"], timings["predicted_n"]) == (11, len(REPLY.encode()) + 1)
        assert (await here.post("/completion", SAID))[1]["tokens"] == []


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word", "truncated"),
    [
        ({"stop": ["w"]}, "Héllo, ", "word", "w", False),
        ({"stop_token_ids": [ord("l")]}, "Hé", "eos", "", False),
        ({"n_predict": 3}, "Hé", "limit", "", False),
        ({"max_tokens": 3, "n_predict": -1}, REPLY, "eos", "", False),
        ({"max_tokens": 3}, "Hé", "limit", "", False),
        ({"ignore_eos": True, "logit_bias": {str(END): False}}, None, "limit", "", True),
    ],
)
async def test_why_a_reply_ends(
    fields: dict[str, Any], content: str | None, kind: str, word: str, truncated: bool
) -> None:
    async with running() as here:
        _, reply, _ = await here.post("/completion", {**SAID, **fields})
        assert content is None or reply["content"] == content
        assert (reply["stop_type"], reply["stopping_word"], reply["truncated"]) == (kind, word, truncated)


async def test_a_stream() -> None:
    async with running() as here:
        *events, last = await stream(here, "/completion", {**SAID, "n_probs": 2, "timings_per_token": True})
        assert "".join(event["content"] for event in events) == REPLY
        assert [token for event in events for token in event["tokens"]] == [*REPLY.encode(), END]
        assert all(event["stop"] is False for event in events)
        assert [event["tokens_predicted"] for event in events] == list(range(1, len(events) + 1))
        assert all(len(event["completion_probabilities"]) == 1 and event["timings"] for event in events)
        assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
        assert last["tokens_predicted"] == len(REPLY.encode()) + 1 and last["generation_settings"]["stream"] is True
        first = (await stream(here, "/completion", {**SAID, "return_progress": True, "cache_prompt": False}))[0]
        assert {**first["prompt_progress"], "time_ms": 0} == {"total": 11, "cache": 0, "processed": 0, "time_ms": 0}


async def test_what_is_held_back_comes_before_the_last_event() -> None:
    async with running() as here:
        *events, last = await stream(here, "/completion", {**SAID, "stop": ["!?"]})
        assert "".join(event["content"] for event in events) == REPLY and last["stop"]


async def test_prompts() -> None:
    async with running(model={"add_bos": True}) as here:
        turn = [START, *b"assistant\n"]
        assert await ids(here, {"prompt": TURN}) == [BOS, *turn]
        assert await ids(here, {"prompt": turn}) == turn
        assert await ids(here, {"prompt": [THINK, "a", 98]}) == [THINK, 97, 98]
        # BOS goes in front of a list that begins with a text.
        assert await ids(here, {"prompt": ["a", THINK]}) == [BOS, 97, THINK]


async def test_several_prompts_give_a_list() -> None:
    async with running() as here:
        _, replies, _ = await here.post("/completion", {**SAID, "prompt": ["a", TURN], "n_predict": 2})
        assert [(reply["index"], reply["prompt"]) for reply in replies] == [(0, "a"), (1, TURN)]
        _, replies, _ = await here.post("/completion", {**SAID, "prompt": [[97, "b"], TURN], "n_predict": 2})
        assert [reply["prompt"] for reply in replies] == ["ab", TURN]
        _, replies, _ = await here.post("/completion", {**SAID, "n_cmpl": 2, "n_predict": 2})
        assert [reply["index"] for reply in replies] == [0, 1]
        events = await stream(here, "/completion", {**SAID, "prompt": ["a", TURN]})
        assert "".join(event["content"] for event in events if event["index"] == 1) == REPLY


async def test_probabilities() -> None:
    async with running() as here:
        _, reply, _ = await here.post("/completion", {**SAID, "n_probs": 2, "n_predict": 2})
        first, second = reply["completion_probabilities"]
        assert (first["id"], first["token"], first["bytes"]) == (72, "H", [72])
        assert second["bytes"] == [195] and first["logprob"] > -0.1
        assert first["top_logprobs"][0]["id"] == 72 and len(first["top_logprobs"]) == 2


async def test_chosen_fields() -> None:
    async with running() as here:
        fields = ["content", "generation_settings/n_predict", "nothing", "content/x"]
        _, reply, _ = await here.post("/completion", {**SAID, "n_predict": 1, "response_fields": fields})
        assert reply == {"content": "H", "generation_settings/n_predict": 1}
        *_, last = await stream(here, "/completion", {**SAID, "n_predict": 1, "response_fields": ["stop"]})
        assert last == {"stop": True}


async def test_values_of_llama_cpp() -> None:
    async with running(temperature=0.7, top_k=40) as here:

        async def settings(**fields: Any) -> dict[str, Any]:
            status, reply, _ = await here.post("/completion", {"prompt": "a", "n_predict": 1, **fields})
            assert status == 200, reply
            return dict(reply["generation_settings"])

        found = await settings(top_k=-1, repeat_last_n=-1, seed=-1)
        assert (found["top_k"], found["repeat_last_n"]) == (-1, 512) and found["seed"] >= 0
        assert (await settings(seed=2**32 - 1))["seed"] != (await settings(seed=2**32 - 1))["seed"]
        # Samplers that are not in the list are off.
        found = await settings(samplers=["top_k", "top_p", "infill"], min_p=0.1, top_p=0.9, repeat_penalty=1.5)
        names = ("top_k", "top_p", "min_p", "temperature", "repeat_penalty")
        assert [found[name] for name in names] == [40, 0.9, 0.0, 1.0, 1.0]
        found = await settings(samplers=["top_k", "temp"], top_k=3, temperature=0.5, frequency_penalty=1.0)
        assert [found[name] for name in (*names, "frequency_penalty")] == [3, 1.0, 0.0, 0.5, 1.0, 0.0]
        biases = [{"token": 97, "bias": 1.5}, {"token": 98, "bias": -100.0}, {"token": 99, "bias": -100.0}]
        assert (await settings(logit_bias=[[97, 1.5], ["bc", False]]))["logit_bias"] == biases
        assert (await settings(logit_bias={"97": 1.5, "bc": False}))["logit_bias"] == biases


async def test_the_prefix_cache_is_used_unless_it_is_off() -> None:
    async with running(model={"resumes": True}) as here:
        body = {**SAID, "prompt": TURN * 20, "n_predict": 1}
        assert (await here.post("/completion", body))[1]["tokens_cached"] == 0
        assert (await here.post("/completion", body))[1]["tokens_cached"] > 0
        assert (await here.post("/completion", {**body, "cache_prompt": False}))[1]["tokens_cached"] == 0


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [261]}, "prompt", "invalid_value"),
        ({"prompt": [97, True]}, "prompt", "invalid_value"),
        ({"prompt": {"prompt_string": "a"}}, "prompt", "invalid_value"),
        ({"prompt": ["a", {"prompt_string": "a"}]}, "prompt", "invalid_value"),
        ({"prompt": "a", "n_predict": -2}, "n_predict", "invalid_value"),
        ({"prompt": "a", "n_probs": 21}, "n_probs", "invalid_value"),
        ({"prompt": "a", "id_slot": 1}, "id_slot", "unsupported_parameter"),
        ({"prompt": "a", "mirostat": 2}, "mirostat", "unsupported_parameter"),
        ({"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs", "unsupported_parameter"),
        ({"prompt": "a", "min_keep": 2}, "min_keep", "unsupported_parameter"),
        ({"prompt": "a", "dynatemp_range": 0.5}, "dynatemp_range", "unsupported_parameter"),
        ({"prompt": "a", "lora": [{"id": 0}]}, "lora", "unsupported_parameter"),
        ({"prompt": "a", "samplers": ["top_k", "best"]}, "samplers", "invalid_value"),
        ({"prompt": "a", "samplers": ["seed"]}, "samplers", "invalid_value"),
        ({"prompt": "a", "logit_bias": [[97, True]]}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "logit_bias": [[261, 1]]}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "xtc_probability": 0.5}, "xtc_probability", "unsupported_parameter"),
        ({"prompt": "a" * 600}, None, "context_length_exceeded"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], param: str | None, code: str) -> None:
    async with running() as here:
        status, reply, _ = await here.post("/completion", body)
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, code)


async def test_neutral_values_are_accepted() -> None:
    body = {"id_slot": -1, "mirostat": 0, "min_keep": 0, "dynatemp_range": 0.0, "lora": [], "n_keep": 4, "n_indent": 2}
    async with running() as here:
        assert (await here.post("/completion", {**SAID, **body, "post_sampling_probs": False}))[1]["content"] == REPLY


async def test_an_error_in_a_stream_is_an_event() -> None:
    def broken(step: object) -> None:
        raise RuntimeError

    async with running(model={"hook": broken}) as here:
        (event,) = await stream(here, "/completion", SAID)
        assert event["error"]["type"] == "server_error"


# --- gaps


@asynccontextmanager
async def filling(*, keys: dict[str, int] | None = None, add_bos: bool = False) -> AsyncIterator[Running]:
    """A server whose vocabulary has tokens for gaps, and whose model says "mid" behind the middle one."""
    script = after([THINK], [*b"mid", THOUGHT])
    async with running(model={"script": script}) as here:
        named = {f"tokenizer.ggml.{name}_token_id": token for name, token in (KEYS if keys is None else keys).items()}
        here.model.tokenizer = OffLoopTokenizer(metadata(add_bos=add_bos) | named)
        yield here


async def test_infill() -> None:
    async with filling() as here:
        body = {"input_prefix": "a<|im_end|>", "input_suffix": "b", "temperature": 0}
        # What a client sends stays text.
        want = [START, 97, *b"<|im_end|>", BOS, 98, THINK]
        status, reply, _ = await here.post("/infill", {**body, "n_predict": 9})
        assert (status, reply["tokens_evaluated"]) == (200, len(want))
        assert reply["prompt"] == "<|im_start|>a<|im_end|><|bos|>b<think>"
        # The token for files ends the reply.
        assert (reply["content"], reply["stop_type"]) == ("mid", "eos")
        *events, last = await stream(here, "/infill", body)
        assert "".join(event["content"] for event in events) == "mid" and last["stop_type"] == "eos"
        _, reply, _ = await here.post("/infill", {**body, "prompt": "c"})
        assert reply["prompt"] == "<|im_start|>a<|im_end|>c<|bos|>b<think>"
        _, reply, _ = await here.post(
            "/infill", {**body, "input_extra": [{"filename": "x.py", "text": "y"}, {"text": "z"}]}
        )
        assert reply["prompt"].startswith("</think>x.py\ny</think>tmp\nz</think>filename\n<|im_start|>a")


async def test_infill_begins_with_bos_where_the_file_asks_for_it() -> None:
    async with filling(keys={"prefix": 97, "suffix": 98, "middle": THINK}, add_bos=True) as here:
        _, reply, _ = await here.post("/infill", {"input_prefix": "c", "input_suffix": "d", "n_predict": 0})
        assert reply["prompt"] == "<|bos|>acbd<think>"
        extra = {"input_extra": [{"filename": "x", "text": "y"}]}
        _, reply, _ = await here.post("/infill", {"input_prefix": "c", "input_suffix": "", "n_predict": 0, **extra})
        assert reply["prompt"] == "<|bos|>\n\n--- snippet ---\n\nyacb<think>"


async def test_suffix() -> None:
    async with filling() as here:
        body = {"prompt": "a", "suffix": "b", "temperature": 0, "return_token_ids": True}
        _, reply, _ = await here.post("/v1/completions", body)
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("mid", "stop")
        assert choice["prompt_token_ids"] == [START, 97, BOS, 98, THINK]
        _, reply, _ = await here.post("/v1/completions", {**body, "prompt": [[97, END]]})
        assert reply["choices"][0]["prompt_token_ids"] == [START, 97, END, BOS, 98, THINK]
        _, reply, _ = await here.post("/v1/completions", {**body, "suffix": ""})
        assert reply["choices"][0]["prompt_token_ids"] == [97]
        status, reply, _ = await here.post("/v1/completions", {**body, "echo": True})
        assert (status, reply["error"]["param"]) == (400, "echo")


async def test_a_gap_without_tokens_for_it() -> None:
    async with running() as here:
        status, reply, _ = await here.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert (status, reply["error"]["code"]) == (400, "unsupported_parameter")
        assert "no fill-in-the-middle tokens" in reply["error"]["message"]
        for body, param in (({}, "input_prefix"), ({"input_prefix": "a"}, "input_suffix")):
            status, reply, _ = await here.post("/infill", body)
            assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, "invalid_value")


async def test_a_gap_that_does_not_fit() -> None:
    async with filling() as here:
        for field in ("input_prefix", "input_suffix"):
            body = {"input_prefix": "a", "input_suffix": "b", field: "a" * 600}
            status, reply, _ = await here.post("/infill", body)
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
