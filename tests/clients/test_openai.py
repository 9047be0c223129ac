"""The official openai client against the application: this environment's with asyncio, and versions 2 and 3 without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library
from tests.support.http_server import Running, running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]

HI = [{"role": "user", "content": "hi"}]
REASONED = {"script": saying("Hm, well.</think>\n\nYes.", marker="<|im_start|>assistant\n<think>\n")}


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


# --- without asyncio: each function runs in the client's own process


def replies(url: str) -> Json:
    """A whole reply, the same again, and the same as a stream."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        first, second = (client.chat.completions.create(**ask) for _ in range(2))
        chunks = list(client.chat.completions.create(**ask, stream=True))
        last = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))[-1]
        assert first.usage and second.usage and second.usage.prompt_tokens_details
        return {
            "text": first.choices[0].message.content,
            "finish": first.choices[0].finish_reason,
            "sum": first.usage.prompt_tokens + first.usage.completion_tokens - first.usage.total_tokens,
            "cached": second.usage.prompt_tokens_details.cached_tokens,
            "role": chunks[0].choices[0].delta.role,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "usages": sum(chunk.usage is not None for chunk in chunks),
            "last": [len(last.choices), last.usage is not None and last.usage.total_tokens == first.usage.total_tokens],
        }


async def test_whole_and_streamed_replies(threaded: Library) -> None:
    async with running() as here:
        found = await threaded(replies, here.url)
    assert found.pop("cached") > 0
    assert found == {
        "text": REPLY,
        "finish": "stop",
        "sum": 0,
        "role": "assistant",
        "streamed": REPLY,
        "usages": 0,
        "last": [0, True],
    }


def fields(url: str) -> Json:
    """Replies with the fields of sampling and of ends."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:

        def create(**more: Any) -> Any:
            ask: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            return client.chat.completions.create(**{**ask, **more})

        short = list(create(max_completion_tokens=5, stream=True))
        several = list(create(n=3, stream=True, max_tokens=4))
        seeded = [create(seed=1, temperature=1, max_tokens=20).choices[0].message.content for _ in range(2)]
        scored = create(logprobs=True, top_logprobs=5, max_tokens=6).choices[0].logprobs.content
        raw = client.chat.completions.with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=1,
            extra_body={"top_k": 20, "min_p": 0.1, "prefix_cache": {"scope": "off"}},
        )
        return {
            "short": create(max_completion_tokens=5).choices[0].finish_reason,
            "short stream": short[-1].choices[0].finish_reason,
            "stop": create(stop=["w"]).choices[0].message.content,
            "indexes": sorted({choice.index for chunk in several for choice in chunk.choices}),
            "seeded": seeded[0] == seeded[1],
            "scored": [len(scored), {len(token.top_logprobs) for token in scored} == {5}],
            "banned": create(logit_bias={"72": -100}, max_tokens=1).choices[0].message.content != "H",
            "id": raw.headers["x-request-id"].startswith("req_"),
            "raw": raw.parse().choices[0].finish_reason,
        }


async def test_fields_of_sampling_and_of_ends(threaded: Library) -> None:
    async with running(parallel=3) as here:
        assert await threaded(fields, here.url) == {
            "short": "length",
            "short stream": "length",
            "stop": "Héllo, ",
            "indexes": [0, 1, 2],
            "seeded": True,
            "scored": [6, True],
            "banned": True,
            "id": True,
            "raw": "length",
        }


def reasoning(url: str, effort: str) -> list[Any]:
    """The reasoning and the content of a reply with an effort."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        effort_: Any = effort
        reply = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], reasoning_effort=effort_, max_tokens=300
        )
        message = reply.choices[0].message
        return [getattr(message, "reasoning_content", None), message.content]


async def test_efforts(threaded: Library) -> None:
    async with running(model=REASONED) as here:
        for effort in ("low", "high", "xhigh"):
            thought, content = await threaded(reasoning, here.url, effort)
            assert (thought.strip(), content.strip()) == ("Hm, well.", "Yes."), effort
    async with running() as here:
        thought, content = await threaded(reasoning, here.url, "none")
        assert not thought and content == REPLY


def refusals(url: str) -> list[list[Any]]:
    """Class, status, code and field of errors; each has the id of its request."""
    import openai

    found: list[list[Any]] = []

    def caught(key: str, **fields: Any) -> None:
        with openai.OpenAI(base_url=url + "/v1", api_key=key) as client:
            ask: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            try:
                client.chat.completions.create(**{**ask, **fields})
            except openai.APIStatusError as error:
                assert error.request_id
                found.append([type(error).__name__, error.status_code, error.code, error.param])

    image = {"type": "image_url", "image_url": {"url": "data:"}}
    caught("wrong")
    caught("secret", model="zzz")
    caught("secret", messages=[{"role": "user", "content": "x" * 600}])
    caught("secret", messages=[{"role": "user", "content": [image]}])
    caught("secret", temperature=9)
    return found


async def test_refusals(threaded: Library) -> None:
    async with running(api_key=("secret",), strict_model=True, alias=("m",)) as here:
        assert await threaded(refusals, here.url) == [
            ["AuthenticationError", 401, "invalid_api_key", None],
            ["NotFoundError", 404, "model_not_found", "model"],
            ["BadRequestError", 400, "context_length_exceeded", None],
            ["BadRequestError", 400, "unsupported_content", "messages[0].content[0]"],
            ["BadRequestError", 400, "invalid_value", "temperature"],
        ]
        # None of them is tried again.
        for status, count in ((401, 1), (404, 1), (400, 3)):
            assert await requests(here, status) == count


def parsed(url: str) -> Json:
    """Objects by `parse`, by its stream, and by json_object: whatever the model would rather say."""
    import json
    from typing import Literal

    import openai
    import pydantic

    class City(pydantic.BaseModel):
        kind: Literal["town", "village"]
        port: bool

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        whole = client.chat.completions.parse(**ask, response_format=City).choices[0].message.parsed
        with client.chat.completions.stream(**ask, response_format=City) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0].message.parsed
        some = client.chat.completions.create(**ask, max_tokens=300, response_format={"type": "json_object"})
        assert isinstance(whole, City) and isinstance(streamed, City)
        assert some.choices[0].finish_reason == "length" or isinstance(
            json.loads(some.choices[0].message.content), dict
        )
        return {
            "same": whole == streamed,
            "kind": whole.kind,
            "begins": some.choices[0].message.content.lstrip()[0],
            "events": "content.delta" in kinds and "content.done" in kinds,
        }


async def test_structured_replies(threaded: Library) -> None:
    async with running(model={"context": 1024}) as here:
        found = await threaded(parsed, here.url)
    assert found.pop("kind") in ("town", "village")
    assert found == {"same": True, "begins": "{", "events": True}


def tool_loop(url: str, streamed: bool) -> Json:
    """A call, its result, and the reply that uses it."""
    import json

    import openai

    function = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "What is 19 + 23?"}]
    pieces = 0
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        if streamed:
            with client.chat.completions.stream(model="m", messages=messages, tools=tools, temperature=0) as stream:
                kinds = [event.type for event in stream]
                choice = stream.get_final_completion().choices[0]
            pieces = kinds.count("tool_calls.function.arguments.delta")
        else:
            choice = client.chat.completions.create(model="m", messages=messages, tools=tools, temperature=0).choices[0]  # type: ignore[assignment]
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        numbers = json.loads(call.function.arguments)
        messages.append(choice.message.to_dict())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
        last = client.chat.completions.create(model="m", messages=messages, tools=tools, temperature=0)
        assert last.usage and last.usage.prompt_tokens_details
        return {
            "finish": [choice.finish_reason, last.choices[0].finish_reason],
            "content": choice.message.content or None,
            "name": call.function.name,
            "numbers": numbers,
            "pieces": pieces,
            "text": last.choices[0].message.content,
            "cached": last.usage.prompt_tokens_details.cached_tokens,
        }


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_tool_loop(threaded: Library, streamed: bool) -> None:
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(model={**AGENT, "context": 8192, "script": script}) as here:
        found = await threaded(tool_loop, here.url, streamed)
        assert found.pop("cached") > 100 and (found.pop("pieces") > 1) == streamed
        assert found == {
            "finish": ["tool_calls", "stop"],
            "content": None,
            "name": "add",
            "numbers": {"a": 19, "b": 23},
            "text": "It is 42.",
        }


def forced(url: str, choice: Any) -> list[Any]:
    """Names and arguments of the calls that a request forces, and how the reply ended."""
    import json

    import openai

    parameters = {
        "type": "object",
        "properties": {"kind": {"enum": ["town", "village"]}, "port": {"type": "boolean"}},
        "required": ["kind", "port"],
        "additionalProperties": False,
    }
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("city", "place")
    ]
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        ).choices[0]
        calls: Any = reply.message.tool_calls or []
        return [[[c.function.name, json.loads(c.function.arguments)] for c in calls], reply.message.content]


@pytest.mark.parametrize(
    "choice",
    ["none", "required", {"type": "function", "function": {"name": "place"}}],
    ids=["none", "required", "named"],
)
async def test_tool_choice(threaded: Library, choice: Any) -> None:
    async with running(model={**AGENT, "context": 8192, "script": saying("I would rather not.")}) as here:
        calls, content = await threaded(forced, here.url, choice)
    if choice == "none":
        assert (calls, content) == ([], "I would rather not.")
    else:
        ((name, arguments),) = calls
        assert name in (("city", "place") if choice == "required" else ("place",))
        assert arguments["kind"] in ("town", "village") and isinstance(arguments["port"], bool)
