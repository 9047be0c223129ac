"""Types of K and V on the NumPy device: what each costs in accuracy, what it takes in memory, that it is saved."""

from __future__ import annotations

import json

import numpy as np
import pytest

from luce.cli.main import main
from luce.errors import BackendError
from luce.ops.kvtype import KVTypes
from luce.runtime.device import Device
from luce.runtime.host import HostDevice
from luce.runtime.step import PAGE
from luce.shard.saved_state import StatePiece
from tests.support.drive import gathered
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, errors

# Mean over rows of the normalised squared error of the logits, 17-token prompt and last 16 rows of the 154-token one:
# limits of three times what was measured, which stands behind. K and V in float32 have 8e-12. Models with random
# weights attend to everything alike, so each rounding counts; of qwen35's layers one in four has K and V at all.
LIMITS = {
    "qwen3-b-Q4_K_M": {
        ("f16", "f16"): 1.2e-6,  # 3.9e-7
        ("bf16", "bf16"): 8e-5,  # 2.7e-5
        ("q8_0", "q8_0"): 9e-4,  # 3.0e-4
        ("q8_0", "q4_0"): 0.10,  # 3.4e-2
        ("q4_0", "q4_0"): 0.23,  # 7.8e-2
    },
    "qwen35-b-Q4_K_M": {
        ("f16", "f16"): 3.7e-8,  # 1.2e-8
        ("bf16", "bf16"): 2.1e-6,  # 7.1e-7
        ("q8_0", "q8_0"): 2.4e-5,  # 8.0e-6
        ("q8_0", "q4_0"): 2.7e-3,  # 8.9e-4
        ("q4_0", "q4_0"): 5.7e-3,  # 1.9e-3
    },
    "qwen35-a-F32": {
        ("f16", "f16"): 2.2e-8,  # 7.2e-9
        ("bf16", "bf16"): 1.6e-6,  # 5.5e-7
        ("q8_0", "q8_0"): 1.8e-5,  # 6.0e-6
        ("q8_0", "q4_0"): 2.0e-3,  # 6.7e-4
        ("q4_0", "q4_0"): 4.0e-3,  # 1.3e-3
    },
}
CASES = [(name, types) for name, limits in LIMITS.items() for types in limits]


@pytest.mark.parametrize(("name", "types"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case))
def test_logits(name: str, types: tuple[str, str], make_driver: MakeDriver) -> None:
    reference = Reference(name)
    driver = make_driver(reference, [HostDevice()], kv=KVTypes(*types))
    found = []
    for prompt, key in (("17", "logits_17"), ("long", "logits_long_last16")):
        logits = driver.feed((driver.start(), reference.expected[f"prompt_{prompt}"]))[0]
        expected = reference.expected[key]
        found.append(errors(logits[-len(expected) :], expected))
    error, limit = np.concatenate(found).mean(), LIMITS[name][types]
    # Far below it another type would be in use.
    assert limit / 10 < error <= limit


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("q8_0", "q4_0")], ids="-".join)
def test_save_and_restore(types: tuple[str, str], make_driver: MakeDriver) -> None:
    reference = Reference("qwen35-a-F32")
    driver = make_driver(reference, [HostDevice()], kv=KVTypes(*types))
    (shard,), prompt = driver.backend.shards, reference.expected["prompt_long"]
    sequence = driver.start()
    driver.feed((sequence, prompt[:90]))
    saved = gathered(shard.state.save(sequence.slot, sequence.pages))
    dtype, sizes = (np.uint16, (64, 64)) if types[0] == "bf16" else (np.uint8, (2 * 34, 2 * 18))
    layer = next(i for i in range(len(reference.spec.layers)) if reference.spec.group_of(i) is not None)
    for part, size in zip("kv", sizes, strict=True):
        rows = saved[f"blk.{layer}.{part}"]
        assert (rows.shape, rows.dtype) == ((2 * PAGE, 2, size), dtype)
    expected = driver.feed((sequence, prompt[90:]))[0]
    other = driver.start()
    driver.feed((other, prompt[5:95]))
    driver.restore(other, saved)
    assert (driver.feed((other, prompt[90:]))[0] == expected).all()


@pytest.mark.parametrize("fault", ["missing", "shape", "type"])
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(fault: str, make_driver: MakeDriver) -> None:
    reference = Reference("qwen35-a-F32")
    driver = make_driver(reference, [HostDevice()])
    prompt, sequence, other = reference.expected["prompt_long"], driver.start(), driver.start()
    for each in (sequence, other):
        driver.feed((each, prompt[:90]))
    name, tensor = list(driver.save(other).items())[-1]
    wrong = {"missing": {}, "shape": {name: tensor[:-1]}, "type": {name: tensor.astype(np.int32)}}[fault]
    zeros = {key: np.zeros_like(value) for key, value in driver.save(other).items() if key != name}
    piece = StatePiece(sequence.slot, sequence.pages, range(len(reference.spec.layers)), {**zeros, **wrong})
    with pytest.raises(BackendError, match=rf"cpu:0: cannot restore tensor {name}"):
        driver.backend.state.load([piece])
    assert (driver.feed((sequence, prompt[90:]))[0] == driver.feed((other, prompt[90:]))[0]).all()


def test_memory_is_that_of_the_types(make_driver: MakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    # Two of eight layers attend, with 2 heads of 64: per token and layer 2 * (68 + 36) bytes.
    reference = Reference("qwen35-a-F32")
    driver = make_driver(reference, [HostDevice()], slots=1, kv=KVTypes("q8_0", "q4_0"))
    plain = make_driver(reference, [HostDevice()], slots=1)
    (shard,), (wide,) = driver.backend.shards, plain.backend.shards
    tokens = driver.backend.capacity.pages[0] * PAGE
    assert wide.info.state - shard.info.state == tokens * 2 * 2 * (2 * 64 * 4 - 68 - 36)
    flags = ("--json", "--target-devices", "cpu:0", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0")
    assert main(["inspect", str(reference.path), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["kv_per_token"] == 2 * 2 * (68 + 36)


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0")], ids="-".join)
def test_kernels_agree_with_the_host(types: tuple[str, str], make_driver: MakeDriver, emulated: Device) -> None:
    reference = Reference("qwen3-a-F32")
    prompt, logits = reference.expected["prompt_17"], []
    for device in (HostDevice(), emulated):
        driver = make_driver(reference, [device], kv=KVTypes(*types))
        sequence = driver.start()
        parts = [driver.feed((sequence, part))[0] for part in (prompt[:11], prompt[11:12], prompt[12:])]
        logits.append(np.concatenate(parts))
    # Measured 2e-12 and 2e-10. The room is for a value that rounds the other way, and far below what the type costs.
    # Where queries and weights are halves, many a value of the next layer does: a seventh of the cost.
    cost = errors(logits[0], reference.expected["logits_17"]).max()
    assert errors(logits[1], logits[0]).max() <= cost / (3 if emulated.products else 100)
