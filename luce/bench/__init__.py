"""How fast a model runs here, beside what its devices could do.

Here: a device's measured limits (limits.py), the bytes and operations that a step cannot do without (cost.py), and
steps timed on a backend (measure.py). Not here: tables and flags (luce.cli.bench). Called by `luce bench`; calls
backend, runtime and the engine's account of pages.
"""
