"""What the grammar library does, where Luce relies on it or works around it; an update that changes it is noticed here.

The cases of tests/reference/json-schema-suite.json are a floor: what strict schemas accept is valid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from luce.text.grammar_library import EMPTY, INVALID, LARGE, GrammarError, GrammarLibrary
from luce.text.lark import json_rule
from luce.text.plain_schema import plain_schema
from luce.text.schema_limits import SchemaError
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level

SUITE = Path(__file__).parents[1] / "reference" / "json-schema-suite.json"
TOKENIZER = Tokenizer(byte_level(("a b",), control=("<end>",), visible=("<mark>",), eos_token_id=257))
LIBRARY = GrammarLibrary(TOKENIZER)
END, MARK = 257, 258


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, specials=False)


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    tokens = ids(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def bits(matcher: LLMatcher) -> set[int]:
    words = np.zeros(-(-TOKENIZER.vocab // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_rollback_does_not_count_an_end_token() -> None:
    matcher = LIBRARY.matcher('start: "ab"')
    for token in [*ids("ab"), END]:
        matcher.consume_token(token)
    matcher.rollback(1)
    # So the matcher never gets one: it is where it was before the text's last token.
    assert not matcher.is_accepting()


def test_a_wrong_token_is_final_only_where_it_is_consumed() -> None:
    matcher = LIBRARY.matcher('start: "ab"')
    assert matcher.validate_tokens(ids("x")) == 0 and matcher.try_consume_tokens(ids("x")) == 0
    assert not matcher.is_error()
    matcher.consume_token(ids("x")[0])
    assert matcher.is_error() and bits(matcher) <= {END}


def test_errors_are_not_raised() -> None:
    library = LLTokenizer(TokenizerWrapper(_Source()), n_vocab=258, eos_token=[257])
    assert LLMatcher(library, LLMatcher.grammar_from_lark("start: foo"), log_level=0).is_error()


class _Source:
    """A tokenizer for the library; keeps the types that it is called with."""

    eos_token_id, bos_token_id = 257, None

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"ab", b"<end>"]
        self.special_token_ids = [257]
        self.called: set[type] = set()

    def __call__(self, text: str | bytes) -> list[int]:
        self.called.add(type(text))
        return list(text.encode() if isinstance(text, str) else text)


def test_the_tokenizer_is_called_with_texts_or_bytes() -> None:
    source = _Source()
    library = LLTokenizer(TokenizerWrapper(source), n_vocab=258, eos_token=[257])
    assert library.tokenize_str("é") == list("é".encode()) and source.called and source.called <= {str, bytes}


def test_some_limits_strike_at_the_first_mask() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(1200)}
    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps({'type': 'object', 'properties': properties})}")
    library = LLTokenizer(TokenizerWrapper(_Source()), n_vocab=258, eos_token=[257])
    matcher = LLMatcher(library, grammar, log_level=0)
    assert not matcher.is_error()
    for token in b'{"p2": "x"':
        matcher.consume_token(token)
    assert matcher.is_error()


def test_an_unknown_dialect_of_schemas_is_refused() -> None:
    with pytest.raises(GrammarError):
        LIBRARY.matcher('start: %json {"$schema": "https://example.com/unknown", "type": "null"}')
    assert plain_schema({"$schema": "https://example.com/unknown", "type": "null"}, strict=True).schema == {
        "type": "null"
    }


def test_special_tokens_are_never_text() -> None:
    for lark in (r"start: /(.|\n)*/", 'start: %json {"type": "string"}'):
        matcher = LIBRARY.matcher(lark)
        if "json" in lark:
            matcher.consume_token(ids('"')[0])
        assert MARK not in bits(matcher) and ids("<")[0] in bits(matcher)
    assert bits(LIBRARY.matcher(f"start: <[{MARK}]>")) == {MARK}


def test_white_space_of_the_library_is_unbounded_and_that_of_luce_is_not() -> None:
    free = LIBRARY.matcher('start: %json {"type": "array"}')
    held = LIBRARY.matcher(f"start: {json_rule({'type': 'array'})}")
    for text, bounded in (
        ("[ ]", True),
        ("[\n    ]", True),
        ("[  ]", False),
        ("[\n\n]", False),
        ("[" + " " * 500 + "]", False),
    ):
        assert accepts(free, text) and accepts(held, text) is bounded


@pytest.mark.parametrize(
    ("lark", "code", "message"),
    [
        ("start: a\na: foo", INVALID, "line 2, column 4: unknown name"),
        ("start: /(/", INVALID, "line 1, column 8: invalid regex"),
        ("start: /a(?=b)/", INVALID, "look-around"),
        ("begin: /a/", INVALID, "no start rule found"),
        ("", INVALID, "no start rule found"),
        ('start: %json {"not": {}}', INVALID, 'Unimplemented keys: ["not"]'),
        ("start: %json false", EMPTY, "allows nothing"),
        ('start: %json {"type": "integer", "minimum": 3, "maximum": 1}', EMPTY, "allows nothing"),
        ("start: start", EMPTY, "allows nothing"),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, LARGE, "too large"),
        (f"start: %json {json.dumps({'enum': [str(i) for i in range(100_000)]})}", LARGE, "too large"),
        ("start: %json " + "[" * 300 + "]" * 300, LARGE, "too large"),
    ],
)
def test_messages_of_the_library_are_told_apart(lark: str, code: str, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        LIBRARY.matcher(lark)
    assert caught.value.code == code and message in str(caught.value) and "\n" not in str(caught.value)


#: schemas of the suite that compile, instances that are told right, valid instances that are refused at most
FLOOR = (144, 488, 16)


def _cases() -> list[tuple[str, str, Any, list[tuple[Any, bool]]]]:
    cases: list[tuple[str, str, Any, list[tuple[Any, bool]]]] = json.loads(SUITE.read_text())
    return cases


def test_strict_schemas_accept_what_is_valid_alone() -> None:
    compiled, right, refused, wrong = 0, 0, list[str](), list[str]()
    for keyword, name, schema, tests in _cases():
        if isinstance(schema, bool):
            continue
        try:
            plain = plain_schema(schema, strict=True, root=False).schema
            matcher = LIBRARY.matcher(f"start: {json_rule(plain)}")
        except (SchemaError, GrammarError):
            continue
        compiled += 1
        for value, valid in tests:
            accepted = accepts(matcher, json.dumps(value, ensure_ascii=False))
            right += accepted is valid
            if accepted and not valid:
                wrong.append(f"{keyword}: {name}: {value}")
            elif valid and not accepted:
                refused.append(f"{keyword}: {name}: {value}")
    assert wrong == []
    # The floor: properties in another order, 1.0 as an integer and the like are refused.
    assert compiled >= FLOOR[0] and right >= FLOOR[1] and len(refused) <= FLOOR[2], (compiled, right, refused)
