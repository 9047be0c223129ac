"""What a gemma3n file may not say."""

from __future__ import annotations

import numpy as np
import pytest

from luce.errors import UnsupportedError
from luce.gguf.metadata import Metadata, Value
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from tests.support.reference import Reference


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("altup.num_inputs", 2, "is 2, Luce has code for 4 alone"),
        ("altup.active_idx", 1, "is 1, Luce has code for 0 alone"),
        ("activation_sparsity_scale", np.ones(1, np.float32), "has 1 entries for 6 layers"),
        ("activation_sparsity_scale", np.full(6, np.nan, np.float32), "holds a value that is neither finite nor -inf"),
    ],
)
def test_refused(key: str, value: Value, message: str) -> None:
    path = Reference("gemma3n-a-F32").path
    with open_gguf(path) as file:
        own = {name: held for name, held in file.metadata.items() if not name.startswith("tokenizer.")}
        stored = {name: np.array(held) if isinstance(held, list) else held for name, held in own.items()}
        metadata = Metadata({**stored, f"gemma3n.{key}": value}, path)
        with pytest.raises(UnsupportedError, match=rf"gemma3n\.{key} {message}"):
            read_spec(Source(str(path), metadata, file.tensors))
