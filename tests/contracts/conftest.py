"""The fixture `gpu`."""

from tests.support.gpu import gpu

__all__ = ["gpu"]
