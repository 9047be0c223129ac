"""docs/internals/adding-a-family.md tried out on an unpublished family: one spec function and one registry line."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.cli.main import main
from luce.errors import UnsupportedError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import FAMILIES, read_spec
from luce.models.spec import Attention, GatedMLP, Layer, ModelSpec, Rope
from luce.runtime.host import HostDevice
from tests.support.drive import Driver

PAGE = Path(__file__).parents[2] / "docs/internals/adding-a-family.md"
Floats = NDArray[np.float64]


def toyrope(source: Source) -> ModelSpec:
    """Toyrope: dense decoder; heads turn their first dimensions only, odd layers look back a few tokens."""
    heads, kv_heads = source.positive("queries"), source.positive("keys")
    if heads % kv_heads:
        raise source.refuse("queries", f"is {heads}, not a multiple of {kv_heads} keys")
    layers = [
        Layer(
            mixer=Attention(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=source.positive("head_width"),
                rope=Rope(dims=source.positive("turn.width"), base=source.number("turn.base"), adjacent=True),
                scale=source.number("sharpness"),
                window=source.positive("lookback") if layer % 2 else None,
            ),
            ffn=GatedMLP(source.positive("inner_width"), "gelu"),
            mixer_norm="norm_in",
            ffn_norm="norm_mid",
        )
        for layer in range(source.positive("depth"))
    ]
    return ModelSpec(
        family="toyrope",
        hidden=source.positive("width"),
        vocab=source.vocabulary(),
        context_length=source.positive("memory"),
        norm_eps=source.number("epsilon"),
        layers=tuple(layers),
        tied_head="output.weight" not in source.tensors,
    )


@dataclass(frozen=True)
class Toy:
    """The sizes of the file, and its weights as [out, in] matrices and vectors."""

    weights: dict[str, NDArray[np.float32]]
    depth: int = 3
    width: int = 48
    queries: int = 4
    keys: int = 2
    head_width: int = 16
    turned: int = 10
    inner: int = 80
    lookback: int = 24
    base: float = 500.0
    sharpness: float = 0.3
    epsilon: float = 1e-4

    @classmethod
    def random(cls, vocab: int) -> Toy:
        """Weights of about unit gain."""
        toy, rng = cls({}), np.random.default_rng(3)
        queries, keys, width = toy.queries * toy.head_width, toy.keys * toy.head_width, toy.width
        matrices = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
        matrices |= {"attn_output": (width, queries), "ffn_gate": (toy.inner, width), "ffn_up": (toy.inner, width)}
        matrices["ffn_down"] = (width, toy.inner)
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, width), "output_norm": (width,)}
        for layer in range(toy.depth):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
            shapes |= {f"blk.{layer}.{name}": (width,) for name in ("norm_in", "norm_mid")}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape)
            toy.weights[f"{name}.weight"] = (1 + 0.2 * values if len(shape) == 1 else values * shape[1] ** -0.5).astype(
                np.float32
            )
        return toy

    def write(self, path: Path) -> None:
        """The GGUF file."""
        writer = GGUFWriter(path, "toyrope")
        integers = {"depth": self.depth, "width": self.width, "queries": self.queries, "keys": self.keys}
        integers |= {"head_width": self.head_width, "turn.width": self.turned, "inner_width": self.inner}
        integers |= {"lookback": self.lookback, "memory": 256}
        for key, integer in integers.items():
            writer.add_uint32(f"toyrope.{key}", integer)
        for key, number in {"turn.base": self.base, "sharpness": self.sharpness, "epsilon": self.epsilon}.items():
            writer.add_float32(f"toyrope.{key}", number)
        for name, array in self.weights.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def logits(self, ids: NDArray[np.int32]) -> Floats:
        """The forward pass, in float64: [len(ids), vocab]."""
        w = {name: array.astype(np.float64) for name, array in self.weights.items()}
        x = w["token_embd.weight"][ids]
        age = np.arange(len(ids))[:, None] - np.arange(len(ids))
        for layer in range(self.depth):
            p = f"blk.{layer}."
            y = self._norm(x) * w[p + "norm_in.weight"]
            q, k, v = (
                (y @ w[f"{p}attn_{part}.weight"].T).reshape(len(ids), -1, self.head_width).swapaxes(0, 1)
                for part in "qkv"
            )
            shared = self.queries // self.keys
            k, v = np.repeat(k, shared, axis=0), np.repeat(v, shared, axis=0)
            scores = self._turn(q) @ self._turn(k).swapaxes(1, 2) * np.float64(np.float32(self.sharpness))
            visible = (age >= 0) & (age < (self.lookback if layer % 2 else len(ids)))
            weights = np.where(visible, np.exp(scores - scores.max(axis=2, keepdims=True)), 0)
            weights /= weights.sum(axis=2, keepdims=True)
            mixed = (weights @ v).swapaxes(0, 1).reshape(len(ids), -1)
            x = x + mixed @ w[p + "attn_output.weight"].T
            y = self._norm(x) * w[p + "norm_mid.weight"]
            gate = y @ w[p + "ffn_gate.weight"].T
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            x = x + (gelu * (y @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T
        logits: Floats = (self._norm(x) * w["output_norm.weight"]) @ w["token_embd.weight"].T
        return logits

    def _norm(self, x: Floats) -> Floats:
        result: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return result

    def _turn(self, x: Floats) -> Floats:
        """Neighbours (0, 1), (2, 3), ... of the first dimensions as complex numbers: [heads, tokens, head_width]."""
        pairs = np.arange(self.turned // 2)
        angles = np.arange(x.shape[1])[:, None] * self.base ** (-2 * pairs / self.turned)
        turned = (x[..., 0 : self.turned : 2] + 1j * x[..., 1 : self.turned : 2]) * np.exp(1j * angles)
        front = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:2], self.turned)
        return np.concatenate([front, x[..., self.turned :]], axis=-1)


TOY = Toy.random(vocab=96)
#: longer than the window, and than a page
PROMPT = np.random.default_rng(5).integers(0, 96, 80).astype(np.int32)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, with the family registered."""
    monkeypatch.setitem(FAMILIES, "toyrope", toyrope)
    TOY.write(tmp_path / "toy.gguf")
    return tmp_path / "toy.gguf"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("chunk", [80, 7])
def test_logits(path: Path, shards: int, chunk: int) -> None:
    with open_gguf(path) as file:
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        backend = LayerSplitBackend(
            file, spec, [HostDevice(index) for index in range(shards)], ServingOptions(context=256)
        )
        driver = Driver(backend)
        sequence = driver.start()
        parts = [driver.feed((sequence, PROMPT[at : at + chunk]))[0] for at in range(0, len(PROMPT), chunk)]
        backend.close()
    expected = TOY.logits(PROMPT)
    assert np.abs(np.concatenate(parts) - expected).max() < 1e-5 * expected.std()


def test_the_rest_follows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--target-devices", "cpu:0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == "toyrope"
    assert facts["layers"] == {"attention": 2, "sliding attention": 1}
    assert [group["per_token"] for group in facts["kv"]] == [2 * 2 * 2 * 16 * 4, 2 * 2 * 16 * 4]


def test_the_page_shows_this_spec() -> None:
    assert f"```python\n{inspect.getsource(toyrope)}```" in PAGE.read_text()


def test_without_its_line_the_family_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "toyrope")
    with (
        open_gguf(path) as file,
        pytest.raises(UnsupportedError, match=f"'toyrope' is not supported; Luce runs {', '.join(sorted(FAMILIES))}"),
    ):
        read_spec(Source(str(path), file.metadata, file.tensors))
