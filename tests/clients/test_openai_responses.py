"""OpenAI's /v1/responses by the openai client: versions 2 and 3 without asyncio, this environment's with it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library
from tests.support.http_server import running
from tests.support.scripted_agent import call, playing, thinking_chat
from tests.support.scripted_model import REPLY, saying

Json = dict[str, Any]


def replies(url: str) -> Json:
    """A whole response, the same by events, and the same by the client's own accumulator."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "input": "hi", "instructions": "Be brief.", "temperature": 0}
        first, second = (client.responses.create(**ask) for _ in range(2))
        events = list(client.responses.create(**ask, stream=True))
        with client.responses.stream(**ask) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        short = client.responses.create(**ask, max_output_tokens=5)
        assert first.usage and second.usage and short.incomplete_details
        return {
            "text": first.output_text,
            "status": first.status,
            "sum": first.usage.input_tokens + first.usage.output_tokens - first.usage.total_tokens,
            "cached": second.usage.input_tokens_details.cached_tokens > 0,
            "ends": [events[0].type, events[-1].type],
            "pieces": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
            "accumulated": final.output_text,
            "kinds": {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds,
            "short": [short.status, short.incomplete_details.reason],
        }


async def test_whole_and_streamed_responses(threaded: Library) -> None:
    async with running() as here:
        assert await threaded(replies, here.url) == {
            "text": REPLY,
            "status": "completed",
            "sum": 0,
            "cached": True,
            "ends": ["response.created", "response.completed"],
            "pieces": REPLY,
            "accumulated": REPLY,
            "kinds": True,
            "short": ["incomplete", "max_output_tokens"],
        }


def parsed(url: str) -> list[Json]:
    """Objects of a class, whatever the model would rather say: by `parse`, and by its stream."""
    from typing import Literal

    import openai
    import pydantic

    class City(pydantic.BaseModel):
        kind: Literal["town", "village"]
        port: bool

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "input": "hi", "temperature": 0, "text_format": City}
        whole = client.responses.parse(**ask).output_parsed
        with client.responses.stream(**ask) as stream:
            streamed = stream.get_final_response().output_parsed
        assert isinstance(whole, City) and isinstance(streamed, City)
        return [dict(whole.model_dump()), dict(streamed.model_dump())]


async def test_parsed_responses(threaded: Library) -> None:
    async with running(model={"context": 1024, "script": saying("I would rather not.")}) as here:
        whole, streamed = await threaded(parsed, here.url)
    assert whole == streamed and whole["kind"] in ("town", "village") and isinstance(whole["port"], bool)


def tool_loop(url: str, streamed: bool) -> Json:
    """A call, its result, and the response that uses it; all items of the first response are sent back."""
    import json

    import openai

    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "name": "add", "parameters": parameters, "strict": True}]
    items: list[Any] = [{"role": "user", "content": "What is 19 + 23?"}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "tools": tools, "temperature": 0, "include": ["reasoning.encrypted_content"]}
        pieces = ""
        if streamed:
            with client.responses.stream(**ask, input=items) as stream:
                for event in stream:
                    pieces += event.delta if event.type == "response.function_call_arguments.delta" else ""
                first: Any = stream.get_final_response()
        else:
            first = client.responses.create(**ask, input=items)
        (call,) = [item for item in first.output if item.type == "function_call"]
        numbers = json.loads(call.arguments)
        items += [item.to_dict() for item in first.output]
        total = str(numbers["a"] + numbers["b"])
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
        last = client.responses.create(**ask, input=items)
        assert last.usage
        return {
            "kinds": [item.type for item in first.output],
            "sealed": [bool(item.encrypted_content) for item in first.output if item.type == "reasoning"],
            "name": call.name,
            "numbers": numbers,
            "pieces": pieces == call.arguments if streamed else None,
            "text": last.output_text,
            "cached": last.usage.input_tokens_details.cached_tokens > 100,
        }


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reasons", [False, True], ids=["calls", "reasoning and calls"])
async def test_a_tool_loop(threaded: Library, streamed: bool, reasons: bool) -> None:
    thought = "<think>\nI add them.\n</think>\n\n" if reasons else ""
    script = playing(thought + call("add", {"a": 19, "b": 23}), "It is 42.")
    model: Json = {**AGENT, "context": 8192, "script": script}
    async with running(model={**model, "chat": thinking_chat} if reasons else model) as here:
        assert await threaded(tool_loop, here.url, streamed) == {
            "kinds": ["reasoning", "function_call"] if reasons else ["function_call"],
            "sealed": [True] if reasons else [],
            "name": "add",
            "numbers": {"a": 19, "b": 23},
            "pieces": True if streamed else None,
            "text": "It is 42.",
            "cached": True,
        }


def forced(url: str, choice: Any) -> Json:
    """Names and arguments of the calls with a `tool_choice`, and the text."""
    import json

    import openai

    parameters = {
        "type": "object",
        "properties": {"kind": {"enum": ["town", "village"]}, "port": {"type": "boolean"}},
        "required": ["kind", "port"],
        "additionalProperties": False,
    }
    tools: Any = [
        {"type": "function", "name": name, "parameters": parameters, "strict": True} for name in ("city", "place")
    ]
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        ask: Any = {"model": "m", "input": "hi", "tools": tools, "temperature": 0, "parallel_tool_calls": False}
        response = client.responses.create(**ask, tool_choice=choice)
        calls = [[item.name, json.loads(item.arguments)] for item in response.output if item.type == "function_call"]
        return {"calls": calls, "text": response.output_text}


@pytest.mark.parametrize(
    "choice", ["none", "required", {"type": "function", "name": "place"}], ids=["none", "required", "named"]
)
async def test_tool_choice(threaded: Library, choice: Any) -> None:
    async with running(model={**AGENT, "context": 8192, "script": saying("I would rather not.")}) as here:
        found = await threaded(forced, here.url, choice)
    if choice == "none":
        assert found == {"calls": [], "text": "I would rather not."}
    else:
        ((name, arguments),) = found["calls"]
        assert name in (("city", "place") if choice == "required" else ("place",))
        assert arguments["kind"] in ("town", "village") and isinstance(arguments["port"], bool)


def refused(url: str) -> list[Any]:
    """The error for a response that the server should have stored."""
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        try:
            client.responses.create(model="m", input="hi", previous_response_id="resp_1")
        except openai.APIStatusError as error:
            return [type(error).__name__, error.status_code, error.code, error.param]
    return []


async def test_stored_responses_are_refused(threaded: Library) -> None:
    async with running() as here:
        assert await threaded(refused, here.url) == [
            "BadRequestError",
            400,
            "unsupported_parameter",
            "previous_response_id",
        ]
        assert await here.metric("luce_requests_total") == 1


async def test_with_asyncio() -> None:
    async with running() as here, openai.AsyncOpenAI(api_key="none", base_url=here.url + "/v1") as client:
        whole = await client.responses.create(model="m", input="hi", temperature=0)
        async with client.responses.stream(model="m", input="hi", temperature=0) as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert whole.output_text == "".join(pieces) == final.output_text == REPLY
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
