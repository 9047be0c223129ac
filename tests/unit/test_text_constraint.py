"""Masks of grammars against brute force over all texts of small languages, and drafts against fresh grammars."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from luce.engine.sequence import Constraint, RowKind
from luce.errors import BackendError, GrammarLimitError
from luce.text.grammar import GrammarCompiler
from luce.text.reasoning import ReasoningTokens
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level, sentencepiece

TOKENIZER = Tokenizer(
    byte_level(
        ("a b", "ab c", '" :', '{ "', "1 2", "é é"), control=("<end>",), visible=("<t>", "</t>"), eos_token_id=256 + 6
    )
)
VOCAB = TOKENIZER.vocab + 37
WORDS = -(-VOCAB // 32)
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
OPENS, CLOSES = (TOKENIZER.encode(text, specials=True)[0] for text in ("<t>", "</t>"))
END = min(TOKENIZER.eos_ids)
NONE: frozenset[int] = frozenset()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, specials=False)


def bits(words: NDArray[np.uint32]) -> set[int]:
    return {token for token in range(32 * len(words)) if int(words[token // 32]) >> token % 32 & 1}


PIECES = {"▁": -1.0, "▁h": -2.0, "he": -2.5, "lo": -2.0, "▁lo": -1.5, "▁a": -3.0, "b": -4.0}
SPACED = Tokenizer(sentencepiece(PIECES, control=("<s>", "</s>"), eos_token_id=2))
NO_SPACE = Tokenizer(sentencepiece({"a": -1.0}, control=("<s>", "</s>"), eos_token_id=2, add_space_prefix=False))
COMPOSED = Tokenizer(byte_level(("Ã ©",), control=("<end>",), eos_token_id=257), nfc=True)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (SPACED, "hello a lo"),
        (SPACED, "a\u2581b"),
        (NO_SPACE, "a b"),
        (COMPOSED, "cafe\u0301!"),
        (TOKENIZER, "a<t>b"),
    ],
    ids=["space before the text", "no space", "no token of a space", "letters composed", "special token"],
)
def test_text_that_the_tokenizer_writes_otherwise(tokenizer: Tokenizer, text: str) -> None:
    constraint, written = GrammarCompiler(tokenizer, tokenizer.vocab).grammar("start: " + json.dumps(text)), b""
    while not constraint.over:
        assert all(constraint.valid(constraint.forced(15, NONE), (), NONE))
        token = max(bits(constraint.mask(NONE)) - tokenizer.eos_ids)
        constraint.push(token)
        written += tokenizer.token_bytes(token)
    assert written == text.encode()


@settings(deadline=None)
@given(
    st.lists(st.text('abc12"{:,é', min_size=1, max_size=6), min_size=1, max_size=8, unique=True), st.integers(0, 2**32)
)
def test_a_mask_is_what_brute_force_finds(texts: list[str], seed: int) -> None:
    constraint = COMPILER.grammar("start: " + " | ".join(json.dumps(text) for text in texts))
    language = [text.encode() for text in texts]
    random, so_far = np.random.default_rng(seed), b""
    for _ in range(20):
        possible = {
            token
            for token in range(TOKENIZER.vocab)
            if not TOKENIZER.is_special(token)
            and any(text.startswith(so_far + TOKENIZER.token_bytes(token)) for text in language)
        }
        may_end = so_far in language
        forced = constraint.forced(15, NONE)
        # Where the text is forced, the library also asks for the token in which the tokenizer would write it.
        assert not forced or forced[0] in possible
        expected = {forced[0]} if forced else possible
        assert bits(constraint.mask(NONE)) == expected | ({END} if may_end else set())
        # An id of the request's own ends may come where the text may end, and nowhere else.
        stop = int(random.choice([*sorted(possible), 5]))
        assert bits(constraint.mask(frozenset({stop}))) == (expected - {stop}) | ({END, stop} if may_end else set())
        after = so_far + b"".join(map(TOKENIZER.token_bytes, forced))
        # With what is forced alone, nothing is left out.
        assert not forced or {text for text in language if text.startswith(so_far)} == {
            text for text in language if text.startswith(after)
        }
        assert constraint.over == (not possible)
        if not possible:
            return
        token = int(random.choice(sorted(expected)))
        constraint.push(token)
        so_far += TOKENIZER.token_bytes(token)
    raise AssertionError("a text of more tokens than it has bytes")


def of_schema() -> Constraint:
    made = COMPILER.constraint(
        {
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {"ab": {"type": "array", "items": {"enum": ["abc", "1"]}}, "c": {"type": "integer"}},
                    "required": ["ab", "c"],
                    "additionalProperties": False,
                }
            },
        },
        ReasoningTokens(OPENS, CLOSES, False),
    )
    assert made is not None
    return made


def triggered() -> Constraint:
    """Begins with a token that is no special one, ends with one that is named by its id."""
    (space,), (comma,) = ids(" "), ids(",")
    return COMPILER.grammar(f"start: <[{space}]> /[A-Z]{{3}}/ <[{comma}]>", triggers=frozenset({space}))


def called() -> Constraint:
    return COMPILER.grammar(f'start: <[{OPENS}]> "ab" /[0-9]+/ <[{CLOSES}]>', triggers=frozenset({OPENS}), once=True)


def comes(state: Constraint, token: int) -> bool:
    """Whether a token may come. Where the text is forced, the mask has only the token in which the tokenizer writes it;
    a draft may have others with the same text."""
    if token == END:
        return token in bits(state.mask(NONE))
    return state.open or token in bits(state.mask(NONE)) or (bool(state.forced(1, NONE)) and state.allows(token))


def random_draft(
    state: Constraint, random: np.random.Generator, favourite: int
) -> tuple[list[int], list[int], list[Constraint | None]]:
    """Tokens, parents, and the state behind each token that may come and ends nothing."""
    tokens: list[int] = []
    parents: list[int] = []
    states: list[Constraint | None] = [state.copy()]
    for number in range(int(random.integers(0, 9))):
        parent = int(random.integers(-1, number)) if number and random.random() < 0.3 else number - 1
        above = states[parent + 1]
        token = int(random.integers(0, VOCAB))
        behind = None
        if above is not None:
            allowed = bits(above.mask(NONE))
            if random.random() < 0.9:
                token = favourite if above.open and random.random() < 0.5 else int(random.choice(sorted(allowed)))
            if token != END and comes(above, token):
                behind = above.copy()
                behind.push(token)
                behind = None if behind.over else behind
        tokens.append(token)
        parents.append(parent)
        states.append(behind)
    return tokens, parents, states


@pytest.mark.parametrize("make", [of_schema, triggered, called])
@given(seed=st.integers(0, 2**32))
@example(seed=1848789)  # with `called`: "a", where the mask has only the token "ab"
@settings(deadline=None, max_examples=40)
def test_a_draft_leaves_the_state_as_it_is(make: Callable[[], Constraint], seed: int) -> None:
    constraint, random = make(), np.random.default_rng(seed)
    favourite = {triggered: ids(" ")[0], called: OPENS}.get(make, END)
    pushed: list[int] = []
    for _ in range(12):
        if constraint.over:
            break
        fresh = make()
        for token in pushed:
            fresh.push(token)
        assert (constraint.mask(NONE) == fresh.mask(NONE)).all()
        tokens, parents, states = random_draft(fresh, random, favourite)
        out = np.zeros((1 + len(tokens), WORDS), np.uint32)
        kinds = constraint.fill(tokens, parents, NONE, out)
        for row, (kind, state) in enumerate(zip(kinds, states, strict=True)):
            assert (kind is RowKind.LEFT) == (state is None)
            if kind in (RowKind.MADE, RowKind.FREE):
                assert state is not None and (out[row] == state.mask(NONE)).all()
            elif kind is RowKind.OPEN:
                assert state is not None and state.open
        valid = constraint.valid(tokens, parents, NONE)
        for node, parent in enumerate(parents):
            above = states[parent + 1]
            if above is None:
                assert not valid[node]
            else:
                assert valid[node] == comes(above, tokens[node])
        allowed = sorted(bits(constraint.mask(NONE)))
        token = favourite if constraint.open and random.random() < 0.5 else int(random.choice(allowed))
        if token == END:
            break
        constraint.push(token)
        pushed.append(token)


def test_an_id_that_the_tokenizer_lacks_leaves_no_error() -> None:
    constraint = of_schema()
    for token in (TOKENIZER.vocab, VOCAB - 1, VOCAB + 5, -1):
        assert not constraint.allows(token) and constraint.valid([token, token], (), NONE) == [False, False]
        with pytest.raises(BackendError):
            constraint.push(token)
    for token in ids('{"ab"'):
        constraint.push(token)


def test_a_limit_behind_a_guess_is_no_error_of_the_reply() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}}
    constraint = COMPILER.grammar(f"start: %json {json.dumps(schema)}")
    tokens = ids('{"p2": "x"')
    out = np.zeros((1 + len(tokens), WORDS), np.uint32)
    kinds = constraint.fill(tokens, (), NONE, out)
    assert kinds[0] is RowKind.MADE and kinds[-1] is RowKind.LEFT
    assert bits(constraint.mask(NONE)) >= {ids("{")[0]}
    with pytest.raises(GrammarLimitError, match=r"^the grammar of the reply: "):
        for token in tokens:
            constraint.push(token)


def test_reasoning_has_one_mask_without_ends() -> None:
    constraint = of_schema()
    assert OPENS in bits(constraint.mask(NONE)) and not constraint.forced(9, NONE)
    constraint.push(OPENS)
    out = np.zeros((2, WORDS), np.uint32)
    assert constraint.fill([CLOSES], (), frozenset({7}), out) == [RowKind.FREE, RowKind.MADE]
    assert bits(out[0]) == set(range(TOKENIZER.vocab)) - {END, 7}
    assert OPENS not in bits(out[1])


@pytest.mark.parametrize("before", ["a", "a</t>b"])
def test_a_trigger_ends_the_reasoning_in_which_the_reply_began(before: str) -> None:
    (space,), (comma,) = ids(" "), ids(",")
    reasoning = ReasoningTokens(OPENS, CLOSES, True, frozenset({space}))
    source = f"start: <[{space}]> /[A-Z]{{3}}/ <[{comma}]>"
    constraint = COMPILER.grammar(source, reasoning, triggers=frozenset({space}))
    for token in TOKENIZER.encode(before, specials=True):
        constraint.push(token)
        assert constraint.open
    constraint.push(space)
    assert not constraint.open
    assert bits(constraint.mask(NONE)) == {token for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for token in ids(letter)}
    for token in ids("ABC,"):
        constraint.push(token)
    assert constraint.open
