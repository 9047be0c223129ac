"""The draft's forward against the formula in float64, and against itself: cached, wrapped, rewound, several at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.draft.context import CONTEXT_CHUNK
from luce.draft.dflash.spec import DFlashSpec, read_dflash
from luce.draft.feature_window import as_table
from luce.gguf.reader import open_gguf
from luce.layers.decoder_layer import Embedding
from luce.models.keys import Source
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.drafts import F32, DraftedText, formula, spec_of
from tests.support.made_drafts import MadeDraft


class Made:
    """A made draft on the host, with random captured rows and embeddings."""

    def __init__(self, path: Path, made: MadeDraft, rows: int, *, slots: int = 1, context: int = 4096) -> None:
        self.file = open_gguf(made.write(path / "draft.gguf"))
        self.made = made
        self.spec: DFlashSpec = spec_of(self.file, path)
        rng = np.random.default_rng(rows)
        self.captured: F32 = rng.standard_normal((rows, self.spec.count * self.spec.hidden), np.float32)
        self.seed, self.mask = rng.standard_normal((2, self.spec.hidden), np.float32)
        self.context, self.slots = context, slots

    def drafting(
        self, *, context: int = 0, captured: F32 | None = None, device: Device | None = None, table: F32 | None = None
    ) -> DraftedText:
        """A draft that remembers nothing yet. `table`: of an embedding on its device."""
        rows, device = self.captured if captured is None else captured, device or HostDevice()
        embedding = None if table is None else Embedding(device, as_table(table), 2.0)
        sizes = {"slots": self.slots, "context": context or self.context}
        return DraftedText(self.file, self.spec, device, rows, self.mask, **sizes, embedding=embedding)

    def expected(self, at: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The formula's block behind the captured rows first .. at - 1."""
        noise = np.concatenate([[self.seed], np.repeat([self.mask], self.spec.block - 1, axis=0)]).astype(np.float64)
        tensors = {name: tensor.astype(np.float64) for name, tensor in self.made.tensors.items()}
        return formula(self.spec, tensors, self.captured[first:at].astype(np.float64), noise, at)[1:]


SLIDING = {"attention__sliding_window": 24, "attention__sliding_window_pattern": [True, False]}
VARIANTS: dict[str, dict[str, Any]] = {
    "all full": {},
    "sliding": SLIDING,
    "window beyond the context": {**SLIDING, "attention__sliding_window": 900},
    "window within the block": {**SLIDING, "attention__sliding_window": 3},
    "both ways": {**SLIDING, "attention__causal": False},
    "both ways within the block": {**SLIDING, "attention__sliding_window": 3, "attention__causal": False},
    "causal": {**SLIDING, "attention__causal": True},
    "slides in name only": {**SLIDING, "attention__sliding_window": 0},
    "gate per head": {"gate": 1},
    "gate per channel": {"gate": 16},
    "norms of captures": {"capture_norms": True},
    "normed context": {"dflash__context_kv_layer_norm": 1},
    "partial rotation": {"rope__dimension_count": 6},
    "linear scaling": {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    "yarn": {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    },
    "another base for the context": {"dflash__backbone_rotary_base": 50.0},
    "scaled embedding": {"dflash__input_embedding_scale": 3.0},
    "one capture": {"captures": 1},
    "one KV head": {"kv_heads": 1, "head_dim": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_formula(variant: str, rows: int, tmp_path: Path) -> None:
    made = Made(tmp_path, MadeDraft.random(3, **VARIANTS[variant]), max(1, rows))
    drafting = made.drafting()
    drafting.append_context(rows, chunk=23)
    np.testing.assert_allclose(drafting.draft_block(made.seed), made.expected(rows), rtol=0, atol=2e-5)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_other_names_of_tensors(suffix: str, tmp_path: Path) -> None:
    draft = MadeDraft.random(4, capture_norms=True)
    expected = Made(tmp_path, draft, 20).expected(20)
    names = {
        "dflash.fc.weight": "dflash_fc.weight",
        "dflash.hidden_norm.weight": "dflash_hidden_norm.weight",
        **{f"dflash.aux_hidden_norm.{i}.weight": f"dflash_aux_hidden_norm.{i}{suffix}" for i in range(2)},
        **{f"blk.{i}.ffn_norm.weight": f"blk.{i}.post_attention_norm.weight" for i in range(2)},
    }
    draft.tensors = {names.pop(name, name): tensor for name, tensor in draft.tensors.items()}
    assert not names
    drafting = Made(tmp_path, draft, 20).drafting()
    drafting.append_context(20)
    seed = Made(tmp_path, draft, 20).seed
    np.testing.assert_allclose(drafting.draft_block(seed), expected, rtol=0, atol=2e-5)


def test_learned_mask(tmp_path: Path) -> None:
    draft = MadeDraft.random(4)
    made = Made(tmp_path, draft, 20)
    draft.tensors["dflash.mask_embedding.weight"] = made.mask
    learned = Made(tmp_path, draft, 20)
    expected = made.expected(20)
    learned.mask = np.zeros_like(made.mask)
    drafting = learned.drafting()
    drafting.append_context(20)
    np.testing.assert_allclose(drafting.draft_block(made.seed), expected, rtol=0, atol=2e-5)


@pytest.fixture
def sliding(tmp_path: Path) -> Made:
    """Long enough that every ring wraps several times."""
    return Made(tmp_path, MadeDraft.random(5, layers=3, **sliding_keys()), 2600, context=128)


def sliding_keys() -> dict[str, Any]:
    return {"attention__sliding_window": 24, "attention__sliding_window_pattern": [True, False, True]}


def test_cached_is_one_shot(sliding: Made) -> None:
    # Random gaps, some longer than a chunk; a block behind each, compared with a new draft that reads the rows at once.
    rng = np.random.default_rng(1)
    cached, at = sliding.drafting(), 0
    while at < 2000:
        at += int(rng.choice([1, 3, 8, 19, 64, 200, 600]))
        cached.append_context(at, chunk=int(rng.integers(1, CONTEXT_CHUNK + 1)))
        once = sliding.drafting()
        once.append_context(at, chunk=CONTEXT_CHUNK)
        np.testing.assert_allclose(cached.draft_block(sliding.seed), once.draft_block(sliding.seed), rtol=0, atol=1e-5)


def test_rewind(sliding: Made) -> None:
    # Back within what the rings still hold, then on with other rows.
    drafting = sliding.drafting()
    for at, back in ((300, 290), (900, 640), (1000, 999), (1001, 700), (706, 590)):
        drafting.append_context(at)
        drafting.draft_block(sliding.seed)
        drafting.model.context.rewind(0, back)
        assert drafting.model.context.cached(0).stop == back
        drafting.append_context(back + 5)
        once = sliding.drafting()
        once.append_context(back + 5)
        np.testing.assert_allclose(
            drafting.draft_block(sliding.seed), once.draft_block(sliding.seed), rtol=0, atol=1e-5
        )


def test_rewind_beyond_the_rings(sliding: Made) -> None:
    # Overwritten rows are not seen, as if they had been dropped.
    drafting = sliding.drafting()
    drafting.append_context(2600)
    drafting.model.context.rewind(0, 1200)
    once = sliding.drafting()
    once.model.context.forget(0, 1200)
    np.testing.assert_allclose(drafting.draft_block(sliding.seed), once.draft_block(sliding.seed), rtol=0, atol=1e-5)


def test_a_hole_begins_anew(sliding: Made) -> None:
    drafting = sliding.drafting()
    drafting.append_context(100)
    drafting.model.context.forget(0, 350)
    assert drafting.model.context.cached(0) == range(350, 350)
    drafting.append_context(420)
    expected = sliding.expected(420, first=350)
    np.testing.assert_allclose(drafting.draft_block(sliding.seed), expected, rtol=0, atol=2e-5)


def test_rebased_positions(sliding: Made) -> None:
    # The same rows a thousand positions later: differences alone count.
    here, there = sliding.drafting(), sliding.drafting(captured=np.concatenate([sliding.captured[:1000]] * 2))
    here.append_context(90)
    there.model.context.forget(0, 1000)
    there.append_context(1090)
    np.testing.assert_array_equal(here.draft_block(sliding.seed), there.draft_block(sliding.seed))
    assert np.abs(formula_at(sliding, 90, 0) - formula_at(sliding, 90, 5000)).max() < 1e-9


def formula_at(made: Made, rows: int, shift: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    noise = np.concatenate([[made.seed], np.repeat([made.mask], made.spec.block - 1, axis=0)]).astype(np.float64)
    tensors = {name: tensor.astype(np.float64) for name, tensor in made.made.tensors.items()}
    return formula(made.spec, tensors, made.captured[:rows].astype(np.float64), noise, rows + shift)


def test_context_cap(sliding: Made) -> None:
    # Full layers see whole pages that reach at least as far back as the cap.
    drafting = sliding.drafting(context=128)
    drafting.append_context(700)
    assert drafting.model.context.reach == 128
    made = sliding.expected(700, first=(700 - 128) // 64 * 64)
    np.testing.assert_allclose(drafting.draft_block(sliding.seed), made, rtol=0, atol=2e-5)


def test_several_slots(tmp_path: Path) -> None:
    made = Made(tmp_path, MadeDraft.random(5, layers=3, **sliding_keys()), 500, slots=3)
    together, lengths = made.drafting(), (77, 3, 260)
    seeds = [made.seed, made.mask, -made.seed]
    rows = [np.arange(n, dtype=np.int32) for n in lengths]
    together.model.append_context([2, 0, 1], lengths, np.concatenate(rows))
    both = together.draft_block(*seeds, slots=(2, 0, 1))
    for index, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        alone = made.drafting()
        alone.append_context(length)
        own = both[index * (made.spec.block - 1) : (index + 1) * (made.spec.block - 1)]
        np.testing.assert_allclose(own, alone.draft_block(seed), rtol=0, atol=1e-5)
        # Behind another seed, so that nothing of the block before serves.
        again = together.draft_block(seed / 2, slots=((2, 0, 1)[index],))
        np.testing.assert_allclose(again, alone.draft_block(seed / 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", [HostDevice, CpuDevice])
def test_seeds_are_embedded_within_the_step(tmp_path: Path, device: Callable[[], Device]) -> None:
    made = Made(tmp_path, MadeDraft.random(5, layers=3, **sliding_keys()), 100, slots=3)
    table = np.random.default_rng(1).standard_normal((9, made.spec.hidden)).astype(np.float32)
    embeds, copies = (made.drafting(device=device(), table=own) for own in (table, None))
    assert embeds.model.embeds and not copies.model.embeds
    for drafting in (embeds, copies):
        for slot in range(3):
            drafting.append_context(20 + 30 * slot, slot)
    # Eager, captured and replayed where the device captures, by turns with other numbers of texts.
    for tokens in [(3, 8, 0), (5,), (8, 8, 1), (2,), (0, 1, 2), (7,), (4, 2)]:
        slots = (2, 0, 1)[: len(tokens)]
        found = embeds.draft_block_of(*tokens, slots=slots)
        np.testing.assert_array_equal(found, copies.draft_block(*table[list(tokens)], slots=slots))


def test_rehearsing_changes_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path, MadeDraft.random(5, layers=3, **sliding_keys()), 70, slots=3)
    drafting = made.drafting()
    # Nothing attends, so layers compute with whatever lay in memory.
    with np.errstate(all="ignore"):
        drafting.model.warm_up()
    drafting.append_context(70)
    np.testing.assert_allclose(drafting.draft_block(made.seed), made.expected(70), rtol=0, atol=2e-5)


def test_unknown_tensor(tmp_path: Path) -> None:
    made = MadeDraft.random(0)
    made.tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    with pytest.raises(Exception, match=r"tensor blk.0.attn_sinks.weight is unknown"):
        Made(tmp_path, made, 1).drafting()


def test_the_window_option(tmp_path: Path) -> None:
    made = Made(tmp_path, MadeDraft.random(6, layers=3), 80)
    made.spec = read_dflash(Source("draft", made.file.metadata, made.file.tensors), window=24)
    drafting = made.drafting()
    drafting.append_context(80)
    np.testing.assert_allclose(drafting.draft_block(made.seed), made.expected(80), rtol=0, atol=2e-5)
    assert [getattr(block.mixer, "window", 0) for block in made.spec.layers] == [24, 24, None]
