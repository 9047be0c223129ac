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
        begins = min((info.offset for info in file.tensors.values() if info.part == part), default=0)
        data = file.files[part]
        size = data.size
        digest.update(f"{size} {begins}\n".encode())
        digest.update(data.read(0, begins).data)
        for place in range(_PLACES + 1):
            at = begins + max(0, size - begins - _SAMPLE) * place // _PLACES
            digest.update(data.read(at, min(_SAMPLE, size - at)).data)
    return digest.hexdigest()
