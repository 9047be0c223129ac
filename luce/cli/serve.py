"""`luce serve`: listen, load the model, notify systemd, answer until a signal, and stop in order.

SIGTERM or SIGINT: new and waiting requests get 503, running ones have --drain-seconds; then the rest end with the text
that they have (`length`, cause `shutdown`). A second signal ends the wait. SIGHUP reads the key file again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from luce import log
from luce.api import Model
from luce.assembly import device_memory, open_model
from luce.cli.arguments import LOADED, add_model, add_settings, settings
from luce.config.settings import Config
from luce.errors import UsageError
from luce.hub.lookup import resolve_model
from luce.server.app import start
from luce.server.auth import is_loopback
from luce.server.sdnotify import Notifier
from luce.server.sockets import inherited, listen, url
from luce.server.state import Server

_log = logging.getLogger("luce.serve")

_STATUS_SECONDS = 5.0
# Each status while loading asks systemd to wait this much longer.
_EXTEND_USEC = 60_000_000
#: time in which the ended replies can reach their clients
_FLUSH_SECONDS = 5.0


#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling", "reasoning", "server", "log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and the flags of the settings."""
    add_model(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit status is 0 after an orderly stop. Raises LuceError if the server cannot start."""
    config = settings(arguments)
    writer = log.configure(config.log_level, as_json=config.log_json)
    # A signal such as SIGBUS or SIGSEGV ends the process: its name and the threads' stacks are the log's last lines.
    faulthandler.enable(2)
    try:
        sockets = inherited() or listen(config.host, config.port)
        notifier = Notifier()
        try:
            asyncio.run(_Service(config, arguments.model, notifier, sockets).main())
        finally:
            notifier.close()
    finally:
        writer.stop()
    return 0


class _Service:
    def __init__(self, config: Config, name: str, notifier: Notifier, sockets: Sequence[socket.socket]) -> None:
        self._config = config
        self._name = name
        self._notifier = notifier
        self._sockets = sockets
        self._server = Server(config)
        self._tasks: set[asyncio.Task[None]] = set()

    async def main(self) -> None:
        """Serve from the first request to the last."""
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload()))
        server = self._server
        runner = await start(server, self._sockets)
        try:
            devices = self._config.target_devices or (self._config.target_device,)
            log.event(_log, "loading", model=self._name, devices=",".join(devices))
            for sock in self._sockets:
                log.event(_log, "listening", url=url(sock))
            if not server.keys.required:
                for host in self._config.host:
                    if not is_loopback(host):
                        _log.warning("--host %s: other machines can use this server without an API key", host)
            server.model = await self._load()
            if server.model is not None:
                self._ready(server.model)
                await self._stop.wait()
                await self._drain(server.model)
        finally:
            server.draining = True
            await runner.cleanup()
            if server.model is not None:
                await asyncio.to_thread(server.model.close)
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _load(self) -> Model | None:
        """The model, loaded and warmed up; None if a signal came first."""
        loaded: asyncio.Future[Model] = asyncio.get_running_loop().create_future()
        # Not in the loop's executor: loading cannot be interrupted, and the process must be able to end during it.
        threading.Thread(target=self._load_thread, args=(loaded,), name="luce-load", daemon=True).start()
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            while not (loaded.done() or stopped.done()):
                self._notifier.send(STATUS=f"loading {self._name}", EXTEND_TIMEOUT_USEC=_EXTEND_USEC)
                await asyncio.wait((loaded, stopped), timeout=_STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        return loaded.result() if loaded.done() else None

    def _load_thread(self, loaded: asyncio.Future[Model]) -> None:
        result: Any
        try:
            path = resolve_model(self._name, memory=partial(device_memory, self._config))
            model = open_model(path, self._config, self._progress)
            # The first token builds kernels and graphs; clients that wait for READY do not wait for that.
            model.warm_up()
            settle, result = loaded.set_result, model
        except BaseException as error:
            settle, result = loaded.set_exception, error  # type: ignore[assignment]
        # The loop is closed if a signal has ended the process meanwhile.
        with contextlib.suppress(RuntimeError):
            loaded.get_loop().call_soon_threadsafe(settle, result)

    def _progress(self, share: float) -> None:
        self._server.progress = share

    def _ready(self, model: Model) -> None:
        for shard in model.placement:
            first, last = shard["layers"]
            sizes = {name: shard[name] for name in ("weights", "state", "activation_bytes_per_token")}
            log.event(_log, "shard", device=shard["device"], layers=f"{first}..{last}", **sizes)
        log.event(_log, "ready", model=model.name, context=model.context)
        self._notifier.send(READY=1, STATUS=f"serving {model.name}")
        if self._notifier.watchdog:
            self._spawn(self._notifier.feed_watchdog(lambda: model.engine.stats().stalled))

    async def _drain(self, model: Model) -> None:
        server = self._server
        server.draining = True
        running = model.engine.stats().running
        log.event(_log, "draining", running=running)
        self._notifier.send(STOPPING=1, STATUS=f"draining {running} requests")
        model.engine.drain()
        await self._wait_unless_forced(asyncio.to_thread(model.engine.wait_idle, self._config.drain_seconds))
        model.engine.stop_running()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._wait_unless_forced(server.idle.wait())

    async def _wait_unless_forced(self, waiting: Awaitable[Any]) -> None:
        """Wait for `waiting` or for the second signal."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop_now.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _reload(self) -> None:
        self._notifier.reloading()
        try:
            await asyncio.to_thread(self._server.keys.reload)
            _log.info("API keys reloaded")
        except UsageError as error:
            _log.error("API keys not reloaded: %s", error)
        if self._server.model is not None:
            self._notifier.send(READY=1)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
