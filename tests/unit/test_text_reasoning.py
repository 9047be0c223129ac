"""Reasoning and content: the parts do not depend on the chunks, and the families' vocabularies have the markers."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Dialect, Markers, ReasoningBudget
from luce.text.chat import ChatFormat
from luce.text.reasoning import ReasoningSplitter, ReasoningTokens, reasoning_limit, reasoning_splitter
from luce.text.tokenizer import USER_DEFINED, Tokenizer
from tests.support.vocabulary import DIRECTORY, NAMES, byte_level, cases, metadata, nfc, sentencepiece

MARKERS = Markers("<t>", "</t>")
PIECES = st.lists(st.sampled_from(["<t>", "</t>", "<", "/", "t>", "a", "b ", " ", "\n"]), max_size=12)


def parts(text: str, *, inside: bool) -> tuple[str, str]:
    """(content, reasoning) of a whole reply."""
    if not inside and (closed := re.fullmatch(r"(?s)\s*</t>\s*(.*)", text)):
        return closed[1], ""
    opened = "" if inside else r"\s*<t>"
    found = re.fullmatch(rf"(?s){opened}\s*(.*?)\s*</t>\s*(.*)", text)
    if found:
        return found[2], found[1]
    unfinished = re.fullmatch(rf"(?s){opened}\s*(.*?)\s*", text)
    return ("", unfinished[1]) if unfinished else (text, "")


@settings(max_examples=600)
@given(PIECES, st.booleans())
def test_every_chunking_gives_the_result_for_the_whole_text(pieces: list[str], inside: bool) -> None:
    splitter = ReasoningSplitter(MARKERS, inside=inside)
    deltas = [*map(splitter.push, pieces), splitter.flush()]
    assert ("".join(s.content for s in deltas), "".join(s.reasoning for s in deltas)) == parts(
        "".join(pieces), inside=inside
    )


@settings(max_examples=200)
@given(PIECES.map(lambda pieces: [*pieces, "\ud800", *pieces]), st.booleans())
def test_the_token_of_a_call_ends_the_reasoning_and_is_content(pieces: list[str], inside: bool) -> None:
    splitter = ReasoningSplitter(MARKERS, inside=inside, call="\ud800")
    deltas = [*map(splitter.push, pieces), splitter.flush()]
    content, reasoning = ("".join(getattr(s, name) for s in deltas) for name in ("content", "reasoning"))
    before = "".join(pieces[: pieces.index("\ud800")])
    expected = parts(before, inside=inside)
    assert reasoning == expected[1] and content == expected[0] + "".join(pieces)[len(before) :]


def test_text_that_can_only_be_content_is_not_held_back() -> None:
    splitter = ReasoningSplitter(MARKERS)
    assert splitter.push("a").content == "a" and splitter.push("<t>").content == "<t>"
    inside = ReasoningSplitter(MARKERS, inside=True)
    assert inside.push("a<").reasoning == "a" and inside.push("b").reasoning == "<b"


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [([], False), ([256], True), ([256, 10], True), ([256, 10, 257], False), ([256, *range(40)], False)],
)
def test_the_prompt_s_end_may_open_the_reasoning(prompt: list[int], inside: bool) -> None:
    splitter = reasoning_splitter(MARKERS, Tokenizer(byte_level(visible=("<t>", "</t>"))), prompt)
    assert splitter is not None and splitter.inside == inside


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ([258, 256, *range(40)], True),
        ([258, 256, 257, *range(40)], False),
        ([256, 258, *range(4)], False),
        ([258, *range(40)], False),
    ],
)
def test_a_continued_message_may_have_opened_the_reasoning_long_ago(prompt: list[int], inside: bool) -> None:
    vocabulary = Tokenizer(byte_level(control=("<|s|>",), visible=("<t>", "</t>")))
    names = {256: "<t>", 257: "</t>", 258: "<|s|>"}
    ids = [vocabulary.encode(names[i], specials=True)[0] if i in names else i for i in prompt]
    splitter = reasoning_splitter(MARKERS, vocabulary, ids)
    assert splitter is not None and splitter.inside == inside


def test_a_vocabulary_without_the_markers_has_no_reasoning() -> None:
    assert reasoning_splitter(MARKERS, Tokenizer(byte_level(visible=("<t>",))), []) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_families_markers_begin_with_visible_tokens(name: str) -> None:
    with open_gguf(sorted(DIRECTORY.glob(f"{name}-*.gguf"))[0]) as file:
        dialect = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors)).dialect
    keys = metadata(name)
    tokenizer = Tokenizer(keys, nfc=nfc(name))
    types = keys["tokenizer.ggml.token_type"]
    assert isinstance(types, list) and dialect.reasoning and dialect.notes
    for text in (*vars(dialect.reasoning).values(), dialect.calls.trigger, dialect.calls.call[1].split("\n")[-1]):
        token, *_ = tokenizer.encode(text, specials=True)
        assert types[token] == USER_DEFINED and text.startswith(tokenizer.token_text(token))
    # The reference conversations end with the template's own suffix.
    ids = cases(name)["chat"]["ids"]
    splitter = reasoning_splitter(dialect.reasoning, tokenizer, ids)
    assert splitter is not None and splitter.inside == cases(name)["chat"]["rendered"].endswith("<think>\n")


def test_the_limit_of_a_family_has_its_ids() -> None:
    vocabulary = Tokenizer(byte_level(visible=("<t>", "</t>")))
    opens, closes = (vocabulary.encode(text, specials=True)[0] for text in ("<t>", "</t>"))
    family = Dialect(Markers("<t>go\n", "</t>"), ReasoningBudget(lead_in="<t>?", lead_out="\n"))
    found = reasoning_limit(family, vocabulary, ReasoningTokens(opens, closes, inside=True), 5, 7)
    bytes_of = functools.partial(vocabulary.encode, specials=False)
    assert found.opening == (opens, *bytes_of("go\n")) and found.closers == {closes}
    # Only the markers are special tokens.
    assert found.closing == (closes, *bytes_of("\n")) and found.lead_in == tuple(bytes_of("<t>?"))
    assert found.blank == {token for text in " \t\n" for token in bytes_of(text)}
    assert (found.inside, found.budget, found.reply_reserve) == (True, 5, 7)
    closed = reasoning_limit(family, vocabulary, ReasoningTokens(opens, closes, inside=False), None, 0)
    assert not closed.inside and closed.budget is None


def test_what_a_limit_adds_continues_the_reply() -> None:
    # A vocabulary that writes a space before a text.
    vocabulary = Tokenizer(sentencepiece({"▁": -1.0}, control=("<s>", "</s>")))
    family = Dialect(Markers("<t>", "</t>"), ReasoningBudget(lead_in="go"))
    found = reasoning_limit(family, vocabulary, ReasoningTokens(5, 6, inside=True), 5, 7)
    assert b"".join(map(vocabulary.token_bytes, found.lead_in)) == b"go"
    assert {vocabulary.token_bytes(token) for token in found.blank} == {b" ", b"\n", b"\t"}


def test_the_limit_of_a_reply_depends_on_its_prompt() -> None:
    vocabulary = Tokenizer(byte_level(visible=("<t>", "</t>")))
    opens, closes = (vocabulary.encode(text, specials=True)[0] for text in ("<t>", "</t>"))
    chat = ChatFormat(None, vocabulary, Dialect(MARKERS))
    for prompt, inside in (([opens, 10], True), ([opens, closes], False), ([], False)):
        found = chat.reasoning_limit(prompt, 5, 0)
        assert found is not None and found.inside is inside
    chat.set_budget(ReasoningBudget(lead_in="Enough.", lead_out="\n"))
    found = chat.reasoning_limit([opens, 10], 5, 0)
    assert found is not None
    lead_in, lead_out = (tuple(vocabulary.encode(text, specials=False)) for text in ("Enough.", "\n"))
    assert (found.lead_in, found.closing) == (lead_in, (closes, *lead_out))
    for dialect in (Dialect(), Dialect(Markers("<t>", "</u>"))):
        assert ChatFormat(None, vocabulary, dialect).reasoning_limit([], 5, 0) is None
