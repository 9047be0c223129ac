"""Captured graphs (CUDA graphs): the launches of a step, queued again as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from luce.errors import DeviceError
from luce.runtime.driver import Driver


class DriverGraph:
    """luce.runtime.device.Graph by the vendor's driver, bound to the stream it is captured from."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        self._stream = stream
        self._graph = 0

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the work that the stream gets inside. Raises DeviceError if something cannot be captured."""
        self._driver.begin_capture(self._stream)
        try:
            yield
        except BaseException:
            # The capture has to end, even if it fails because the work was cut short.
            with contextlib.suppress(DeviceError):
                self._graph = self._driver.end_capture(self._stream)
            raise
        self._graph = self._driver.end_capture(self._stream)

    def launch(self) -> None:
        """As in the interface."""
        self._driver.launch_graph(self._graph, self._stream)

    def __del__(self) -> None:
        if self._graph:
            with contextlib.suppress(DeviceError):
                self._driver.destroy_graph(self._graph)
