"""litellm against the application, in OpenAI's and Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library, library, recorded
from tests.support.http_server import running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import REPLY

Json = dict[str, Any]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Library]:
    # Without the variable it asks another machine for a table of prices when it is imported.
    with library("openai2", "litellm", LITELLM_LOCAL_MODEL_COST_MAP="True") as found:
        yield found


def completion(url: str, model: str, path: str) -> Json:
    """A whole reply, the same as a stream, and a cut one."""
    import litellm

    def complete(**more: Any) -> Any:
        ask: Json = {"model": model, "api_base": url + path, "api_key": "none", "max_retries": 0}
        return litellm.completion(messages=[{"role": "user", "content": "hi"}], **{**ask, "max_tokens": 100, **more})

    reply = complete()
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    return {
        "text": reply.choices[0].message.content,
        "finish": [reply.choices[0].finish_reason, complete(max_tokens=5).choices[0].finish_reason],
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": usage.total_tokens == reply.usage.total_tokens > 0,
    }


@pytest.mark.parametrize(
    "model, path",
    [("openai/m", "/v1"), ("hosted_vllm/m", "/v1"), ("anthropic/m", "")],
)
async def test_completion(litellm: Library, model: str, path: str) -> None:
    async with running() as here:
        assert await litellm(completion, here.url, model, path) == {
            "text": REPLY,
            "finish": ["stop", "length"],
            "streamed": REPLY,
            "usage": True,
        }


def text_completion(url: str) -> str:
    """The text of the completion endpoint."""
    import litellm

    reply: Any = litellm.text_completion(
        model="text-completion-openai/m",
        prompt="<|im_start|>assistant\n",
        max_tokens=4,
        api_base=url + "/v1",
        api_key="none",
    )
    return str(reply.choices[0].text)


async def test_text_completion(litellm: Library) -> None:
    async with running() as here:
        assert await litellm(text_completion, here.url) == REPLY.encode()[:4].decode()


def errors(url: str, model: str, path: str) -> list[str]:
    """The classes of errors."""
    import litellm

    def caught(key: str, text: str, **more: Any) -> str:
        try:
            litellm.completion(
                model=model,
                api_base=url + path,
                api_key=key,
                messages=[{"role": "user", "content": text}],
                max_retries=0,
                **more,
            )
        except Exception as error:
            return type(error).__name__
        return ""

    return [caught("wrong", "hi"), caught("secret", "x" * 600), caught("secret", "hi", temperature=9)]


@pytest.mark.parametrize("model, path", [("openai/m", "/v1"), ("anthropic/m", "")])
async def test_errors_are_mapped(litellm: Library, model: str, path: str) -> None:
    async with running(api_key=("secret",)) as here:
        assert await litellm(errors, here.url, model, path) == [
            "AuthenticationError",
            "ContextWindowExceededError",
            "BadRequestError",
        ]


def effort(url: str, drop: bool) -> str:
    """A reply with an effort that litellm passes on, or drops."""
    import litellm

    reply: Any = litellm.completion(
        model="openai/m",
        api_base=url + "/v1",
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        reasoning_effort="none",
        drop_params=drop,
        **({} if drop else {"allowed_openai_params": ["reasoning_effort"]}),
    )
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("drop", [False, True])
async def test_efforts(litellm: Library, drop: bool) -> None:
    async with running() as here:
        assert await litellm(effort, here.url, drop) == REPLY


def structured(url: str, model: str, path: str) -> str:
    """A reply that a class describes."""
    from typing import Literal

    import litellm
    import pydantic

    class City(pydantic.BaseModel):
        kind: Literal["town", "village"]
        port: bool

    reply: Any = litellm.completion(
        model=model,
        api_base=url + path,
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        response_format=City,
        max_tokens=200,
    )
    return str(City.model_validate_json(reply.choices[0].message.content).kind)


@pytest.mark.parametrize("model, path", [("openai/m", "/v1"), ("hosted_vllm/m", "/v1")])
async def test_structured_output(litellm: Library, model: str, path: str) -> None:
    async with running() as here:
        assert await litellm(structured, here.url, model, path) in ("town", "village")


def tool_loop(url: str, model: str, path: str) -> Json:
    """A call, its result, and the reply that uses it."""
    import json

    import litellm

    function = {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }

    def complete(messages: list[Any]) -> Any:
        return litellm.completion(
            model=model,
            api_base=url + path,
            api_key="none",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            max_tokens=300,
        ).choices[0]

    messages: list[Any] = [{"role": "user", "content": "What is 19 + 23?"}]
    first = complete(messages)
    (call,) = first.message.tool_calls
    numbers = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])}
    last = complete([*messages, first.message.model_dump(), result])
    return {
        "finish": [first.finish_reason, last.finish_reason],
        "name": call.function.name,
        "numbers": numbers,
        "text": last.message.content,
    }


@pytest.mark.parametrize("model, path", [("openai/m", "/v1"), ("anthropic/m", "")])
async def test_a_tool_loop(litellm: Library, model: str, path: str) -> None:
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(model={**AGENT, "context": 8192, "script": script}) as here:
        assert await litellm(tool_loop, here.url, model, path) == {
            "finish": ["tool_calls", "stop"],
            "name": "add",
            "numbers": {"a": 19, "b": 23},
            "text": "It is 42.",
        }


def responses(url: str) -> list[str]:
    """A response, and the same as a stream."""
    import litellm

    ask: Json = {"model": "openai/m", "input": "hi", "api_base": url + "/v1", "api_key": "none", "max_retries": 0}
    whole: Any = litellm.responses(**ask)
    events: Any = litellm.responses(**ask, stream=True)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    return [whole.output[0].content[0].text, "".join(pieces)]


async def test_responses(litellm: Library) -> None:
    async with running() as here:
        with recorded() as bodies:
            assert await litellm(responses, here.url) == [REPLY, REPLY]
    assert all("input" in json.loads(body) for body in bodies)
