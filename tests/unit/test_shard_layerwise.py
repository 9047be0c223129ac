"""A text through a model's layers one at a time, on the emulated GPU as in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from luce.gguf.reader import open_gguf
from luce.runtime.host import HostDevice
from luce.shard.layerwise import LayerwiseModel, Reading
from tests.support.emulated import EmulatedDevice
from tests.support.reference import Reference


@pytest.mark.emulated
@pytest.mark.parametrize("rotated", [False, True])
def test_kernels_compute_the_attention_of_the_last_rows(rotated: bool) -> None:
    small = Reference("qwen3-a-F32")
    tokens = np.random.default_rng(0).integers(0, small.spec.vocab, 37).astype(np.int32)
    device = EmulatedDevice()
    found = []
    with open_gguf(small.path) as file:
        for each in (device, HostDevice()):
            model = LayerwiseModel(file, small.spec, each, Reading(16), longest=64)
            found.append(model.tail_attention(tokens, 8, rotated=rotated))
            model.close()
    device.close()
    # Keys are fp16 on the device, and float32 in NumPy.
    np.testing.assert_allclose(found[0], found[1], rtol=0.02, atol=1e-4)
