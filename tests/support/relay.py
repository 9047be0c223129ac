"""A relay in front of a server on loopback, whose line can be cut and mended."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Passes the bytes of connections to a port on to another one."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address of the relay, the same over all times that it is mended."""
        return f"http://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
            finally:
                far_writer.close()
                writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
