"""The fixtures `gpu` and `make_driver`."""

from tests.support.gpu import gpu
from tests.support.make_driver import make_driver

__all__ = ["gpu", "make_driver"]
