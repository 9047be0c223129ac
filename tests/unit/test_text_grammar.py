"""Constraints by JSON schemas: what they let a reply hold, token by token, against the json module and the schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.engine.sequence import Constraint
from luce.errors import BackendError, GrammarLimitError, RequestError
from luce.text.digit_limit import DigitLimit
from luce.text.grammar import GrammarCompiler, WantedReply
from luce.text.reasoning import ReasoningTokens
from luce.text.reply_format import ReplyFormat
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level

MERGES = ('{ "', '" :', '" }', "y y", '" ,')
TOKENIZER = Tokenizer(byte_level(MERGES, control=("<end>",), visible=("<t>", "</t>"), eos_token_id=256 + len(MERGES)))
#: the model has more ids than the tokenizer
VOCAB = TOKENIZER.vocab + 37
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
OPENS, CLOSES = (TOKENIZER.encode(text, specials=True)[0] for text in ("<t>", "</t>"))
END = min(TOKENIZER.eos_ids)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "test", "schema": schema}}


def made(schema: Any = SCHEMA, reasoning: ReasoningTokens | None = None) -> Constraint:
    constraint = COMPILER.constraint(form(schema), reasoning)
    assert constraint is not None
    return constraint


def push(constraint: Constraint, text: str) -> None:
    for token in TOKENIZER.encode(text, specials=False):
        assert constraint.allows(token) and token in allowed(constraint), text
        constraint.push(token)


def mask_of(constraint: Constraint) -> NDArray[np.bool_]:
    """The bits of a mask, each by itself."""
    words = constraint.mask(frozenset())
    assert len(words) == -(-VOCAB // 32) and not words[-1] >> np.uint32(VOCAB % 32)
    return np.array([int(words[i // 32]) >> i % 32 & 1 for i in range(VOCAB)], np.bool_)


def allowed(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(mask_of(constraint)).tolist())


@given(st.integers(0, 2**32), st.booleans())
def test_whatever_the_mask_allows_is_valid(seed: int, free: bool) -> None:
    random, constraint = np.random.default_rng(seed), made()
    ids: list[int] = []
    while not constraint.over and len(ids) < 400:
        mask = mask_of(constraint)
        assert mask.shape == (VOCAB,) and not mask[TOKENIZER.vocab :].any() and mask.any()
        choices = np.flatnonzero(mask) if free else np.flatnonzero(mask)[:3]
        token = int(random.choice(choices))
        assert constraint.allows(token)
        constraint.push(token)
        if token != END:
            ids.append(token)
    text = b"".join(TOKENIZER.token_bytes(i) for i in ids).decode()
    if constraint.over:
        value = json.loads(text)
        assert value.keys() == {"a", "b"} and 0 <= value["a"] <= 99 and value["b"] in ("x", "yy")
    else:
        # Blanks are bounded at each place, and there are nine of them.
        raise AssertionError(f"no end after {len(ids)} tokens: {text!r}")


def test_a_token_is_allowed_where_its_bit_is_set() -> None:
    constraint = made()
    for text in ("", '{"a', '": 1', ', "b": "y', 'y"'):
        push(constraint, text)
        mask = mask_of(constraint)
        assert [constraint.allows(token) for token in range(TOKENIZER.vocab)] == mask[: TOKENIZER.vocab].tolist()


def test_a_reply_may_end_where_the_body_does() -> None:
    constraint = made()
    push(constraint, '{"a": 1, "b": "x"')
    assert not constraint.may_end and not constraint.over and not constraint.allows(END)
    push(constraint, "}")
    assert constraint.may_end and constraint.over and allowed(constraint) == {END}


def test_special_tokens_are_no_text() -> None:
    constraint = made({"type": "string"})
    push(constraint, '"')
    assert not {OPENS, CLOSES, END} & allowed(constraint)
    # The spelling of a marker is text.
    for letter in "<t>":
        push(constraint, letter)


def test_white_space_is_bounded() -> None:
    constraint = made()
    push(constraint, "{\n" + " " * 40)
    assert not constraint.allows(TOKENIZER.encode(" ", specials=False)[0])
    # A schema cannot switch that off.
    own = made(SCHEMA | {"x-guidance": {"whitespace_flexible": True}, "$schema": "https://example.com/unknown"})
    push(own, "{\n" + " " * 40)
    assert not own.allows(TOKENIZER.encode(" ", specials=False)[0])


@pytest.mark.parametrize("inside", [True, False])
def test_the_body_begins_behind_the_reasoning(inside: bool) -> None:
    constraint = made(reasoning=ReasoningTokens(OPENS, CLOSES, inside))
    if not inside:
        assert OPENS in allowed(constraint) and constraint.allows(OPENS)
        constraint.push(OPENS)
    push(constraint, "free } text")
    assert not constraint.may_end and not constraint.over and END not in allowed(constraint)
    assert not constraint.allows(END) and constraint.allows(CLOSES)
    constraint.push(CLOSES)
    assert OPENS not in allowed(constraint) and not constraint.allows(OPENS)
    push(constraint, '\n\n{"a": 2, "b": "x"}')
    assert constraint.over


def test_a_reply_without_reasoning_begins_with_the_body() -> None:
    constraint = made(reasoning=ReasoningTokens(OPENS, CLOSES, False))
    push(constraint, "{")
    assert OPENS not in allowed(constraint) and not constraint.allows(OPENS)


def test_any_object() -> None:
    constraint = COMPILER.constraint({"type": "json_object"})
    assert constraint is not None and not constraint.allows(TOKENIZER.encode("[", specials=False)[0])
    push(constraint, '{"k": [1.5, null, {"é": "\\n"}]}')
    assert constraint.over
    assert COMPILER.constraint({"type": "text"}) is None


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({}, "response_format.type", "invalid_value"),
        ({"type": "xml"}, "response_format.type", "invalid_value"),
        ({"type": "json_schema"}, "response_format.json_schema", "invalid_value"),
        ({"type": "json_schema", "json_schema": {"schema": 1}}, "response_format.json_schema.schema", "invalid_value"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}},
            "response_format.json_schema.schema.not",
            "unsupported_schema",
        ),
        (form({"type": "strnig"}), "response_format.json_schema.schema.type", "invalid_schema"),
    ],
)
def test_formats_that_cannot_be_enforced_are_refused(given: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.constraint(given)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert str(caught.value).startswith(f"{param}: ") and len(str(caught.value)) < 400


def grammar_of(lark: str) -> Constraint:
    return COMPILER.wait(WantedReply(ReplyFormat("grammar", lark))).constraint()


@pytest.mark.parametrize("integer", [-(2**63), -(2**63) + 512])
def test_a_schema_in_a_grammar_has_none_of_the_least_integers(integer: int) -> None:
    with pytest.raises(RequestError, match="the least integers of 64 bits") as caught:
        grammar_of(f'start: %json {{"const": {integer}}}')
    assert caught.value.code == "invalid_value"
    push(grammar_of(f'start: %json {{"const": {-(2**63) + 1024}}}'), str(-(2**63) + 1024))
    push(grammar_of(f'start: "{integer}"'), str(integer))


@pytest.mark.parametrize("word", ["e\u0301", "\u212b", "\u1112\u1161\u11ab"])
def test_a_text_that_the_tokenizer_would_compose_can_be_forced(word: str) -> None:
    """The mask allows the bytes of the grammar's text, not those of its composed form."""
    composing = Tokenizer(byte_level(MERGES, control=("<end>",), eos_token_id=256 + len(MERGES)), nfc=True)
    compiler = GrammarCompiler(composing, composing.vocab)
    text = f"a yy {word} yy"
    constraint = compiler.wait(WantedReply(ReplyFormat("choice", [text]))).constraint()
    forced = constraint.forced(len(text.encode()))
    assert text.encode().startswith(b"".join(map(composing.token_bytes, forced))) and len(forced) > 2
    written = b""
    while not constraint.over:
        words = constraint.mask()
        token = next(i for i in range(composing.vocab) if int(words[i // 32]) >> i % 32 & 1)
        assert constraint.allows(token)
        constraint.push(token)
        written += composing.token_bytes(token)
    assert written.decode() == text


def test_a_long_chain_of_schemas_compiles() -> None:
    """The library calls itself for each; it would end the process at the end of a usual stack."""
    inner = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}
    push(made({"$ref": "#/$defs/d0", "$defs": {**inner, "d3000": {"type": "null"}}}), "[[[]]]")


def test_a_long_chain_of_rules_compiles() -> None:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(9000))
    push(grammar_of(f'start: r0\n{rules}r9000: "yes"\n'), "yes")


def test_a_grammar_that_grows_too_large_in_a_reply_is_the_clients() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    constraint = COMPILER.grammar(f"start: %json {json.dumps(schema)}")
    with pytest.raises(GrammarLimitError, match=r"^the grammar of the reply: .*items; max is") as caught:
        push(constraint, '{"p2": "x"')
    assert (caught.value.status, caught.value.code) == (422, "grammar_limit")


def test_a_token_that_was_not_allowed_is_an_error() -> None:
    constraint = made()
    with pytest.raises(BackendError, match=r"^token 93 was chosen, which the grammar does not allow$"):
        constraint.push(TOKENIZER.encode("]", specials=False)[0])
    push(constraint, "{")


def test_without_the_library_nothing_is_unconstrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance cannot be imported") as caught:
        COMPILER.constraint(form({"const": "a schema that no other test has"}))
    assert caught.value.code == "unsupported_parameter"


def triggered(*, once: bool = False) -> Constraint:
    return COMPILER.grammar(f'start: <[{OPENS}]> "call" <[{CLOSES}]>', triggers=frozenset({OPENS}), once=once)


def test_a_reply_is_free_until_a_trigger_comes() -> None:
    constraint = triggered()
    for _ in range(2):
        assert constraint.open and constraint.may_end and not constraint.over
        assert allowed(constraint) == set(range(TOKENIZER.vocab))
        push(constraint, "any } text")
        constraint.push(OPENS)
        assert not constraint.open and not constraint.may_end and END not in allowed(constraint)
        push(constraint, "call")
        assert allowed(constraint) == {CLOSES} and not constraint.allows(OPENS)
        constraint.push(CLOSES)
    constraint.push(END)
    assert constraint.over and not constraint.open


def test_a_reply_of_one_call_is_over_behind_it() -> None:
    constraint = triggered(once=True)
    constraint.push(OPENS)
    push(constraint, "call")
    assert not constraint.over
    constraint.push(CLOSES)
    assert constraint.over and not constraint.open


@pytest.mark.parametrize("made", [made, triggered])
def test_a_copy_goes_its_own_way(made: Callable[[], Constraint]) -> None:
    constraint = made()
    if constraint.open:
        constraint.push(OPENS)
        begin, more = "ca", "ll"
    else:
        begin, more = '{"a": 1, "b": ', '"x"}'
    push(constraint, begin)
    other = constraint.copy()
    push(constraint, more)
    assert allowed(other) != allowed(constraint)
    push(other, more)
    assert allowed(other) == allowed(constraint)


@pytest.mark.parametrize(
    ("bounds", "taken", "refused"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.25}, ("0.1", "0.01"), ("0", "0.0", "0.25", "-0.1")),
        ({"exclusiveMinimum": 1, "maximum": 1.25}, ("1.1", "1.25"), ("1", "1.0", "1.3")),
        ({"minimum": -0.25, "exclusiveMaximum": 0}, ("-0.1", "-0.25"), ("0", "-0", "0.1")),
        ({"exclusiveMinimum": -1.25, "exclusiveMaximum": -1}, ("-1.1",), ("-1", "-1.0", "-1.25")),
        ({"minimum": 0.5, "exclusiveMaximum": 1}, ("0.5", "0.75"), ("1", "1.0", "0")),
    ],
)
def test_exclusive_bounds_are_excluded(
    bounds: dict[str, float], taken: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    def accepts(text: str) -> bool:
        constraint = made({"type": "array", "items": {"type": "number", **bounds}, "minItems": 1, "maxItems": 1})
        for token in TOKENIZER.encode(f"[{text}]", specials=False):
            if token not in allowed(constraint):
                return False
            constraint.push(token)
        return True

    assert all(map(accepts, taken)) and not any(map(accepts, refused))


def test_a_warm_up_reads_the_vocabulary_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = llguidance.LLTokenizer
    monkeypatch.setattr(
        llguidance, "LLTokenizer", lambda *args, **options: read.append(1) or original(*args, **options)
    )
    monkeypatch.setattr(DigitLimit, "__init__", _counting(DigitLimit.__init__, limits := list[int]()))
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    compiler.warm_up()
    assert (len(read), len(limits)) == (1, 1)
    assert compiler.constraint(form(SCHEMA)) is not None
    assert (len(read), len(limits)) == (1, 1)
    compiler.close()


def _counting(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def counted(*args: Any) -> None:
        calls.append(1)
        function(*args)

    return counted


def test_a_warm_up_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    compiler.warm_up()
    with pytest.raises(RequestError) as caught:
        compiler.constraint(form(SCHEMA))
    assert caught.value.code == "unsupported_parameter"
    compiler.close()
