"""Figures of a device for a model with several types of weights, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as T

from luce.backend.device_figures import device_figures, weight_types
from luce.ops.weight import KERNEL_TYPES
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile, Observed, Phase
from luce.runtime.host import HostDevice


@dataclass
class Tensor:
    type: T
    nbytes: int


def types(*tensors: tuple[T, int]) -> dict[T, int]:
    made: Any = [Tensor(*tensor) for tensor in tensors]
    return weight_types(made)


def test_rare_types_count_as_the_type_with_the_nearest_bits() -> None:
    # Q5_K has 5.5 bits: nearer to Q4_K's 4.5 than to Q8_0's 8.5.
    assert types((T.Q4_K, 900), (T.Q8_0, 100), (T.Q5_K, 40), (T.F32, 3)) == {T.Q4_K: 940, T.Q8_0: 103}


def test_types_without_a_kernel_count_as_the_type_that_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luce.backend.device_figures.KERNEL_TYPES", KERNEL_TYPES - {T.TQ2_0})
    assert types((T.TQ2_0, 500), (T.Q8_0, 500)) == {T.F16: 500, T.Q8_0: 500}


def test_rates_are_those_of_all_bytes_and_of_all_products() -> None:
    quants = FormatProfile(100.0, {1: 10.0, 512: 80.0}, 50.0, 0.1, False)
    halves = FormatProfile(50.0, {1: 40.0, 512: 80.0}, None, 0.1, False)
    profile = DeviceProfile("cuda:0", "x", 0.0, 3.0, 2.0, LinkProfile(0.5, 7.0), {"Q8_0": quants, "F16": halves})
    # 34 bytes are 32 elements of Q8_0, 64 bytes 32 of F16.
    found = device_figures(HostDevice(), profile, {T.Q8_0: 34, T.F16: 64}, free=9, expand=1.5)
    assert found.read == pytest.approx(98 / (34 / 100 + 64 / 50))
    assert dict(found.rates) == pytest.approx({1: 64 / (32 / 10 + 32 / 40), 512: 80.0})
    assert found.unpack == pytest.approx(50.0)
    assert (found.launch, found.step, found.way.latency, found.way.bandwidth) == (2.0, 3.0, 0.5, 7.0)
    assert (found.free, found.expand, found.host, found.name) == (9, 1.5, True, "cpu:0")


def test_what_servers_observed_corrects_each_phase_within_limits() -> None:
    quants = FormatProfile(100.0, {1: 10.0}, 50.0, 0.1, False, {1: 0.5, 16: 0.25})
    profile = DeviceProfile(
        "cuda:0", "x", 0.0, 3.0, 2.0, LinkProfile(0.5, 7.0), {"Q8_0": quants}, 40.0, 20.0, 15.0, 10.0
    )

    def found(ratio: float) -> Any:
        observed = replace(profile, observed={"decode": Observed(ratio, 1000), "prompt": Observed(2 * ratio, 16)})
        return device_figures(HostDevice(), observed, {T.Q8_0: 34}, free=9, expand=1.0)

    none = device_figures(HostDevice(), profile, {T.Q8_0: 34}, free=9, expand=1.0)
    assert (none.decode_ratio, none.prompt_ratio) == (1.0, 1.0)
    slow = found(0.75)
    assert (slow.decode_ratio, slow.prompt_ratio) == (slow.ratio("decode"), slow.ratio("prompt")) == (0.75, 1.5)
    # The figures are the measured ones.
    assert replace(slow, decode_ratio=1.0, prompt_ratio=1.0) == none
    assert (found(9.0).decode_ratio, found(0.1).prompt_ratio) == (2.0, 0.5)


def test_prompts_in_int8_have_their_own_rates() -> None:
    int8 = FormatProfile(100.0, {1: 10.0, 512: 80.0}, 50.0, 0.1, False, int8={512: 160.0}, int8_unpack=20.0)
    halves = FormatProfile(50.0, {1: 40.0, 512: 80.0}, None, 0.1, False)
    seen: dict[Phase, Observed] = {"decode": Observed(1.5, 1000), "prompt": Observed(0.5, 16)}
    formats, way = {"Q8_0": int8, "F16": halves}, LinkProfile(0.5, 7.0)
    profile = DeviceProfile("cuda:0", "x", 0.0, 3.0, 2.0, way, formats, observed=seen)
    sizes = {T.Q8_0: 34, T.F16: 64}
    found = device_figures(HostDevice(), profile, sizes, free=9, expand=1.0, int8=True)
    # Half of the products are those of F16, which stay in fp16. What was observed in fp16 says nothing of them.
    assert dict(found.rates) == pytest.approx({1: 64 / (32 / 10 + 32 / 40), 512: 64 / (32 / 160 + 32 / 80)})
    assert (found.unpack, found.decode_ratio, found.prompt_ratio) == (20.0, 1.5, 1.0)
    plain = device_figures(HostDevice(), profile, sizes, free=9, expand=1.0)
    assert (dict(plain.rates)[512], plain.unpack, plain.prompt_ratio) == (pytest.approx(80.0), 50.0, 0.5)
    # Without figures of int8, those of fp16 count with all that is known of them.
    without = replace(profile, formats={"Q8_0": replace(int8, int8={}), "F16": halves})
    assert device_figures(HostDevice(), without, sizes, free=9, expand=1.0, int8=True) == plain
