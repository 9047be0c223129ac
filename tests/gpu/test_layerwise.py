"""The scores of a text by a model on a real GPU, as in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from luce.compress.scorer import TextScorer
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice
from luce.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "models" / "tiny" / "drafter.gguf"


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("length", [13, 512, 2051])
def test_scores_agree(gpu: GpuDevice, length: int, rotated: bool) -> None:
    with open_gguf(TINY) as file:
        spec = read_spec(Source(str(TINY), file.metadata, file.tensors))
        text = (TINY.parents[2] / "LICENSE").read_text()
        tokens = np.array(Tokenizer(file.metadata).encode(text, specials=False)[:length], np.int32)
        found = []
        for device in (gpu, HostDevice()):
            scorer = TextScorer(file, spec, device)
            found.append(scorer(tokens, rotated=rotated))
            scorer.close()
    # Keys are fp16 on the GPU, and the products of long steps too.
    np.testing.assert_allclose(found[0], found[1], rtol=0.1, atol=1e-3)
