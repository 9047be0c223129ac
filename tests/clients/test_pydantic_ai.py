"""pydantic-ai against the application, in OpenAI's and Anthropic's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library, library
from tests.support.http_server import running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]


@pytest.fixture(scope="module")
def pydantic_ai() -> Iterator[Library]:
    with library("openai3", "pydantic-ai") as found:
        yield found


def texts(url: str, protocol: str) -> Json:
    """A whole reply and a streamed one."""
    import asyncio

    from pydantic_ai import Agent

    model: Any
    if protocol == "openai":
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    else:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model = AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="none"))

    async def both() -> Json:
        agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 100})
        reply = await agent.run("hi")
        async with agent.run_stream("hi") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
            used = stream.usage
        usage = used() if callable(used) else used
        return {"text": reply.output, "streamed": "".join(pieces), "tokens": usage.output_tokens}

    return asyncio.run(both())


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_texts(pydantic_ai: Library, protocol: str) -> None:
    async with running() as here:
        assert await pydantic_ai(texts, here.url, protocol) == {
            "text": REPLY,
            "streamed": REPLY,
            "tokens": len(REPLY.encode()) + 1,
        }


def structured(url: str, mode: str) -> Json:
    """An object of a class, by the schema that the request names or by one in the prompt."""
    from typing import Literal

    import pydantic
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(pydantic.BaseModel):
        kind: Literal["town", "village"]
        port: bool

    output: Any = NativeOutput(City) if mode == "native" else PromptedOutput(City)
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    profile: Any = OpenAIModelProfile(supports_json_schema_output=True, supports_json_object_output=True)
    agent = Agent(OpenAIChatModel("m", provider=provider, profile=profile), output_type=output, retries=0)
    return dict(agent.run_sync("hi").output.model_dump())


@pytest.mark.parametrize("mode", ["native", "prompted"])
async def test_structured_output(pydantic_ai: Library, mode: str) -> None:
    wish = '{"kind": "town", "port": true}' if mode == "prompted" else "I would rather not."
    async with running(model={"context": 4096, "script": saying(wish)}) as here:
        found = await pydantic_ai(structured, here.url, mode)
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)


def tool_loop(url: str, protocol: str) -> Json:
    """An agent with a tool: what it was called with, and the answer."""
    from pydantic_ai import Agent

    model: Any
    if protocol == "openai":
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
    else:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model = AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key="none"))
    agent = Agent(model, retries=0, model_settings={"max_tokens": 300})
    called: list[list[int]] = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds."""
        called.append([a, b])
        return a + b

    reply = agent.run_sync("What is 19 + 23?")
    return {"called": called, "text": reply.output}


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_a_tool_loop(pydantic_ai: Library, protocol: str) -> None:
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(model={**AGENT, "context": 8192, "script": script}) as here:
        assert await pydantic_ai(tool_loop, here.url, protocol) == {"called": [[19, 23]], "text": "It is 42."}


def output_tool(url: str) -> Json:
    """An object by the call that the default mode forces."""
    from typing import Literal

    import pydantic
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(pydantic.BaseModel):
        kind: Literal["town", "village"]
        port: bool

    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    agent = Agent(OpenAIChatModel("m", provider=provider), output_type=City, retries=0)
    return dict(agent.run_sync("hi").output.model_dump())


async def test_structured_output_by_a_forced_call(pydantic_ai: Library) -> None:
    async with running(model={**AGENT, "context": 8192, "script": saying("I would rather not.")}) as here:
        found = await pydantic_ai(output_tool, here.url)
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)
