"""The GGUF reader against gguf.GGUFReader, and against files that are broken in one place each."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from luce.errors import FormatError, ModelError, UnsupportedError
from luce.gguf.quants import dequantize
from luce.gguf.reader import model_stem, open_gguf
from tests.support.gguf_files import (
    SAMPLE_KEYS,
    SAMPLE_TENSORS,
    Array,
    Key,
    Raw,
    Tensor,
    encode,
    floats,
    sample,
    string,
    write_split,
)

REFERENCE = sorted((Path(__file__).parent.parent / "reference").glob("*.gguf"))


def assert_same_as_gguf(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        # The oracle adds the header's fields under these names.
        keys = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(keys)
        for key, field in keys.items():
            assert file.metadata[key] == field.contents(), key
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            info = file.tensors[tensor.name]
            raw = file.raw(tensor.name)
            assert info.shape == tuple(tensor.shape.tolist())
            assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
            assert raw.shape == (info.rows, info.row_bytes)
            assert info.rows * info.cols == tensor.n_elements
            assert raw.tobytes() == tensor.data.tobytes()
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(dequantize(raw, info.type), expected.reshape(info.rows, info.cols))


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.stem)
def test_reference_files(path: Path) -> None:
    assert_same_as_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path: Path, version: int) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample(version=version))
    assert_same_as_gguf(path)
    with open_gguf(path) as file:
        assert file.paths == (path,)
        assert file.metadata["sample.strings"] == ["a", "", "größe", "日本"]
        assert file.metadata["sample.booleans"] == [True, False, True]
        np.testing.assert_array_equal(file.raw("two").view(np.float32), 100 + np.arange(12.0).reshape(3, 4))


def test_empty_arrays_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "empty-arrays.gguf"
    keys = [
        Key("strings", GGUFValueType.ARRAY, Array(GGUFValueType.STRING, [])),
        Key("integers", GGUFValueType.ARRAY, Array(GGUFValueType.INT32, [])),
    ]
    path.write_bytes(encode(keys, alignment=1))
    with open_gguf(path) as file:
        assert dict(file.metadata) == {"strings": [], "integers": []}
        assert file.metadata.integers("integers") == []
        assert not file.tensors


def test_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    path = tmp_path / "unpadded.gguf"
    path.write_bytes(encode(tensors=[Tensor("t", (5,), data=floats(5))]))
    with open_gguf(path) as file:
        assert file.tensors["t"].offset + 20 == path.stat().st_size
        assert file.raw("t").view(np.float32).tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("alignment", [1, 4, 4096])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    key = Key("general.alignment", GGUFValueType.UINT32, alignment)
    tensors = [Tensor("a", (3,), data=floats(3)), Tensor("bb", (2, 2), data=floats(4, first=7))]
    path.write_bytes(encode([key], tensors, alignment=alignment))
    assert_same_as_gguf(path)


def test_raw_and_metadata_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())
    with open_gguf(path) as file:
        raw = file.raw("one")
        metadata = file.metadata
    file.close()
    assert raw.view(np.float32).tolist() == [[0, 1, 2, 3, 4]]
    assert metadata.strings("sample.strings")[3] == "日本"


def test_the_file_is_not_mapped_and_close_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())

    def links() -> list[str]:
        return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]

    with open_gguf(path) as file:
        file.raw("one")
        assert str(path) in links() and str(path) not in Path("/proc/self/maps").read_text()
    assert str(path) not in links()


@pytest.mark.parametrize("change", ["truncated", "written", "emptied"])
def test_a_file_that_changes_is_noticed_by_the_next_read(change: str, tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())
    os.utime(path, ns=(10**18, 10**18))
    with open_gguf(path) as file:
        file.raw("one")
        if change == "written":
            with path.open("r+b") as other:
                other.seek(file.tensors["two"].offset)
                other.write(bytes(48))
        else:
            os.truncate(path, path.stat().st_size - 1 if change == "truncated" else 0)
        for read in (file.raw, lambda name: file.rows(name)[:1]):
            with pytest.raises(ModelError, match=r"sample\.gguf: was changed while it was read; replace a model file"):
                read("one")


def test_a_file_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())
    with open_gguf(path) as file:
        (tmp_path / "new").write_bytes(bytes(1000))
        file.files[0].check_path()
        (tmp_path / "new").replace(path)
        assert file.raw("one").view(np.float32).tolist() == [[0, 1, 2, 3, 4]]
        with pytest.raises(ModelError, match=r"sample\.gguf: is another file than the one that is loaded"):
            file.files[0].check_path()


def test_missing_tensor(tmp_path: Path) -> None:
    path = tmp_path / "sample.gguf"
    path.write_bytes(sample())
    with open_gguf(path) as file, pytest.raises(FormatError, match=r"sample\.gguf: tensor 'output.weight' is missing"):
        file.raw("output.weight")


def test_big_vocabulary(tmp_path: Path) -> None:
    tokens = [f"token {index} é" for index in range(250_000)]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(encode([Key("tokens", GGUFValueType.ARRAY, Array(GGUFValueType.STRING, tokens))]))
    tracemalloc.start()
    try:
        file = open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The bytes that are read, and the values of them.
    assert peak < 2.2 * path.stat().st_size
    assert file.metadata.strings("tokens") == tokens


# Files that cannot be opened at all.


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    for name, message in [
        ("absent", "No such file"),
        (".", "is a directory"),
        ("fifo", "is not a regular file"),
        ("loop", "Too many levels"),
        ("empty/file", "Not a directory"),
        ("empty", "is empty"),
    ]:
        with pytest.raises(ModelError) as caught:
            open_gguf(tmp_path / name)
        assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(sample())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # chmod would not stop tests that run as root.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelError, match=r"secret\.gguf: Permission denied"):
        open_gguf(path)


# Files broken in one place: each gives one line that names the file and the item.

_U32, _STRING, _ARRAY, _BOOL = GGUFValueType.UINT32, GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.BOOL
_T = Tensor("t", (4,), data=floats(4))

BROKEN = {
    "magic": (encode(magic=b"GGML"), "not a GGUF file"),
    "html": (b"<!DOCTYPE html>", "not a GGUF file"),
    "short magic": (b"GG", "not a GGUF file"),
    "no version": (b"GGUF\3\0", "version"),
    "no header": (b"GGUF" + struct.pack("<IQ", 3, 0), "header"),
    "2^60 tensors": (encode(tensor_count=2**60), f"claims {2**60} tensors"),
    "2^60 keys": (encode(key_count=2**60), f"claims {2**60} metadata keys"),
    "missing tensors": (encode(tensor_count=10, alignment=1), "name of tensor 0"),
    "missing keys": (encode(key_count=10, alignment=1), "name of metadata key 0"),
    "key length": (encode([Key("k", _U32, 1)])[:24] + struct.pack("<Q", 2**63) + bytes(99), "metadata key 0"),
    "key not UTF-8": (encode([Key(b"k\xff", _U32, 1)]), "name of metadata key 0 is not UTF-8"),
    "key twice": (encode([Key("same", _U32, 1), Key("same", _U32, 1)]), "key 'same' occurs twice"),
    "value type": (encode([Key("k", 99, Raw(bytes(64)))]), "key 'k' has type 99"),
    "value missing": (encode([Key("k", GGUFValueType.UINT64, Raw(b""))], alignment=1), "key 'k' passes the end"),
    "bool 2": (encode([Key("flag", _BOOL, 2)]), "key 'flag' is a boolean of value 2"),
    "bools 3": (encode([Key("flags", _ARRAY, Array(_BOOL, [0, 3]))]), "key 'flags' has a boolean of value 3"),
    "string length": (encode([Key("k", _STRING, Raw(struct.pack("<Q", 2**60)))]), "key 'k' passes the end"),
    "string not UTF-8": (encode([Key("k", _STRING, b"\xc3\x28")]), "key 'k' is not UTF-8"),
    "array count": (encode([Key("k", _ARRAY, Array(_U32, [1], 2**60))]), "key 'k' passes the end"),
    "array count 2^64": (encode([Key("k", _ARRAY, Array(_U32, [1], 2**64 - 1))]), "key 'k' passes the end"),
    "strings count": (encode([Key("k", _ARRAY, Array(_STRING, ["a"], 2**60))]), "key 'k' passes the end"),
    "strings length": (
        encode([Key("k", _ARRAY, Array(_STRING, [Raw(struct.pack("<Q", 2**64 - 1))], 2))]),
        "key 'k' passes the end",
    ),
    "last string's length": (
        encode([Key("k", _ARRAY, Array(_STRING, [Raw(struct.pack("<Q", 2**64 - 1))]))]),
        "key 'k' passes the end",
    ),
    "array type": (encode([Key("k", _ARRAY, Array(77, [Raw(bytes(64))], 1))]), "key 'k' has type 77"),
    "nested arrays": (
        encode([Key("k", _ARRAY, Raw(struct.pack("<IQ", _ARRAY, 1) * 100_000))]),
        "key 'k' is an array of arrays",
    ),
    "alignment 0": (encode([Key("general.alignment", _U32, 0)]), "general.alignment is 0"),
    "alignment 24": (encode([Key("general.alignment", _U32, 24)]), "general.alignment is 24"),
    "alignment -32": (encode([Key("general.alignment", GGUFValueType.INT32, -32)]), "general.alignment is -32"),
    "alignment text": (encode([Key("general.alignment", _STRING, "32")]), "'general.alignment' is a string"),
    "alignment 2^31": (encode([Key("general.alignment", _U32, 2**31)], [_T]), "tensor 't' passes the end"),
    "tensor not UTF-8": (encode(tensors=[Tensor(b"\x80", (4,), data=floats(4))]), "name of tensor 0 is not UTF-8"),
    "tensor twice": (encode(tensors=[_T, _T]), "tensor 't' occurs twice"),
    "no dimensions": (encode(tensors=[Tensor("t", (), data=floats(1))]), "tensor 't' has 0 dimensions"),
    "5 dimensions": (encode(tensors=[Tensor("t", (1,) * 5, data=floats(1))]), "tensor 't' has 5 dimensions"),
    "2^32 dimensions": (
        encode()[:8] + struct.pack("<QQ", 1, 0) + string("t") + b"\xff" * 4,
        f"tensor 't' has {2**32 - 1} dimensions",
    ),
    "ne0 0": (encode(tensors=[Tensor("t", (0, 4))]), "tensor 't' has an empty dimension"),
    "ne2 0": (encode(tensors=[Tensor("t", (4, 4, 0))]), "tensor 't' has an empty dimension"),
    "product overflows": (encode(tensors=[Tensor("t", (2**40, 2**40), data=floats(4))]), "tensor 't' passes the end"),
    # 2^64 elements, so 0 for arithmetic modulo 2^64.
    "product wraps to 0": (encode(tensors=[Tensor("t", (2**32, 2**32))]), "tensor 't' passes the end"),
    "offset 2^64": (
        encode(tensors=[Tensor("t", (4,), data=floats(4), offset=2**64 - 32)]),
        "tensor 't' passes the end",
    ),
    "misaligned": (encode(tensors=[Tensor("t", (4,), data=floats(99), offset=16)]), "tensor 't' has offset 16"),
    "part of a block": (
        encode(tensors=[Tensor("t", (33,), GGMLQuantizationType.Q8_0, bytes(99))]),
        "tensor 't' has rows of 33 elements",
    ),
    "row not whole blocks": (
        encode(tensors=[Tensor("t", (16, 2), GGMLQuantizationType.Q4_0, bytes(99))]),
        "tensor 't' has rows of 16 elements",
    ),
    "no data": (encode(tensors=[Tensor("t", (4,))]), "tensor 't' passes the end"),
    "overlap": (
        encode(tensors=[Tensor("a", (99,), data=floats(99)), Tensor("b", (4,), offset=32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "overlap of a byte": (
        encode(
            [Key("general.alignment", _U32, 1)],
            [Tensor("a", (4,), data=floats(4)), Tensor("b", (1,), data=floats(1), offset=15)],
            alignment=1,
        ),
        "tensors 'a' and 'b' overlap",
    ),
    "same place": (
        encode(tensors=[Tensor("a", (4,), data=floats(4)), Tensor("b", (4,), offset=0)]),
        "tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < len(data) + 200_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encode(version=1), "version 1"),
        (encode(version=4), "version 4"),
        (encode(version=0), "version 0"),
        (encode(version=3 << 24), "big-endian"),
        (encode(tensors=[Tensor("t", (4,), 4, floats(4))]), "tensor 't' has unknown type 4"),
        (encode(tensors=[Tensor("t", (4,), 2**32 - 1, floats(4))]), f"tensor 't' has unknown type {2**32 - 1}"),
    ],
)
def test_unsupported_file(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "unsupported.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_big_endian_file_of_gguf(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "sample", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"big\.gguf: is a big-endian"):
        open_gguf(path)


def test_hostile_names_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "names.gguf"
    path.write_bytes(encode([Key("\n" * 50_000, 99, Raw(b""))]))
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_truncated_anywhere(tmp_path: Path) -> None:
    # The last tensor needs every byte, so no prefix is a valid file.
    data = sample()
    path = tmp_path / "truncated.gguf"
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"truncated\.gguf: "):
            open_gguf(path)


# Split files.


def test_split_opens_from_any_part(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "model", tensors=5, per_file=2)
    assert [path.name for path in paths] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path in paths:
        with open_gguf(path) as file:
            assert file.paths == tuple(paths)
            assert file.metadata.integer("sample.width") == 3
            assert list(file.tensors) == [f"t{index}" for index in range(5)]
            assert [info.part for info in file.tensors.values()] == [0, 0, 1, 1, 2]
            for index in range(5):
                assert file.raw(f"t{index}").view(np.float32).tolist() == [[10 * index + i for i in range(3)]]


def test_split_with_metadata_only_in_the_first_part(tmp_path: Path) -> None:
    def part(number: int, tensors: list[Tensor]) -> bytes:
        keys = [
            Key("split.no", GGUFValueType.UINT16, number),
            Key("split.count", GGUFValueType.UINT16, 2),
            Key("split.tensors.count", GGUFValueType.INT32, 1),
        ]
        return encode([*SAMPLE_KEYS, *keys] if number == 0 else keys, tensors)

    (tmp_path / "m-00001-of-00002.gguf").write_bytes(part(0, []))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(part(1, [_T]))
    with open_gguf(tmp_path / "m-00002-of-00002.gguf") as file:
        assert file.metadata.string("general.architecture") == "sample"
        assert file.raw("t").view(np.float32).tolist() == [[0, 1, 2, 3]]


def test_merged_file_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(encode([Key("split.count", GGUFValueType.UINT16, 0)], SAMPLE_TENSORS))
    with open_gguf(path) as file:
        assert file.paths == (path,) and len(file.tensors) == len(SAMPLE_TENSORS)


def test_split_part_missing(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "model", tensors=3, per_file=1)
    paths[1].unlink()
    with pytest.raises(FormatError) as caught:
        open_gguf(paths[2])
    assert str(caught.value).startswith(f"{paths[1]}: is missing")


def test_split_part_renamed(tmp_path: Path) -> None:
    path = write_split(tmp_path, "model", tensors=2, per_file=1)[0]
    for name in ("model.gguf", "model-00001-of-00003.gguf", "model-1-of-2.gguf", "model-00003-of-00002.gguf"):
        path = path.rename(tmp_path / name)
        with pytest.raises(FormatError) as caught:
            open_gguf(path)
        assert str(caught.value) == f"{path}: is part of 2 files, so its name must end in -NNNNN-of-00002.gguf"


def test_split_part_twice(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "model", tensors=3, per_file=1)
    shutil.copy(paths[0], paths[1])
    with pytest.raises(FormatError) as caught:
        open_gguf(paths[0])
    assert str(caught.value).startswith(f"{paths[1]}: split.no is 0")


def test_a_split_model_is_named_without_the_part(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "model", tensors=3, per_file=1)
    with open_gguf(paths[1]) as file:
        assert file.name == model_stem(paths[2]) == "model"
    assert model_stem(Path("some.Q4_K_M.gguf")) == "some.Q4_K_M"


def test_split_foreign_parts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = write_split(tmp_path, "model", tensors=3, per_file=1)
    others = {
        "another count of parts": write_split(tmp_path / "other", "four", tensors=4, per_file=1)[1],
        "another count of tensors": write_split(tmp_path / "other", "six", tensors=6, per_file=2)[1],
        "no part": tmp_path / "other" / "whole.gguf",
        "not GGUF": tmp_path / "other" / "text.gguf",
    }
    others["no part"].write_bytes(sample())
    others["not GGUF"].write_text("version https://git-lfs.example")
    for other in others.values():
        shutil.copy(other, paths[1])
        with pytest.raises(FormatError) as caught:
            open_gguf(paths[0])
        assert str(caught.value).startswith(f"{paths[1]}: ")


def _split_pair(directory: Path, tensors: tuple[str, str], total: int) -> Path:
    for number, name in enumerate(tensors):
        keys = [
            Key("split.no", GGUFValueType.UINT16, number),
            Key("split.count", GGUFValueType.UINT16, 2),
            Key("split.tensors.count", GGUFValueType.INT32, total),
        ]
        path = directory / f"pair-0000{number + 1}-of-00002.gguf"
        path.write_bytes(encode(keys, [Tensor(name, (4,), data=floats(4))]))
    return path


def test_split_tensor_in_two_parts(tmp_path: Path) -> None:
    path = _split_pair(tmp_path, ("t", "t"), 2)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    assert str(caught.value) == f"{path}: tensor 't' is also in pair-00001-of-00002.gguf"


def test_split_tensors_missing(tmp_path: Path) -> None:
    path = _split_pair(tmp_path, ("a", "b"), 3)
    with pytest.raises(FormatError, match=r"split\.tensors\.count is 3, the parts hold 2"):
        open_gguf(path)
