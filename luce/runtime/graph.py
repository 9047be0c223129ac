"""Captured graphs (CUDA graphs): the launches of a step, queued again as one, or as several with host work between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from luce.errors import DeviceError
from luce.runtime.driver import Driver


class DriverGraph:
    """luce.runtime.device.Graph by the vendor's driver, bound to the stream it is captured from."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        self._stream = stream
        #: the driver's graphs, one more than calls
        self._graphs: list[int] = []
        #: host work behind each graph but the last
        self._calls: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the work that the stream gets inside. Raises DeviceError if something cannot be captured."""
        self._driver.begin_capture(self._stream)
        try:
            yield
        except BaseException:
            # The capture has to end, even if it fails because the work was cut short.
            with contextlib.suppress(DeviceError):
                self._end()
            raise
        self._end()

    def cut(self, call: Callable[[], None]) -> None:
        """Inside `capturing`: let each launch call this between the work captured so far and what follows."""
        self._end()
        self._calls.append(call)
        self._driver.begin_capture(self._stream)

    def _end(self) -> None:
        self._graphs.append(self._driver.end_capture(self._stream))

    def launch(self) -> None:
        """As in the interface."""
        for graph, call in zip(self._graphs, self._calls, strict=False):
            self._driver.launch_graph(graph, self._stream)
            call()
        self._driver.launch_graph(self._graphs[-1], self._stream)

    def __del__(self) -> None:
        for graph in self._graphs:
            with contextlib.suppress(DeviceError):
                self._driver.destroy_graph(graph)
