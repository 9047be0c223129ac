"""Per-layer embeddings of a shard: a part of the table's columns gives the same values as the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.tensors import tensor_bytes
from luce.layers.weights import WeightLoader
from luce.ops.embedding import embed
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference

NAME, ROWS, COLS = "per_layer_token_embd.weight", 30, 128
TYPE = GGMLQuantizationType.Q8_0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GGUFFile]:
    values = np.random.default_rng(1).standard_normal((ROWS, COLS)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "table.gguf", "gemma4")
    writer.add_tensor(NAME, gguf.quants.quantize(values, TYPE), raw_dtype=TYPE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "table.gguf") as opened:
        yield opened


@pytest.mark.parametrize("columns", [range(32), range(32, 128), range(128), range(96, 128)])
def test_columns_of_a_table(file: GGUFFile, emulated: Device, columns: range) -> None:
    ids = np.array([0, 29, 7, 7], np.int32)
    expected = gguf.quants.dequantize(np.array(file.raw(NAME)), TYPE)[ids][:, columns.start : columns.stop]
    for device in (HostDevice(), emulated):
        loader = WeightLoader(file, device)
        table = loader.table(NAME, COLS, ROWS, columns)
        assert (table.rows, table.cols) == (ROWS, len(columns))
        assert (device.download(embed(device, table, device.upload(ids))) == expected).all()
        assert loader.nbytes == file.tensors[NAME].nbytes * len(columns) // COLS


@pytest.mark.parametrize(
    ("width", "layers", "columns"),
    [
        (32, range(1, 3), 64),
        (64, range(1, 2), 64),
        # Two layers share a block of 32: with layer 1 comes 0, with 1 and 2 come all four of a pair's.
        (16, range(1, 2), 32),
        (16, range(1, 3), 64),
        (16, range(8), 128),
    ],
)
def test_layers_come_in_whole_blocks(file: GGUFFile, width: int, layers: range, columns: int) -> None:
    spec = Reference("gemma4-e-F32").spec
    spec = replace(spec, per_layer=width, layers=spec.layers[: COLS // width])
    taken = tensor_bytes(file, spec, layers, EmulatedDevice(), layers_only=True)
    assert taken == file.tensors[NAME].nbytes * columns // COLS
