"""A load builds every kernel that steps use: the first use of a new number of rows compiles nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.bench.measure import Stepper
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.routed_experts import ExpertOffload
from luce.layers.weights import WeightLoader
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.matmul import FEW_ROWS, MANY_ROWS
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.host import HostDevice
from luce.runtime.kernels import KernelBuild
from luce.shard import local
from luce.shard.shard_options import DeviceLayers
from luce.shard.warm_up import layers_of_each_kind
from tests.support.drive import Driver
from tests.support.emulated import EmulatedDevice
from tests.support.wide_model import open_wide

REFERENCE = Path(__file__).parents[1] / "reference"
#: models with layers of several kinds; the other families run in the nightly check
_SEVERAL = ("qwen35-a-Q8_0", "qwen3-a-MIX", "deepseek2-a-F32", "gptoss-a-F32", "laguna-a-F32", "lfm2moe-a-F32")
MODELS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in _SEVERAL else pytest.mark.slow)
    for path in sorted(REFERENCE.glob("*-[abe]*-*.gguf"))
]


class Recorder(EmulatedDevice):
    """Writes down what would be built, and runs nothing: `built` by a load, `late` what steps want besides."""

    def __init__(self) -> None:
        super().__init__()
        self.built: set[KernelBuild] = set()
        self.late: dict[KernelBuild, str] = {}
        self.doing = ""

    def warm_up(self, work: Callable[[], object]) -> None:
        self.doing = "warm up"
        work()
        self.doing = ""

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        defines: Mapping[str, int | str] | None = None,
        shared: int = 0,
    ) -> None:
        build = KernelBuild.of(source, defines)
        if self.doing in ("", "warm up"):
            self.built.add(build)
        elif build not in self.built:
            self.late.setdefault(build, self.doing)


@pytest.mark.parametrize(
    ("name", "sequences"),
    [("qwen35-a-Q8_0", 1), ("qwen35-a-Q8_0", 18), ("qwen3-b-Q4_K_M", 1), ("qwen35moe-a-Q4_0", 18)],
)
def test_the_first_use_of_a_number_of_rows_compiles_nothing(name: str, sequences: int) -> None:
    device = Recorder()
    with open_gguf(REFERENCE / f"{name}.gguf") as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        options = ServingOptions(context=512, chunk=256, slots=sequences, verify_rows=16)
        backend = LayerSplitBackend(file, spec, [device], options)
        stepper = Stepper(backend, 256)
        for rows in (1, 2, 3, 5, 9, 16, 17, 143, 144):
            device.doing = f"a prompt of {rows} rows"
            stepper.move_to(0, 0)
            stepper.read(0, rows)
        for rows in (2, 3, 5, 9, 16):
            device.doing = f"{rows} rows with an output each"
            stepper.verify(0, rows)
        for slots in (n for n in (1, 2, 3, 8, 9, 16, 17, 18) if n <= sequences):
            device.doing = f"{slots} sequences"
            for slot in range(slots):
                stepper.move_to(slot, 4)
            stepper.decode(range(slots))
        if sequences > 1:
            device.doing = "short prompts that share a step"
            driver = Driver(backend)
            step = driver.step(*((driver.start(), np.zeros(rows, np.int32)) for rows in (17, 143, 60)))
            wanted = np.array([span.start + span.rows - 1 for span in step.spans], np.int32)
            backend.forward(dataclasses.replace(step, output_rows=wanted, needs_logits=np.zeros(3, np.bool_)))
        device.doing = "drawing a token"
        forward = backend.forward
        draws = RowDraws.of([Draw(1, 0.7, 40)])
        backend.forward = lambda step, queued=lambda: None: forward(dataclasses.replace(step, draws=draws), queued)  # type: ignore[method-assign]
        stepper.decode([0])
        backend.close()
    assert device.built
    assert not device.late, "\n".join(f"{when}: {build}" for build, when in device.late.items())


def test_more_replies_than_a_short_prompt_has_rows_compile_nothing(tmp_path: Path) -> None:
    device, count = Recorder(), MANY_ROWS + 1
    with ExitStack() as stack:
        driver = open_wide(stack, tmp_path, device, slots=count, context=64)
        assert driver.backend.capacity.invariant_rows > FEW_ROWS
        stepper = Stepper(driver.backend, 64)
        for sequences in (FEW_ROWS + 1, count):
            device.doing = f"{sequences} sequences"
            for slot in range(sequences):
                stepper.move_to(slot, 4)
            stepper.decode(range(sequences))
    assert device.built
    assert not device.late, "\n".join(f"{when}: {build}" for build, when in device.late.items())


def _built(path: Path, shards: int, **options: Any) -> list[set[KernelBuild]]:
    """The builds of each shard's load."""
    devices = [Recorder() for _ in range(shards)]
    with open_gguf(path) as file:
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        LayerSplitBackend(file, spec, devices, ServingOptions(context=512, chunk=256, **options)).close()
    return [device.built for device in devices]


@pytest.mark.parametrize("path", MODELS)
def test_layers_of_each_kind_launch_what_all_layers_launch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"slots": 2, "verify_rows": 4, "captured": (1,)}
    some = [_built(path, shards, **options) for shards in (1, 2)]
    monkeypatch.setattr(local, "layers_of_each_kind", lambda file, spec, own, options, weights: list(own.layers))
    assert some == [_built(path, shards, **options) for shards in (1, 2)]


@pytest.fixture
def plain() -> Iterator[tuple[GGUFFile, ModelSpec]]:
    """A model of six layers of one kind."""
    with open_gguf(REFERENCE / "qwen3-a-F32.gguf") as file:
        yield file, read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ("nothing", [0, 1, 5]),
        ("type", [0, 1, 3, 5]),
        ("missing", [0, 1, 3, 5]),
        ("spec", [0, 1, 3, 5]),
        ("copied", [0, 1, 3, 5]),
        ("offloaded", [0, 1, 3, 5]),
        ("captured", [0, 1, 3, 5]),
        ("donor", [0, 1, 2, 3, 4, 5]),
        ("second shard", [2, 3, 5]),
    ],
)
def test_a_layer_that_differs_is_of_another_kind(
    plain: tuple[GGUFFile, ModelSpec], change: str, chosen: list[int]
) -> None:
    file, spec = plain
    layers, tensors, captured, weights = [*spec.layers], dict(file.tensors), (), WeightLoader(file, HostDevice())
    own = DeviceLayers(HostDevice(), range(2 if change == "second shard" else 0, 6))
    match change:
        case "type":
            name = "blk.3.ffn_down.weight"
            tensors[name] = dataclasses.replace(tensors[name], type=GGMLQuantizationType.Q6_K)
        case "missing":
            del tensors["blk.3.attn_q_norm.weight"]
        case "spec" | "donor":
            changed = {"window": 64} if change == "spec" else {"donor": 2}
            layers[3] = dataclasses.replace(layers[3], mixer=dataclasses.replace(layers[3].mixer, **changed))
        case "copied":
            shape = file.tensors["blk.3.ffn_down.weight"].shape
            weights.matrix(["blk.3.ffn_down.weight"], shape[0], [shape[1]]).copy = np.zeros((1, 1), np.float16)
        case "offloaded":
            own = dataclasses.replace(own, offload=ExpertOffload(HostDevice(), frozenset({3})))
        case "captured":
            captured = (3,)
    changed_file = cast(GGUFFile, SimpleNamespace(tensors=tensors))
    options = ServingOptions(captured=captured)
    spec = dataclasses.replace(spec, layers=tuple(layers))
    assert layers_of_each_kind(changed_file, spec, own, options, weights) == chosen
