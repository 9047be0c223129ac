"""A digest that distinguishes two model files without reading all of their weights."""

from __future__ import annotations

import hashlib

from luce.gguf.reader import GGUFFile

# Bytes that are read at each place, and places spread over each file besides its end.
_SAMPLE = 4096
_PLACES = 64


def fingerprint(file: GGUFFile) -> str:
    """32 hex digits of all metadata, the tensor directory, the sizes of the files and samples of the weights.

    It differs for another quantisation of a model, and after further training; damage between the samples does not
    change it. Raises ModelError if a file has changed since it was opened.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in range(len(file.files)):
        begins = tensors_begin(file, part)
        data = file.files[part]
        digest.update(f"{data.size} {begins}\n".encode())
        for begin, end in sampled(data.size, begins):
            digest.update(data.read(begin, end - begin).data)
    return digest.hexdigest()


def tensors_begin(file: GGUFFile, part: int) -> int:
    """Where the tensors of a part begin; 0 if it has none."""
    return min((info.offset for info in file.tensors.values() if info.part == part), default=0)


def sampled(size: int, begins: int) -> list[tuple[int, int]]:
    """[begin, end) of what the fingerprint reads of a file of `size` bytes whose tensors begin at `begins`: the part
    before them, then samples, which may overlap."""
    places = (begins + max(0, size - begins - _SAMPLE) * place // _PLACES for place in range(_PLACES + 1))
    return [(0, begins), *((at, at + min(_SAMPLE, size - at)) for at in places)]
