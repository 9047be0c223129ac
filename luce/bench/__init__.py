"""Measures how fast a model runs on this machine, beside the limits of its devices.

Here: the measured limits of a device, the bytes and operations that a step needs at least, and timed steps on a
backend. Not here: flags, tables and JSON (luce.cli.bench), and figures for predictions (luce.profiles). `luce bench`
and `luce doctor` call it; it calls backend, ops, runtime, and the engine's paging and page tables.

    limits   bandwidth and matrix products of a device
    cost     bytes and operations of a step
    measure  timed steps: prompts, decoding, verification, many sequences
"""
