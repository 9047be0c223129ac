"""A load builds every kernel that steps use: the first use of a new number of rows compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.bench.measure import Stepper
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.runtime.kernels import KernelBuild
from tests.support.emulated import EmulatedDevice

REFERENCE = Path(__file__).parents[1] / "reference"


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
        backend.close()
    assert device.built
    assert not device.late, "\n".join(f"{when}: {build}" for build, when in device.late.items())
