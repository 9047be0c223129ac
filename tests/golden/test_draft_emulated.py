"""Reference drafts by the kernels of GPUs, run on the CPU under checks that GPUs do not make."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.drafts import Drafting, DraftReference, bfloat16, open_draft, spec_of
from tests.support.emulated import EmulatedDevice


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
    expected, (table, head) = reference.expected, reference.ends
    with open_draft(reference.path) as file:
        spec = spec_of(file, reference.path)
        assert spec.mask_token is not None
        captured = bfloat16(expected["captured_17"])
        drafting = Drafting(file, spec, device, captured, table[spec.mask_token], context=64)
        drafting.remember(17, piece=9)
        logits = drafting.fill(table[expected["seed_17"]]) @ head.T
    device.close()
    wanted = expected["draft_logits_17"]
    assert ((logits - wanted) ** 2).mean() <= limit * wanted.var()
    np.testing.assert_array_equal(logits.argmax(axis=1), expected["draft_tokens_17"])
