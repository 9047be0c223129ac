#!/usr/bin/env python3
"""Speed of a model on the CPU device beside the limits of this machine: memory bandwidth and sgemm rate.

    tools/bench_cpu.py smollm2 --prompt 128 --tokens 32

Decoding reads every weight once a token (float32), so its limit is the memory's bandwidth: that of a copy by all cores,
counting bytes read and written, and beside it that of reading alone. A prompt's limit is the rate of float32 matrix
products. Medians of `--repeat` runs; limits are medians too, taken before and after each run, because machines drift.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import luce


def seconds(work: Callable[[], object], repeat: int = 5) -> float:
    """Median time of a few runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidths(cores: int, size: int = 1 << 29) -> tuple[float, float]:
    """Bytes per second of `cores` threads together on arrays far larger than the caches: (copied, read)."""
    array = np.ones(size // 4, np.float32)
    parts, copies = np.array_split(array, cores), np.array_split(np.zeros_like(array), cores)
    with ThreadPoolExecutor(cores) as pool:
        copied = 2 * array.nbytes / seconds(lambda: list(pool.map(np.copyto, copies, parts)))
        return copied, array.nbytes / seconds(lambda: list(pool.map(np.max, parts)))


def sgemm_rate(rows: int) -> float:
    """Floating-point operations per second of float32 [rows, 4096] x [4096, 4096]."""
    a = np.random.default_rng(0).random((rows, 4096), np.float32)
    b = np.random.default_rng(1).random((4096, 4096), np.float32)
    return 2 * rows * 4096 * 4096 / seconds(lambda: a @ b.T)


def main() -> None:
    """Print one table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default: 128)")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens (default: 32)")
    parser.add_argument("--repeat", type=int, default=5, help="runs (default: 5)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with luce.load(arguments.model, target_devices="cpu:0", max_ctx=2048) as model:
        weights = sum(shard["weights"] for shard in model.placement)
        head = 4 * model.spec.vocab * model.spec.hidden
        # A prompt needs logits of its last row only; embedding is a look-up.
        flops = 2 * (weights - head) / 4
        ids = np.random.default_rng(2).integers(0, model.tokenizer.vocab, arguments.prompt).tolist()
        runs = []
        for _ in range(arguments.repeat + 1):
            limits = [(*bandwidths(cores), sgemm_rate(arguments.prompt))]
            generation = model.generate(ids, max_tokens=arguments.tokens + 1, temperature=0, ignore_eos=True)
            for _token in generation:
                pass
            limits.append((*bandwidths(cores), sgemm_rate(arguments.prompt)))
            assert generation.finish is not None
            timings = generation.finish.timings
            prefill = arguments.prompt / timings.prompt
            decode = (timings.predicted_tokens - 1) / timings.predicted
            copied, read, rate = (statistics.mean(values) for values in zip(*limits, strict=True))
            shares = (prefill * flops / rate, decode * weights / copied, decode * weights / read)
            runs.append((prefill, decode, *shares, rate, copied, read))
    # The first run warms up.
    medians = [statistics.median(column) for column in zip(*runs[1:], strict=True)]
    names = ("prompt_tokens_per_s", "decode_tokens_per_s", "of_sgemm_rate", "of_copy_bandwidth", "of_read_bandwidth")
    result = dict(zip((*names, "sgemm_flops", "copy_bytes_per_s", "read_bytes_per_s"), medians, strict=True))
    if arguments.json:
        print(json.dumps(result))
        return
    prefill, decode, of_rate, of_copy, of_read, rate, copied, read = medians
    print(f"{model.name}, {weights / 1e6:.0f} MB of float32 weights, {cores} cores, median of {arguments.repeat}")
    print(f"prompt {arguments.prompt}: {prefill:8.1f} tok/s, {of_rate:.0%} of {rate / 1e9:.0f} GFLOP/s sgemm")
    print(
        f"decode {arguments.tokens}: {decode:8.1f} tok/s, {of_copy:.0%} of {copied / 1e9:.1f} GB/s copied, "
        f"{of_read:.0%} of {read / 1e9:.1f} GB/s read"
    )


if __name__ == "__main__":
    main()
