"""Draft trees as rows of a step: chains of rows side by side, each of which goes on after rows of earlier chains. Pure.

A row must have the bits that it has in plain decoding, where the rows before it lie side by side in pages. So each
branch of a tree is a span of its own, at its own depth, and has pages of its own from the root's page on. The rows
before the branch that lie in these pages are copied there, layer by layer, when the step's keys and values are written.
When a path that ends on a branch is accepted, the branch's pages replace those of the sequence. luce.runtime.step
describes the spans of such a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from luce.draft.drafter import Draftable, Proposal
from luce.draft.prompt_lookup import Copy
from luce.kvcache.page_table import PageTable
from luce.runtime.step import PAGE, Int32, PageView, Span

# The number of copies in a step is padded to a multiple of this, so that steps have few shapes.
_COPY_MULTIPLE = 256


def children_of(parents: Iterable[int]) -> dict[int, list[int]]:
    """The children of each node of a tree that has any, in order; parents as in `depth_first`."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def depth_first(parents: Sequence[int]) -> list[int]:
    """The nodes of a tree in depth-first order, where a node's first child comes first.

    parents[i] is the parent of node i: an earlier node, or -1 for the root.
    """
    children = children_of(parents)
    order: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])[::-1]
    return order


def well_formed(parents: Sequence[int], tokens: Sequence[int], depth: int) -> bool:
    """Whether parents come before children, siblings have different tokens, and no node is more than `depth` deep."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return False
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0) <= depth and len(set(zip(parents, tokens, strict=False))) == len(parents)


def refused_tokens(proposal: Proposal, kept: Sequence[bool]) -> list[int]:
    """The tokens of a proposal that are not kept although their parents are."""
    parents = proposal.parents or range(-1, len(proposal.tokens) - 1)
    return [node for node, parent in enumerate(parents) if not kept[node] and (parent < 0 or kept[parent])]


def part_of(proposal: Proposal, nodes: Sequence[int], root: int = -1) -> Proposal:
    """The proposal of these nodes alone, in their order; `root` is the node that the seed stands for, all else follows
    it."""
    parents = proposal.parents or range(-1, len(proposal.tokens) - 1)
    numbers = {root: -1} | {node: number for number, node in enumerate(nodes)}
    return Proposal(
        [proposal.tokens[node] for node in nodes],
        [proposal.probabilities[node] for node in nodes] if len(proposal.probabilities) else (),
        [numbers[parents[node]] for node in nodes] if proposal.parents else (),
        [proposal.copied[node] for node in nodes] if len(proposal.copied) else (),
    )


def with_copy(proposal: Proposal, copy: Copy) -> list[Proposal]:
    """A chain with a copied text: where that goes on behind all of the chain, the two as one chain, otherwise both."""
    tokens, probabilities = list(proposal.tokens), list(proposal.probabilities)
    pairs = enumerate(zip(tokens, copy.tokens, strict=False))
    same = next((place for place, (own, other) in pairs if own != other), min(len(tokens), len(copy.tokens)))
    missing = [0.0] * (len(copy.tokens) - same) if probabilities else []
    found = [Proposal(copy.tokens, (*probabilities[:same], *missing), copied=copy.lengths)]
    if same < len(tokens):
        found.append(Proposal(tokens, probabilities, copied=(*copy.lengths[:same], *[0] * (len(tokens) - same))))
    return found if same < len(copy.tokens) else found[1:] or found


def with_branch(proposal: Proposal, copy: Copy) -> Proposal:
    """A tree with a copied text: as much of it as the tree lacks is a branch, which comes last."""
    tokens, parents = list(proposal.tokens), list(proposal.parents or range(-1, len(proposal.tokens) - 1))
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    lengths, at = [0] * len(tokens), -1
    for token, length in zip(copy.tokens, copy.lengths, strict=True):
        node = nodes.get((at, token))
        if node is None:
            node = len(tokens)
            tokens.append(token)
            parents.append(at)
            lengths.append(0)
        lengths[node] = length
        at = node
    added = len(tokens) - len(proposal.tokens)
    probabilities = (*proposal.probabilities, *[0.0] * added) if len(proposal.probabilities) else ()
    return Proposal(tokens, probabilities, parents, lengths)


def behind(proposal: Proposal, tokens: Sequence[int], most: int) -> Proposal:
    """What a proposal says of the text behind these tokens, up to `most` tokens; empty if it goes another way."""
    root, children = -1, children_of(proposal.parents or range(-1, len(proposal.tokens) - 1))
    for token in tokens:
        found = next((node for node in children.get(root, []) if proposal.tokens[node] == token), None)
        if found is None:
            return Proposal()
        root = found
    if root < 0:
        return proposal
    inside, nodes = {root}, []
    for node, parent in enumerate(proposal.parents or range(-1, len(proposal.tokens) - 1)):
        if parent in inside:
            inside.add(node)
            nodes.append(node)
    return part_of(proposal, nodes[: max(0, most)], root)


def compared(proposal: Proposal, text: Sequence[int]) -> list[tuple[int, bool]]:
    """The tokens of a proposal that follow on what the text began with, each with whether the text goes on so."""
    children, found, node = children_of(proposal.parents or range(-1, len(proposal.tokens) - 1)), [], -1
    for token in text:
        outcomes = [(child, proposal.tokens[child] == token) for child in children.get(node, [])]
        found += outcomes
        node = next((child for child, right in outcomes if right), len(proposal.tokens))
    return found


def in_row_order(proposal: Proposal, count: int) -> tuple[Proposal, tuple[int, ...]]:
    """The first `count` tokens of a tree in the order of rows, and the row of each token's parent.

    The parents are () if each token follows the one before it.
    """
    order = depth_first(proposal.parents[:count])
    rows = {-1: 0} | {node: row for row, node in enumerate(order, 1)}
    tokens = [proposal.tokens[node] for node in order]
    probabilities = [proposal.probabilities[node] for node in order] if proposal.probabilities else ()
    copied = [proposal.copied[node] for node in order] if proposal.copied else ()
    parents = tuple(rows[proposal.parents[node]] for node in order)
    return Proposal(tokens, probabilities, copied=copied), parents if parents != tuple(range(count)) else ()


def merge_branches(spans: Sequence[Span]) -> list[Span]:
    """A step's spans with each tree as one span of all its rows, which has the `ancestors` of the last branch."""
    found: list[Span] = []
    for span in spans:
        if span.ancestors:
            found[-1] = replace(found[-1], rows=found[-1].rows + span.rows, ancestors=span.ancestors)
        else:
            found.append(span)
    return found


@dataclass(frozen=True)
class Branch:
    """Rows [first, last] of a tree, each the child of the one before it."""

    first: int
    last: int
    #: the rows from the root to the parent of the first row
    ancestors: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Number of ancestors of the first row."""
        return len(self.ancestors)


def branches(parents: Sequence[int]) -> tuple[Branch, ...]:
    """The branches of a tree, depth first: parents[i] is the row of the parent of row i + 1; row 0 is the root."""
    found: list[Branch] = []
    paths: list[tuple[int, ...]] = [()]
    first = 0
    for row, parent in enumerate(parents, 1):
        paths.append((*paths[parent], parent))
        if parent != row - 1:
            found.append(Branch(first, row - 1, paths[first]))
            first = row
    found.append(Branch(first, len(parents), paths[first]))
    return tuple(found)


def tree_depth(parents: Sequence[int]) -> int:
    """Rows of the longest path of a tree."""
    return max(branch.depth + branch.last - branch.first + 1 for branch in branches(parents))


def tree_spans(parents: Sequence[int], root: Span) -> list[Span]:
    """The spans of a tree; `root` has the root's slot, row and position, and the rows accepted before it."""
    first, *others = branches(parents)
    made = [replace(root, rows=first.last + 1, speculative=True)]
    for branch in others:
        ancestors = tuple(root.start + row for row in branch.ancestors)
        start, position = root.start + branch.first, root.position + branch.depth
        rows = branch.last - branch.first + 1
        made.append(Span(root.slot, start, rows, position, speculative=True, ancestors=ancestors))
    return made


#: pages that branches have for themselves: by the branch's first row of the step the page of each table entry
BranchPages = dict[int, dict[int, int]]


def with_branch_pages(view: PageView, group: PageTable, spans: Sequence[Span]) -> tuple[PageView, BranchPages]:
    """A view in which each branch among a step's spans has pages of its own, and these pages."""
    table, count, dest = view.table.copy(), view.count.copy(), view.dest.copy()
    copies: list[tuple[Int32, Int32]] = []
    own: BranchPages = {}
    spare = iter(group.branch_pages)
    for index, span in enumerate(spans):
        if not span.ancestors:
            continue
        root = span.position - len(span.ancestors)
        entries = range(root // PAGE, (span.position + span.rows - 1) // PAGE + 1)
        pages = own[span.start] = {entry: next(spare) for entry in entries}
        # The positions from the first of these pages to the branch: where they lie (old), and where they go (new).
        before = np.arange(entries.start * PAGE, root, dtype=np.int32)
        # The pages from the root's on are resident, whichever pages before them are not.
        low = int(np.searchsorted(view.first[index, : count[index]], entries.start * PAGE)) - entries.start
        old = np.concatenate([table[index, before // PAGE + low] * PAGE + before % PAGE, dest[list(span.ancestors)]])
        for entry, page in pages.items():
            table[index, entry + low] = page
        count[index] = entries.stop + low
        positions = np.arange(entries.start * PAGE, span.position + span.rows, dtype=np.int32)
        new = table[index, positions // PAGE + low] * PAGE + positions % PAGE
        copies.append((old, new[: len(old)]))
        dest[span.start : span.start + span.rows] = new[len(old) :]
    pairs = np.stack([np.concatenate(side) for side in zip(*copies, strict=True)], axis=1)
    padded = np.full((-(-len(pairs) // _COPY_MULTIPLE) * _COPY_MULTIPLE, 2), -1, np.int32)
    padded[: len(pairs)] = pairs
    return replace(view, table=table, count=count, dest=dest, copies=padded), own


def is_moved(path: Sequence[int]) -> bool:
    """Whether the rows of an accepted path are not the first rows of its span."""
    return list(path) != list(range(len(path)))


def checked(proposal: Proposal, draftable: Draftable, vocab: int) -> Proposal:
    """A proposal up to its first id that is not below `vocab`. Raises ValueError if it is no tree."""
    tokens = [int(token) for token in proposal.tokens[: draftable.max_tokens]]
    count = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab), len(tokens))
    probabilities = proposal.probabilities[:count] if len(proposal.probabilities) >= count else ()
    parents = tuple(proposal.parents[:count])
    if parents and not well_formed(parents, tokens, draftable.max_depth):
        depth = draftable.max_depth
        raise ValueError(f"tokens {tokens} with parents {list(parents)} are no tree of depth {depth}")
    copied = proposal.copied[:count] if len(proposal.copied) >= count else ()
    return Proposal(tokens[:count], probabilities, parents, copied)
