"""What steps cost, against sizes that the gguf package reads and formulas written out here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from gguf import GGUFReader

from luce.bench.cost import Cost, Rows, ShardCost
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Attention, GatedDeltaNet, ModelSpec, MoE
from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice

FILES = Path(__file__).parents[1] / "reference"


def opened(name: str, device: Device, layers: range | None = None, **changes: object) -> tuple[ShardCost, ModelSpec]:
    with open_gguf(FILES / f"{name}.gguf") as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        spec = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
        return ShardCost(file, spec, layers or range(len(spec.layers)), device, KVTypes("q8_0", "f16")), spec


def sizes(name: str) -> dict[str, tuple[int, int]]:
    """Bytes and elements of each tensor."""
    return {t.name: (int(t.n_bytes), int(t.n_elements)) for t in GGUFReader(FILES / f"{name}.gguf").tensors}


@pytest.mark.parametrize("host", [True, False])
def test_a_dense_model(host: bool) -> None:
    cost, spec = opened("qwen3-a-MIX", HostDevice() if host else EmulatedDevice())
    tensors = sizes("qwen3-a-MIX")
    head = tensors["token_embd.weight" if spec.tied_head else "output.weight"]
    blocks = [size for name, size in tensors.items() if name.startswith("blk.")]
    step = cost.step([Rows(3, 10), Rows(1, 0)], wanted=2)
    mixers = [block.mixer for block in spec.layers]
    assert all(isinstance(mixer, Attention) and mixer.window is None for mixer in mixers)
    heads = mixers[0]
    assert isinstance(heads, Attention)
    # Keys of 13 and of 1 positions; rows see 11, 12, 13 and 1 of them.
    key_bytes = heads.head_dim // 32 * 34 + 2 * heads.head_dim
    kept = len(mixers) * (13 + 1) * heads.kv_heads * key_bytes
    seen = len(mixers) * 4 * heads.heads * heads.head_dim * (11 + 12 + 13 + 1)
    if host:
        weights = 4 * (head[1] + sum(elements for _, elements in blocks))
    else:
        weights = head[0] + sum(size for size, _ in blocks)
    flops = 2 * (4 * sum(elements for _, elements in blocks) + 2 * head[1]) + seen
    assert step == Cost(weights + kept, flops)
    assert cost.step([Rows(4, 0)], wanted=0).bytes < step.bytes - head[0]


def test_a_pool_is_all_that_rows_see() -> None:
    whole, spec = opened("qwen3-a-MIX", HostDevice())
    with open_gguf(FILES / "qwen3-a-MIX.gguf") as file:
        pool = ShardCost(file, spec, range(len(spec.layers)), HostDevice(), KVTypes("q8_0", "f16"), 512)
    for rows, position in ((1, 0), (100, 412), (1, 511)):
        assert pool.step([Rows(rows, position)], 1) == whole.step([Rows(rows, position)], 1)
    far = pool.step([Rows(1, 9000)], 1)
    assert far == whole.step([Rows(1, 511)], 1)
    # Of 64 rows of a block of a prompt each sees the pool; its pages are read once.
    assert pool.step([Rows(64, 9000)], 0).bytes == whole.step([Rows(64, 448)], 0).bytes
    assert pool.step([Rows(64, 9000)], 0).flops > whole.step([Rows(64, 448)], 0).flops


def test_experts_are_read_as_far_as_rows_choose_them() -> None:
    cost, spec = opened("qwen35moe-a-Q4_0", EmulatedDevice())
    tensors = sizes("qwen35moe-a-Q4_0")
    moe = spec.layers[0].ffn
    assert isinstance(moe, MoE)
    experts = sum(size for name, (size, _) in tensors.items() if "_exps." in name)
    rest = sum(size for name, (size, _) in tensors.items() if name.startswith("blk.") and "_exps." not in name)
    state = 0
    keys = 0
    for block in spec.layers:
        if isinstance(block.mixer, GatedDeltaNet):
            net = block.mixer
            # The matrix of each value head, and the inputs before the convolution of the q, k and v that it reads.
            state += 4 * net.value_heads * (net.head_dim**2 + 3 * (net.conv_kernel - 1) * net.head_dim)
        else:
            keys += block.mixer.kv_heads * (block.mixer.head_dim // 32 * 34 + 2 * block.mixer.head_dim)
    for rows in (1, 2, 500):
        left = (1 - moe.used / moe.experts) ** rows
        expected = rest + experts * (1 - left) + 2 * state + rows * keys
        assert cost.step([Rows(rows, 0)], wanted=0).bytes == pytest.approx(expected)
    one, two = (cost.step([Rows(rows, 0)], wanted=0).flops for rows in (1, 2))
    counts = {name: count for name, (_, count) in tensors.items() if name.startswith("blk.")}
    used = sum(count * (moe.used / moe.experts if "_exps." in name else 1) for name, count in counts.items())
    assert one > 2 * used and two == pytest.approx(2 * one, rel=0.01)


def test_windows_bound_what_is_seen() -> None:
    cost, spec = opened("gemma4-e-F32", EmulatedDevice())
    windows = {block.mixer.window for block in spec.layers if isinstance(block.mixer, Attention)} - {None}
    (window,) = windows
    assert window is not None
    far, farther = (cost.step([Rows(2, window + n)], wanted=0) for n in (0, 100))
    full = [b.mixer for b in spec.layers if isinstance(b.mixer, Attention) and b.mixer.window is None]
    per_key = sum(m.kv_heads * (m.head_dim // 32 * 34 + 2 * m.head_dim) for m in full)
    assert farther.bytes - far.bytes == 100 * per_key
    assert farther.flops - far.flops == sum(4 * m.heads * m.head_dim * 2 * 100 for m in full)


def test_shards_share_the_cost() -> None:
    whole, spec = opened("qwen35-a-Q8_0", EmulatedDevice())
    parts = [opened("qwen35-a-Q8_0", EmulatedDevice(), layers)[0] for layers in (range(3), range(3, len(spec.layers)))]
    step = [Rows(5, 7)], 1
    assert whole.step(*step) == parts[0].step(*step) + parts[1].step(*step)
