"""The engine over a backend that holds a part of each sequence only, and whose replies depend on which part.

Neither company nor drafting nor the prefix cache changes a reply, and what a row sees is its sequence's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.draft.ngram import NgramDrafter
from luce.engine.loop import Engine
from luce.errors import BackendError
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.paging import KVFlash, PagingStats
from luce.kvcache.policies import AgePolicy, Policy
from luce.kvcache.prefix_tree import Residency
from luce.runtime.step import PAGE, Step
from tests.support.drafters import BranchingDrafter, sometimes
from tests.support.paging import Asked, Hashed
from tests.support.replies import make_engine
from tests.support.scripted_backend import ScriptedBackend

BOUND, CONTEXT, VOCAB = 9, 48 * PAGE, 7
LAYERS = tuple(range(i, i + 1) for i in range(3))


@contextmanager
def running(
    policy: Policy | None = None, *, chunk: int = 4 * PAGE, slots: int = 3, tau: int = 16, **options: Any
) -> Iterator[tuple[Engine, ScriptedBackend]]:
    own = ("hook", "windows", "recurrent", "bound", "lag", "branch_pages")
    scripted = {name: options.pop(name) for name in own if name in options}
    backend = ScriptedBackend(
        vocab=VOCAB, context=CONTEXT, slots=slots, chunk=chunk, **({"bound": BOUND, "recurrent": True} | scripted)
    )
    how = KVFlash(policy or Hashed(), 4, tau, options.pop("budget", 1 << 40))
    engine = make_engine(backend, chunk=chunk, kvflash=how, **options)
    try:
        yield engine, backend
        assert backend.broken is None, backend.broken
    finally:
        engine.close()


def residency(engine: Engine) -> PagingStats:
    stats = engine.stats().paging
    assert stats is not None
    return stats


def prompts(seed: int, count: int = 6) -> list[list[int]]:
    """Some that fit and some that do not, of tokens that repeat so that drafts are accepted."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 30 * PAGE, count)
    return [np.resize(random.integers(0, VOCAB, 50), length).tolist() for length in lengths]


def alone(asked: Sequence[Sequence[int]], n: int, **options: Any) -> list[list[int]]:
    with running(**options) as (engine, _):
        return [Asked(engine, prompt, n).reply() for prompt in asked]


@pytest.mark.parametrize("policy", [AgePolicy, Hashed])
@pytest.mark.parametrize("seed", [0, 1])
def test_company_changes_nothing(policy: type[AgePolicy], seed: int) -> None:
    asked = prompts(seed)
    expected = alone(asked, 150, policy=policy())
    assert expected != alone(asked, 150, bound=None), "nothing was missing"
    with running(policy()) as (engine, backend):
        found = [sequence.reply() for sequence in [Asked(engine, prompt, 150) for prompt in asked]]
        assert found == expected
        assert max(spans for _, spans in backend.steps) > 1
        stats = residency(engine)
        assert (
            stats.copied_pages <= stats.swapped_out + 4 * len(asked)
            and stats.swapped_out > 20
            and stats.lost_pages == 0
        )
        assert (stats.swapped_in > 0) == (policy is Hashed)
        assert (stats.host_pages, stats.host_bytes, stats.resident_pages) == (0, 0, 0)


@pytest.mark.parametrize("chunk", [PAGE // 2, PAGE, 5 * PAGE])
def test_prompts_about_as_long_as_the_pool(chunk: int) -> None:
    """By age, a row sees the first page and the newest ones, as many as there may be."""
    edges = [BOUND * PAGE + extra for extra in (-PAGE - 1, -PAGE, -PAGE + 1, -1, 0, 1, PAGE - 1, PAGE, PAGE + 1)]
    asked = [np.resize([1, 2, 5, 0, 3, 1], length).tolist() for length in (*edges, 2 * BOUND * PAGE, 40 * PAGE - 1)]
    with running(AgePolicy(), chunk=chunk) as (engine, backend):
        sequences = [Asked(engine, prompt, 2 * PAGE) for prompt in asked]
        for prompt, sequence in zip(asked, sequences, strict=True):
            history = list(prompt)
            for _ in range(2 * PAGE):
                missing = range(1, -(-len(history) // PAGE) - BOUND + 1)
                history.append(int(backend.logits(history, missing).argmax()))
            assert sequence.reply() == history[len(prompt) :]


def test_pages_stay_until_they_are_copied() -> None:
    asked = prompts(9)
    expected = alone(asked, 100, cache_bytes=1 << 30)
    for lag in (1, 1000):
        with running(lag=lag, cache_bytes=1 << 30) as (engine, _):
            sequences = [Asked(engine, prompt, 100) for prompt in [*asked, *asked]]
            assert [sequence.reply() for sequence in sequences] == [*expected, *expected]


@pytest.mark.parametrize("policy", [AgePolicy, Hashed])
def test_drafting_changes_nothing(policy: type[AgePolicy]) -> None:
    asked = prompts(2, 4)
    expected = alone(asked, 200, policy=policy())
    with running(policy(), drafter=NgramDrafter(block=15), verify_width=8) as (engine, _):
        sequences = [Asked(engine, prompt, 200) for prompt in asked]
        assert [sequence.reply() for sequence in sequences] == expected
        assert all(sequence.drafted > 20 for sequence in sequences)


@pytest.mark.parametrize(("policy", "windows"), [(AgePolicy, (None,)), (Hashed, (100, None))])
def test_trees_change_nothing(policy: type[AgePolicy], windows: tuple[int | None, ...]) -> None:
    asked = [*prompts(2, 4), prompts(8, 1)[0][: BOUND * PAGE - 50]]
    expected = alone(asked, 200, policy=policy(), windows=windows)
    texts = [[*prompt, *reply] for prompt, reply in zip(asked, expected, strict=True)]

    def follow(text: Sequence[int], count: int) -> Sequence[int]:
        return next(whole[len(text) :][:count] for whole in texts if whole[: len(text)] == list(text))

    drafter = BranchingDrafter(follow, vocab=VOCAB, wrong=sometimes(0.1, 1))
    trees = {"drafter": drafter, "verify_width": 8, "tree_tokens": 15, "branch_pages": 30}
    with running(policy(), windows=windows, cache_bytes=1 << 30, **trees) as (engine, backend):
        for _ in range(2):
            sequences = [Asked(engine, prompt, 200) for prompt in asked]
            assert [sequence.reply() for sequence in sequences] == expected
            assert all(sequence.drafted > 100 for sequence in sequences)
        assert all(sequence.cached for sequence in sequences)
        assert len(backend.moved) > 20 and residency(engine).swapped_out > 20


@pytest.mark.parametrize("length", [BOUND * PAGE - 76, BOUND * PAGE - 1, BOUND * PAGE])
def test_a_reply_outgrows_its_pool_as_it_does_without_drafting(length: int) -> None:
    asked = [np.resize(np.random.default_rng(length).integers(0, VOCAB, 50), length).tolist()]
    expected = alone(asked, 200)
    with running(drafter=NgramDrafter(block=15), verify_width=8) as (engine, _):
        sequence = Asked(engine, asked[0], 200)
        assert [sequence.reply()] == expected
        assert sequence.drafted > 20 and residency(engine).swapped_in


@pytest.mark.parametrize("windows", [(None,), (None, 100), (100, None)])
def test_a_prompt_asked_again_is_answered_as_the_first_time(windows: tuple[int | None, ...]) -> None:
    asked = [prompt for prompt in prompts(3) if len(prompt) > BOUND * PAGE]
    with running(cache_bytes=1 << 30, windows=windows, budget=1 << 30) as (engine, _):
        for prompt in asked:
            first = Asked(engine, prompt, 200).reply()
            Asked(engine, prompts(4, 1)[0], 3).reply()
            again = Asked(engine, prompt, 200)
            assert again.reply() == first
            assert again.cached == len(prompt)


def test_a_conversation_goes_on_behind_what_is_known_of_it() -> None:
    (prompt,) = prompts(5, 1)
    with running(cache_bytes=1 << 30) as (engine, _):
        text = list(prompt)
        for turn in range(6):
            sequence = Asked(engine, text, 100)
            reply = sequence.reply()
            assert sequence.cached == (len(text) - 21 if turn else 0)
            text += [*reply, *range(6), *range(6), *range(6), 0, 1]
        assert len(text) > 2 * BOUND * PAGE


def test_sequences_share_the_pages_of_a_long_prefix() -> None:
    (text,) = prompts(12, 1)
    text = np.resize(text, 25 * PAGE).tolist()
    asked = [[*text, *np.resize([i, 5, 2, i], PAGE + 40 * i).tolist()] for i in range(3)]
    expected = []
    for prompt in asked:
        with running(cache_bytes=1 << 30) as (engine, _):
            Asked(engine, text, 1).reply()
            expected.append(Asked(engine, prompt, 150).reply())
    used: list[int] = []
    with running(cache_bytes=1 << 30) as (engine, backend):
        Asked(engine, text, 1).reply()
        before = residency(engine)
        backend.hook = lambda step: used.append(engine.stats().pages_used if len(step.spans) == 3 else 0)
        sequences = [Asked(engine, prompt, 150) for prompt in asked]
        assert [sequence.reply() for sequence in sequences] == expected
        assert [sequence.cached for sequence in sequences] == [len(text)] * 3
        stats = residency(engine)
        assert 0 < max(used) < 3 * BOUND
        assert stats.copied_pages - before.copied_pages < stats.swapped_out - before.swapped_out


@contextmanager
def disk(directory: Path, policy: Policy, windows: tuple[int | None, ...]) -> Iterator[Engine]:
    """An engine that starts anew over a directory; all is written when it ends."""
    model, layers = Fingerprint("0123456789abcdef", {}), LAYERS[: len(windows) + 1]
    tier = DiskTier(directory, budget=0, identify=lambda: model, known=True, layers=layers)
    options = {"cache_bytes": 1 << 30, "disk": tier, "min_disk_tokens": 1}
    with running(policy, windows=windows, **options) as (engine, backend):
        assert backend.capacity.layers == LAYERS[: len(windows) + 1]
        yield engine


@pytest.mark.parametrize("policy", [AgePolicy, Hashed])
@pytest.mark.parametrize("windows", [(None,), (None, 100)])
def test_a_conversation_goes_on_after_restarts(
    policy: type[AgePolicy], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    text, known = prompts(5, 1)[0], 0
    for turn in range(4):
        with disk(tmp_path, policy(), windows) as engine:
            sequence = Asked(engine, text, 70)
            reply = sequence.reply()
            assert sequence.cached == known
            assert len(text) < BOUND * PAGE or residency(engine).swapped_out > 0
            known = len(text) + 69
            text += [*reply, *([turn] * 5 * PAGE)]


@pytest.mark.parametrize("windows", [(None,), (100, None)])
def test_a_prompt_asked_again_after_a_restart(windows: tuple[int | None, ...], tmp_path: Path) -> None:
    """What had come back is there again: from the disk alone, and where a part of it is in memory already."""
    prompt = prompts(11, 1)[0]
    prompt = np.resize(prompt, 25 * PAGE + 7).tolist()
    with disk(tmp_path, Hashed(), windows) as engine:
        expected = Asked(engine, prompt, 150).reply()
        assert residency(engine).swapped_in > 0
    for known in (0, 5 * PAGE, 20 * PAGE):
        directory = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{known}"))
        with disk(directory, Hashed(), windows) as engine:
            if known:
                Asked(engine, prompt[:known], 1).reply()
            sequence = Asked(engine, prompt, 150)
            assert sequence.reply() == expected
            assert sequence.cached == len(prompt)


@given(st.data())
def test_a_residency_as_bytes(data: st.DataObject) -> None:
    pages = st.integers(0, 200)
    scores = st.lists(st.floats(width=32), max_size=150).map(lambda values: np.array(values, np.float32))
    first = Residency(
        data.draw(st.frozensets(pages)),
        data.draw(st.dictionaries(pages, st.integers(1, 2**31 - 1))),
        data.draw(st.none() | scores),
        data.draw(st.integers(0, 2**31 - 1)),
    )
    again = Residency.decode(first.encode())
    assert (again.resident, again.swapped_in_at, again.scored_at) == (
        first.resident,
        first.swapped_in_at,
        first.scored_at,
    )
    assert (again.scores is None) == (first.scores is None)
    if first.scores is not None and again.scores is not None:
        assert again.scores.tobytes() == first.scores.tobytes()


@pytest.mark.parametrize(
    "rows", [np.zeros((0, 3), np.int32), np.zeros((4, 2), np.int32), np.zeros((4, 3)), np.full((2, 3), 9, np.int32)]
)
def test_malformed_residencies(rows: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"shape|scores"):
        Residency.decode(rows)


def test_sequences_that_fit_are_not_paged() -> None:
    asked = [prompt[: BOUND * PAGE - 50] for prompt in prompts(6)]
    expected = alone(asked, 50, bound=None)
    with running() as (engine, _):
        assert [Asked(engine, prompt, 50).reply() for prompt in asked] == expected
        stats = residency(engine)
        assert (stats.swapped_out, stats.rescores) == (0, 0)


@pytest.mark.parametrize("chunk", [PAGE, 4 * PAGE])
def test_the_rows_of_a_long_prompt_that_fit_see_all_of_its_text(chunk: int) -> None:
    """A sequence that fits may begin like it, and share their pages."""
    hidden: list[int] = []

    def note(step: Step) -> None:
        (span,), (view,) = step.spans, step.views
        if span.position < BOUND * PAGE and view.count[0] * PAGE < span.position + span.rows:
            hidden.append(span.position)

    (prompt,) = prompts(12, 1)
    with running(chunk=chunk, hook=note) as (engine, _):
        assert len(Asked(engine, np.resize(prompt, 20 * PAGE).tolist(), 5).reply()) == 5
        assert residency(engine).swapped_out > 0
    assert not hidden


def test_a_context_that_fits_is_as_without_a_limit() -> None:
    asked = prompts(7, 4)
    assert alone(asked, 100) != alone(asked, 100, bound=CONTEXT // PAGE)
    assert alone(asked, 100, bound=CONTEXT // PAGE) == alone(asked, 100, bound=None)


def test_a_copy_that_fails_ends_its_sequence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = [1] * (20 * PAGE), [2] * PAGE
    expected = alone([short], 300)
    with running() as (engine, backend):
        bystander = Asked(engine, short, 300)

        def save(*args: Any, **options: Any) -> None:
            raise BackendError("no memory to copy to")

        with monkeypatch.context() as patch:
            patch.setattr(backend.state, "save", save)
            with pytest.raises(BackendError, match="no memory to copy to"):
                Asked(engine, long, 5).reply()
        assert bystander.reply() == expected[0]
        assert engine.stats().pages_used == 0
        assert len(Asked(engine, long, 5).reply()) == 5


def test_too_little_host_memory_is_lossy_and_nothing_worse() -> None:
    with running(budget=20 * PAGE * 16, cache_bytes=1 << 30) as (engine, _):
        prompt = prompts(8, 1)[0] * 3
        prompt = prompt[: 40 * PAGE]
        assert len(Asked(engine, prompt, 100).reply()) == 100
        stats = residency(engine)
        assert stats.lost_pages > 0
        again = Asked(engine, prompt, 5)
        again.reply()
        assert again.cached == 0, "a sequence of which pages are lost is not kept"


def test_a_client_that_leaves_frees_everything() -> None:
    with running() as (engine, _):
        sequence = Asked(engine, [3] * (30 * PAGE), CONTEXT - 30 * PAGE)
        while not residency(engine).host_pages:
            pass
        sequence.ticket.cancel()
        sequence.reply()
        stats = residency(engine)
        assert (stats.host_pages, stats.host_bytes, stats.resident_pages) == (0, 0, 0)
