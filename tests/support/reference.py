"""The reference models (tests/reference): files, expected values, tolerances, comparison rules of their README."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import FAMILIES, read_spec
from luce.models.spec import ModelSpec
from luce.ops.matmul import FEW_ROWS
from luce.ops.matmul_int8 import INT8_TYPES

DIRECTORY = Path(__file__).parent.parent / "reference"


@dataclass(frozen=True)
class Reference:
    """One file with what an independent implementation computes for it."""

    name: str

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return DIRECTORY / f"{self.name}.gguf"

    @cached_property
    def expected(self) -> dict[str, NDArray[Any]]:
        """The arrays that README.md of the reference models lists."""
        with np.load(DIRECTORY / f"{self.name}.npz") as arrays:
            return dict(arrays)

    @cached_property
    def spec(self) -> ModelSpec:
        """What the file's family makes of it."""
        with open_gguf(self.path) as file:
            return read_spec(Source(str(self.path), file.metadata, file.tensors))

    def among(self, devices: str) -> str:
        """The first of these devices, separated by commas: no more than the model has layers."""
        return ",".join(devices.split(",")[: len(self.spec.layers)])

    def kind(self, rows: int) -> str:
        """Whose limits a GPU must keep that is given `rows` rows at a time: what products round (luce/ops/matmul.py).

        Up to FEW_ROWS rows meet weights in INT8_TYPES as bytes with a scale for 32; otherwise nothing is rounded to
        less than 11 bits: K, V, and of many rows x and the weights.
        """
        with open_gguf(self.path) as file:
            types = {tensor.type for tensor in file.tensors.values()}
        return "int8_activations" if rows <= FEW_ROWS and types & INT8_TYPES else "bf16_activations"

    def limits(self, kind: str) -> dict[str, Any]:
        """Suggested limits of an implementation of this kind (f32, bf16_activations, ...)."""
        tolerances = json.loads((DIRECTORY / "tolerances.json").read_text())
        limits: dict[str, Any] = tolerances[self.name]["suggested"][kind]
        return limits


@cache
def references() -> tuple[Reference, ...]:
    """Every reference file of a family that Luce has."""
    found = []
    for path in sorted(DIRECTORY.glob("*.gguf")):
        with open_gguf(path) as file:
            if Source(str(path), file.metadata, file.tensors).architecture in FAMILIES:
                found.append(Reference(path.stem))
    return tuple(found)


def errors(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """Normalised mean squared error of each row."""
    difference = actual.astype(np.float64) - expected
    return (difference**2).mean(axis=1) / expected.astype(np.float64).var()


def check_logits(reference: Reference, kind: str, rows: dict[str, NDArray[np.float32]]) -> None:
    """Compare computed logits (by their npz key) with the expected ones under the limits of `kind`."""
    nmse, agree = [], []
    for key, actual in rows.items():
        expected = reference.expected[key]
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        nmse.append(errors(actual, expected))
        agree.append(actual.argmax(axis=1) == expected.argmax(axis=1))
    each, same = np.concatenate(nmse), np.concatenate(agree)
    limits = reference.limits(kind)
    assert np.median(each) <= limits["nmse_median"]
    assert np.quantile(each, 0.9) <= limits["nmse_p90"]
    assert same.mean() >= limits["top1"]


def check_greedy(reference: Reference, key: str, tokens: list[int], error: float) -> int:
    """Tokens (a continuation, maybe shorter than the expected one) must equal the expected ones up to the first step
    whose margin is below 5 times the logit error; an `error` of 0 demands all of them. Returns the steps compared.
    """
    expected = reference.expected[key][: len(tokens)]
    margins = reference.expected[f"{key}_margin"][: len(tokens)]
    unsure = np.flatnonzero(margins < 5 * error)
    steps = int(unsure[0]) if len(unsure) else len(expected)
    assert tokens[:steps] == expected[:steps].tolist()
    return steps
