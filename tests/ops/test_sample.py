"""Masks, argmax, candidates, draws and kernels/mask_logits.cu, sample.cu, top_k.cu, argmax_logsumexp.cu and draw.cu."""

from __future__ import annotations

import numpy as np

from luce.ops.sample import argmax, mask_logits, top_k_keys, unpack_candidates
from luce.runtime.device import Device
from tests.support.devices import emulated_only, on_devices
from tests.support.op_checks_sample import (
    check_argmax,
    check_argmax_logsumexp,
    check_draw,
    check_draw_of_no_numbers,
    check_draw_of_no_rows,
    check_mask_logits,
    check_near_draws,
    check_top_k,
)


@on_devices("vocab, scale, softcap", [(1, 1, 0), (300, 0.5, 0), (4097, 1, 30), (9000, 2, 0)])
def test_argmax_logsumexp(device: Device, vocab: int, scale: float, softcap: float) -> None:
    check_argmax_logsumexp(device, vocab, scale, softcap)


@on_devices(
    "vocab, words",
    host=[(1, 1), (31, 1), (33, 2), (100, 2), (100, 4), (500, 16)],
    emulated=[(1, 1), (33, 2), (100, 2), (4096, 128), (4097, 129), (9000, 280)],
    gpu=[(1, 1), (33, 2), (1000, 20), (4097, 129), (32003, 1001), (151936, 4747), (248320, 7751), (262144, 8192)],
)
def test_mask_logits(device: Device, vocab: int, words: int) -> None:
    check_mask_logits(device, vocab, words)


@emulated_only
def test_mask_of_no_rows(device: Device) -> None:
    logits = device.zeros((2, 70))
    mask_logits(device, logits, device.upload(np.empty(0, np.int32)), device.upload(np.empty((0, 3), np.uint32)))
    assert not device.download(logits).any()


@on_devices(
    "vocab",
    host=[1, 2, 3, 500],
    emulated=[1, 2, 31, 257, 4096, 4097, 9000],
    gpu=[1, 31, 1000, 4096, 4097, 32000, 151936, 248320, 262144],
)
def test_argmax(device: Device, vocab: int) -> None:
    check_argmax(device, vocab)


@on_devices(
    "vocab",
    host=[1, 2, 64, 65, 500],
    emulated=[1, 63, 64, 65, 4096, 4099, 9000],
    gpu=[1, 31, 64, 1000, 4096, 4097, 32000, 151936, 248320, 262144, 300000],
)
def test_top_k(device: Device, vocab: int) -> None:
    check_top_k(device, vocab)


@emulated_only
def test_top_k_of_more_parts_than_a_block_takes(device: Device) -> None:
    # 65 parts leave 4160 keys for a second round, and two parts of these for a third.
    logits = (np.arange(65 * 4096)[None] * 7919 % 266239).astype(np.float32)
    found = unpack_candidates(device.download(top_k_keys(device, device.upload(logits))))
    assert found.ids[0].tolist() == np.lexsort((np.arange(logits.size), -logits[0]))[:64].tolist()


@emulated_only
def test_top_k_of_no_rows(device: Device) -> None:
    assert top_k_keys(device, device.zeros((0, 5000))).shape == (0, 64)


@emulated_only
def test_argmax_of_no_rows(device: Device) -> None:
    assert argmax(device, device.zeros((0, 5000))).shape == (0,)


@emulated_only
def test_argmax_of_a_real_vocabulary(device: Device) -> None:
    logits = np.zeros((1, 248320), np.float32)
    logits[0, [248319, 99999]] = 1
    assert device.download(argmax(device, device.upload(logits))).tolist() == [99999]


@on_devices("vocab", [1, 2, 31, 64, 65, 5000])
def test_draw(device: Device, vocab: int) -> None:
    check_draw(device, vocab)


@on_devices()
def test_near_draws(device: Device) -> None:
    check_near_draws(device)


@on_devices()
def test_draw_of_no_rows(device: Device) -> None:
    check_draw_of_no_rows(device)


@on_devices()
def test_draw_of_no_numbers(device: Device) -> None:
    check_draw_of_no_numbers(device)
