"""Reference drafts by the kernels of GPUs, run on the CPU under checks that GPUs do not make."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.draft.dflash.drafter import DFlashDrafter
from luce.draft.dflash.model import DFlashModel
from luce.draft.drafter import Draftable, PendingProposals
from luce.draft.target_head import LoadedHead, TargetHead
from luce.gguf.reader import open_gguf
from luce.layers.features import FeatureRing
from luce.runtime.device import Device
from luce.runtime.step import Int32
from tests.support.capturing import SharingDevice
from tests.support.drafts import DraftedText, DraftReference, bfloat16, open_draft, spec_of
from tests.support.emulated import EmulatedDevice
from tests.support.replies import make_engine, submit

pytestmark = pytest.mark.emulated


@contextlib.contextmanager
def counting(device: Device) -> Iterator[Counter[str]]:
    """Counts copies to and on a device."""
    calls = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(device, name)

        def copy(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments)

        return copy

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "upload", "copy"):
            patch.setattr(device, name, counted(name))
        yield calls


# Masks both ways, a window, gates and norms; bfloat16 weights; weights that meet bytes.
@pytest.mark.parametrize(
    ("name", "lanes", "products", "limit"),
    [
        ("qwen35-a-draft-var-F32", 32, ["F16", "BF16"], 1e-4),
        ("qwen35-b-draft-BF16", 32, ["F16", "BF16"], 1e-4),
        ("qwen35-a-draft-Q8_0", 64, [], 5e-3),
    ],
)
def test_block(name: str, lanes: int, products: list[str], limit: float) -> None:
    reference, device = DraftReference(name), EmulatedDevice(lanes, products=products)
    expected, (table, head) = reference.expected, reference.table_and_head
    with open_draft(reference.path) as file:
        spec = spec_of(file, reference.path)
        assert spec.mask_token is not None
        captured = bfloat16(expected["captured_17"])
        drafting = DraftedText(file, spec, device, captured, table[spec.mask_token], context=64)
        drafting.append_context(17, chunk=9)
        logits = drafting.draft_block(table[expected["seed_17"]]) @ head.T
    device.close()
    wanted = expected["draft_logits_17"]
    assert ((logits - wanted) ** 2).mean() <= limit * wanted.var()
    np.testing.assert_array_equal(logits.argmax(axis=1), expected["draft_tokens_17"])


@pytest.mark.parametrize("embeds", [True, False])
def test_a_reply_by_graphs_that_share_their_memory(embeds: bool) -> None:
    # Rows are read before the output of their verification has been waited for.
    reference, device = DraftReference("qwen35-a-draft-fit-F32"), SharingDevice()
    with open_draft(reference.path) as file, open_gguf(reference.target.path) as target:
        spec = spec_of(file, reference.path)
        layers = spec.captured(reference.target.spec)
        ring = FeatureRing(device, layers, spec.hidden, slots=1, capacity=64)
        backend = LayerSplitBackend(
            target,
            reference.target.spec,
            [device],
            ServingOptions(context=64, chunk=32, verify_rows=4, slots=1),
            ring=ring,
        )
        assert spec.mask_token is not None
        mask = reference.table_and_head[0][spec.mask_token]
        end = LoadedHead(target, reference.target.spec, device)
        embedding = end.embedding if embeds else None
        model = DFlashModel(file, spec, device, slots=1, context=64, rows=ring.rows, mask=mask, embedding=embedding)
        read: list[int] = []
        append_context = model.append_context

        def noted(slots: Sequence[int], counts: Sequence[int], rows: Int32) -> None:
            read.extend(counts)
            append_context(slots, counts, rows)

        model.append_context = noted  # type: ignore[method-assign]
        drafter = DFlashDrafter(model, ring, TargetHead(device, end, end))
        # It has captured its steps of few rows.
        read.clear()
        propose, copies = drafter.propose, list[Counter[str]]()

        def counted(asked: Sequence[Draftable]) -> PendingProposals:
            with counting(device) as calls:
                copies.append(calls)
                return propose(asked)

        drafter.propose = counted  # type: ignore[method-assign]
        engine = make_engine(backend, chunk=32, drafter=drafter, verify_width=4)
        try:
            reply, _ = submit(engine, reference.expected["prompt_17"].tolist(), max_tokens=18)
            reply.finished()
            stats = engine.stats().draft
        finally:
            engine.close()
        backend.close()
    assert reply.ids == reference.target.expected["greedy_17"][:18].tolist()
    assert stats is not None and stats.state == "on" and stats.accepted and device.launched > 6
    # All rows of each verification, and the prompt's; no more when the next proposal is made.
    assert sum(read) == 17 + stats.proposed + stats.steps
    # A seed comes with its step, or its row is copied.
    own = {"write": 1} if embeds else {"write": 1, "upload": 1, "copy": 1}
    assert len(copies) > 3 and copies[-1] == copies[3] == own
