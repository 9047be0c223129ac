"""The packages, as luce/__init__.py has them."""

from __future__ import annotations

#: from top to bottom; a module imports only from its own layer or from below
FLOW = (
    "cli",
    "ray",
    "server",
    "bench",
    "assembly",
    "api",
    "text",
    "engine",
    "kvcache",
    "draft",
    "compress",
    "cluster",
    "backend",
    "planner",
    "remote",
    "shard",
    "layers",
    "profiles",
    "ops",
    "ipc",
    "runtime",
    "cpu_kernels",
)
