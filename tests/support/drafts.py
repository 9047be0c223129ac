"""The reference drafts (tests/reference/dflash): files, expected values, limits; and the draft's formula in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.draft.dflash.model import DFlashModel
from luce.draft.dflash.safetensors import is_checkpoint, open_checkpoint
from luce.draft.dflash.spec import DFlashSpec, read_dflash
from luce.gguf.quants import dequantize
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.decoder_layer import Embedding
from luce.layers.rotary import frequencies
from luce.models.keys import Source
from luce.models.spec import Attention, GatedMLP
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.drive import Driver
from tests.support.reference import DIRECTORY, Reference

F32, F64 = NDArray[np.float32], NDArray[np.float64]
DRAFTS = DIRECTORY / "dflash"
#: the DFlash2 drafts, published checkpoints
DRAFTS2 = DIRECTORY / "dflash2"


def open_draft(path: Path) -> GGUFFile:
    """A draft in either format."""
    return open_checkpoint(path) if is_checkpoint(path) else open_gguf(path)


def spec_of(file: GGUFFile, path: Path) -> DFlashSpec:
    """The spec of a draft file."""
    return read_dflash(Source(str(path), file.metadata, file.tensors))


def matrix(file: GGUFFile, name: str) -> F32:
    """A tensor as float32 [rows, cols]."""
    return dequantize(file.raw(name), file.tensors[name].type)


def bfloat16(x: F32) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


@dataclass(frozen=True)
class DraftReference:
    """One draft, with the values that an independent implementation computes for it."""

    name: str

    @property
    def path(self) -> Path:
        """The GGUF file, or the checkpoint's directory."""
        return self._directory / (self.name if self.name.endswith("-hf") else f"{self.name}.gguf")

    @property
    def target(self) -> Reference:
        """The model that it drafts for."""
        return Reference("qwen35-b-Q4_K_M" if "qwen35-b" in self.name else "qwen35-a-F32")

    @property
    def _directory(self) -> Path:
        return DRAFTS2 if "draft2" in self.name else DRAFTS

    @property
    def _numbers(self) -> str:
        return f"{self.name.removesuffix('-hf')}-F32" if self.name.endswith("-hf") else self.name

    @cached_property
    def expected(self) -> dict[str, NDArray[Any]]:
        """The arrays that README.md of the reference drafts lists."""
        with np.load(self._directory / f"{self._numbers}.npz") as arrays:
            return dict(arrays)

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of an implementation, by where its captured rows come from."""
        tolerances: dict[str, Any] = json.loads((self._directory / "tolerances.json").read_text())
        found: dict[str, Any] | None = tolerances.get(self._numbers, tolerances.get(self.name.removesuffix("-hf")))
        return tolerances["qwen35-a-draft-F32"] if found is None else found

    @cached_property
    def table_and_head(self) -> tuple[F32, F32]:
        """The target's embedding table and its head, float32 [vocab, hidden]."""
        with open_gguf(self.target.path) as file:
            table = matrix(file, "token_embd.weight")
            return table, table if self.target.spec.tied_head else matrix(file, "output.weight")

    def captured(self, tokens: NDArray[np.int32]) -> F32:
        """The captured rows of this implementation's target, without a cache: float32 [n, captures * hidden]."""
        spec = self.target.spec
        layers = len(spec.layers)
        with open_gguf(self.target.path) as file, open_draft(self.path) as draft:
            # One shard per layer: an activation between shards begins with the residual stream.
            devices = [HostDevice(index) for index in range(layers)]
            backend = LayerSplitBackend(file, spec, devices, ServingOptions(slots=1, context=256))
            driver = Driver(backend)
            step = driver.step((driver.start(), tokens))
            activation, rows = None, []
            for shard in backend.shards[:-1]:
                activation = shard.forward(step, activation)
                assert isinstance(activation, tuple)
                rows.append(activation[0].copy())
            backend.close()
            return np.concatenate([rows[i] for i in spec_of(draft, self.path).captured(spec)], axis=1)


def references() -> list[DraftReference]:
    """All of them."""
    names = sorted(path.stem for path in DRAFTS.glob("*.gguf"))
    return [DraftReference(name) for name in (*names, "qwen35-a-draft-hf")]


def with_flavour(spec: DFlashSpec, causal: bool) -> DFlashSpec:
    """The draft with an explicit causal flag."""
    layers = [replace(x, mixer=replace(_attention(x.mixer), bidirectional=not causal)) for x in spec.layers]
    return replace(spec, layers=tuple(layers))


def _attention(mixer: Any) -> Attention:
    assert isinstance(mixer, Attention)
    return mixer


class DraftedText:
    """A draft model on a device with captured rows of one text in its ring, driven without an engine."""

    def __init__(
        self,
        file: GGUFFile,
        spec: DFlashSpec,
        device: Device,
        captured: NDArray[Any],
        mask: F32,
        *,
        slots: int = 1,
        context: int = 4096,
        embedding: Embedding | None = None,
    ) -> None:
        self.device = device
        sizes = {"slots": slots, "context": context}
        rows = device.upload(captured)
        self.model = DFlashModel(file, spec, device, **sizes, rows=rows, mask=mask, embedding=embedding)

    def append_context(self, to: int, slot: int = 0, chunk: int = 500) -> None:
        """Append the rows up to a position to a slot's context."""
        for at in range(self.model.context.cached(slot).stop, to, chunk):
            rows = np.arange(at, min(to, at + chunk), dtype=np.int32)
            self.model.append_context([slot], [len(rows)], rows)

    def draft_block(self, *seeds: F32, slots: tuple[int, ...] = (0,)) -> F32:
        """A block behind the context of each slot."""
        return self._block(slots, self.device.upload(np.stack(seeds)))

    def draft_block_of(self, *tokens: int, slots: tuple[int, ...] = (0,)) -> F32:
        """The same behind tokens, with an embedding."""
        return self._block(slots, np.array(tokens, np.int32))

    def _block(self, slots: tuple[int, ...], seeds: Any) -> F32:
        result: F32 = self.device.download(self.model.draft_block(slots, seeds))
        return result.copy()


def formula(spec: DFlashSpec, tensors: Mapping[str, F64], features: F64, noise: F64, at: int) -> F64:
    """The draft's forward as a formula, in float64: captured rows [n, captures * hidden] of positions at - n .., rows
    [block, hidden] at `at` .. -> [block, hidden] after the final norm. Visibility is decided for each pair of rows."""

    def rms(x: F64, weight: F64) -> F64:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * weight

    parts = features.reshape(len(features), spec.count, spec.hidden)
    if spec.capture_norms:
        norms = [tensors[f"dflash.aux_hidden_norm.{i}.weight"] for i in range(spec.count)]
        parts = np.stack([rms(parts[:, i], norms[i]) for i in range(spec.count)], axis=1)
    f = rms(
        parts.reshape(len(features), spec.count * spec.hidden) @ tensors["dflash.fc.weight"].T,
        tensors["dflash.hidden_norm.weight"],
    )
    h = noise * spec.embedding_scale
    here = np.arange(at, at + len(noise))
    past = np.arange(at - len(features), at)
    for index, layer in enumerate(spec.layers):
        mixer, ffn = _attention(layer.mixer), layer.ffn
        assert isinstance(ffn, GatedMLP)
        w = {
            name.removeprefix(f"blk.{index}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"blk.{index}.")
        }
        d = mixer.head_dim
        x = rms(h, w["attn_norm"])
        context = rms(f, w["attn_norm"]) if spec.context_norm else f

        def heads(rows: F64, matrix: F64, d: int = d) -> F64:
            return (rows @ matrix.T).reshape(len(rows), len(matrix) // d, d)

        def turn(rows: F64, positions: NDArray[np.int64], base: float | None = None, m: Attention = mixer) -> F64:
            rope = m.rope if base is None else replace(m.rope, base=base)
            angles = positions[:, None, None] * frequencies(rope, None)
            half, size = rope.dims // 2, 1 if rope.yarn is None else 0.1 * np.log(rope.yarn.factor) + 1
            a, b, rest = rows[..., :half], rows[..., half : rope.dims], rows[..., rope.dims :]
            cos, sin = np.cos(angles) * size, np.sin(angles) * size
            return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)

        q = turn(rms(heads(x, w["attn_q"]), w["attn_q_norm"]), here)
        k = turn(rms(heads(x, w["attn_k"]), w["attn_k_norm"]), here)
        k_past = turn(rms(heads(context, w["attn_k"]), w["attn_k_norm"]), past, spec.context_base)
        keys, values = np.concatenate((k_past, k)), np.concatenate((heads(context, w["attn_v"]), heads(x, w["attn_v"])))
        places = np.concatenate((past, here))
        mixed = np.zeros_like(q)
        for row, p in enumerate(here):
            seen = np.array([_sees(int(p), int(j), mixer) for j in places])
            for head in range(mixer.heads):
                kv = head // (mixer.heads // mixer.kv_heads)
                scores = keys[seen, kv] @ q[row, head] * mixer.scale
                weights = np.exp(scores - scores.max())
                mixed[row, head] = weights @ values[seen, kv] / weights.sum()
        if mixer.output_gate:
            mixed = mixed * np.log1p(np.exp((x @ w["attn_gate"].T).reshape(len(x), mixer.heads, -1)))
        h = h + mixed.reshape(len(x), -1) @ w["attn_output"].T
        y = rms(h, w["ffn_norm"])
        gate = y @ w["ffn_gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T
    return rms(h, tensors["output_norm.weight"])


def _sees(query: int, key: int, mixer: Attention) -> bool:
    """Whether a block row at `query` sees a key."""
    if not mixer.bidirectional and key > query:
        return False
    return mixer.window is None or abs(query - key) < mixer.window
