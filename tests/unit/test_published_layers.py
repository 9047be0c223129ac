"""Layers built from the headers of published models: every tensor is asked for in the shape that the file has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from luce.errors import UnsupportedError
from luce.gguf.model_file import FileRows, ModelFile
from luce.gguf.reader import open_gguf
from luce.layers import weights
from luce.layers.build import LayerBuilder
from luce.layers.state import StateOptions
from luce.models.keys import Source
from luce.models.registry import FAMILIES, read_spec
from luce.ops.weight import RawTensor, Weight, WeightPart
from luce.runtime.host import HostDevice
from tests.support.published import PUBLISHED
from tests.support.published_header import Published


@pytest.fixture(autouse=True)
def _weights_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(device: object, tensors: Sequence[RawTensor], experts: int = 1) -> Weight:
        parts = tuple(WeightPart(tensor.raw, tensor.type, 0, tensor.rows) for tensor in tensors)
        return Weight(sum(tensor.rows for tensor in tensors), tensors[0].cols, parts)

    monkeypatch.setattr(weights, "upload_weight", left)
    monkeypatch.setattr(weights, "upload_experts", left)
    # What the hole in the place of the data reads as, without GBs of it: the embeddings of Gemma's layers.
    monkeypatch.setattr(
        FileRows,
        "__getitem__",
        lambda rows, part: np.zeros((len(range(rows.shape[0])[part]), rows.shape[1]), np.uint8),
    )
    # Nor are the embeddings that stay in the file read in advance.
    monkeypatch.setattr(ModelFile, "hold", lambda file, offset, size: np.zeros(size, np.uint8))


def build(path: Path) -> tuple[set[str], set[str]]:
    """Build all layers; names of the tensors that were used, and of those that a load should use."""
    with open_gguf(path) as file, np.errstate(divide="ignore"):
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        builder = LayerBuilder(
            file, spec, range(len(spec.layers)), HostDevice(), StateOptions([1] * len(spec.page_groups), 1)
        )
        builder.embedding()
        if spec.streams > 1:
            builder.split()
        if spec.per_layer:
            builder.per_layer()
        for block in range(len(spec.layers)):
            builder.layer(block)
        builder.head()
        skipped = tuple(f"blk.{block}." for block in spec.skipped_layers)
        return builder.weights.used, {name for name in file.tensors if not name.startswith(skipped)}


@pytest.mark.parametrize("model", [m for m in PUBLISHED if m.architecture in FAMILIES], ids=lambda m: m.name)
def test_all_tensors_are_used(model: Published, tmp_path: Path) -> None:
    used, stored = build(model.write(tmp_path))
    assert used == stored


def test_other_names_of_per_layer_embeddings(tmp_path: Path) -> None:
    model = next(m for m in PUBLISHED if m.name == "Gemma4-E2B")
    other = {
        "per_layer_token_embd.": "per_layer_tok_embd.",
        ".inp_gate.": ".per_layer_inp_gate.",
        ".proj.": ".per_layer_proj.",
        ".post_norm.": ".per_layer_post_norm.",
    }

    def renamed(name: str) -> str:
        for stock, given in other.items():
            name = name.replace(stock, given)
        return name

    tensors = tuple((renamed(name), shape) for name, shape in model.tensors)
    assert len({*tensors} - {*model.tensors}) == 1 + 3 * 35
    used, stored = build(replace(model, tensors=tensors).write(tmp_path))
    assert used == stored
    absent = tuple(tensor for tensor in tensors if "per_layer_tok_embd" not in tensor[0])
    with pytest.raises(UnsupportedError, match=r"tensor per_layer_token_embd\.weight is missing"):
        build(replace(model, tensors=absent).write(tmp_path))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = PUBLISHED[0]
    name = "blk.63.attn_output.weight"
    tensors = tuple((n, (6144, 5376) if n == name else shape) for n, shape in model.tensors)
    path = Published(model.name, model.architecture, model.keys, tensors).write(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"{name} has shape \[6144, 5376\], expected \[6144, 5120\]"):
        build(path)
