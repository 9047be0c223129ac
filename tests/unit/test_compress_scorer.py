"""Scores of tokens against the definition in float64: a model's layers as formulas, then its last rows' shares."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.compress.scorer import READING, Retokenized, TextScorer, scorer_bytes, segment_tokens, smoothed, spread
from luce.errors import DeviceError, LuceError, ModelError, OutOfMemoryError, RequestError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.attention import AttentionLayer
from luce.layers.build import LayerBuilder
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.block_sparse import BLOCK, SparseStep
from luce.ops.tail_attention import TailAttention
from luce.ops.weight import upload_weight
from luce.runtime.host import HostDevice
from luce.shard.layerwise import Reading, ReadingSize, layerwise_bytes
from luce.text.tokenizer import Tokenizer
from tests.support import op_checks_block_sparse as sparse
from tests.support.reference import Reference

F64 = NDArray[np.float64]
#: six layers of 4 query heads and 2 key heads of 32, random weights
SMALL = Reference("qwen3-a-F32")
TINY = Path(__file__).parents[2] / "models" / "tiny" / "drafter.gguf"
ROWS = 16
#: more weights than a layer of any reference model has beside its experts, and fewer than two layers
MATRICES = 8


@pytest.fixture(scope="module")
def file() -> Iterator[GGUFFile]:
    with open_gguf(SMALL.path) as opened:
        yield opened


@pytest.fixture(scope="module")
def scorer(file: GGUFFile) -> Iterator[TextScorer]:
    made = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(ROWS))
    yield made
    made.close()


def rms(x: F64, weight: F64) -> F64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + SMALL.spec.norm_eps) * weight


def turned(x: F64, base: float) -> F64:
    """Rotated to the positions 0, 1, ...: float64 [n, heads, d]."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def shares_of(q: F64, k: F64, rows: int) -> F64:
    """What each head of each of the last rows gives to each key: float64 [heads, rows, n]."""
    n, heads = len(k), q.shape[1]
    found = np.zeros((heads, rows, n))
    for t in range(rows):
        seen = n - rows + t + 1
        for head in range(heads):
            logits = k[:seen, head * k.shape[1] // heads] @ q[seen - 1, head] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            found[head, t, :seen] = weights / weights.sum()
    return found


def formula(
    file: GGUFFile, tokens: list[int], *, rotated: bool, alpha: float = 0, layers: int = 6, scored: int = 6
) -> F64:
    """R[t, j] of the specification, the maximum over layers and heads: float64 [min(8, n), n].

    `alpha`: of block-sparse attention. The first `layers` layers read the text, of which the last `scored` count.
    """
    tensors = {
        name: file.raw(name).view(np.float32).astype(np.float64).reshape(tensor.shape[::-1])
        for name, tensor in file.tensors.items()
    }
    n, rows = len(tokens), min(8, len(tokens))
    x, best = tensors["token_embd.weight"][tokens], np.zeros((rows, n))
    for index in range(layers):
        w = {name.removeprefix(f"blk.{index}.").removesuffix(".weight"): value for name, value in tensors.items()}
        y = rms(x, w["attn_norm"])
        q, k, v = ((y @ w[f"attn_{part}"].T).reshape(n, -1, 32) for part in "qkv")
        q, k = rms(q, w["attn_q_norm"]), rms(k, w["attn_k_norm"])
        base = SMALL.spec.layers[index].mixer.rope.base  # type: ignore[union-attr]
        q_turned, k_turned = turned(q, base), turned(k, base)
        if index >= layers - scored:
            best = np.maximum(best, shares_of(*((q_turned, k_turned) if rotated else (q, k)), rows).max(axis=0))
        text = sparse.Text(q_turned, k_turned, v, 32**-0.5)
        blocks = np.arange(-(-n // BLOCK))
        read = np.broadcast_to(blocks <= blocks[:, None], (4, len(blocks), len(blocks)))
        if alpha:
            read, nearest = sparse.blocks_read(text, alpha)
            assert nearest.min() > 1e-5
        mixed = sparse.reference(text, read)
        x = x + mixed.reshape(n, -1) @ w["attn_output"].T
        y = rms(x, w["ffn_norm"])
        gate = y @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T
    return best


def expected(best: F64) -> F64:
    """The mean over the rows, then over up to 6 neighbours on each side."""
    means = best.mean(axis=0)
    return np.array([means[max(0, j - 6) : j + 7].mean() for j in range(len(means))])


_OTHERS = [
    pytest.param(length, marks=pytest.mark.slow) for length in range(10, 200) if length not in (13, 31, *range(64, 81))
]


@pytest.mark.parametrize("rotated", [False, True])
# Every remainder of a step of 16 rows; in 65 .. 71 the queries come from two steps. The nightly run has all lengths.
@pytest.mark.parametrize("length", [1, 7, 8, 9, 13, 31, *range(64, 81), 200, *_OTHERS])
def test_scores_are_those_of_the_definition(file: GGUFFile, scorer: TextScorer, length: int, rotated: bool) -> None:
    tokens = np.random.default_rng(length).integers(0, SMALL.spec.vocab, length).astype(np.int32)
    found = scorer(tokens, rotated=rotated)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected(formula(file, tokens.tolist(), rotated=rotated)), rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("layers", "scored"), [(1, 0), (3, 0), (3, 1), (3, 2), (0, 2), (6, 1), (9, 0), (0, 7)])
def test_some_layers_read_and_some_count(file: GGUFFile, layers: int, scored: int, rotated: bool) -> None:
    """0, and more layers than there are: all."""
    tokens = np.random.default_rng(9).integers(0, SMALL.spec.vocab, 70).astype(np.int32)
    reading = Reading(ROWS, layers=layers, scored=scored)
    found = TextScorer(file, SMALL.spec, HostDevice(), reading=reading)(tokens, rotated=rotated)
    read = min(layers or 6, 6)
    best = formula(file, tokens.tolist(), rotated=rotated, layers=read, scored=min(scored or read, read))
    np.testing.assert_allclose(found, expected(best), rtol=2e-4, atol=1e-7)
    sizes = [scorer_bytes(file, SMALL.spec, HostDevice(), reading=each) for each in (reading, READING)]
    assert (sizes[0] < sizes[1]) == (read < 6)


def test_the_first_layers_must_have_full_attention() -> None:
    reference = Reference("qwen35-a-F32")
    first = min(index for index in range(len(reference.spec.layers)) if reference.spec.owns_full_pages(index))
    with open_gguf(reference.path) as other:
        TextScorer(other, reference.spec, HostDevice(), reading=Reading(layers=first + 1)).close()
        with pytest.raises(ModelError, match=f"of its first {first} layers none has full attention"):
            TextScorer(other, reference.spec, HostDevice(), reading=Reading(layers=first))


def test_block_sparse_attention_is_that_of_the_definition(file: GGUFFile) -> None:
    """In steps that are rounded up to whole blocks; short texts are read whole."""
    tokens = np.random.default_rng(7).integers(0, SMALL.spec.vocab, 1330).astype(np.int32)
    read_in_blocks = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(ROWS, 0.98))
    best = formula(file, tokens.tolist(), rotated=False, alpha=0.98)
    np.testing.assert_allclose(read_in_blocks(tokens), expected(best), rtol=2e-3, atol=1e-7)
    whole = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(128))
    assert not np.allclose(read_in_blocks(tokens), whole(tokens), rtol=2e-3)
    np.testing.assert_array_equal(read_in_blocks(tokens[:1024]), whole(tokens[:1024]))


def test_where_block_sparse_attention_fails_the_text_is_read_whole(
    file: GGUFFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = np.random.default_rng(8).integers(0, SMALL.spec.vocab, 1200).astype(np.int32)
    whole = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(128))(tokens)

    def fails(self: SparseStep, inputs: object) -> None:
        raise DeviceError("the kernel failed")

    monkeypatch.setattr(SparseStep, "__call__", fails)
    scorer = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(128, 0.12))
    np.testing.assert_array_equal(scorer(tokens), whole)
    assert "read again with full attention: the kernel failed" in caplog.text

    def cancelled() -> None:
        raise RequestError("the client left")

    with pytest.raises(RequestError, match="the client left"):
        scorer(tokens, check=cancelled)


def test_long_texts_are_read_in_segments_with_the_end_behind_each(file: GGUFFile, scorer: TextScorer) -> None:
    tokens = np.random.default_rng(0).integers(0, SMALL.spec.vocab, 250).astype(np.int32)
    found = scorer(tokens, segment=100)
    parts = []
    for begin in (0, 84, 168):
        end = min(begin + 84, 250)
        read = [*tokens[begin:end], *tokens[max(end, 250 - 64) :]]
        parts.append(expected(formula(file, read, rotated=False))[: end - begin])
    np.testing.assert_allclose(found, np.concatenate(parts), rtol=2e-4, atol=1e-7)


def test_a_row_sees_no_key_behind_it(file: GGUFFile, scorer: TextScorer) -> None:
    """The last token changes what its own row sees, and no share of the rows before it."""
    tokens = np.random.default_rng(1).integers(0, SMALL.spec.vocab, 40).astype(np.int32)
    best = formula(file, tokens.tolist(), rotated=False)
    assert all((best[t, 40 - 8 + t + 1 :] == 0).all() and best[t, 40 - 8 + t] > 0 for t in range(8))
    np.testing.assert_allclose(scorer(tokens), expected(best), rtol=2e-4, atol=1e-7)


def test_smoothing_at_the_ends() -> None:
    scores = np.random.default_rng(2).random(40)
    means = [scores[max(0, j - 6) : j + 7].mean() for j in range(40)]
    np.testing.assert_allclose(smoothed(scores), means)
    assert smoothed(np.array([3.0, 5.0])).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32", "deepseek2-a-F32", "lfm2-a-F32", "gptoss-a-F32"])
def test_every_kind_of_layer_scores_the_same_in_steps_of_any_size(name: str) -> None:
    """Recurrent, windowed, latent and convolution layers, borrowed keys, per-layer embeddings."""
    reference = Reference(name)
    tokens = np.random.default_rng(3).integers(0, reference.spec.vocab, 90).astype(np.int32)
    found = []
    with open_gguf(reference.path) as file:
        for rows in (32, 512):
            scorer = TextScorer(file, reference.spec, HostDevice(), reading=Reading(rows))
            found += [scorer(tokens), scorer(tokens)]
            scorer.close()
    assert (found[0] > 0).all()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["qwen3-a-F32", "qwen35-a-F32", "gemma4-e-F32", "deepseek2-a-F32", "lfm2-a-F32", "gptoss-a-F32"]
)
def test_parked_weights_score_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two texts, one behind the other; while a layer is loaded the one before it is the only one that is there."""
    reference = Reference(name)
    tokens = np.random.default_rng(3).integers(0, reference.spec.vocab, 90).astype(np.int32)
    layers: list[weakref.ref[Any]] = []
    weights: list[weakref.ref[Any]] = []
    build, upload = LayerBuilder.layer, upload_weight

    def there(built: list[weakref.ref[Any]]) -> int:
        return sum(each() is not None for each in built)

    def layer(self: LayerBuilder, index: int) -> Any:
        assert there(layers) <= 1 and there(weights) <= MATRICES
        made = build(self, index)
        layers.append(weakref.ref(made))
        return made

    def uploaded(*given: Any) -> Any:
        made = upload(*given)
        weights.append(weakref.ref(made))
        return made

    with open_gguf(reference.path) as file:
        scorer = TextScorer(file, reference.spec, HostDevice(), reading=Reading(32))
        expected = [scorer(tokens), scorer(tokens[:50])]
        scorer.close()
        monkeypatch.setattr(LayerBuilder, "layer", layer)
        monkeypatch.setattr("luce.layers.weights.upload_weight", uploaded)
        parked = TextScorer(file, reference.spec, HostDevice(), reading=Reading(32, parked=True))
        outside = there(weights)
        assert not layers and (not outside or reference.spec.per_layer)
        for text, scores in zip((tokens, tokens[:50]), expected, strict=True):
            np.testing.assert_array_equal(parked(text), scores)
            assert there(layers) == 0 and there(weights) == outside
        assert len(weights) > MATRICES
        parked.close()


def test_parked_weights_that_cannot_be_loaded_leave_the_next_text_as_it_was(
    file: GGUFFile, scorer: TextScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(50, dtype=np.int32)
    parked = TextScorer(file, SMALL.spec, HostDevice(), reading=Reading(ROWS, parked=True))
    before = parked(tokens)
    np.testing.assert_array_equal(before, scorer(tokens))
    calls = []
    whole = LayerBuilder.layer

    def layer(self: LayerBuilder, index: int) -> Any:
        calls.append(index)
        if len(calls) == 4:
            raise OutOfMemoryError("no memory for it")
        return whole(self, index)

    monkeypatch.setattr(LayerBuilder, "layer", layer)
    with pytest.raises(OutOfMemoryError):
        parked(tokens)
    np.testing.assert_array_equal(parked(tokens), before)
    assert calls == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def test_parked_weights_take_the_memory_of_two_layers(file: GGUFFile) -> None:
    """Or that of the embedding, whichever is more: it goes before the layers come."""
    sizes = [
        sum(tensor.nbytes for name, tensor in file.tensors.items() if name.startswith(f"blk.{index}."))
        for index in range(6)
    ]
    two = max(a + b for a, b in pairwise(sizes))
    # With the tied head.
    ends = 2 * file.tensors["token_embd.weight"].nbytes + file.tensors["output_norm.weight"].nbytes
    resident, rest = scorer_bytes(file, SMALL.spec, HostDevice())
    parked, same = scorer_bytes(file, SMALL.spec, HostDevice(), reading=Reading(parked=True))
    assert (parked, same) == (max(ends, two), rest) and parked < resident == ends + sum(sizes)


def test_keys_that_a_later_layer_borrows_are_still_there(file: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a pool for each layer: the last layer reads the keys of the second, and those between have others."""
    last = SMALL.spec.layers[-1]
    borrowing = replace(last, mixer=replace(last.mixer, donor=1))  # type: ignore[type-var]
    # A layer behind it has full attention of its own, so that the borrowing one is read too.
    spec = replace(SMALL.spec, layers=(*SMALL.spec.layers[:-2], borrowing, last))
    tokens = np.random.default_rng(4).integers(0, SMALL.spec.vocab, 60).astype(np.int32)
    shared = TextScorer(file, spec, HostDevice())(tokens)
    monkeypatch.setattr("luce.layers.state.KVPool.form", staticmethod(lambda *_, **__: object()))
    np.testing.assert_array_equal(TextScorer(file, spec, HostDevice())(tokens), shared)


def test_a_limit_of_segments_bounds_the_memory(file: GGUFFile, scorer: TextScorer) -> None:
    tokens = np.random.default_rng(5).integers(0, SMALL.spec.vocab, 250).astype(np.int32)
    short = TextScorer(file, SMALL.spec, HostDevice(), longest=100)
    np.testing.assert_allclose(short(tokens), scorer(tokens, segment=100), rtol=1e-4)
    assert scorer_bytes(file, SMALL.spec, HostDevice(), 100) < scorer_bytes(file, SMALL.spec, HostDevice())


def test_the_answer_scores_highest_without_rotation() -> None:
    with open_gguf(TINY) as file:
        spec = read_spec(Source(str(TINY), file.metadata, file.tensors))
        tokenizer, scorer = Tokenizer(file.metadata), TextScorer(file, spec, HostDevice())
        licence = tokenizer.encode((TINY.parents[2] / "LICENSE").read_text(), specials=False)
        statement = tokenizer.encode("\nThe pass key is 71432. Remember it. 71432 is the pass key.\n", specials=False)
        question = tokenizer.encode("\nWhat is the pass key? The pass key is", specials=False)
        tokens = np.array([*licence[:300], *statement, *licence[300:1500], *question], np.int32)
        scores = scorer(tokens)[: -len(question) - 32]
        assert 290 <= scores.argmax() <= 310 + len(statement)
        scorer.close()
        scorer.close()


class _StopError(LuceError):
    pass


def test_work_ends_between_layers(scorer: TextScorer) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise _StopError("enough")

    tokens = np.arange(50, dtype=np.int32)
    before = scorer(tokens)
    with pytest.raises(_StopError):
        scorer(tokens, check=check)
    assert len(calls) == 3
    np.testing.assert_array_equal(scorer(tokens), before)


@pytest.mark.parametrize("place", ["embedding", "layer 0", "layer 3", "scores of a layer", "output"])
def test_a_failure_anywhere_leaves_the_next_text_as_it_was(
    scorer: TextScorer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(50, dtype=np.int32)
    before = scorer(tokens)
    calls = 0

    def fails_at(owner: type, name: str, call: int) -> None:
        """The call of this number fails."""
        whole = getattr(owner, name)

        def instead(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise DeviceError(f"the {place} failed")
            return whole(*given, **named)

        monkeypatch.setattr(owner, name, instead)

    # 50 tokens are four steps of each layer.
    owner, name, call = {
        "embedding": (HostDevice, "copy", 1),
        "layer 0": (AttentionLayer, "mix", 0),
        "layer 3": (AttentionLayer, "mix", 3 * 4 + 1),
        "scores of a layer": (TailAttention, "add", 2),
        "output": (TailAttention, "result", 0),
    }[place]
    fails_at(owner, name, call)
    with pytest.raises(DeviceError, match=f"the {place} failed"):
        scorer(tokens)
    assert calls == call + 1
    np.testing.assert_array_equal(scorer(tokens), before)


def test_scores_of_other_tokens() -> None:
    """Token 0 of the other vocabulary has parts of known tokens 0 and 1, token 1 of 1 alone, token 2 of 3 and 4."""
    text = Retokenized(np.zeros(3, np.int32), np.array([0, 1, 3]), np.array([1, 1, 4]))
    assert spread(text, np.array([0.5, 0.25, 1.0]), 6).tolist() == [0.5, 0.5, 0.0, 1.0, 1.0, 0.0]


def test_models_that_cannot_score(file: GGUFFile) -> None:
    def made(spec: ModelSpec) -> TextScorer:
        return TextScorer(file, spec, HostDevice())

    with pytest.raises(ModelError, match=r"qwen3-a-F32\.gguf: cannot score texts: its context of 100 is too short"):
        made(replace(SMALL.spec, context_length=100))
    windowed = tuple(replace(x, mixer=replace(x.mixer, window=64)) for x in SMALL.spec.layers)  # type: ignore[type-var]
    with pytest.raises(ModelError, match="no layer has full attention"):
        made(replace(SMALL.spec, layers=windowed))


def test_one_layer_of_keys_and_values_takes_memory(file: GGUFFile) -> None:
    """Six layers and 4096 positions: one layer's K and V in float32, the rows, logits and angles."""
    positions = 4096
    states = 2 * positions * 2 * 32 * 4 + positions * 64 * 4
    # 8 rows by 4 heads, and the largest weights; cos and sin of 16 pairs.
    states += positions * 8 * 5 * 4 + positions * 32 * 4
    weights = sum(scorer_bytes(file, SMALL.spec, HostDevice())) - states
    # A tied head counts as well.
    table = file.tensors["token_embd.weight"].nbytes
    assert weights == pytest.approx(sum(tensor.nbytes for tensor in file.tensors.values()) + table, rel=0.01)


@pytest.mark.parametrize("alpha", [0, 0.12])
def test_131072_tokens_of_a_small_qwen3_take_less_than_3_gb_beside_its_weights(file: GGUFFile, alpha: float) -> None:
    """The shapes of Qwen3-0.6B: 28 layers of 16 heads and 8 key heads of 128, hidden states of 1024."""
    some = SMALL.spec.layers[0]
    mixer = replace(some.mixer, heads=16, kv_heads=8, head_dim=128)  # type: ignore[type-var]
    rope = replace(mixer.rope, dims=128)  # type: ignore[union-attr]
    layer = replace(some, mixer=replace(mixer, rope=rope))  # type: ignore[type-var]
    spec = replace(SMALL.spec, layers=(layer,) * 28, hidden=1024, context_length=1 << 19)
    _, peak = layerwise_bytes(file, spec, HostDevice(), ReadingSize(131072, Reading(2048, alpha)))
    n = 131072
    kv, hidden = 2 * n * 8 * 128 * 4, n * 1024 * 4
    scores, angles = n * 8 * (16 + 1) * 4, n * 128 * 4
    # The copies of keys and values by heads, and the lists, queries and results of 2048 rows.
    sparse = kv + (n // 128) * (8 * 128 * 4 + 16 * 16 * 20) + 2 * 2048 * 16 * 128 * 4
    assert peak == pytest.approx(kv + hidden + scores + angles + bool(alpha) * sparse, rel=0.01)
    assert peak < 3e9
    # One pass covers twice that.
    assert segment_tokens(file, spec) == 2 * n
