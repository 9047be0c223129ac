"""Draft trees in the engine: their rows, their pages, and replies that are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.draft.drafter import Draftable, PendingProposals, Proposal
from luce.draft.ngram import NgramDrafter
from luce.draft.prompt_lookup import Copy
from luce.engine import draft_tree
from luce.engine.events import FinishReason
from luce.kvcache.page_table import PageTable
from luce.runtime.step import PAGE, Span, Step, StepShape
from tests.support.drafters import BranchingDrafter, always, never, sometimes
from tests.support.replies import EOS, PROMPT, draft_counts, engine, same, submit
from tests.support.scripted_backend import ScriptedBackend, after


@st.composite
def parents_of(draw: st.DrawFn, most: int = 15) -> list[int]:
    """Parents of nodes: each is an earlier one, or -1."""
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, most)))]


def rows_of(parents: Many[int]) -> tuple[int, ...]:
    """The same tree in rows: of each row but the root, in depth-first order, the parent's row."""
    order = draft_tree.depth_first(parents)
    rows = {-1: 0} | {node: row for row, node in enumerate(order, 1)}
    return tuple(rows[parents[node]] for node in order)


def path_to(row: int, parents: Many[int]) -> tuple[int, ...]:
    return (0,) if not row else (*path_to(parents[row - 1], parents), row)


@given(parents_of())
def test_branches_tile_the_rows_and_are_chains(nodes: list[int]) -> None:
    assert sorted(draft_tree.depth_first(nodes)) == list(range(len(nodes)))
    parents = rows_of(nodes)
    found = draft_tree.branches(parents)
    assert [row for one in found for row in range(one.first, one.last + 1)] == list(range(len(parents) + 1))
    for one in found:
        for row in range(one.first, one.last + 1):
            assert path_to(row, parents) == (*one.ancestors, *range(one.first, row + 1))
    # As few as there can be: each ends in a leaf.
    assert len(found) == len(set(range(len(parents) + 1)) - set(parents))


def test_a_proposal_is_compared_with_the_text() -> None:
    chain = Proposal([5, 6, 7])
    assert draft_tree.compared(chain, []) == []
    assert draft_tree.compared(chain, [5, 6]) == [(0, True), (1, True)]
    # Behind a wrong token nothing is known.
    assert draft_tree.compared(chain, [5, 9, 7]) == [(0, True), (1, False)]
    assert draft_tree.compared(chain, [5, 6, 7, 8]) == [(0, True), (1, True), (2, True)]
    tree = Proposal([5, 6, 7, 8, 9], (), [-1, -1, 0, 1, 1])
    assert draft_tree.compared(tree, [6, 9, 1]) == [(0, False), (1, True), (3, False), (4, True)]


def test_chains_of_several_lengths_share_a_shape() -> None:
    def shape(*rows: int, speculative: bool = True) -> StepShape:
        starts = np.cumsum((0, *rows))
        spans = [Span(slot, int(starts[slot]), n, 9, speculative=speculative) for slot, n in enumerate(rows)]
        total = int(starts[-1])
        return StepShape.of(Step.of_spans(spans, np.zeros(total, np.int32), (), np.arange(total, dtype=np.int32)))

    assert shape(5, 11) == shape(7, 9) != shape(8, 8)
    # Kernels for prompts read how long the longest is.
    assert shape(5, speculative=False).longest == 5


@given(st.data())
def test_the_first_tokens_of_a_tree_in_rows(data: st.DataObject) -> None:
    nodes = data.draw(parents_of())
    count = data.draw(st.integers(0, len(nodes)))
    tokens = data.draw(st.permutations(range(100, 100 + len(nodes))))
    proposal, parents = draft_tree.in_row_order(Proposal(tokens, [t / 200 for t in tokens], nodes), count)
    texts = {tuple(tokens[n] for n in path) for path in ([n, *above(n, nodes)][::-1] for n in range(count))}
    rows = parents or tuple(range(count))
    assert texts == {tuple(proposal.tokens[row - 1] for row in path_to(row, rows)[1:]) for row in range(1, count + 1)}
    assert [t / 200 for t in proposal.tokens] == proposal.probabilities
    assert not parents or parents != tuple(range(count))


def above(node: int, parents: Many[int]) -> list[int]:
    return [] if parents[node] < 0 else [parents[node], *above(parents[node], parents)]


@pytest.mark.parametrize(
    ("parents", "tokens", "depth", "right"),
    [
        ((-1, -1, 0), (1, 2, 1), 2, True),
        ((-1, 0, 1), (1, 1, 1), 2, False),
        ((0,), (1,), 5, False),
        ((-1, 2, 0), (1, 2, 3), 5, False),
        ((-1, -1), (1, 1), 5, False),
        ((-2,), (1,), 5, False),
    ],
)
def test_what_is_no_tree(parents: tuple[int, ...], tokens: tuple[int, ...], depth: int, right: bool) -> None:
    assert draft_tree.well_formed(parents, tokens, depth) is right


@settings(max_examples=50)
@given(st.data())
def test_branches_have_pages_for_themselves(data: st.DataObject) -> None:
    """Each row of a tree sees, in order, what a chain of its path would; an accepted path leaves it in the pages."""
    window, bound = data.draw(st.sampled_from([(None, None), (5, None), (70, None), (None, 5)]))
    group = PageTable(20, window, slots=2, context=640, chunk=16, max_resident=bound, branch_pages=30)
    group.reserve(1, 640)
    root = data.draw(st.integers(1, 3 * PAGE))
    parents = rows_of(data.draw(parents_of()))
    pool = np.full((50 * PAGE, 2), -1)
    for position in range(0, root, 16):
        group.extend(1, position, min(16, root - position))
    own = [int(p) for p in group.held(1)]
    first = group.first_visible(max(0, root - 1) // 16 * 16)
    for position in range(first * PAGE, root):
        pool[own[position // PAGE - first] * PAGE + position % PAGE] = position, 0
    # Of a bounded group any page but the last one may have left.
    entries = range(root // PAGE) if bound else range(0)
    gone = data.draw(st.lists(st.sampled_from(entries), unique=True)) if entries else []
    group.swap_out(1, gone)
    spans = draft_tree.tree_spans(parents, Span(1, 0, len(parents) + 1, root))
    group.extend(1, root, max(span.position + span.rows for span in spans) - root)
    slots = np.ones(len(spans), np.int32)
    positions = np.concatenate([np.arange(s.position, s.position + s.rows) for s in spans]).astype(np.int32)
    view = group.view(slots, np.ones(len(positions), np.int32), positions)
    if len(spans) > 1:
        view, taken = draft_tree.with_branch_pages(view, group, spans)
    for row, dest in enumerate(view.dest):
        pool[dest] = positions[row], 1 + row
    assert len(set(view.dest.tolist())) == len(view.dest)
    if view.copies is not None:
        source, target = view.copies[view.copies[:, 0] >= 0].T
        assert len(view.copies) % 256 == 0
        pool[target] = pool[source]
    for index, span in enumerate(spans):
        path = path_to(span.start + span.rows - 1, parents)
        expected = [(p, 0) for p in range(root)] + [(root + depth, 1 + row) for depth, row in enumerate(path)]
        low = 0 if window is None else max(0, root - window + 1)
        seen = {}
        for page, begin in zip(view.table[index, : view.count[index]], view.first[index], strict=False):
            seen |= {int(begin) + i: tuple(pool[page * PAGE + i].tolist()) for i in range(PAGE)}
        assert not {p // PAGE for p in seen} & set(gone)
        there = [p for p in range(low, len(expected)) if p // PAGE not in gone]
        assert [seen[p] for p in there] == [expected[p] for p in there]
    if len(spans) == 1:
        return
    chosen = data.draw(st.sampled_from(spans[1:]))
    path = path_to(data.draw(st.integers(chosen.start, chosen.start + chosen.rows - 1)), parents)
    for entry, page in taken[chosen.start].items():
        group.exchange(1, entry, page)
    assert group.refill() == 30 and not set(group.held(1)) & set(group.branch_pages)
    after = group.view(slots[:1], slots[:1], np.array([root], np.int32))
    for depth, row in enumerate(path):
        at = after.first[0].tolist().index((root + depth) // PAGE * PAGE)
        assert pool[after.table[0, at] * PAGE + (root + depth) % PAGE].tolist() == [root + depth, 1 + row]
    group.release(1)
    assert group.free == 20


def test_a_page_that_somebody_reads_is_made_up_for() -> None:
    group = PageTable(4, None, slots=1, context=256, chunk=16, branch_pages=2)
    group.reserve(0, 128)
    group.extend(0, 0, 100)
    page, spare = group.held(0)[1], group.branch_pages[0]
    group.add_reference(page)
    group.exchange(0, 1, spare)
    assert group.held(0)[1] == spare and page not in group.branch_pages and group.free == 2
    assert group.refill() == 2 and group.free == 1
    group.remove_reference(page)
    assert group.free == 2
    group.release(0)
    assert group.free == 4


def branching(backend: ScriptedBackend, wrong: Callable[[int], bool] = never, **options: Any) -> BranchingDrafter:
    return BranchingDrafter(backend.reply, vocab=backend.capacity.vocab, wrong=wrong, **options)


TREES: dict[str, Any] = {"tree_tokens": 15, "eos": frozenset()}


@pytest.mark.parametrize("width", [0, 3, 8, 16])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("wrong", [never, sometimes(0.2, 1)], ids=["oracle", "mixed"])
def test_the_reply_is_that_of_plain_decoding(wrong: Callable[[int], bool], recurrent: bool, width: int) -> None:
    backend = ScriptedBackend(recurrent=recurrent, windows=(None, 40), branch_pages=30)
    with engine(backend, drafter=branching(backend, wrong), verify_width=width, **TREES) as made:
        reply, _ = submit(made, PROMPT, max_tokens=200)
        reply.finished()
        steps, proposed, accepted = draft_counts(made)
    assert backend.broken is None and reply.ids == backend.reply(PROMPT, 200)
    if width == 16:
        assert accepted > steps and proposed > 10 * steps and len(backend.moved) > steps // 8


@settings(max_examples=25)
@given(st.data())
def test_sequences_share_the_rows(data: st.DataObject) -> None:
    recurrent = data.draw(st.booleans())
    slots = data.draw(st.integers(1, 4))
    backend = ScriptedBackend(slots=slots, chunk=16, recurrent=recurrent, resumes=not recurrent, branch_pages=30)
    prompts = data.draw(st.lists(st.lists(st.integers(20, 60), min_size=1, max_size=70), min_size=1, max_size=6))
    options = {
        "verify_width": data.draw(st.sampled_from([0, 4, 16])),
        "cache_bytes": data.draw(st.sampled_from([0, 9**9])),
    }
    drafter = branching(backend, sometimes(0.2, 3), probabilities=data.draw(st.booleans()))
    with engine(backend, drafter=drafter, **TREES, **options) as made:
        replies = [submit(made, prompt, max_tokens=30 + i)[0] for i, prompt in enumerate(prompts)]
        for reply in replies:
            reply.finished()
    assert backend.broken is None
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        assert reply.ids == backend.reply(prompt, 30 + i)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_later_turn_begins_behind_accepted_rows(recurrent: bool) -> None:
    backend = ScriptedBackend(recurrent=recurrent, resumes=not recurrent, branch_pages=30)
    with engine(backend, drafter=branching(backend), verify_width=16, cache_bytes=1 << 20, **TREES) as made:
        prompt = [20] * 50
        for _ in range(3):
            reply, _ = submit(made, prompt, max_tokens=70)
            cached = reply.finished().timings.cached_tokens
            assert reply.ids == backend.reply(prompt, 70)
            assert cached >= len(prompt) - (75 if recurrent else 135) or len(prompt) == 50
            prompt = [*prompt, *reply.ids, 33, 34]
    assert backend.broken is None and backend.moved


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.01, "logprobs": 3, "seed": 4},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.8, "seed": 5},
        {"logit_bias": {40: 2.0, 41: -100.0}, "min_tokens": 9},
    ],
    ids=["sampled", "candidates", "logprobs", "penalties", "bias"],
)
def test_sampled_replies_are_those_of_plain_decoding(params: dict[str, Any]) -> None:
    backend = ScriptedBackend(recurrent=True, branch_pages=30)
    with engine(backend) as made:
        plain, _ = submit(made, PROMPT, **({"max_tokens": 50} | params))
        plain.finished()

    def known(text: Many[int], count: int) -> Many[int]:
        at = len(text) - len(PROMPT)
        return [*plain.ids, *range(20)][at : at + count]

    drafter = BranchingDrafter(known, vocab=backend.capacity.vocab, wrong=sometimes(0.1, 2))
    with engine(backend, drafter=drafter, verify_width=16, tree_tokens=15) as made:
        reply, _ = submit(made, PROMPT, **({"max_tokens": 50} | params))
        reply.finished()
        steps, _, accepted = draft_counts(made)
    same(reply, plain)
    assert accepted > steps and backend.moved


@pytest.mark.parametrize("at", range(1, 12))
def test_an_end_inside_a_tree(at: int) -> None:
    text = [30 + i for i in range(20)]
    text[at] = EOS
    backend = ScriptedBackend(script=after(PROMPT, text), recurrent=True, branch_pages=30)
    with engine(backend, drafter=branching(backend), verify_width=16, tree_tokens=15) as made:
        reply, _ = submit(made, PROMPT, max_tokens=18)
        assert reply.finished().reason is FinishReason.EOS
        timings = reply.finished().timings
    assert reply.ids == text[: at + 1] and timings.accepted <= at


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_a_budget_ends_inside_a_tree(max_tokens: int) -> None:
    backend = ScriptedBackend(context=64, slots=2, branch_pages=30)
    with engine(backend, drafter=branching(backend), verify_width=16, **TREES) as made:
        reply, _ = submit(made, [20] * 45, max_tokens=max_tokens)
        assert reply.finished().reason is FinishReason.LENGTH
    assert backend.broken is None and reply.ids == backend.reply([20] * 45, max_tokens)


def test_a_chain_where_pages_are_missing() -> None:
    backend = ScriptedBackend(branch_pages=3)
    with engine(backend, drafter=branching(backend), verify_width=16, **TREES) as made:
        reply, _ = submit(made, PROMPT, max_tokens=60)
        reply.finished()
        assert draft_counts(made)[2]
    assert backend.broken is None and reply.ids == backend.reply(PROMPT, 60) and not backend.moved


def test_what_is_no_tree_ends_drafting() -> None:
    class Wild(NgramDrafter):
        def propose(self, asked: Many[Draftable]) -> PendingProposals:
            return lambda: [Proposal([5, 5], [0.5, 0.5], [-1, -1]) for _ in asked]

    backend = ScriptedBackend(branch_pages=30)
    with engine(backend, drafter=Wild(block=15), verify_width=8, **TREES) as made:
        reply, _ = submit(made, PROMPT, max_tokens=20)
        reply.finished()
        stats = made.stats().draft
    assert stats is not None and "no tree" in stats.state and reply.ids == backend.reply(PROMPT, 20)


#: a 1; its children b 2 and c 3; d 4 behind c; e 5 beside a
BRANCHED = Proposal([1, 5, 2, 3, 4], [0.9, 0.8, 0.7, 0.6, 0.5], [-1, -1, 0, 0, 3])


@pytest.mark.parametrize(
    ("proposal", "tokens", "most", "left"),
    [
        (BRANCHED, [], 9, BRANCHED),
        (BRANCHED, [1], 9, Proposal([2, 3, 4], [0.7, 0.6, 0.5], [-1, -1, 1])),
        (BRANCHED, [1, 3], 9, Proposal([4], [0.5], [-1])),
        (BRANCHED, [1], 2, Proposal([2, 3], [0.7, 0.6], [-1, -1])),
        (BRANCHED, [1], 0, Proposal()),
        (BRANCHED, [5], 9, Proposal()),
        (BRANCHED, [2], 9, Proposal()),
        (BRANCHED, [1, 4], 9, Proposal()),
        (Proposal([1, 2, 3]), [1, 2], 9, Proposal([3])),
        (Proposal([1, 2, 3]), [1, 3], 9, Proposal()),
    ],
)
def test_what_a_proposal_says_behind_forced_tokens(
    proposal: Proposal, tokens: list[int], most: int, left: Proposal
) -> None:
    found = draft_tree.behind(proposal, tokens, most)
    assert (list(found.tokens), list(found.probabilities), list(found.parents)) == (
        list(left.tokens),
        list(left.probabilities),
        list(left.parents),
    )


def test_tokens_that_are_refused_take_those_behind_them_along() -> None:
    kept = [True, False, True, False, False]
    assert draft_tree.refused_tokens(BRANCHED, kept) == [1, 3]
    left = draft_tree.part_of(BRANCHED, [0, 2])
    assert (left.tokens, left.probabilities, left.parents) == ([1, 2], [0.9, 0.7], [-1, 0])
    assert draft_tree.refused_tokens(Proposal([1, 2, 3]), [True, False, False]) == [1]
    assert draft_tree.refused_tokens(Proposal([1, 2]), [True, True]) == []


LOW = st.lists(st.integers(0, 2), max_size=6)


@given(LOW, LOW.filter(bool), st.integers(1, 20), st.booleans())
def test_a_chain_with_a_copied_text(own: list[int], other: list[int], matched: int, sure: bool) -> None:
    found = draft_tree.with_copy(Proposal(own, [0.7] * len(own) if sure else ()), Copy(other, matched))
    same = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    # One goes on behind the other, or both are there.
    expected = [own if len(own) > len(other) else other] if same == min(len(own), len(other)) else [other, own]
    assert [list(one.tokens) for one in found] == expected
    for one in found:
        assert list(one.copied) == [
            matched + i if i < len(other) and list(one.tokens[: i + 1]) == other[: i + 1] else 0
            for i in range(len(one.tokens))
        ]
        drafted = [0.7 if list(one.tokens[: i + 1]) == own[: i + 1] else 0.0 for i in range(len(one.tokens))]
        assert list(one.probabilities) == (drafted if sure and own else [])


def test_a_tree_with_a_copied_text() -> None:
    tree = Proposal([5, 6, 7, 8], [0.5, 0.4, 0.9, 0.8], [-1, -1, 0, 2])
    merged = draft_tree.with_branch(tree, Copy([5, 7, 9, 9], 3))
    assert (merged.tokens, merged.parents) == ([5, 6, 7, 8, 9, 9], [-1, -1, 0, 2, 2, 4])
    assert (merged.copied, list(merged.probabilities)) == ([3, 0, 4, 0, 5, 6], [0.5, 0.4, 0.9, 0.8, 0.0, 0.0])
    alone = draft_tree.with_branch(Proposal(), Copy([1, 2], 2))
    assert (alone.tokens, alone.parents, alone.copied, alone.probabilities) == ([1, 2], [-1, 0], [2, 3], ())
    assert draft_tree.in_row_order(merged, 6)[0].copied == [3, 4, 0, 5, 6, 0]
    assert draft_tree.part_of(merged, [0, 2, 4]).copied == [3, 4, 5]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("wrong", [never, always, sometimes(0.3, 1)], ids=["oracle", "adversary", "mixed"])
@pytest.mark.parametrize("width", [0, 16])
def test_copied_texts_are_branches_of_trees(wrong: Callable[[int], bool], recurrent: bool, width: int) -> None:
    text = [30 + i for i in range(40)]
    backend = ScriptedBackend(script=after([22], text * 3), recurrent=recurrent)
    drafter = BranchingDrafter(backend.reply, vocab=backend.capacity.vocab, block=7, wrong=wrong, probabilities=True)
    options: dict[str, Any] = {"verify_width": width, "tree_tokens": 15, "lookup": True}
    with engine(backend, eos=frozenset(), drafter=drafter, **options) as made:
        reply, _ = submit(made, PROMPT, max_tokens=120)
        reply.finished()
        stats = made.stats().draft
    assert reply.ids == text * 3 and stats is not None
    assert not width or stats.copied > 50
