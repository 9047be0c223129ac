"""luce/text/channel_splitter.py: replies in harmony's format. Expectations are written by hand from openai/harmony's
docs/format.md, and from what users report that gpt-oss writes instead; those of tests/reference/harmony.json are what
the library openai-harmony reads."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.models.channels import Channels
from luce.text.call_parser import CallableTools
from luce.text.channel_splitter import ChannelSplitter, channel_splitter
from luce.text.chat import ChatFormat
from luce.text.marks import Marks
from luce.text.reply_parser import Part, ReasoningPart
from tests.support.call_parts import Found, of_parts
from tests.support.harmony import channels, chat, dialect, marks, tokenizer
from tests.support.tool_templates import byte_tokenizer
from tests.support.vocabulary import DIRECTORY

PROMPT = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'


def split(text: str, prompt: str = PROMPT, *, calls: bool = False, pieces: bool = False) -> tuple[str, str]:
    """Content and reasoning of a reply, whole or character by character, special tokens whole."""
    found = ChannelSplitter(marks(), marks().marked(prompt), calls=calls)
    marked = marks().marked(text)
    deltas = [*map(found.push, marked if pieces else [marked]), found.flush()]
    content = "".join(delta.content for delta in deltas)
    return marks().spelled(content), "".join(delta.reasoning for delta in deltas)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"{ANALYSIS}User asks.{NEXT}{FINAL}2 + 2 = 4.", "2 + 2 = 4.", "User asks."),
        (f"{FINAL}Yes.<|return|>", "Yes.", ""),
        # A preamble is for the user, and stands before the call that it announces.
        (
            f"{ANALYSIS}Plan it.{NEXT}<|channel|>commentary<|message|>**Plan**:\n1. Go{NEXT}{CALL}<|call|>",
            f"**Plan**:\n1. Go\n\n{CALL}",
            "Plan it.",
        ),
        (f"{ANALYSIS}Get it.{NEXT}{CALL}", CALL, "Get it."),
        # The recipient in the role's part of the header.
        (
            f'{ANALYSIS}Get it.{NEXT} to=functions.get<|channel|>commentary json<|message|>{{"a": 1}}',
            ' to=functions.get<|channel|>commentary json<|message|>{"a": 1}',
            "Get it.",
        ),
        (' to=functions.get<|channel|>commentary<|message|>{"a": 1}',) * 2 + ("",),
        # Messages of one kind are apart from each other.
        (f"{ANALYSIS}One. {NEXT}{ANALYSIS}\nTwo.\n{NEXT}{FINAL}A{NEXT}{FINAL}B", "A\n\nB", "One.\n\nTwo."),
        (f"{ANALYSIS} \n{NEXT}{FINAL}A", "A", ""),
        (f"{ANALYSIS}Still\n\nthinking ", "", "Still\n\nthinking"),
        (f"{FINAL} kept \n", " kept \n", ""),
        # A message without a header is content.
        ("Hello, world", "Hello, world", ""),
        (" to be or not", " to be or not", ""),
        ("to=", "to=", ""),
        ("t", "t", ""),
        (f"{ANALYSIS}Hm.<|end|>Yes.", "Yes.", "Hm."),
        (f"{ANALYSIS}Hm.{NEXT}Yes.", "Yes.", "Hm."),
        (f"{ANALYSIS}Hm.{NEXT}<|message|>Yes.", "Yes.", "Hm."),
        ("", "", ""),
        (" \n", "", ""),
        # A message to the assistant itself is none to a tool.
        ("<|channel|>commentary to=assistant<|message|>So.", "So.", ""),
        # A header that does not end: what stands behind the channel's name is the text.
        ("<|channel|>final Yes.<|end|>", "Yes.", ""),
        (f"<|channel|>analysis We think{NEXT}{FINAL}Yes.", "Yes.", "We think"),
        (f"<|channel|>commentary?commentary?{NEXT}{ANALYSIS}Hm.", "?commentary?", "Hm."),
        (f"<|channel|>Well, {NEXT}{FINAL}Yes.", "Well,\n\nYes.", ""),
        ("<|channel|>" + "x" * 300, "x" * 300, ""),
        ("<|channel|>commentary to=functions.get json{}", "commentary to=functions.get json{}", ""),
        # One header too many, and another author.
        (f"<|channel|>commentary to=assistant{ANALYSIS}Hm.", "", "Hm."),
        (f"{ANALYSIS}One{FINAL}Two", "Two", "One"),
        ("<|start|>user<|message|>And?", "And?", ""),
        # The mark of a body inside one is its spelling.
        (f"{FINAL}a<|message|>b", "a<|message|>b", ""),
        # Unknown channels are content.
        ("<|channel|>summary<|message|>So.", "So.", ""),
    ],
)
def test_messages_are_reasoning_or_content(text: str, content: str, reasoning: str, pieces: bool) -> None:
    assert split(text, pieces=pieces) == (content, reasoning)


def _expected(messages: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls of messages."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    calls = []
    for message in messages:
        reasons = message["channel"] == "analysis"
        if message["recipient"] is not None:
            calls.append((message["recipient"].removeprefix("functions."), json.loads(message["content"])))
        elif text := message["content"].strip() if reasons else message["content"]:
            texts[reasons].append(text)
    return "\n\n".join(texts[False]), "\n\n".join(texts[True]), calls


def test_replies_are_read_as_openai_harmony_reads_them() -> None:
    prompt = tokenizer().encode(PROMPT, specials=True)
    tools = CallableTools(dict.fromkeys(("get", "get_weather", "a-b_c", "x.y")))
    for case in json.loads((DIRECTORY / "harmony.json").read_text()):
        text, parser = chat().reply_text(prompt=prompt, tools=tools), chat().reply_parser(prompt, tools)
        parts: list[Part] = []
        for token in tokenizer().encode(case["text"], specials=True):
            parts += parser.push(token, text.push(token))
        parts += parser.flush(text.flush())
        content, reasoning, calls = _expected(case["messages"])
        assert "".join(part.text for part in parts if isinstance(part, ReasoningPart)) == reasoning
        assert of_parts(parts, parser) == Found(content, calls)


@pytest.mark.parametrize(
    ("prompt", "text", "content", "reasoning", "place"),
    [
        (PROMPT, f"{FINAL}x", "x", "", "header"),
        (f"<|start|>user<|message|>{ANALYSIS}<|end|>{PROMPT}", f"{FINAL}x", "x", "", "header"),
        (f"{PROMPT}{FINAL}Hello wo", f"rld{NEXT}{FINAL}!", "rld\n\n!", "", "content"),
        (f"{PROMPT}{ANALYSIS}Th ", f"ink{NEXT}{FINAL}!", "!", "ink", "reasoning"),
        ("A text", " goes on", " goes on", "", "content"),
        ("", "A text", "A text", "", "content"),
    ],
)
def test_a_reply_goes_on_where_the_prompt_ends(
    prompt: str, text: str, content: str, reasoning: str, place: str
) -> None:
    ids = tokenizer().encode(prompt, specials=True)
    found = channel_splitter(marks(), tokenizer(), ids)
    assert found.place == place and found.inside is (place == "reasoning")
    deltas = [found.push(marks().marked(text)), found.flush()]
    assert "".join(delta.content for delta in deltas) == content
    assert "".join(delta.reasoning for delta in deltas) == reasoning


def test_the_limit_of_the_reasoning_begins_where_the_prompt_does() -> None:
    found = ChatFormat(None, tokenizer(), dialect())
    for prompt, inside in ((PROMPT, False), (f"{PROMPT}{ANALYSIS}Th", True), (f"{PROMPT}{FINAL}Th", False)):
        limit = found.reasoning_limit(tokenizer().encode(prompt, specials=True), 5, 0)
        assert limit is not None and limit.inside is inside
        assert limit.opening == tuple(tokenizer().encode(ANALYSIS, specials=True))
        assert limit.closing == tuple(tokenizer().encode(NEXT + FINAL, specials=True))


def test_text_flows_and_headers_wait_for_their_mark() -> None:
    found = ChannelSplitter(marks(), marks().marked(PROMPT))
    for mark in marks().marked(ANALYSIS):
        assert not any(found.push(mark)) or mark == marks().marked("<|message|>")
    assert found.inside and found.push("One").reasoning == "One" and found.push(" ").reasoning == ""
    assert found.push("two").reasoning == " two"
    for mark in marks().marked(NEXT + FINAL):
        assert not any(found.push(mark))
        assert not found.inside
    assert found.push("to=").content == "to=" and found.push(" \n").content == " \n"


def test_the_header_of_a_call_comes_with_its_last_token() -> None:
    found = ChannelSplitter(marks(), marks().marked(PROMPT), calls=True)
    header = marks().marked(CALL.partition("{")[0])
    assert [found.push(mark).content for mark in header] == [""] * (len(header) - 1) + [header]


def test_marks_in_content_are_for_the_parser_of_calls_alone() -> None:
    for calls in (True, False):
        found = ChannelSplitter(marks(), marks().marked(PROMPT), calls=calls)
        content = found.push(marks().marked(CALL)).content
        assert content == (marks().marked(CALL) if calls else CALL)


_WORDS = (
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    *("assistant", "analysis", "final", "commentary", " to=functions.get", " json", "user", "t", " ", "\n", "x" * 90),
)


@settings(max_examples=500, deadline=None)
@given(words=st.lists(st.sampled_from(_WORDS), max_size=14), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_every_division_gives_the_same_parts(words: list[str], cuts: list[int]) -> None:
    marked = marks().marked("".join(words))
    at = sorted({0, len(marked), *(cut % (len(marked) + 1) for cut in cuts)})
    found = ChannelSplitter(marks(), marks().marked(PROMPT))
    deltas = [*(found.push(marked[a:b]) for a, b in pairwise(at)), found.flush()]
    content, reasoning = "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas)
    assert (content, reasoning) == split("".join(words))


def test_a_vocabulary_without_the_tokens_has_no_channels() -> None:
    assert Marks(dialect().calls, byte_tokenizer("hermes"), channels()).channels is None
    found = marks().channels
    assert isinstance(found, Channels) and len(found.start) == len(found.channel) == 1 and found.final == "final"
