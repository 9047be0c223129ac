"""The official openai client against the application on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_model import REPLY, saying

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """A client without a server; `at` gives it one."""
    async with openai.AsyncOpenAI(api_key="secret", base_url="http://127.0.0.1:1/v1") as client:
        yield client


def at(client: openai.AsyncOpenAI, here: Running, **options: object) -> openai.AsyncOpenAI:
    return client.with_options(base_url=here.url + "/v1", **options)  # type: ignore[arg-type]


async def test_chat(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        reply = await at(client, here).chat.completions.create(model="m", messages=HI, temperature=0)
        assert reply.choices[0].message.content == REPLY and reply.choices[0].finish_reason == "stop"
        usage = reply.usage
        assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 0


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        options = {"include_usage": True}
        stream = await at(client, here).chat.completions.create(
            model="m", messages=HI, temperature=0, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])


async def test_options_of_the_client(client: openai.AsyncOpenAI) -> None:
    async with running(parallel=3) as here:
        create = at(client, here).chat.completions.create
        reply = await create(model="m", messages=HI, n=3, max_completion_tokens=5, seed=1, temperature=1)
        assert [c.index for c in reply.choices] == [0, 1, 2]
        assert {c.finish_reason for c in reply.choices} == {"length"}
        reply = await create(model="m", messages=HI, temperature=0, stop=["w"], logprobs=True, top_logprobs=5)
        assert reply.choices[0].message.content == "Héllo, "
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 5
        extra = {"top_k": 20, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}}
        await create(model="m", messages=HI, max_tokens=1, extra_body=extra)


async def test_completions_with_logprobs(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        reply = await at(client, here).completions.create(model="m", prompt=["ab"], echo=True, logprobs=1, max_tokens=0)
        logprobs = reply.choices[0].logprobs
        assert reply.choices[0].text == "ab" and logprobs is not None
        assert logprobs.tokens == ["a", "b"] and logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None and logprobs.token_logprobs[1] < 0


async def test_completions_score_every_byte(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        create = at(client, here).completions.create
        reply = await create(model="m", prompt="naïve 🤗 媽", echo=True, logprobs=5, max_tokens=0)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
        spelled = [rf"bytes:\x{byte:02x}" for byte in "媽".encode()]
        assert logprobs.tokens[-3:] == spelled
        assert all(len(row) in (5, 6) for row in logprobs.top_logprobs[1:])


async def test_models(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        api = at(client, here)
        assert [m.id async for m in api.models.list()] == ["scripted"]
        assert (await api.models.retrieve("scripted")).owned_by == "luce"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("zzz")


async def test_an_alias_is_listed_as_one_and_may_be_asked_for(client: openai.AsyncOpenAI) -> None:
    async with running(alias=("main", "gpt-x"), strict_model=True) as here:
        api = at(client, here)
        (model,) = [m async for m in api.models.list()]
        assert model.id == "main" and (model.model_extra or {})["aliases"] == ["gpt-x"]
        assert (await api.models.retrieve("gpt-x")).id == "main"
        reply = await api.chat.completions.create(model="gpt-x", messages=HI, max_tokens=1)  # type: ignore[arg-type]
        assert reply.model == "gpt-x"


async def requests(here: Running, status: int) -> float:
    _, text, _ = await here.get("/metrics", headers={"x-api-key": "secret"})
    lines = [s for s in text.splitlines() if s.startswith("luce_requests_total") and f'status="{status}"' in s]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_a_wrong_key(client: openai.AsyncOpenAI) -> None:
    async with running(api_key=("secret",)) as here:
        assert [m.id async for m in at(client, here).models.list()]
        with pytest.raises(openai.AuthenticationError) as caught:
            await at(client, here, api_key="wrong").chat.completions.create(model="m", messages=HI)
        assert caught.value.code == "invalid_api_key" and caught.value.request_id
        assert await requests(here, 401) == 1


async def test_a_prompt_that_is_too_long_is_sent_once(client: openai.AsyncOpenAI) -> None:
    async with running(model={"context": 64}) as here:
        with pytest.raises(openai.BadRequestError) as caught:
            await at(client, here).chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 99}])
        assert caught.value.code == "context_length_exceeded" and caught.value.request_id
        assert await requests(here, 400) == 1


async def test_the_error_for_an_image_names_its_part(client: openai.AsyncOpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    async with running() as here:
        with pytest.raises(openai.BadRequestError) as caught:
            await at(client, here).chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item,misc]
        assert caught.value.param == "messages[0].content[0]"


async def test_a_client_timeout_frees_the_slot(client: openai.AsyncOpenAI) -> None:
    slow = {"delay": 0.02, "script": saying("x", end=False), "context": 4096}
    async with running(parallel=1, model=slow) as here:
        with pytest.raises(openai.APITimeoutError):
            await at(client, here, timeout=0.3, max_retries=0).chat.completions.create(model="m", messages=HI)
        await here.quiet()
        assert await here.metric("luce_cancelled_sequences_total") == 1
        await here.chat(max_tokens=1)


async def test_a_full_queue_is_tried_again(client: openai.AsyncOpenAI) -> None:
    slow = {"delay": 0.01, "script": saying("x", end=False), "context": 4096}
    async with running(parallel=1, max_queue=0, model=slow) as here:
        api = at(client, here, max_retries=1)
        stream = await api.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(model="m", messages=HI)
        assert caught.value.status_code == 503 and caught.value.code == "overloaded"
        assert await requests(here, 503) == 2
        await stream.close()
        await here.quiet()
        await api.chat.completions.create(model="m", messages=HI, max_tokens=1)


async def test_what_is_not_served_is_asked_for_once(client: openai.AsyncOpenAI) -> None:
    async with running() as here:
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings is not supported") as caught:
            await at(client, here).embeddings.create(model="m", input="a")
        assert caught.value.code == "unsupported_endpoint"
        with pytest.raises(openai.BadRequestError):
            await at(client, here).images.generate(model="m", prompt="a")
        assert await here.metric("luce_requests_total") == 2
