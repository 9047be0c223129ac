"""Constrained replies of the engine over a backend whose logits are a hash of the text: the same tokens however they
are drafted, batched and masked, and trouble with one reply's masks that is trouble of no other reply."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.config.sampling import SamplingParams
from luce.draft.drafter import Drafter
from luce.engine.events import Finished, FinishReason, Tokens
from luce.engine.masks import default_threads
from luce.engine.sampling import Sampler
from luce.engine.sequence import Constraint, RowKind
from luce.errors import GrammarLimitError
from luce.text.grammar import GrammarCompiler
from luce.text.reasoning import ReasoningTokens
from luce.text.tokenizer import Tokenizer
from tests.support.constraints import Few
from tests.support.drafters import BranchingDrafter, ScriptedDrafter
from tests.support.replies import Reply, engine, submit
from tests.support.scripted_backend import ScriptedBackend
from tests.support.vocabulary import byte_level

MERGES = ('{ "', '" :', '" }', "y y", '" ,', "] ,")
TOKENIZER = Tokenizer(byte_level(MERGES, control=("<end>",), visible=("<t>", "</t>"), eos_token_id=256 + 6))
OPENS, CLOSES = (TOKENIZER.encode(text, specials=True)[0] for text in ("<t>", "</t>"))
END = min(TOKENIZER.eos_ids)
#: not a multiple of 32, and more than the tokenizer has
VOCAB = TOKENIZER.vocab + 37
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["certain"]},
    },
    "required": ["name", "tags", "size", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
PROMPTS = [[20, 21, 22 + number, *range(30, 30 + 3 * number)] for number in range(4)]
#: of a reply each in turn; the last three have masks on the host
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {65: 2.0}},
]


def constraint(**options: Any) -> Constraint:
    made = COMPILER.constraint(FORM, **options)
    assert made is not None
    return made


def triggered() -> Constraint:
    """Free until a digit comes; three capitals and a comma follow it. Then free again."""
    (comma,) = TOKENIZER.encode(",", specials=False)
    digit = TOKENIZER.encode("7", specials=False)[0]
    return COMPILER.grammar(f"start: <[{digit}]> /[A-Z]{{3}}/ <[{comma}]>", triggers=frozenset({digit}))


def replies(
    make: Callable[[], Constraint] = constraint,
    drafter: Callable[[ScriptedBackend], Drafter | None] = lambda backend: None,
    *,
    slots: int = 4,
    verify: int = 16,
    branch_pages: int = 0,
    tokens: int = 90,
    **options: Any,
) -> list[list[int]]:
    """Ids of the replies to all prompts, one for each way to sample; plain ones among them."""
    backend = ScriptedBackend(vocab=VOCAB, slots=slots, verify=verify, branch_pages=branch_pages)
    with engine(backend, eos=TOKENIZER.eos_ids, drafter=drafter(backend), **options) as made:
        running = []
        for number, prompt in enumerate(PROMPTS):
            for seed, sampling in enumerate(SAMPLING):
                plain = (number + seed) % 5 == 4
                own = None if plain else make()
                params = {"max_tokens": 12 if plain else tokens, "seed": seed, "ignore_eos": plain, **sampling}
                running.append(submit(made, prompt, constraint=own, **params)[0])
        ended = [reply.finished() for reply in running]
    assert {end.reason for end in ended} <= {FinishReason.EOS, FinishReason.LENGTH}
    return [ids_of(reply) for reply in running]


def ids_of(reply: Reply) -> list[int]:
    return [token.id for event in reply.events if isinstance(event, Tokens) for token in event.tokens]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return replies(slots=1, verify=0)


def test_replies_follow_the_schema(plain: list[list[int]]) -> None:
    valid = 0
    for number, ids in enumerate(plain):
        if (number // len(SAMPLING) + number % len(SAMPLING)) % 5 == 4:
            continue
        text = b"".join(TOKENIZER.token_bytes(token) for token in ids if token != END).decode(errors="replace")
        if len(ids) < 90:
            value = json.loads(text)
            valid += 1
            assert list(value) == ["name", "tags", "size", "kind"] and set(value["tags"]) <= {"red", "green"}
    assert valid > 5


def chance(backend: ScriptedBackend) -> ScriptedDrafter:
    """Random tokens, most of which no grammar allows."""

    def tokens(text: Many[int], count: int) -> list[int]:
        random = np.random.default_rng(len(text))
        return random.choice([*TOKENIZER.encode('{}",: 0123', specials=False), 65, 66], count).tolist()

    return ScriptedDrafter(tokens, vocab=VOCAB)


def invalid(backend: ScriptedBackend) -> ScriptedDrafter:
    """Only tokens that no grammar here allows."""
    return ScriptedDrafter(lambda text, count: [TOKENIZER.vocab + 1] * count, vocab=VOCAB)


def fortunate(plain: list[list[int]]) -> Callable[[ScriptedBackend], ScriptedDrafter]:
    """Knows the replies, with some wrong tokens, on the branches of a tree."""
    known = [(prompt, ids) for ids, prompt in zip(plain, (p for p in PROMPTS for _ in SAMPLING), strict=True)]

    def follow(text: Many[int], count: int) -> list[int]:
        for prompt, ids in known:
            reply = list(text)[len(prompt) :]
            if list(text)[: len(prompt)] == prompt and ids[: len(reply)] == reply:
                return [*ids[len(reply) :], *[65] * count][:count]
        return [65] * count

    def make(backend: ScriptedBackend) -> ScriptedDrafter:
        return BranchingDrafter(follow, vocab=VOCAB)

    return make


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("kind", ["none", "forced", "chance", "invalid", "trees"])
def test_drafts_and_company_change_no_token(plain: list[list[int]], kind: str, slots: int) -> None:
    made: dict[str, Any] = {
        "none": {"verify": 0},
        "forced": {},
        "chance": {"drafter": chance, "verify_width": 5},
        "invalid": {"drafter": invalid, "verify_width": 5},
        "trees": {"drafter": fortunate(plain), "tree_tokens": 12, "branch_pages": 60, "verify_width": 13},
    }
    assert replies(slots=slots, **made[kind]) == plain


@pytest.mark.parametrize("kind", ["forced", "chance", "trees"])
def test_a_boundary_inside_a_draft_changes_no_token(kind: str) -> None:
    expected = replies(triggered, slots=1, verify=0, tokens=60)
    made: dict[str, Any] = {
        "forced": {},
        "chance": {"drafter": chance, "verify_width": 7},
        "trees": {"drafter": fortunate(expected), "tree_tokens": 12, "branch_pages": 60, "verify_width": 13},
    }
    assert replies(triggered, slots=4, tokens=60, **made[kind]) == expected


def test_reasoning_is_free_and_ends_in_a_draft() -> None:
    reasoning = ReasoningTokens(OPENS, CLOSES, True)

    def make() -> Constraint:
        return constraint(reasoning=reasoning)

    def script(history: Many[int]) -> int | None:
        return CLOSES if len(history) == 14 else None

    def one(**options: Any) -> list[int]:
        drafter = options.pop("drafter", lambda backend: None)
        backend = ScriptedBackend(vocab=VOCAB, script=script, verify=options.pop("verify", 16), branch_pages=60)
        with engine(backend, eos=TOKENIZER.eos_ids, drafter=drafter(backend), **options) as made:
            return ids_of(submit_finished(made, make()))

    def submit_finished(made: Any, own: Constraint) -> Reply:
        reply, _ = submit(made, PROMPTS[0], constraint=own, max_tokens=120)
        reply.finished()
        return reply

    expected = one(verify=0)
    place = expected.index(CLOSES)
    assert place > 5 and END not in expected[:place] and CLOSES not in expected[place + 1 :]
    text = b"".join(TOKENIZER.token_bytes(token) for token in expected[place + 1 :] if token != END)
    assert json.loads(text)["kind"] == "certain"

    def knows(backend: ScriptedBackend) -> ScriptedDrafter:
        def follow(text: Many[int], count: int) -> list[int]:
            return [*expected[len(text) - len(PROMPTS[0]) :], *[65] * count][:count]

        return BranchingDrafter(follow, vocab=VOCAB)

    for width in (2, 5, 9, 16):
        assert one(drafter=knows, verify_width=width, tree_tokens=15) == expected


def test_what_is_forced_is_drafted_without_a_drafter() -> None:
    backend = ScriptedBackend(vocab=VOCAB)
    with engine(backend, eos=TOKENIZER.eos_ids, verify_width=8) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=constraint(), max_tokens=120)
        end = reply.finished()
        stats = made.stats()
        steps = len(backend.steps)
    assert stats.draft is None and stats.forced[1] > 10 and stats.forced[0] >= stats.forced[1]
    assert end.timings.accepted == stats.forced[1]
    # The last token of the reply may be a forced one, behind which none is chosen.
    assert steps - (len(ids_of(reply)) - stats.forced[1]) in (0, 1)


def test_a_refused_guess_is_not_verified() -> None:
    backend = ScriptedBackend(vocab=VOCAB)
    with engine(backend, eos=TOKENIZER.eos_ids, drafter=invalid(backend), verify_width=8) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=constraint(), max_tokens=120)
        reply.finished()
        stats = made.stats()
    assert stats.draft is not None and stats.draft.refused > 100
    assert stats.draft.proposed == stats.forced[0]


class Shy(Few):
    """Makes no mask behind a guess, as where a limit strikes there."""

    def fill(
        self, tokens: Many[int], parents: Many[int], ends: frozenset[int], out: NDArray[np.uint32]
    ) -> list[RowKind]:
        super().fill(tokens, parents, ends, out[:1])
        return [RowKind.MADE] + [RowKind.LEFT] * len(tokens)


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"temperature": 0.8, "top_k": 9}])
def test_no_token_is_chosen_where_no_mask_could_be_made(params: dict[str, Any]) -> None:
    found = []
    for make in (Few, Shy):
        backend = ScriptedBackend(vocab=VOCAB)
        drafter = ScriptedDrafter(lambda text, count: [65, 66, 67, 65, 67][:count], vocab=VOCAB)
        with engine(backend, eos=frozenset(), drafter=drafter, verify_width=5) as made:
            reply, _ = submit(made, PROMPTS[0], constraint=make(VOCAB, 65, 66, 67), max_tokens=40, seed=3, **params)
            end = reply.finished()
        found.append(reply.ids)
        assert end.timings.accepted > 3
    assert found[0] == found[1]


def beside(own: Constraint, **options: Any) -> tuple[Exception, list[int]]:
    """The error of a constrained reply, and the plain reply that runs beside it."""
    backend = ScriptedBackend(vocab=VOCAB)
    with engine(backend, eos=frozenset(), **options) as made:
        other, _ = submit(made, PROMPTS[1], max_tokens=30)
        bad, _ = submit(made, PROMPTS[0], constraint=own, max_tokens=30)
        error = bad.failed()
        other.finished()
        again, _ = submit(made, PROMPTS[2], constraint=Few(VOCAB, 65, 66), max_tokens=5)
        again.finished()
    assert other.ids == backend.reply(PROMPTS[1], 30) and set(again.ids) <= {65, 66}
    return error, other.ids


def test_an_error_in_a_mask_ends_that_reply_alone() -> None:
    count = iter(range(100))

    def fail() -> None:
        if next(count) == 3:
            raise GrammarLimitError("too large now")

    error, _ = beside(Few(VOCAB, 65, 66, hook=fail))
    assert isinstance(error, GrammarLimitError) and str(error) == "too large now" and error.status == 422


def test_a_bug_in_a_mask_ends_that_reply_alone() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    error, _ = beside(Few(VOCAB, 65, hook=fail))
    assert "ZeroDivisionError" in str(error)


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.0}])
def test_no_token_that_is_allowed_ends_that_reply_alone(params: dict[str, Any]) -> None:
    backend = ScriptedBackend(vocab=VOCAB)
    with engine(backend, eos=frozenset()) as made:
        bad, _ = submit(made, PROMPTS[0], constraint=Few(VOCAB), **params)
        error = bad.failed()
    assert (str(error), error.code) == ("the grammar of the reply allows no token here", "grammar_limit")


@pytest.mark.parametrize("verify", [0, 8])
def test_the_tokens_before_the_one_that_fails_are_delivered(verify: int) -> None:
    class Ending(Few):
        """Of its ids none at the fifth place; those before it are forced."""

        def at(self, place: int) -> Many[int]:
            return self.ids[place : place + 1]

        def forced(self, most: int, ends: frozenset[int]) -> list[int]:
            return list(self.ids[len(self.pushed) :][:most])

    backend = ScriptedBackend(vocab=VOCAB, verify=verify)
    with engine(backend, verify_width=verify) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=Ending(VOCAB, 7, 8, 9, 7), max_tokens=20)
        assert isinstance(reply.failed(), GrammarLimitError)
    assert max(rows for rows, _ in backend.steps[1:]) == (4 if verify else 1)
    assert ids_of(reply) == [7, 8, 9, 7]


def test_masks_that_are_slow_for_the_second_time_end_the_reply() -> None:
    count = iter(range(100))

    def compute() -> None:
        if next(count) in (2, 4):
            begun = time.thread_time()
            while time.thread_time() - begun < 0.03:
                pass

    own = Few(VOCAB, 65, 66, hook=compute)
    error, _ = beside(own, grammar_mask_seconds=0.02)
    assert str(error) == "masks take more than 20 ms (--grammar-mask-ms)" and len(own.pushed) == 4


def test_a_mask_that_never_comes_ends_that_reply_alone() -> None:
    release = threading.Event()

    def stick() -> None:
        if threading.current_thread().name.startswith("luce-grammar"):
            release.wait(60)

    # Other tasks let a thread of the pool have the one that sticks.
    backend = ScriptedBackend(vocab=VOCAB)
    try:
        with engine(backend, eos=frozenset(), grammar_mask_seconds=0.001, grammar_threads=1) as made:
            stuck = [
                submit(made, PROMPTS[n], constraint=Few(VOCAB, 65, hook=stick), max_tokens=400)[0] for n in range(2)
            ]
            plain, _ = submit(made, PROMPTS[3], max_tokens=30)
            ends = [reply.wait() for reply in stuck]
            plain.finished()
    finally:
        release.set()
    failed = [end for end in ends if not isinstance(end, Finished)]
    assert all(str(end.error) == "a mask takes more than 40 ms" for end in failed)
    assert plain.ids == backend.reply(PROMPTS[3], 30)


@pytest.mark.parametrize("verify", [0, 16])
def test_the_masks_of_one_sequence_wake_no_thread(verify: int) -> None:
    own = Few(VOCAB, 65, 66)
    backend = ScriptedBackend(vocab=VOCAB, verify=verify)
    with engine(backend, eos=frozenset(), grammar_threads=2) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=own, max_tokens=20)
        reply.finished()
    assert own.threads == {"luce-engine"} and len(reply.ids) == 20


def test_counters() -> None:
    backend = ScriptedBackend(vocab=VOCAB, verify=0)
    with engine(backend, eos=TOKENIZER.eos_ids) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=constraint(), max_tokens=20)
        reply.finished()
        free, _ = submit(made, PROMPTS[0], constraint=triggered(), max_tokens=3, ignore_eos=True)
        free.finished()
        stats = made.stats().masks
    assert stats is not None
    assert stats.rows["made"] == len(ids_of(reply)) == sum(stats.made.counts) and stats.rows["open"] >= 1
    assert sum(stats.waits.counts) >= 20 and stats.made.total > 0
    assert 1 <= default_threads() <= 4


def test_a_stop_token_comes_only_where_the_text_may_end() -> None:
    (quote,) = TOKENIZER.encode('"', specials=False)
    brace = TOKENIZER.encode("}", specials=False)[0]
    own = COMPILER.grammar("start: /[a-z]{4}/ | /[a-z]{4}!/")
    stops = frozenset({TOKENIZER.encode("!", specials=False)[0], TOKENIZER.encode("q", specials=False)[0], brace})
    backend = ScriptedBackend(vocab=VOCAB, script=lambda history: min(stops) if len(history) > 20 else brace)
    with engine(backend, eos=TOKENIZER.eos_ids) as made:
        reply, _ = submit(made, PROMPTS[0], constraint=own, stop_token_ids=stops, max_tokens=20)
        end = reply.finished()
    assert end.reason is FinishReason.STOP and end.stop == brace and len(ids_of(reply)) == 5 and quote not in stops


def test_a_masked_draw_is_the_samplers() -> None:
    """One reply by hand: logits, mask, sampler."""
    backend = ScriptedBackend(vocab=VOCAB)
    params = SamplingParams(temperature=0.8, top_k=7, max_tokens=60, seed=5)
    own, ids = constraint(), list(PROMPTS[2])
    hand = Sampler(params, np.array(ids, np.int32), seed=5, ends=TOKENIZER.eos_ids)
    while not own.over and len(ids) < len(PROMPTS[2]) + 60:
        token = hand.choose(backend.logits(ids), own.mask(TOKENIZER.eos_ids))
        hand.push(token)
        ids.append(token)
        if token in TOKENIZER.eos_ids:
            break
        own.push(token)
    with engine(backend, eos=TOKENIZER.eos_ids) as made:
        reply, _ = submit(made, PROMPTS[2], constraint=constraint(), temperature=0.8, top_k=7, max_tokens=60, seed=5)
        reply.finished()
    assert ids_of(reply) == ids[len(PROMPTS[2]) :]
