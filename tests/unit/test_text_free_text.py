"""luce/text/free_text.py: each mask is the one that the grammar library makes, and in free texts it is constant."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from luce.engine.sequence import RowKind
from luce.text.call_format import CallableTool, CallFormat
from luce.text.call_grammar import CallGrammar, call_grammar
from luce.text.constraint import GrammarConstraint, GrammarStart
from luce.text.free_text import FreeTexts, TextVocabulary
from luce.text.grammar import GrammarCompiler, WantedReply
from luce.text.grammar_library import GrammarLibrary
from luce.text.reply_format import ReplyFormat
from luce.text.tokenizer import Tokenizer
from tests.support.call_parts import printed
from tests.support.tool_templates import SPECIALS, TEMPLATES, format_named
from tests.support.vocabulary import byte_level, spelling

NAMES = sorted(name for name in TEMPLATES if name != "harmony")
#: tokens of several bytes: pieces of markers and more than one of them, parts of characters, what stands around them
PIECES = (
    *(
        "\n\n",
        "</",
        "\n</",
        "parameter",
        "</parameter",
        ">\n",
        ">\n\n",
        ">\n<",
        "tool",
        "<tool",
        "_call",
        "call>",
        "_call>\n",
    ),
    *("quot", '"}', '{"name', '", "', "</parameter>\n", "DSML", "value>", "arg_", "le", "é", "x\u00e9", "\U0001f389"),
)
#: tokens that are parts of characters
PARTS = (b"x\xc3", b"\xf0\x9f", b"\x8e\x89!", b"\xa9\n</")
VALUES = (
    "",
    "plain",
    "\n",
    "a\n\n</par\n</parameter\n</parameter> </parameter>x\n",
    "x\u00e9\u00e9\n</\U0001f389!\n<tool_call>\u00e9",
    '{"name": 1}</arg_value </arg_key>\n\n<｜DSML｜x </｜DSML｜',
    "<tool_ca</tool_call>\n</function\n",
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}},
    "required": ["text"],
}


@functools.cache
def vocabulary(name: str, special: bool) -> Tokenizer:
    """A vocabulary of bytes and of PIECES and PARTS, with the special tokens of a dialect or without."""
    spelled = spelling()
    pieces = [piece.encode() for piece in PIECES] + [*PARTS]
    others = SPECIALS[name][2:] if special else ()
    keys = byte_level(control=SPECIALS[name][:2], visible=tuple(others), eos_token_id=257)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    tokens += ["".join(spelled[byte] for byte in piece) for piece in dict.fromkeys(pieces)]
    types += [1] * (len(tokens) - len(types))
    return Tokenizer(keys)


class Both:
    """The same grammar with its free texts, and by the library alone."""

    def __init__(self, name: str, special: bool, *, required: bool = False, tool: CallableTool | None = None) -> None:
        self.tokenizer = tokenizer = vocabulary(name, special)
        library = GrammarLibrary(tokenizer)
        form = CallFormat(format_named(name), (tool or CallableTool("f", PARAMETERS),), required=required)
        self.made: CallGrammar = call_grammar(form, library.matcher, tokenizer.special.cut, blank="")
        texts = FreeTexts(library.text_vocabulary(), self.made.markers) if self.made.markers else None
        self.kinds: list[tuple[bytes, RowKind]] = []
        self._read = b""
        self._pair = [
            GrammarConstraint(
                GrammarStart(self.made.matcher, self.made.triggers, texts=own),
                tokenizer.vocab,
                tokenizer.vocab + 40,
                tokenizer.eos_ids,
            )
            for own in (texts, None)
        ]

    def row(self) -> None:
        """Hold the mask of the next token to the library's."""
        size = -(-(self.tokenizer.vocab + 40) // 32)
        masks = [np.zeros((1, size), np.uint32) for _ in self._pair]
        ends = frozenset({7, self.tokenizer.vocab - 1})
        kinds = [one.fill((), (), ends, mask)[0] for one, mask in zip(self._pair, masks, strict=True)]
        assert np.array_equal(*masks), (self._read, kinds)
        assert kinds[1] in (RowKind.MADE, RowKind.OPEN) and (kinds[0] is RowKind.OPEN) == (kinds[1] is RowKind.OPEN)
        self.kinds.append((self._read, kinds[0]))

    def push(self, token: int) -> bool:
        """Push a token if it may come next."""
        if any(one.over or not one.allows(token) for one in self._pair):
            return False
        for one in self._pair:
            one.push(token)
        special = self.tokenizer.is_special(token)
        self._read += self.tokenizer.token_text(token).encode() if special else self.tokenizer.token_bytes(token)
        return True

    def read(self, text: str, seed: int) -> None:
        """Push a text in tokens that are drawn among those that spell it, as far as it may come."""
        rng = random.Random(seed)
        for token, piece in self.tokenizer.special.cut(text):
            data = b"" if token is not None else piece.encode()
            while data or token is not None:
                self.row()
                fits = [i for i in self._spelling if data.startswith(self._spelling[i])] if token is None else [token]
                found = (
                    rng.choice(fits) if rng.random() < 0.5 else max(fits, key=lambda i: len(self._spelling.get(i, b"")))
                )
                if not self.push(found):
                    return
                data, token = data[len(self._spelling.get(found, b"")) :], None
        self.row()

    @functools.cached_property
    def _spelling(self) -> dict[int, bytes]:
        every = range(self.tokenizer.vocab)
        return {i: self.tokenizer.token_bytes(i) for i in every if not self.tokenizer.is_special(i)}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_each_mask_is_the_library_s(name: str, special: bool) -> None:
    counted: Counter[RowKind] = Counter()
    for number, value in enumerate(VALUES):
        call = printed(name, "", [("f", {"text": value, "count": 3, "deep": {"a": value}})]).lstrip("\n")
        both = Both(name, special)
        both.read((f"So {value} it is. {call}", f"{call}\n{call}", value)[number % 3], number)
        counted.update(kind for _, kind in both.kinds)
    # Where markers are text, most rows of texts have the same mask; not where one token is a marker.
    tokens = [piece.encode() for piece in PIECES]
    held = any(marker.encode() in token for marker in both.made.markers for token in tokens)
    assert bool(counted[RowKind.FREE]) == (bool(both.made.markers) and not held)


def test_only_the_tail_of_a_marker_is_made() -> None:
    both = Both("qwen_xml", True, required=True)
    both.read("<tool_call>\n<function=f>\n<parameter=text>\nline\n\n</par\u00e9</parameter>\n</parameter", 0)
    kinds = dict(both.kinds)
    begin = b"<tool_call>\n<function=f>\n<parameter=text>\n"
    for text, kind in (
        (b"<tool_call>\n<func", RowKind.MADE),
        (b"li", RowKind.FREE),
        (b"line\n", RowKind.FREE),
    ):
        assert kinds.get(text if text.startswith(b"<tool") else begin + text, kind) is kind, text
    whole = begin + "line\n\n</par\u00e9</parameter>\n</parameter".encode()
    # ">" and ">\n" complete the marker here, and "</parameter>\n" is one token behind a line feed.
    assert kinds[whole] is RowKind.MADE
    assert sum(kind is RowKind.FREE for text, kind in both.kinds if text.startswith(begin)) > 5


@pytest.mark.parametrize(
    "tool",
    [
        CallableTool(
            "f",
            {**PARAMETERS, "additionalProperties": False, "properties": {"text": {"type": "string", "maxLength": 9}}},
            strict=True,
        ),
        CallableTool(
            "f", {**PARAMETERS, "properties": {"text": {"type": "string"}}}, input=ReplyFormat("regex", "(.|\n){0,9}")
        ),
        CallableTool(
            "f",
            {**PARAMETERS, "properties": {"text": {"type": "string"}}},
            input=ReplyFormat("grammar", "start: /(.|\\n){0,9}/"),
        ),
    ],
    ids=["a length", "a regular expression", "a grammar"],
)
def test_a_text_that_is_nearly_free_is_not_taken_for_a_free_one(tool: CallableTool) -> None:
    both = Both("qwen_xml", True, required=True, tool=tool)
    both.read("<tool_call>\n<function=f>\n<parameter=text>\nline\n", 1)
    assert both.made.markers == frozenset() and {kind for _, kind in both.kinds} == {RowKind.MADE}


def test_a_format_beside_calls_may_be_nearly_free() -> None:
    tokenizer = vocabulary("qwen_xml", False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab)
    form = CallFormat(format_named("qwen_xml"), (CallableTool("f", PARAMETERS),))
    grammar = compiler.wait(WantedReply(ReplyFormat("regex", "(.|\n){1,9}"), form))
    constraint = grammar.constraint()
    for token in b"123456789":
        constraint.push(token)
    assert constraint.over
    compiler.close()


def test_a_warm_up_reads_the_texts_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    original, read = TextVocabulary.of, list[Tokenizer]()
    monkeypatch.setattr(TextVocabulary, "of", lambda source, masks: read.append(source) or original(source, masks))
    tokenizer = vocabulary("qwen_xml", True)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab)
    compiler.warm_up()
    assert read == [tokenizer]
    for required in (True, False):
        form = CallFormat(format_named("qwen_xml"), (CallableTool("f", PARAMETERS),), required=required)
        compiler.wait(WantedReply(None, form))
    assert read == [tokenizer]
    compiler.close()


def test_drafts_have_the_same_masks() -> None:
    tokenizer = vocabulary("qwen_xml", True)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab)
    form = CallFormat(format_named("qwen_xml"), (CallableTool("f", PARAMETERS),), required=True)
    grammar = compiler.wait(WantedReply(None, form))
    constraint = grammar.constraint()
    begin = tokenizer.encode("<tool_call>\n<function=f>\n<parameter=text>\n", specials=True)
    for token in begin:
        constraint.push(token)
    draft = [*b"ab\n</parameter>\n</function>"]
    size = -(-tokenizer.vocab // 32)
    out = np.zeros((1 + len(draft), size), np.uint32)
    kinds = constraint.fill(draft, (), frozenset(), out)
    assert RowKind.FREE in kinds and RowKind.MADE in kinds
    for row, token in enumerate([*draft, None]):
        assert np.array_equal(out[row], constraint.mask(frozenset())), row
        if token is not None:
            constraint.push(token)
    compiler.close()
