"""langchain-openai and langchain-anthropic against the application."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library, library, recorded
from tests.support.http_server import running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]

REASONED = {"script": saying("Hm, well.</think>\n\nYes.", marker="<|im_start|>assistant\n<think>\n")}


@pytest.fixture(scope="module")
def langchain() -> Iterator[Library]:
    with library("openai3", "langchain") as found:
        yield found


def openai_chat(url: str) -> Json:
    """Invoke, stream, batch and options of ChatOpenAI."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    def chat(**options: Any) -> Any:
        return ChatOpenAI(model="m", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0, **options)

    first, second = (chat().invoke("hi") for _ in range(2))
    chunks = list(chat(stream_usage=True).stream("hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    scored = chat(logprobs=True, top_logprobs=3, max_tokens=4).invoke("hi")
    two = chat(n=2, max_tokens=3).generate([[HumanMessage("hi")]]).generations[0]
    try:
        chat().invoke("x" * 600)
        long = None
    except Exception as error:
        long = type(error).__name__
    return {
        "text": first.content,
        "tokens": first.usage_metadata["total_tokens"],
        "cached": second.usage_metadata["input_token_details"]["cache_read"],
        "streamed": whole.content,
        "streamed tokens": whole.usage_metadata["total_tokens"],
        "finish": [first.response_metadata["finish_reason"], whole.response_metadata["finish_reason"]],
        "batch": [reply.content for reply in chat().batch(["hi", "hi", "hi"])],
        "scored": len(scored.response_metadata["logprobs"]["content"]),
        "two": len(two),
        "long": long,
    }


async def test_chat_openai(langchain: Library) -> None:
    async with running(parallel=3) as here:
        found = await langchain(openai_chat, here.url)
    assert found.pop("cached") > 0 and found.pop("tokens") == found.pop("streamed tokens")
    assert found == {
        "text": REPLY,
        "streamed": REPLY,
        "finish": ["stop", "stop"],
        "batch": [REPLY] * 3,
        "scored": 4,
        "two": 2,
        # langchain recognises it by the message.
        "long": "OpenAIContextOverflowError",
    }


def openai_completion(url: str) -> str:
    """The text of the completion endpoint."""
    from langchain_openai import OpenAI

    model = OpenAI(model="m", base_url=url + "/v1", api_key="none", temperature=0, max_tokens=4)
    return str(model.invoke("<|im_start|>assistant\n"))


async def test_completion_openai(langchain: Library) -> None:
    async with running() as here:
        assert await langchain(openai_completion, here.url) == REPLY.encode()[:4].decode()


def anthropic_chat(url: str, thinking: bool) -> Json:
    """Invoke and stream of ChatAnthropic."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage

    options: Json = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinking else {}
    chat: Any = ChatAnthropic(model="m", base_url=url, api_key="none", max_tokens=1050, max_retries=0, **options)
    reply = chat.invoke([("system", "Be brief."), ("human", "hi")])
    again = chat.invoke([("system", "Be brief."), ("human", "hi")])
    return {
        "content": reply.content,
        "stop": reply.response_metadata["stop_reason"],
        "cached": again.usage_metadata["input_token_details"]["cache_read"] > 0,
        "streamed": "".join(chunk.text for chunk in chat.stream("hi")),
        "counted": chat.get_num_tokens_from_messages([HumanMessage("hi")]) > 0,
    }


async def test_chat_anthropic(langchain: Library) -> None:
    async with running(model={"context": 2048}) as here:
        assert await langchain(anthropic_chat, here.url, False) == {
            "content": REPLY,
            "stop": "end_turn",
            "cached": True,
            "streamed": REPLY,
            "counted": True,
        }


async def test_chat_anthropic_thinks(langchain: Library) -> None:
    async with running(model={"context": 2048, **REASONED}) as here:
        thinking, text = (await langchain(anthropic_chat, here.url, True))["content"]
    assert thinking["thinking"].strip() == "Hm, well." and thinking["signature"] and text["text"].strip() == "Yes."


def structured(url: str, protocol: str, method: str) -> Json:
    """An object by `with_structured_output`."""
    from typing import Literal

    import pydantic
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    class City(pydantic.BaseModel):
        """A place."""

        kind: Literal["town", "village"]
        port: bool

    chat: Any
    if protocol == "openai":
        chat = ChatOpenAI(model="m", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0)
    else:
        chat = ChatAnthropic(model="m", base_url=url, api_key="none", max_tokens=300, max_retries=0)
    return dict(chat.with_structured_output(City, method=method).invoke("hi").model_dump())


@pytest.mark.parametrize(
    "protocol, method", [("openai", "json_schema"), ("openai", "json_mode"), ("anthropic", "json_schema")]
)
async def test_structured_output(langchain: Library, protocol: str, method: str) -> None:
    # json_mode knows no schema: there the model itself has to give the right object.
    wish = '{"kind": "town", "port": true}' if method == "json_mode" else "I would rather not."
    async with running(model={"context": 4096, "script": saying(wish)}) as here:
        found = await langchain(structured, here.url, protocol, method)
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)


def tool_loop(url: str, protocol: str) -> Json:
    """A call of a bound tool, its result, and the reply that uses it."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    chat: Any
    if protocol == "openai":
        chat = ChatOpenAI(model="m", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0)
    else:
        chat = ChatAnthropic(model="m", base_url=url, api_key="none", max_tokens=300, max_retries=0)
    chat = chat.bind_tools([add])
    messages: list[Any] = [HumanMessage("What is 19 + 23?")]
    first = chat.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, add.invoke(call)]
    streamed = list(chat.stream(messages))
    last = chat.invoke(messages)
    return {
        "name": call["name"],
        "arguments": call["args"],
        "text": last.text,
        "streamed": "".join(chunk.text for chunk in streamed),
        "cached": last.usage_metadata["input_token_details"]["cache_read"],
    }


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_a_tool_loop(langchain: Library, protocol: str) -> None:
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(model={**AGENT, "context": 8192, "script": script}) as here:
        found = await langchain(tool_loop, here.url, protocol)
    assert found.pop("cached") > 100
    assert found == {"name": "add", "arguments": {"a": 19, "b": 23}, "text": "It is 42.", "streamed": "It is 42."}


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_structured_output_by_a_forced_call(langchain: Library, protocol: str) -> None:
    async with running(model={**AGENT, "context": 8192, "script": saying("I would rather not.")}) as here:
        found = await langchain(structured, here.url, protocol, "function_calling")
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)


def by_responses(url: str) -> Json:
    """ChatOpenAI on /v1/responses: text, stream, and a loop with a bound tool."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    chat: Any = ChatOpenAI(
        model="m", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0, use_responses_api=True
    ).bind_tools([add])
    messages: list[Any] = [HumanMessage("What is 19 + 23?")]
    first = chat.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, add.invoke(call)]
    last = chat.invoke(messages)
    return {
        "arguments": call["args"],
        "text": last.text,
        "streamed": "".join(chunk.text for chunk in chat.stream(messages)),
        "cached": last.usage_metadata["input_token_details"]["cache_read"] > 100,
    }


async def test_chat_openai_on_responses(langchain: Library) -> None:
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(model={**AGENT, "context": 8192, "script": script}) as here:
        with recorded() as bodies:
            found = await langchain(by_responses, here.url)
    assert found == {"arguments": {"a": 19, "b": 23}, "text": "It is 42.", "streamed": "It is 42.", "cached": True}
    assert all("input" in json.loads(body) for body in bodies)
