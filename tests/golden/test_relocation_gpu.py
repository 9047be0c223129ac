"""A model moves between a GPU and the CPU during a reply: layers that stay on the GPU are not read again."""

from __future__ import annotations

from typing import Any

import pytest

from luce.runtime.gpu import GpuDevice
from tests.support.reference import Reference
from tests.support.relocation import load, moving

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3-a-F32", "qwen35-a-F32", "gemma4-e-F32"])
def test_layers_stay_on_the_gpu(name: str, gpu: GpuDevice) -> None:
    reference = Reference(name)
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    here, layers = str(gpu.name), len(reference.spec.layers)
    with load(reference, cluster="home", cluster_resume=5, target_devices=(here,)) as model:
        whole = model.backend.loaded.read
        assert whole > 0

        def moved(tokens: int, devices: tuple[str, ...], *split: float) -> tuple[int, int]:
            settings: dict[str, Any] = {"target_devices": devices, "target_layer_split": split}
            assert moving(model, prompt, len(expected), {tokens: settings}) == expected
            return model.backend.loaded.read, model.backend.loaded.kept

        read, kept = moved(3, (here, "cpu:0"), layers - 1.0, 1.0)
        assert read > 0 and kept > 0
        again, rest = moved(5, (here,))
        assert again > 0 and rest >= kept
        assert moved(7, (here,))[0] < again
