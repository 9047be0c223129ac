"""`luce serve`: listen, load the model, notify systemd, answer until a signal, and stop in order.

SIGTERM or SIGINT: new and waiting requests get 503, running ones have --drain-seconds; then the rest end with the text
that they have (`length`, cause `shutdown`). A second signal ends the wait. Then the models close: snapshots are written
to the disk, and daemons end. SIGHUP reads the keys, the log level and the models again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from luce import log
from luce.api import Model
from luce.assembly import device_memory, open_model
from luce.cli.arguments import LOADED, MODEL_HELP, add_settings, given, settings
from luce.cli.served_cluster import ServedCluster, served_cluster
from luce.config.model_tables import ModelTable, read_tables
from luce.config.resolve import config_file, resolve
from luce.config.settings import Config, flag
from luce.errors import LuceError, UsageError
from luce.gguf.reader import model_stem
from luce.hub.installed import gguf_models
from luce.hub.lookup import resolve_model
from luce.server.app import start
from luce.server.auth import is_loopback
from luce.server.model_pool import ModelEntry, ModelPool
from luce.server.sdnotify import Notifier
from luce.server.sockets import inherited, listen, url
from luce.server.state import Server
from luce.text.vocabulary import KeptVocabularies

_log = logging.getLogger("luce.serve")

_STATUS_SECONDS = 5.0
# Each status while loading and draining asks systemd to wait this much longer.
_EXTEND_SECONDS = 60.0
# What closing the models may take beside --kv-cache-flush-timeout.
_CLOSE_SECONDS = 30.0
#: time in which the ended replies can reach their clients
_FLUSH_SECONDS = 5.0


#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling", "reasoning", "server", "cluster", "log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and the flags of the settings."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{MODEL_HELP}; not needed with --models-dir, or tables [models.NAME] in the file of --config",
    )
    parser.set_defaults(behind_flags="model")
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit status is 0 after an orderly stop. Raises LuceError if the server cannot start."""

    def read() -> tuple[Config, list[ModelEntry]]:
        config = settings(arguments)
        return config, model_entries(arguments.model, given(arguments), config)

    config, entries = read()
    if config.cluster and len(entries) > 1:
        raise UsageError(f"{flag('cluster')} {config.cluster}: serves one model, not {len(entries)}", param="cluster")
    writer = log.configure(config.log_level, as_json=config.log_json)
    # A signal such as SIGBUS or SIGSEGV ends the process: its name and the threads' stacks are the log's last lines.
    faulthandler.enable(2)
    try:
        sockets = inherited() or listen(config.host, config.port)
        notifier = Notifier()
        try:
            with served_cluster(config) as cluster:
                asyncio.run(_Service(read, notifier, sockets, cluster).main())
        finally:
            notifier.close()
    finally:
        writer.stop()
    return 0


def model_entries(model: str | None, flags: Mapping[str, Any], config: Config) -> list[ModelEntry]:
    """The models of a server: MODEL, which is pinned, those of the tables of the TOML file, and those of --models-dir.

    Raises UsageError if there is none, if two have the same name, or if a setting of one is wrong.
    """
    path = config_file(flags)
    tables = [] if path is None else read_tables(path)
    if config.models_dir is not None:
        tables += _in_directory(config.models_dir)
    if model is not None and not tables:
        return [ModelEntry(model, model, config, pinned=True, named=False)]
    entries = []
    if model is not None:
        name = config.alias[0] if config.alias else model_stem(Path(model)) if model.endswith(".gguf") else model
        own = config if config.alias else dataclasses.replace(config, alias=(name,))
        entries.append(ModelEntry(name, model, own, pinned=True))
    for table in tables:
        own = resolve(flags, table=(table.settings, table.origin))
        entries.append(ModelEntry(table.name, table.model, own, pinned=table.pinned, ttl=table.ttl))
    if not entries:
        raise UsageError("MODEL: missing; give a model, --models-dir, or tables [models.NAME]", param="model")
    names = [name for entry in entries for name in entry.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two models have the name {twice}", param="models")
    return entries


def _in_directory(folder: Path) -> list[ModelTable]:
    """The models of --models-dir, by the names of their files."""
    if not folder.is_dir():
        raise UsageError(f"{flag('models_dir')} {folder}: not a directory", param="models_dir")
    found = gguf_models(folder)
    if not found:
        raise UsageError(f"{flag('models_dir')} {folder}: holds no GGUF file", param="models_dir")
    return [
        ModelTable(name, str(path), settings={"alias": [name]}, origin=f"{flag('models_dir')} {folder}: {name}")
        for name, path in found
    ]


def open_entry(
    cluster: ServedCluster | None,
    vocabularies: KeptVocabularies,
    entry: ModelEntry,
    progress: Callable[[float], None],
) -> Model:
    """The model of an entry, ready for requests."""
    path = resolve_model(entry.source, memory=partial(device_memory, entry.config))
    if cluster is None:
        model = open_model(path, entry.config, progress, vocabularies=vocabularies)
    else:

        def wait(text: str) -> None:
            entry.waiting = text

        model = cluster.open_model(path, entry.config, progress, wait)
    if entry.config.warmup and not entry.waiting_requests:
        # Kernels, graphs and the grammars' vocabulary: clients that wait for READY do not wait for them. A request that
        # waits for this load is answered sooner without.
        model.warm_up()
    return model


def _wait_idle(models: Sequence[Model], seconds: float) -> None:
    """Wait until all sequences of the models have ended, for at most so many seconds."""
    end = time.monotonic() + seconds
    for model in models:
        model.engine.wait_idle(max(0.0, end - time.monotonic()))


def _loading(entry: ModelEntry) -> str:
    return entry.waiting or f"loading {entry.source}: {entry.progress:.0%}"


def _extended(seconds: float) -> dict[str, int]:
    """What asks systemd to wait so much longer for a start or a stop."""
    return {"EXTEND_TIMEOUT_USEC": int(seconds * 1e6)}


class _Service:
    def __init__(
        self,
        settings: Callable[[], tuple[Config, list[ModelEntry]]],
        notifier: Notifier,
        sockets: Sequence[socket.socket],
        cluster: ServedCluster | None,
    ) -> None:
        """`settings` reads the settings and the models; a reload calls it again."""
        self._settings = settings
        config, entries = settings()
        self._config = config
        self._notifier = notifier
        self._sockets = sockets
        self._pool = ModelPool(
            entries,
            partial(open_entry, cluster, KeptVocabularies()),
            max_loaded=config.max_loaded_models,
            wait=config.load_wait,
        )
        self._server = Server(config, self._pool, None if cluster is None else cluster.status)
        self._cluster = cluster
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
            for sock in self._sockets:
                log.event(_log, "listening", url=url(sock))
            if not server.keys.required:
                for host in self._config.host:
                    if not is_loopback(host):
                        _log.warning("--host %s: other machines can use this server without an API key", host)
            if await self._load():
                self._ready()
                if self._cluster is not None:
                    self._cluster.reload = lambda: self._call_on(loop, self._replan)
                if self._config.idle_exit:
                    self._spawn(self._stop_when_idle())
                await self._stop.wait()
                await self._drain()
        finally:
            server.draining = True
            await runner.cleanup()
            # Once: systemd must be able to end a process whose close hangs.
            self._notifier.send(
                STOPPING=1, STATUS="saving", **_extended(self._config.kv_cache_flush_timeout + _CLOSE_SECONDS)
            )
            await self._pool.close()
            await server.send_traces()
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _load(self) -> bool:
        """Load the models of the start; False if a signal came first."""
        for entry in self._pool.entries:
            if not entry.pinned:
                continue
            devices = entry.config.target_devices or (entry.config.target_device,)
            log.event(_log, "loading", model=entry.source, devices=",".join(devices))
            loaded, stopped = asyncio.ensure_future(self._pool.load(entry)), asyncio.ensure_future(self._stop.wait())
            try:
                with self._reporting(partial(_loading, entry)):
                    await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
            if not loaded.done():
                loaded.cancel()
                return False
            loaded.result()
        self._pool.starting = False
        return True

    def _ready(self) -> None:
        for entry in self._pool.loaded():
            assert entry.model is not None
            for shard in entry.model.placement:
                first, last = shard["layers"]
                sizes = {name: shard[name] for name in ("weights", "state", "activation_bytes_per_token")}
                log.event(_log, "shard", device=shard["device"], layers=f"{first}..{last}", **sizes)
            log.event(_log, "ready", model=entry.model.name, context=entry.model.context)
        default = self._pool.default
        name = default.names[0]
        if self._pool.several:
            log.event(_log, "models", count=len(self._pool.entries), default=name)
        self._notifier.send(READY=1, STATUS=f"serving {name}")
        if self._notifier.watchdog:
            self._spawn(self._notifier.feed_watchdog(self._server.stalled))

    async def _drain(self) -> None:
        server = self._server
        server.draining = True
        models = [entry.model for entry in self._pool.loaded() if entry.model is not None]

        def running() -> int:
            return sum(model.engine.stats().running for model in models)

        log.event(_log, "draining", running=running())
        self._notifier.send(STOPPING=1)
        self._pool.drain()
        with self._reporting(lambda: f"draining {running()} requests"):
            for model in models:
                model.engine.drain()
            await self._wait_unless_forced(asyncio.to_thread(_wait_idle, models, self._config.drain_seconds))
            for model in models:
                model.engine.stop_running()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await self._wait_unless_forced(server.idle.wait())

    async def _replan(self) -> None:
        """Place the model anew, on the machines of the cluster that are there."""
        # What fails is in the log; the next request tries again.
        with contextlib.suppress(LuceError):
            await self._pool.reload(self._pool.default)

    async def _stop_when_idle(self) -> None:
        """Stop, as after a signal, once no request has used a model for --idle-exit."""
        while (left := self._config.idle_exit - self._pool.idle()) > 0:
            await asyncio.sleep(left)
        log.event(_log, "idle", seconds=self._config.idle_exit)
        self._on_stop()

    @contextlib.contextmanager
    def _reporting(self, status: Callable[[], str]) -> Iterator[None]:
        """Tell systemd every few seconds what goes on, and that it may take longer, until the block ends."""

        async def report() -> None:
            while True:
                self._notifier.send(STATUS=status(), **_extended(_EXTEND_SECONDS))
                await asyncio.sleep(_STATUS_SECONDS)

        task = asyncio.ensure_future(report())
        try:
            yield
        finally:
            task.cancel()

    async def _wait_unless_forced(self, waiting: Awaitable[Any]) -> None:
        """Wait for `waiting` or for the second signal."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop_now.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _reload(self) -> None:
        """Read the keys, the log level and the models anew. What is wrong changes nothing."""
        self._notifier.reloading()
        try:
            await asyncio.to_thread(self._server.keys.reload)
            _log.info("API keys reloaded")
        except UsageError as error:
            _log.error("API keys not reloaded: %s", error)
        try:
            config, entries = await asyncio.to_thread(self._settings)
            log.set_level(config.log_level)
            if self._pool.several or len(entries) > 1:
                self._pool.update(entries)
            await self._read_cards()
            log.event(_log, "settings reloaded", log_level=config.log_level, models=len(self._pool.entries))
        except LuceError as error:
            _log.error("settings not reloaded: %s", error)
        if not self._pool.starting:
            self._notifier.send(READY=1)

    async def _read_cards(self) -> None:
        """Use the model cards as they are now, for the models that are loaded. Raises UsageError if one cannot be read;
        then none counts."""
        models = [(entry.names[0], entry.model) for entry in self._pool.loaded() if entry.model is not None]
        found = [(name, model, await asyncio.to_thread(model.read_card)) for name, model in models]
        for name, model, card in found:
            if card is not None:
                model.take_card(card)
                log.event(_log, "model card", model=name, source=card.source)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _call_on(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> None:
        """Let the event loop do some work; any thread may call it. Nothing happens where the loop has ended."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: self._spawn(work()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
