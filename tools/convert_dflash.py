#!/usr/bin/env python3
"""Write a DFlash draft, published as config.json and safetensors, as one GGUF file.

tools/convert_dflash.py CHECKPOINT OUTPUT.gguf                keeps the types of matrices (BF16, F16 or F32)
tools/convert_dflash.py CHECKPOINT OUTPUT.gguf --type q8_0    or quantises them

Norms become F32. The keys that the draft depends on are written: windows, sliding layers, the causal flag, mask id,
captured layers. A draft of an unsupported variant is refused; the message names the key or tensor.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from luce.draft.dflash.safetensors import is_checkpoint, open_checkpoint
from luce.draft.dflash.spec import DFlashSpec, read_dflash
from luce.errors import LuceError, UsageError
from luce.gguf.quants import block_size, dequantize
from luce.gguf.reader import GGUFFile
from luce.models.keys import Source

TYPES = {
    "keep": None,
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or the exit code of the error on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="directory with config.json, or a safetensors file in it")
    parser.add_argument("output", type=Path, help="GGUF file to write")
    parser.add_argument("--type", choices=TYPES, default="keep", help="type of the matrices (default: as stored)")
    given = parser.parse_args(arguments)
    try:
        convert(given.checkpoint, given.output, TYPES[given.type])
    except LuceError as error:
        print(f"convert_dflash: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def convert(checkpoint: Path, output: Path, type: GGMLQuantizationType | None = None) -> None:
    """Write `output`, whole or not at all. Raises LuceError."""
    if not is_checkpoint(checkpoint):
        raise UsageError(f"{checkpoint}: is neither a directory nor a safetensors file")
    with open_checkpoint(checkpoint) as file:
        spec = read_dflash(Source(str(checkpoint), file.metadata, file.tensors))
        partial = output.with_name(output.name + ".part")
        try:
            _write(file, spec, partial, type)
            os.replace(partial, output)
        except OSError as error:
            raise UsageError(f"{output}: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)


def _write(file: GGUFFile, spec: DFlashSpec, path: Path, type: GGMLQuantizationType | None) -> None:
    architecture = file.metadata.string("general.architecture")
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name(file.paths[0].resolve().parent.name)
    counts = {"n_target_layers": spec.count, "n_target_features": spec.count * spec.hidden}
    for name, count in counts.items():
        writer.add_uint32(f"{architecture}.dflash.{name}", count)
    for key in file.metadata:
        if not key.startswith("general."):
            add_key(writer, key, file.metadata[key])
    for name, info in file.tensors.items():
        vector = info.rows == 1
        raw, stored = _as(file.raw(name), info.type, GGMLQuantizationType.F32 if vector else type)
        if len(info.shape) > 2:
            # Only the convolutions' base kernels: F32, as they are added to float32 coefficients.
            floats = dequantize(file.raw(name), info.type)
            writer.add_tensor(name, floats.reshape(*reversed(info.shape)))
            continue
        if vector and stored == GGMLQuantizationType.F32:
            writer.add_tensor(name, raw.reshape(-1).view(np.float32))
        else:
            writer.add_tensor(name, raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a key with the GGUF type that files use for its Python type: uint32, int32 below 0, float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _as(
    raw: NDArray[np.uint8], stored: GGMLQuantizationType, wanted: GGMLQuantizationType | None
) -> tuple[NDArray[np.uint8], GGMLQuantizationType]:
    """A tensor's bytes, uint8 [rows, row_bytes], in another type; F16 if the type's blocks do not divide a row."""
    if wanted is None or wanted == stored:
        return np.ascontiguousarray(raw), stored
    floats = dequantize(raw, stored)
    if floats.shape[1] % block_size(wanted)[0]:
        wanted = GGMLQuantizationType.F16
    # gguf's quantiser returns floats for F32 and F16, bytes for other types.
    return np.ascontiguousarray(gguf.quants.quantize(floats, wanted)).view(np.uint8), wanted


if __name__ == "__main__":
    raise SystemExit(main())
