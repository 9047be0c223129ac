"""The official anthropic client, with and without asyncio, against the application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.lazy import Lazy
from tests.support.scripted_agent import agent_chat, call, playing
from tests.support.scripted_model import REPLY, saying

anthropic = Lazy("anthropic")

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "hi"}
ASK: Json = {"model": "m", "max_tokens": 300, "messages": [HI]}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL: Json = {
    "name": "book",
    "description": "Books a table.",
    "input_schema": {
        "type": "object",
        "properties": {
            "guests": {"type": "integer"},
            "outside": {"type": "boolean"},
            "dishes": {"type": "array", "items": {"type": "string"}},
        },
    },
}
INPUT = {"guests": 4, "outside": True, "dishes": ["Knödel"]}
AGENT: Json = {"chat": agent_chat, "context": 8192}
THINK = {"type": "enabled", "budget_tokens": 1024}
REASONED = {"script": saying("Hm, well.</think>\n\nYes.", marker="<|im_start|>assistant\n<think>\n")}


class Client:
    """One of the two clients, used in the same way. Tests on the event loop call that without asyncio in a thread."""

    def __init__(self, here: Running, *, threads: bool, **options: Any) -> None:
        kind = anthropic.Anthropic if threads else anthropic.AsyncAnthropic
        options = {"api_key": "secret", "max_retries": 0, **options}
        self.api: Any = kind(base_url=here.url, **options)
        self._threads = threads

    async def call(self, method: Callable[..., Any], **fields: Any) -> Any:
        """The result of a method."""
        if self._threads:
            return await asyncio.to_thread(method, **fields)
        return await method(**fields)

    async def create(self, **fields: Any) -> Any:
        """A message."""
        return await self.call(self.api.messages.create, **{**ASK, **fields})

    async def stream(self, **fields: Any) -> tuple[str, list[Any], Any]:
        """The text, the events and the final message of the client's stream."""
        if self._threads:
            return await asyncio.to_thread(self._stream, fields)
        async with self.api.messages.stream(**{**ASK, **fields}) as stream:
            events = [event async for event in stream]
            return _text(events), events, await stream.get_final_message()

    def _stream(self, fields: Json) -> tuple[str, list[Any], Any]:
        with self.api.messages.stream(**{**ASK, **fields}) as stream:
            events = list(stream)
            return _text(events), events, stream.get_final_message()

    async def close(self) -> None:
        """Close its connections."""
        await self.call(self.api.close)


def _text(events: list[Any]) -> str:
    return "".join(event.text for event in events if event.type == "text")


Connect = Callable[..., Client]


@pytest.fixture(params=[False, True], ids=["asyncio", "threads"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes clients of one kind."""
    made: list[Client] = []

    def connect(here: Running, **options: Any) -> Client:
        made.append(Client(here, threads=request.param, **options))
        return made[-1]

    yield connect
    for client in made:
        await client.close()


def total(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def said(message: Any) -> list[Json]:
    return [block.to_dict() for block in message.content]


async def test_a_message(connect: Connect) -> None:
    async with running() as here:
        client = connect(here)
        message = await client.create(extra_body={"temperature": 0})
        assert said(message) == [{"type": "text", "text": REPLY}] and message.stop_reason == "end_turn"
        assert message.usage.output_tokens == len(REPLY.encode()) + 1
        assert message.usage.cache_read_input_tokens == 0
        again = await client.create(extra_body={"temperature": 0})
        assert again.usage.cache_read_input_tokens > 0 and total(again.usage) == total(message.usage)


async def test_a_stream(connect: Connect) -> None:
    async with running() as here:
        client = connect(here)
        whole = await client.create()
        text, events, final = await client.stream()
        assert text == REPLY and said(final) == said(whole) and final.stop_reason == "end_turn"
        starts = [event.index for event in events if event.type == "content_block_start"]
        assert starts == [0] and events[0].type == "message_start" and events[-1].type == "message_stop"
        assert final.usage.output_tokens == whole.usage.output_tokens


async def test_ends(connect: Connect) -> None:
    async with running() as here:
        client = connect(here)
        for fields, reason, stop in (
            ({"max_tokens": 5}, "max_tokens", None),
            ({"stop_sequences": ["zzz", "wö"]}, "stop_sequence", "wö"),
        ):
            message = await client.create(**fields)
            _, _, final = await client.stream(**fields)
            for found in (message, final):
                assert (found.stop_reason, found.stop_sequence) == (reason, stop)


async def test_inputs_of_tools_have_their_types(connect: Connect) -> None:
    script = saying("I will book.\n" + call("book", INPUT))
    async with running(model={**AGENT, "script": script}) as here:
        client = connect(here)
        message = await client.create(tools=[TOOL])
        _, events, final = await client.stream(tools=[TOOL])
        for found in (message, final):
            text, use = found.content
            assert text.text == "I will book." and (use.name, use.input) == ("book", INPUT)
            assert found.stop_reason == "tool_use"
        assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]


async def test_no_text_block_stands_before_a_call(connect: Connect) -> None:
    async with running(model={**AGENT, "script": saying("\n\n" + call("book", {}))}) as here:
        _, _, final = await connect(here).stream(tools=[TOOL])
        assert [(block.type, block.input) for block in final.content] == [("tool_use", {})]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "sunny"}, "sunny"),
        ({"content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]}, "sunny\n\nwarm"),
        ({"content": "no such town", "is_error": True}, "Error: no such town"),
    ],
)
async def test_a_tool_loop(connect: Connect, result: Json, shown: str) -> None:
    async with running(model={**AGENT, "script": playing(call("book", INPUT), "Booked.")}) as here:
        client = connect(here)
        first = await client.create(tools=[TOOL])
        (use,) = first.content
        answer = {"type": "tool_result", "tool_use_id": use.id, **result}
        history = [HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        count = await client.call(client.api.messages.count_tokens, model="m", messages=history, tools=[TOOL])
        second = await client.create(tools=[TOOL], messages=history)
        assert said(second) == [{"type": "text", "text": "Booked."}]
        assert count.input_tokens == total(second.usage) == len(prompt(here, history))
        assert f"<tool_response>\n{shown}\n</tool_response>" in here.model.detokenize(prompt(here, history))


def prompt(here: Running, history: list[Json]) -> list[int]:
    """The ids of the prompt with these messages, in the chat's own form."""
    (use,) = history[1]["content"]
    result = history[2]["content"][0]
    content = result["content"]
    text = content if isinstance(content, str) else "\n\n".join(block["text"] for block in content)
    calls = [{"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}}]
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    messages = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": use.id, "content": "Error: " * ("is_error" in result) + text},
    ]
    return threaded(lambda: here.model.chat.prompt(messages, tools=[{"type": "function", "function": function}]))


def threaded(function: Callable[[], list[int]]) -> list[int]:
    """The result of a function that must not run on a thread with an event loop."""
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


async def test_two_calls_answered_in_reverse_order(connect: Connect) -> None:
    both = call("book", {"guests": 1}) + "\n" + call("book", {"guests": 2})
    async with running(model={**AGENT, "script": playing(both, "-", "Both booked.")}) as here:
        client = connect(here)
        _, _, first = await client.stream(tools=[TOOL])
        one, two = first.content
        assert (one.input, two.input) == ({"guests": 1}, {"guests": 2}) and one.id != two.id

        def results(*blocks: Json) -> list[Any]:
            done = [{"type": "tool_result", **block} for block in blocks]
            return [HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": done}]

        ordered = [{"tool_use_id": one.id, "content": "table 7"}, {"tool_use_id": two.id, "content": "table 8"}]
        second = await client.create(tools=[TOOL], messages=results(*ordered))
        reverse = await client.create(tools=[TOOL], messages=results(*reversed(ordered)))
        assert said(second) == said(reverse) == [{"type": "text", "text": "Both booked."}]
        # The prompt is the same, so all of it is cached.
        assert reverse.usage.cache_read_input_tokens == total(second.usage)


async def test_thinking_and_its_signature(connect: Connect) -> None:
    async with running(model=REASONED) as here:
        client = connect(here)
        message = await client.create(thinking=THINK)
        _, events, final = await client.stream(thinking=THINK)
        assert said(final) == said(message)
        thinking, text = message.content
        assert thinking.thinking.strip() == "Hm, well." and text.text.strip() == "Yes." and thinking.signature
        assert [event.signature for event in events if event.type == "signature"] == [thinking.signature]
        history = [HI, {"role": "assistant", "content": message.content}, HI]
        for kind in (THINK, {"type": "adaptive"}):
            assert (await client.create(messages=history, thinking=kind)).stop_reason == "end_turn"
        # Without the marker the script has no text. Sampled bytes would be of any length.
        greedy = {"temperature": 0}
        plain = await client.create(messages=history, thinking={"type": "disabled"}, max_tokens=20, extra_body=greedy)
        assert plain.content and all(block.type == "text" for block in plain.content)


async def test_a_count_is_that_of_the_request(connect: Connect) -> None:
    system = [{"type": "text", "text": "Be brief.", **MARK}]
    async with running() as here:
        client = connect(here)
        count = await client.call(client.api.messages.count_tokens, model="m", messages=[HI], system=system)
        usage = (await client.create(system=system)).usage
        assert count.input_tokens == total(usage) and usage.cache_creation_input_tokens > 0


async def test_errors(connect: Connect) -> None:
    async with running(api_key=("secret",), model={"context": 64}) as here:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            await connect(here, api_key="wrong").create()
        client = connect(here)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum") as long:
            await client.create(messages=[{"role": "user", "content": "x" * 99}])
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
            await client.create(messages=[{"role": "user", "content": [image]}])
        for error in (wrong.value, long.value):
            assert error.request_id and error.request_id.startswith("req_")


async def test_overload_is_tried_again(connect: Connect) -> None:
    async with running(loaded=False) as here:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await connect(here, max_retries=1).create()
        assert caught.value.status_code == 529
        assert caught.value.type == "overloaded_error"
        _, text, _ = await here.get("/metrics")
        assert 'luce_requests_total{endpoint="/v1/messages",status="529"} 2.0' in text


async def test_models(connect: Connect) -> None:
    async with running() as here:
        client = connect(here)
        page = await client.call(client.api.models.list)
        assert [(model.id, model.type) for model in page.data] == [("scripted", "model")]
        assert (await client.call(client.api.models.retrieve, model_id="scripted")).display_name == "scripted"


async def test_the_beta_namespace(connect: Connect) -> None:
    async with running() as here:
        client = connect(here)
        betas = ["context-management-2025-06-27"]
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        message = await client.call(
            client.api.beta.messages.create, **ASK, betas=betas, context_management={"edits": edits}
        )
        assert said(message) == [{"type": "text", "text": REPLY}]


async def test_pings_keep_a_waiting_stream(connect: Connect) -> None:
    gate = threading.Event()
    async with running(sse_ping=0.02, model={"hook": lambda step: gate.wait(60) and None}) as here:
        client = connect(here, timeout=1.0)
        reading = asyncio.create_task(client.stream())
        # Longer than the client waits for a byte.
        await asyncio.sleep(1.5)
        gate.set()
        text, _, _ = await reading
        assert text == REPLY
