"""The fixture `make_driver`: a backend of a reference file on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Device
from tests.support.drive import Driver
from tests.support.reference import Reference

MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> Iterator[MakeDriver]:
    with ExitStack() as stack:

        def make(
            reference: Reference,
            devices: Sequence[Device],
            *,
            slots: int = 4,
            weights: Sequence[float] = (),
            kv: KVTypes = AUTO,
            ring: FeatureRing | None = None,
            **options: Any,
        ) -> Driver:
            file = stack.enter_context(open_gguf(reference.path))
            spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
            backend = LayerSplitBackend(
                file,
                spec,
                devices,
                ServingOptions(slots=slots, context=256, layer_split=tuple(weights), kv=kv, **options),
                ring=ring,
            )
            stack.callback(backend.close)
            return Driver(backend)

        yield make
