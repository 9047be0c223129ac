"""A checkpoint of transformers' own DFlash class, against that class with its own masks and rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from luce.draft.dflash.safetensors import open_checkpoint
from luce.runtime.host import HostDevice
from tests.support.drafts import F32, DraftedText, spec_of

CLASS = "transformers.models.muse_glimmer_assistant"
ROWS, BLOCK, HIDDEN = 70, 8, 64


def computed(directory: Path, window: int, captured: F32, rows: F32) -> F32:
    """The output of a model with random weights, saved in a directory, for captured rows and a block's rows."""
    torch = pytest.importorskip("torch", reason="torch is an oracle of this test and not installed")
    pytest.importorskip(CLASS, reason="transformers is an oracle of this test and not installed, or has no such class")
    from transformers.cache_utils import DFlashCache
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        target_layer_ids=[0, 1, 3],
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        block_size=BLOCK,
        mask_token_id=5,
        attn_implementation="eager",
    )
    random = np.random.default_rng(window)
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            values = random.standard_normal(weight.shape)
            values = 1 + 0.2 * values if weight.ndim == 1 else values * weight.shape[1] ** -0.5
            weight.copy_(torch.from_numpy(values))
        model.save_pretrained(directory)
        cache = DFlashCache(config=config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(ROWS)
        output = model(
            noise_embeds=torch.from_numpy(rows)[None],
            context_hidden_states=torch.from_numpy(captured)[None],
            attention_mask=torch.ones(1, ROWS + BLOCK, dtype=torch.long),
            position_ids=torch.arange(ROWS + BLOCK)[None],
            past_key_values=cache,
        )
    found: F32 = output.last_hidden_state[0].numpy()
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("window", [3, 24, 100])
def test_a_block(window: int, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    captured = random.standard_normal((ROWS, 3 * HIDDEN), np.float32)
    seed, mask = random.standard_normal((2, HIDDEN), np.float32)
    expected = computed(tmp_path, window, captured, np.stack([seed, *[mask] * (BLOCK - 1)]))
    with open_checkpoint(tmp_path) as file:
        drafting = DraftedText(file, spec_of(file, tmp_path), HostDevice(), captured, mask)
        drafting.append_context(ROWS, chunk=23)
        np.testing.assert_allclose(drafting.draft_block(seed), expected[1:], rtol=0, atol=1e-5)
