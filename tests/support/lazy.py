"""Modules that are imported at their first use, not where tests are collected: imports of some packages take seconds of
CPU, in each process of pytest-xdist, as all collect all tests."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module, and has its public names."""

    def __init__(self, name: str) -> None:
        # pytest makes ids of parameters from it.
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        # pytest looks for such as __test__ and _mock_name in whatever a module of tests has.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
