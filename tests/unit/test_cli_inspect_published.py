"""`luce inspect` on the headers of published models: sizes worked out by hand from the models' published shapes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from luce.cli import plan
from luce.cli.main import main
from luce.models.registry import FAMILIES
from luce.runtime.device import DeviceName, Memory
from tests.support.published import PUBLISHED
from tests.support.published_header import Published


@dataclass(eq=False)
class Card:
    """What inspect asks of a GPU: tensors stay as stored, K and V are 16 bits wide; 80 GB are free."""

    name: DeviceName
    host: bool = False
    packed: bool = True
    remote: bool = False
    margin: int | None = None
    kv_dtype: Any = field(default_factory=lambda: np.dtype(np.float16))

    def memory(self) -> Memory:
        return Memory(80 * 10**9, 80 * 10**9)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Group:
    """Attention layers of one window: K and V values per token in each layer with KV of its own, the other layers, and
    the positions that one sequence takes with steps of 512 rows: whole pages of 64 for window + 512, and one more.
    """

    layers: tuple[int, ...]
    values: int
    positions: int
    borrowing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Expected:
    """groups by window; parameters that run, and of these `tables` that are only looked up; memory, conv: bytes of
    recurrent state in all layers."""

    layers: int
    groups: dict[int | None, Group]
    parameters: int
    tables: int = 0
    memory: int = 0
    conv: int = 0


MIB = 1 << 20


def every(period: int, layers: int) -> tuple[int, ...]:
    return tuple(range(period - 1, layers, period))


def others(period: int, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if (layer + 1) % period)


def delta_net(hidden: int, value_heads: int) -> int:
    channels, inner = (16 + 16 + value_heads) * 128, value_heads * 128
    inputs = hidden * (channels + inner + 2 * value_heads)
    return inputs + inner * hidden + 4 * channels + 2 * value_heads + 128 + 2 * hidden


def attention(hidden: int, heads: int, kv_heads: int, size: int, *, gate: int = 0, norms: int = 2) -> int:
    """`gate`: outputs of a gate; `norms` of the layer, as wide as the stream. Head norms are included."""
    return hidden * (size * (2 * heads + 2 * kv_heads) + gate) + 2 * size + norms * hidden


def qwen35(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, ffn: int) -> int:
    full = layers // 4
    mixers = full * attention(hidden, heads, kv_heads, 256, gate=heads * 256)
    mixers += (layers - full) * delta_net(hidden, value_heads)
    return 2 * 248320 * hidden + hidden + mixers + layers * ffn


def gemma(hidden: int, width: int, heads: int, kv_heads: tuple[int, int], layers: int, extra: int) -> int:
    """A model with V from K on each sixth layer, and `extra` parameters in every layer."""
    full, scale = layers // 6, 1
    mixers = (layers - full) * attention(hidden, heads, kv_heads[0], 256, norms=4)
    mixers += full * (attention(hidden, heads, kv_heads[1], 512, norms=4) - hidden * kv_heads[1] * 512)
    return 262144 * hidden + hidden + 256 + mixers + layers * (3 * hidden * width + scale + extra)


def e2b() -> int:
    sliding, full = attention(1536, 8, 1, 256, norms=5), attention(1536, 8, 1, 512, norms=5)
    # attn_k, attn_v, attn_k_norm
    mixers = 28 * sliding + 7 * full - 16 * (2 * 1536 * 256 + 256) - 4 * (2 * 1536 * 512 + 512)
    ffn = 15 * 3 * 1536 * 6144 + 20 * 3 * 1536 * 12288
    per_layer = 262144 * 35 * 256 + 1536 * 35 * 256 + 256 + 35 * (2 * 1536 * 256 + 1)
    return 262144 * 1536 + 1536 + 256 + mixers + ffn + per_layer


def gemma3n() -> int:
    hidden = 2048
    mixers = 30 * attention(hidden, 8, 2, 256, norms=6) - 10 * (2 * hidden * 512 + 256)
    altup, laurel = 4 * hidden + 2 * hidden + 64 + 16, 2 * 64 * hidden
    layers = mixers + 30 * (3 * hidden * 8192 + altup + laurel + 2 * hidden * 256)
    per_layer = 262144 * 30 * 256 + hidden * 30 * 256 + 256
    return 262144 * hidden + hidden + layers + per_layer + 2 * 3 * hidden**2


def laguna() -> int:
    mixers = 10 * attention(2048, 48, 8, 128, gate=48) + 30 * attention(2048, 64, 8, 128, gate=64)
    sparse = 2048 * 256 + 256 + (256 + 1) * 3 * 2048 * 512
    return 2 * 100352 * 2048 + 2048 + mixers + 3 * 2048 * 8192 + 39 * sparse


def qwen25() -> int:
    # No head norms; biases.
    mixer = attention(3584, 28, 4, 128) - 2 * 128 + (28 + 2 * 4) * 128
    return 2 * 152064 * 3584 + 3584 + 28 * (mixer + 3 * 3584 * 18944)


def gpt_oss() -> int:
    mixer = attention(2880, 64, 8, 64) - 2 * 64 + (64 + 2 * 8) * 64 + 2880 + 64
    experts = 2880 * 32 + 32 + 32 * 3 * (2880 * 2880 + 2880)
    return 2 * 201088 * 2880 + 2880 + 24 * (mixer + experts)


def ernie_moe() -> int:
    mixer = attention(2560, 20, 4, 128) - 2 * 128
    # The router and its bias, 64 experts, and two shared ones side by side.
    sparse = 2560 * 64 + 64 + (64 + 2) * 3 * 2560 * 1536
    return 103424 * 2560 + 2560 + 28 * mixer + 3 * 2560 * 12288 + 27 * sparse


def deepseek_v2_lite() -> int:
    cached = 2048 * 576 + 512
    mixer = 2048 * 16 * 192 + cached + 16 * 512 * (128 + 128) + 16 * 128 * 2048 + 2 * 2048
    sparse = 2048 * 64 + (64 + 2) * 3 * 2048 * 1408
    return 2 * 102400 * 2048 + 2048 + 27 * mixer + 3 * 2048 * 10944 + 26 * sparse


EXPECTED = {
    "Qwen3.6-27B": Expected(
        layers=64,
        groups={None: Group(every(4, 64), 2 * 4 * 256, 262144)},
        parameters=qwen35(64, 5120, 24, 4, 48, 3 * 5120 * 17408),
        tables=248320 * 5120,
        memory=144 * MIB,
        conv=48 * 3 * (3 * 48 * 128) * 4,
    ),
    "Qwen3.6-35B-A3B": Expected(
        layers=40,
        groups={None: Group(every(4, 40), 2 * 2 * 256, 262144)},
        parameters=qwen35(40, 2048, 16, 2, 32, 2048 * 256 + 2048 + (256 + 1) * 3 * 2048 * 512),
        tables=248320 * 2048,
        memory=60 * MIB,
        conv=30 * 3 * (3 * 32 * 128) * 4,
    ),
    "Gemma4-E2B": Expected(
        layers=35,
        groups={
            512: Group((0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13), 2 * 256, 17 * 64, others(5, 35)[12:]),
            None: Group((4, 9, 14), 2 * 512, 131072, (19, 24, 29, 34)),
        },
        parameters=e2b(),
        tables=262144 * 35 * 256,
    ),
    "Gemma4-26B-A4B": Expected(
        layers=30,
        groups={
            1024: Group(others(6, 30), 2 * 8 * 256, 25 * 64),
            None: Group(every(6, 30), 2 * 2 * 512, 262144),
        },
        # Router with its scale, experts with theirs, three more norms.
        parameters=gemma(2816, 2112, 16, (8, 2), 30, 2816 * 129 + 128 * (3 * 2816 * 704 + 1) + 3 * 2816),
    ),
    "Gemma4-31B": Expected(
        layers=60,
        groups={
            1024: Group(others(6, 60), 2 * 16 * 256, 25 * 64),
            None: Group(every(6, 60), 2 * 4 * 512, 262144),
        },
        parameters=gemma(5376, 21504, 32, (16, 4), 60, 0),
    ),
    "Laguna-XS.2": Expected(
        layers=40,
        groups={
            None: Group(tuple(range(0, 40, 4)), 2 * 8 * 128, 131072),
            512: Group(tuple(layer for layer in range(40) if layer % 4), 2 * 8 * 128, 17 * 64),
        },
        parameters=laguna(),
        tables=100352 * 2048,
    ),
    "Qwen2.5-7B": Expected(
        layers=28,
        groups={None: Group(tuple(range(28)), 2 * 4 * 128, 32768)},
        parameters=qwen25(),
        tables=152064 * 3584,
    ),
    "Gemma3-4B": Expected(
        layers=34,
        groups={
            1024: Group(others(6, 34), 2 * 4 * 256, 25 * 64),
            None: Group(every(6, 34), 2 * 4 * 256, 131072),
        },
        parameters=262144 * 2560 + 2560 + 34 * (attention(2560, 8, 4, 256, norms=4) + 3 * 2560 * 10240),
    ),
    "Gemma3n-E2B": Expected(
        layers=30,
        groups={
            512: Group(others(5, 20), 2 * 2 * 256, 17 * 64, others(5, 30)[16:]),
            None: Group(every(5, 20), 2 * 2 * 256, 32768, (24, 29)),
        },
        parameters=gemma3n(),
        tables=262144 * 30 * 256,
    ),
    "gpt-oss-20b": Expected(
        layers=24,
        groups={
            128: Group(tuple(range(0, 24, 2)), 2 * 8 * 64, 11 * 64),
            None: Group(tuple(range(1, 24, 2)), 2 * 8 * 64, 131072),
        },
        parameters=gpt_oss(),
        tables=201088 * 2880,
    ),
    # Latents of 512 values and a rotated key of 64, which all heads share: the values are the keys.
    "DeepSeek-V2-Lite": Expected(
        layers=27,
        groups={None: Group(tuple(range(27)), 512 + 64, 163840)},
        parameters=deepseek_v2_lite(),
        tables=102400 * 2048,
    ),
    "OLMoE-1B-7B": Expected(
        layers=16,
        groups={None: Group(tuple(range(16)), 2 * 16 * 128, 4096)},
        # Four square projections, four norms, the router and 64 experts.
        parameters=2 * 50304 * 2048 + 2048 + 16 * (4 * 2048**2 + 4 * 2048 + 2048 * 64 + 64 * 3 * 2048 * 1024),
        tables=50304 * 2048,
    ),
    "ERNIE-4.5-0.3B": Expected(
        layers=18,
        groups={None: Group(tuple(range(18)), 2 * 2 * 128, 131072)},
        parameters=103424 * 1024 + 1024 + 18 * (attention(1024, 16, 2, 128) - 2 * 128 + 3 * 1024 * 3072),
    ),
    "ERNIE-4.5-21B-A3B": Expected(
        layers=28,
        groups={None: Group(tuple(range(28)), 2 * 4 * 128, 131072)},
        parameters=ernie_moe(),
    ),
    # One norm of each layer.
    "Command-R-35B": Expected(
        layers=40,
        groups={None: Group(tuple(range(40)), 2 * 64 * 128, 131072)},
        parameters=256000 * 8192 + 8192 + 40 * (4 * 8192**2 + 8192 + 3 * 8192 * 22528),
    ),
    # Norms with biases, the last one too, and biases of queries, keys and values.
    "StableLM-2-1.6B": Expected(
        layers=24,
        groups={None: Group(tuple(range(24)), 2 * 32 * 64, 4096)},
        parameters=2 * 100352 * 2048 + 2 * 2048 + 24 * (4 * 2048**2 + (3 + 4) * 2048 + 3 * 2048 * 5632),
        tables=100352 * 2048,
    ),
    "Qwen1.5-MoE-A2.7B": Expected(
        layers=24,
        groups={None: Group(tuple(range(24)), 2 * 16 * 128, 8192)},
        # Three biases, two norms, the router with the shared expert's gate, the shared expert, and 60 others.
        parameters=2 * 151936 * 2048
        + 2048
        + 24 * (4 * 2048**2 + 5 * 2048 + 61 * 2048 + 3 * 2048 * 5632 + 60 * 3 * 2048 * 1408),
        tables=151936 * 2048,
    ),
    "Gemma-2B": Expected(
        layers=18,
        groups={None: Group(tuple(range(18)), 2 * 256, 8192)},
        parameters=256000 * 2048 + 2048 + 18 * (attention(2048, 8, 1, 256) - 2 * 256 + 3 * 2048 * 16384),
    ),
}
each = pytest.mark.parametrize("model", [m for m in PUBLISHED if m.architecture in FAMILIES], ids=lambda m: m.name)


def inspected(model: Published, directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["inspect", str(model.write(directory)), "--json", *flags]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--target-devices cuda:0,cuda:1` gives cards."""
    monkeypatch.setattr(
        plan,
        "open_placement",
        lambda config: [Card(DeviceName("cuda", i)) for i in range(len(config.target_devices or "1"))],
    )


def test_every_model_has_expected_sizes() -> None:
    assert list(EXPECTED) == [model.name for model in PUBLISHED]
    # The published totals, as far as they are round: the names of the models.
    billions = {name: expected.parameters / 1e9 for name, expected in EXPECTED.items()}
    assert billions == pytest.approx(
        {
            "Qwen3.6-27B": 27,
            "Qwen3.6-35B-A3B": 35,
            "Gemma4-E2B": 4.6,
            "Gemma4-26B-A4B": 26,
            "Gemma4-31B": 31,
            "Laguna-XS.2": 33,
            "Qwen2.5-7B": 7.6,
            "Gemma3-4B": 3.9,
            "Gemma3n-E2B": 4.46,
            "gpt-oss-20b": 20.9,
            "DeepSeek-V2-Lite": 15.7,
            "OLMoE-1B-7B": 6.9,
            "ERNIE-4.5-0.3B": 0.36,
            "ERNIE-4.5-21B-A3B": 21.8,
            "Command-R-35B": 35,
            "StableLM-2-1.6B": 1.64,
            "Qwen1.5-MoE-A2.7B": 14.3,
            "Gemma-2B": 2.5,
        },
        rel=0.04,
    )


@each
def test_states(model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None) -> None:
    facts = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0", "--chunk", "512")
    expected = EXPECTED[model.name]
    layers = facts["per_layer"]
    assert [layer["layer"] for layer in layers] == list(range(expected.layers))
    attending: set[int] = set()
    for window, group in expected.groups.items():
        for layer in group.layers:
            assert (layers[layer]["kv_per_token"], layers[layer]["window"]) == (group.values * 2, window)
        for layer in group.borrowing:
            assert (layers[layer]["kv_per_token"], layers[layer]["window"]) == (0, window)
            assert layers[layer]["donor"] == group.layers[-1]
        attending |= {*group.layers, *group.borrowing}
    assert facts["kv"] == [
        {
            "window": window,
            "layers": len(group.layers) + len(group.borrowing),
            "per_token": len(group.layers) * group.values * 2,
            "positions": group.positions,
            "bytes": len(group.layers) * group.values * 2 * group.positions,
        }
        for window, group in expected.groups.items()
    ]
    assert facts["kv_per_token"] == sum(group["per_token"] for group in facts["kv"])
    recurrent = [layer for layer in layers if layer["layer"] not in attending]
    assert all(layer["mixer"] == "gated DeltaNet" and layer["kv_per_token"] == 0 for layer in recurrent)
    assert {layer["state_per_sequence"] * len(recurrent) for layer in recurrent} <= {expected.memory + expected.conv}
    assert sum(layer["state_per_sequence"] for layer in layers) == facts["state_per_sequence"]
    assert facts["state_per_sequence"] == expected.memory + expected.conv


def test_figures_that_the_models_are_published_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None
) -> None:
    dense, sparse = (inspected(model, tmp_path, capsys, "--target-devices", "cuda:0") for model in PUBLISHED[:2])
    assert (dense["kv_per_token"], sparse["kv_per_token"]) == (2 * 32768, 2 * 10240)
    # The convolution's past is 5.6 MiB; three value heads that read one key head each keep it: 10.1.
    assert dense["state_per_sequence"] / MIB == pytest.approx(144 + 10.1, abs=0.05)
    assert dense["skipped_layers"] == [64]
    assert sparse["layers"] == {"gated DeltaNet": 30, "attention": 10}
    assert (dense["experts"], sparse["experts"]) == ([], [{"count": 256, "used": 8, "size": 512}])
    assert {layer["ffn"] for layer in dense["per_layer"]} == {"MLP"}
    assert {layer["ffn"] for layer in sparse["per_layer"]} == {"MoE"}


def test_experts_beside_and_in_place_of_a_dense_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None
) -> None:
    beside, place = (
        inspected(model, tmp_path, capsys, "--target-devices", "cuda:0")
        for model in PUBLISHED
        if model.name in ("Gemma4-26B-A4B", "Laguna-XS.2")
    )
    assert {layer["ffn"] for layer in beside["per_layer"]} == {"MLP, MoE"}
    assert [layer["ffn"] for layer in place["per_layer"]] == ["MLP"] + 39 * ["MoE"]
    assert beside["experts"] == [{"count": 128, "used": 8, "size": 704}]
    sizes = [[(h["query"], h["kv"], h["size"]) for h in facts["heads"]] for facts in (beside, place)]
    assert sizes == [[(16, 8, 256), (16, 2, 512)], [(48, 8, 128), (64, 8, 128)]]


def is_value_too(model: Published, name: str) -> bool:
    """Whether a key projection is loaded a second time, in the place of the value projection that its layer lacks."""
    return "attn_k.weight" in name and name.replace("attn_k", "attn_v") not in dict(model.tensors)


@each
def test_weights(model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None) -> None:
    stored: defaultdict[str, int] = defaultdict(int)
    for tensor in GGUFReader(model.write(tmp_path)).tensors:
        times = 2 if is_value_too(model, tensor.name) else 1
        stored[tensor.name.split(".")[1] if tensor.name.startswith("blk.") else tensor.name] += times * tensor.n_bytes
    facts = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0")
    columns = stored["per_layer_token_embd.weight"] // EXPECTED[model.name].layers
    for layer in facts["per_layer"]:
        assert layer["weights"] == stored[str(layer["layer"])] + columns
    skipped = sum(stored[str(layer)] for layer in facts["skipped_layers"])
    assert facts["weights"] == sum(stored.values()) - skipped


@each
def test_weights_on_the_host(model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, expected = inspected(model, tmp_path, capsys, "--target-devices", "cpu:0"), EXPECTED[model.name]
    again = sum(math.prod(shape) for name, shape in model.tensors if is_value_too(model, name))
    tables = ("token_embd.weight", "per_layer_token_embd.weight")
    held = sum(tensor.n_bytes for tensor in GGUFReader(model.write(tmp_path)).tensors if tensor.name in tables)
    # The host computes in float32, but holds tables as they are stored.
    assert facts["weights"] == 4 * (expected.parameters - expected.tables + again) + held


@each
def test_shards_add_up(model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None) -> None:
    whole = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0")
    facts = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0,cuda:1", "--target-layer-split", "1,3")
    assert [layer["device"] for layer in facts["per_layer"]] == [
        shard["device"] for shard in facts["plan"] for _ in range(shard["layers"][0], shard["layers"][1] + 1)
    ]
    for name in ("kv_per_token", "state_per_sequence"):
        assert whole[name] == facts[name] == sum(layer[name] for layer in facts["per_layer"])
    for shard in facts["plan"]:
        first, last = shard["layers"]
        donors = {layer["donor"] for layer in facts["per_layer"][first : last + 1]} - {None}
        kept = {*range(first, last + 1), *donors}
        assert shard["kv_per_token"] == sum(facts["per_layer"][layer]["kv_per_token"] for layer in kept)
        assert shard["state_per_sequence"] == sum(facts["per_layer"][layer]["state_per_sequence"] for layer in kept)
    assert facts["kv"] == whole["kv"]


def test_a_boundary_among_borrowing_layers_moves_to_the_last_donor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None
) -> None:
    # Layers 15 to 34 of E2B read what 13 and 14 keep. Layer 14 goes along; the keys and values of 13, 2 * 256 values,
    # pass the boundary with the stream and the token's embedding, 1536 values each.
    model = next(m for m in PUBLISHED if m.name == "Gemma4-E2B")
    for flags in ((), ("--target-layer-split", "1,1")):
        facts = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0,cuda:1", *flags)
        assert [shard["layers"] for shard in facts["plan"]] == [[0, 13], [14, 34]]
        assert [shard["activation_bytes_per_token"] for shard in facts["plan"]] == [4 * (2 * 1536 + 2 * 256), 0]


@each
def test_layer_table(
    model: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(model.write(tmp_path))
    facts = inspected(model, tmp_path, capsys, "--target-devices", "cuda:0")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", path, "--target-devices", "cuda:0"]) == 0
    assert "FFN" not in capsys.readouterr().out
    assert main(["inspect", path, "--target-devices", "cuda:0", "--layers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.split()[:3] == ["layer", "mixer", "FFN"])
    for layer, line in zip(facts["per_layer"], lines[start + 1 :], strict=False):
        assert line.split()[0] == str(layer["layer"])
        assert f"{layer['weights']:,}" in line and layer["mixer"] in line
        kv = f"{layer['kv_per_token']:,}" if layer["donor"] is None else f"layer {layer['donor']}'s"
        assert f" {kv} " in line
    total = lines[start + len(facts["per_layer"]) + 2]
    for name in ("weights", "kv_per_token", "state_per_sequence"):
        assert f" {facts[name]:,}" in total


def test_smaller_context_bounds_every_group(tmp_path: Path, capsys: pytest.CaptureFixture[str], cards: None) -> None:
    flags = ("--target-devices", "cuda:0", "--max-ctx", "1000", "--chunk", "256")
    for model in PUBLISHED:
        if model.architecture in FAMILIES:
            facts = inspected(model, tmp_path, capsys, *flags)
            # 16 pages hold 1000 positions; 12 and one more hold 512 + 256, 6 and one more 128 + 256.
            positions = {None: 1024, 1024: 1024, 512: 13 * 64, 128: 7 * 64}
            assert [group["positions"] for group in facts["kv"]] == [positions[g["window"]] for g in facts["kv"]]
