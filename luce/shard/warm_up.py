"""What a load runs so that every kernel is built and loaded: steps of each kind, through layers of each kind."""

from __future__ import annotations

from collections.abc import Hashable

from luce.gguf.reader import GGUFFile
from luce.layers.weights import WeightLoader
from luce.models.spec import ModelSpec
from luce.ops.matmul import FEW_ROWS
from luce.runtime.step import StepShape
from luce.shard.shard_options import DeviceLayers, ShardOptions

# Rows of prompts for which different kernels run: of few rows every number that has kernels of its own, of up to
# MANY_ROWS, and of more.
_FEW_PROMPT_ROWS, _PROMPT_ROWS = (1, 2, 4, 8, FEW_ROWS), (64, 512)


def step_shapes(groups: int, options: ShardOptions) -> list[StepShape]:
    """Steps of each kind for which kernels differ: prompts, sequences with a row each, and drafts."""
    tables, seen = (1,) * groups, (False,) * groups
    shapes = [StepShape(n, 1, n, 1, tables, seen) for n in (*_FEW_PROMPT_ROWS, *_PROMPT_ROWS)]
    several = list(range(2, min(options.slots, FEW_ROWS) + 1))
    if options.slots > FEW_ROWS:
        several.append(_PROMPT_ROWS[0])
    shapes += [StepShape(n, n, 1, n, tables, seen) for n in several]
    drafts = [n for n in _FEW_PROMPT_ROWS if n <= options.verify_rows]
    return shapes + [StepShape(n, 1, n, n, tables, seen, pending=True) for n in drafts]


def layers_of_each_kind(
    file: GGUFFile, spec: ModelSpec, own: DeviceLayers, options: ShardOptions, weights: WeightLoader
) -> list[int]:
    """Layers that launch every kernel which the layers `own` launch: the first of each kind, those whose output is
    captured, and the last one, which leaves the stream as the head finds it.

    A step through all 64 layers of a 27B model takes 12 ms of Python, and a load runs 20 of them.
    """
    if any(spec.donor(layer) is not None for layer in range(len(spec.layers))):
        # Layers read keys and values that others, of any kind, have put down in the step.
        return list(own.layers)
    parts: dict[int, set[Hashable]] = {layer: set() for layer in own.layers}
    for name, tensor in file.tensors.items():
        block, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if block == "blk" and number.isdecimal() and int(number) in parts:
            parts[int(number)].add((part, tensor.type, tensor.shape))
    chosen = {own.layers[-1], *(layer for layer in own.layers if layer in options.captured)}
    kinds: list[Hashable] = []
    for layer in own.layers:
        # Nothing is pending before the first layer, so its norm adds nothing.
        first = layer == own.layers[0]
        kind = spec.layers[layer], parts[layer], weights.copied(layer), layer in own.offloaded, first
        if kind not in kinds:
            kinds.append(kind)
            chosen.add(layer)
    return sorted(chosen)
