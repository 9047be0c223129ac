"""Hostile GGUF files: whatever the bytes, reading everything in them succeeds or raises a LuceError."""

from __future__ import annotations

import functools
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.errors import LuceError
from luce.gguf.metadata import Metadata, PackedStrings
from luce.gguf.quants import dequantize
from luce.gguf.reader import GGUFFile, TensorInfo, open_gguf
from luce.models import registry
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.text.tokenizer import Tokenizer
from tests.support.gguf_files import SAMPLE_KEYS, SAMPLE_TENSORS, Array, Key, Raw, Tensor, encode, sample, string
from tests.support.reference import Reference

SAMPLE = sample()
#: characters of a message, whatever the file holds
LONGEST = 2000
GETTERS = ("integer", "number", "string", "boolean", "integers", "numbers", "strings", "booleans")

#: numbers at which arithmetic overflows, alignments break and counts exceed the file
NUMBERS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([2**bits + delta for bits in (7, 8, 15, 16, 31, 32, 40, 60, 63) for delta in (-1, 0, 1)]),
    st.integers(0, 2**64 - 1),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "hostile.gguf"


def read_everything(path: Path) -> None:
    """Open the file and use all of it; whatever is read must be consistent."""
    with open_gguf(path) as file:
        read_metadata(file)
        ends = 0
        for info in sorted(file.tensors.values(), key=lambda info: info.offset):
            assert info.offset >= ends
            ends = info.offset + info.nbytes
            assert ends <= path.stat().st_size
            raw = file.raw(info.name)
            assert raw.shape == (info.rows, info.row_bytes) and raw.size == info.nbytes
            with suppress(LuceError):
                assert dequantize(raw, info.type).shape == (info.rows, info.cols)


def read_metadata(file: GGUFFile) -> None:
    for key in file.metadata:
        with suppress(LuceError):
            assert isinstance(file.metadata[key], bool | int | float | str | list)
        for name in GETTERS:
            with suppress(LuceError):
                getattr(file.metadata, name)(key)


def attempt(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        read_everything(path)
    except LuceError as error:
        assert str(path.parent) in str(error) and "\n" not in str(error) and len(str(error)) <= LONGEST


#: mostly behind the magic and the version: integers() would favour the start
PLACES = st.one_of(st.sampled_from(range(8, len(SAMPLE))), st.sampled_from(range(len(SAMPLE))))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The sample with bytes and numbers overwritten, inserted, removed or cut off."""
    data = bytearray(SAMPLE)
    for _ in range(draw(st.integers(1, 4))):
        at = min(draw(PLACES), len(data))
        kind = draw(st.sampled_from(["byte", "number", "insert", "remove", "move", "cut"]))
        if kind == "byte":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            size = draw(st.sampled_from(["<I", "<Q"]))
            value = struct.pack(size, draw(NUMBERS) % 256 ** struct.calcsize(size))
            data[at : at + len(value)] = value
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "move":
            piece = data[at : at + draw(st.integers(1, 40))]
            to = draw(st.integers(0, len(data)))
            data[to : to + len(piece)] = piece
        else:
            del data[at:]
    return bytes(data)


@settings(max_examples=1500)
@given(data=mutations())
def test_mutated_bytes(path: Path, data: bytes) -> None:
    attempt(path, data)


NAMES = st.one_of(
    st.sampled_from(["general.alignment", "split.count", "split.no", "k", "t"]),
    st.text(max_size=6).map(lambda text: text.encode("utf-8", "ignore")),
    st.sampled_from([b"\xff", b"\n"]),
)
TYPES = st.one_of(st.sampled_from([int(type) for type in GGUFValueType]), NUMBERS.map(lambda n: n % 2**32))
VALUES = st.one_of(
    st.binary(max_size=24).map(Raw),
    NUMBERS.map(lambda n: Raw(struct.pack("<Q", n))),
    st.binary(max_size=8),
    st.builds(
        Array,
        TYPES,
        st.lists(st.one_of(st.binary(max_size=6), st.binary(max_size=8).map(Raw)), max_size=4),
        st.one_of(st.none(), NUMBERS),
    ),
)
KEYS = st.lists(st.one_of(st.builds(Key, NAMES, TYPES, VALUES), st.sampled_from(SAMPLE_KEYS)), max_size=5)
DIMENSIONS = st.one_of(st.sampled_from([1, 2, 32, 64, 256]), NUMBERS)
TENSORS = st.lists(
    st.one_of(
        st.builds(
            Tensor,
            NAMES,
            st.lists(DIMENSIONS, max_size=6).map(tuple),
            st.one_of(st.sampled_from([int(type) for type in GGMLQuantizationType]), NUMBERS.map(lambda n: n % 2**32)),
            st.binary(max_size=300),
            st.one_of(st.none(), st.sampled_from([0, 32, 64]), NUMBERS),
        ),
        st.sampled_from(SAMPLE_TENSORS),
    ),
    max_size=5,
)
COUNTS = st.one_of(st.none(), st.none(), NUMBERS)


@settings(max_examples=1500)
@given(
    keys=KEYS,
    tensors=TENSORS,
    key_count=COUNTS,
    tensor_count=COUNTS,
    version=st.sampled_from([3, 3, 3, 3, 2, 1, 2**32 - 1]),
    alignment=st.sampled_from([32, 32, 1, 8, 256]),
)
def test_mutated_structure(
    path: Path,
    keys: list[Key],
    tensors: list[Tensor],
    key_count: int | None,
    tensor_count: int | None,
    version: int,
    alignment: int,
) -> None:
    attempt(
        path,
        encode(keys, tensors, version=version, key_count=key_count, tensor_count=tensor_count, alignment=alignment),
    )


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_random_bytes_behind_a_valid_start(path: Path, data: bytes) -> None:
    attempt(path, SAMPLE[:8] + data)


FAMILIES = ("qwen3-a-F32", "qwen35-a-F32", "qwen35moe-a-F32", "gemma4-e-F32", "gemma4-moe-F32", "laguna-a-F32")


@functools.cache
def published(name: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The family's keys, arrays of numbers packed as the reader has them, and the tensors of a reference file."""
    with open_gguf(Reference(name).path) as file:
        keys = {key: file.metadata[key] for key in file.metadata if not key.startswith("tokenizer.")}
        packed = {key: np.array(value) if isinstance(value, list) else value for key, value in keys.items()}
        return packed, dict(file.tensors)


@settings(max_examples=600)
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_counts_of_a_model(data: st.DataObject, name: str) -> None:
    """A spec of the file's tensors, or a refusal: whatever the counts are, the work is bounded by the tensors."""
    keys, tensors = published(name)
    own = sorted(key for key, value in keys.items() if not key.startswith("general.") and type(value) is int)
    changes = data.draw(st.dictionaries(st.sampled_from(own), NUMBERS, min_size=1, max_size=3))
    path = Path("/x/model.gguf")
    try:
        spec = read_spec(Source(str(path), Metadata({**keys, **changes}, path), tensors))
    except LuceError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) <= LONGEST
        return
    assert len(spec.layers) <= len(tensors)
    assert tensors["token_embd.weight"].shape == (spec.hidden, spec.vocab)


LONG = "ÿ" * 100_000


@pytest.mark.parametrize(
    "key",
    ["general.architecture", "qwen3.rope.scaling.type", "tokenizer.ggml.model", "tokenizer.ggml.pre"],
)
def test_long_values_are_cut_in_messages(key: str) -> None:
    path = Path("/x/model.gguf")
    keys, tensors = published("qwen3-a-F32")
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": PackedStrings(string("a"), 1)}
    changed = Metadata({**keys, **tokens, key: LONG}, path)
    with pytest.raises(LuceError) as caught:
        read_spec(Source(str(path), changed, tensors))
        Tokenizer(changed)
    # Beside the list of families, which is not the file's.
    text = str(caught.value).replace(", ".join(sorted(registry.FAMILIES)), "")
    assert key in text and len(text) < 400


def test_a_long_message_loses_its_middle() -> None:
    message = str(LuceError(f"{LONG}: key is wrong"))
    assert len(message) <= LONGEST and message.endswith(": key is wrong") and message.startswith("ÿÿ")


@settings(max_examples=300)
@given(number=st.one_of(st.integers(0, 2), NUMBERS), count=st.one_of(st.integers(0, 3), NUMBERS), total=NUMBERS)
def test_split_keys(path: Path, number: int, count: int, total: int) -> None:
    keys = [
        Key("split.no", GGUFValueType.UINT64, number),
        Key("split.count", GGUFValueType.UINT64, count),
        Key("split.tensors.count", GGUFValueType.UINT64, total),
    ]
    attempt(path.with_name("split-00001-of-00002.gguf"), encode(keys, SAMPLE_TENSORS))
