"""Measures how fast a model runs on this machine, beside the limits of its devices.

Here: the measured limits of a device, the bytes and operations that a step needs at least, and timed steps on a
backend. Not here: flags, tables and JSON (luce.cli.bench). `luce bench` calls it; it calls backend, runtime, and the
engine's paging and page tables.

    limits   bandwidth and matrix products of a device
    cost     bytes and operations of a step
    measure  timed steps: prompts, decoding, verification, many sequences
"""
