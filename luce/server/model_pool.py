"""The models of a server: which are loaded, who uses them, and which makes room for another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

from luce import log
from luce.api import Model
from luce.config.model_tables import SHARED
from luce.config.settings import FIELDS, Config
from luce.errors import LuceError, OutOfMemoryError, RequestError, UnavailableError
from luce.server.errors import unknown_model

_log = logging.getLogger("luce.pool")

State = Literal["unloaded", "loading", "loaded", "unloading"]
_LOADING = "the model is being loaded"


class ModelEntry:
    """One model that the server has, loaded or not."""

    def __init__(
        self, name: str, source: str, config: Config, *, pinned: bool = False, ttl: float = 0.0, named: bool = True
    ) -> None:
        """source: what luce.hub.lookup.resolve_model takes; pinned, ttl: as in luce.config.model_tables.ModelTable;
        named: whether requests know `name` before the load, and not the name in the file."""
        self.name = name
        self.source = source
        self.config = config
        self.pinned = pinned
        self.ttl = ttl
        self.named = named
        self.model: Model | None = None
        self.state: State = "unloaded"
        #: requests that use the model, or wait for its load
        self.users = 0
        #: requests among them that wait for the load; the loading thread reads it
        self.waiting_requests = 0
        #: time.monotonic() of the last end of a request
        self.last_used = time.monotonic()
        #: share of the model that is loaded; the loading thread writes it
        self.progress = 0.0
        #: what the load waits for, "" if it reads; the loading thread writes it
        self.waiting = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes it the same model in a later reading of the settings."""
        own = (getattr(self.config, name) for name, field in FIELDS.items() if field.metadata["group"] not in SHARED)
        return self.name, self.source, self.config.alias, self.pinned, self.ttl, *own

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is its id."""
        if self.config.alias:
            return self.config.alias
        return (self.name,) if self.named or self.model is None else (self.model.name,)


#: opens the model of an entry and warms it up; on a thread. The function that it gets takes the share that is loaded.
Opener = Callable[[ModelEntry, Callable[[float], None]], Model]


#: keeps a client that waits for a load; returns the seconds until the next call
Heartbeat = Callable[[], Awaitable[float]]


class ModelPool:
    """The models of a server, the default one first. All methods run on the event loop.

    A model is loaded when a request names it, one at a time. The least recently used one that is not pinned makes room:
    where `max_loaded` are loaded already (0: no limit), or where a device has no memory for another one. New requests
    for it wait from then on. It is closed behind those that it has, and writes what its prefix cache has for the disk.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], opener: Opener | None = None, *, max_loaded: int = 0, wait: float = 30.0
    ) -> None:
        """wait: seconds that a request waits for a load."""
        self.entries = tuple(entries)
        #: models that a reload has dropped and that are still loaded
        self._dropped: list[ModelEntry] = []
        #: until the models of the start are loaded, requests are refused
        self.starting = True
        self._opener = opener
        self._max_loaded = max_loaded
        self._wait = wait
        #: what requests wait for whose model is not there yet
        self._acquiring: set[asyncio.Task[Model]] = set()
        self._draining = False
        self._loads = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def several(self) -> bool:
        """Whether requests choose among models."""
        return len(self.entries) > 1

    @property
    def default(self) -> ModelEntry:
        """The model of requests that name none."""
        return self.entries[0]

    def loaded(self) -> list[ModelEntry]:
        """The entries with a model, the last used first. Any thread may ask."""
        known = (*self.entries, *self._dropped)
        return sorted((entry for entry in known if entry.model is not None), key=lambda e: -e.last_used)

    def idle(self) -> float:
        """Seconds since the last end of a request that used a model; 0 while one does."""
        if any(entry.users for entry in (*self.entries, *self._dropped)):
            return 0.0
        return time.monotonic() - max(entry.last_used for entry in self.entries)

    def entry(self, name: str | None) -> ModelEntry:
        """The model of a name; the default one without. Raises NotFoundError, where there are several."""
        if name is None or not self.several:
            return self.default
        for entry in self.entries:
            if name in entry.names:
                return entry
        raise unknown_model(name)

    @contextlib.asynccontextmanager
    async def lease(self, entry: ModelEntry, heartbeat: Heartbeat | None = None) -> AsyncIterator[Model]:
        """The model of an entry, loaded if needed, which stays loaded until the block ends.

        `heartbeat` is called if the load takes longer than a request waits. Raises UnavailableError then without one,
        also if the server drains meanwhile, and what the load and the heartbeat raise.
        """
        if self.starting:
            raise UnavailableError(_LOADING)
        model = entry.model
        if model is not None and entry.state == "loaded":
            entry.users += 1
        else:
            model = await self._waited(entry, heartbeat)
        try:
            yield model
        finally:
            self._release(entry)

    def drain(self) -> None:
        """Refuse the requests that wait for a model to be loaded."""
        self._draining = True
        for task in self._acquiring:
            task.cancel()

    async def load(self, entry: ModelEntry) -> None:
        """Load a model, unless it is loaded. Raises what the load raises."""
        await self._acquire(entry)
        self._release(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model behind the requests that use it. Raises RequestError if it is pinned."""
        if entry.pinned:
            raise RequestError(f"the model {entry.names[0]} is pinned", param="model", code="pinned")
        async with self._loads:
            if entry.state == "loaded":
                await self._retire(entry)

    async def reload(self, entry: ModelEntry) -> None:
        """Unload a model behind the requests that use it, and load it again; new requests wait. Raises what the load
        raises."""
        async with self._loads:
            if entry.state == "loaded":
                await self._retire(entry)
        await self.load(entry)

    def update(self, entries: Sequence[ModelEntry]) -> None:
        """Have these models from now on. Those that are as before stay loaded; others that are loaded are unloaded
        behind their requests, also pinned ones, and new ones that are pinned are loaded."""
        before = {entry.identity: entry for entry in self.entries}
        self.entries = tuple(before.get(entry.identity, entry) for entry in entries)
        for entry in before.values():
            if entry not in self.entries and entry.state != "unloaded":
                self._dropped.append(entry)
                self._spawn(self._drop(entry))
        for entry in self.entries:
            if entry.pinned and entry.model is None:
                self._spawn(self.load(entry))

    async def _drop(self, entry: ModelEntry) -> None:
        async with self._loads:
            if entry.state == "loaded":
                await self._retire(entry)
            self._dropped.remove(entry)

    async def close(self) -> None:
        """Close all models; the requests have ended."""
        for task in list(self._tasks):
            task.cancel()
        for entry in self.loaded():
            model, entry.model = entry.model, None
            assert model is not None
            await asyncio.to_thread(model.close)

    async def _acquire(self, entry: ModelEntry) -> Model:
        while entry.state == "unloading":
            await self._changed.wait()
        entry.users += 1
        try:
            if entry.model is None:
                entry.task = entry.task or self._spawn(self._load(entry))
                await asyncio.shield(entry.task)
            assert entry.model is not None
            return entry.model
        except BaseException:
            self._release(entry)
            raise

    async def _waited(self, entry: ModelEntry, heartbeat: Heartbeat | None) -> Model:
        """As _acquire, for a request, which does not wait for ever."""
        task = asyncio.create_task(self._acquire(entry))
        self._acquiring.add(task)
        entry.waiting_requests += 1
        try:
            await asyncio.wait((task,), timeout=self._wait)
            while not task.done():
                if heartbeat is None:
                    raise UnavailableError(f"{_LOADING}: {entry.names[0]}", retry_after=5)
                await asyncio.wait((task,), timeout=await heartbeat())
            if self._draining and task.cancelled():
                raise UnavailableError("the server is shutting down", code="draining")
            return task.result()
        except BaseException:
            task.cancel()
            await asyncio.wait((task,))
            # The request leaves in the moment in which it gets its model.
            if not task.cancelled() and task.exception() is None:
                self._release(entry)
            raise
        finally:
            entry.waiting_requests -= 1
            self._acquiring.discard(task)

    def _release(self, entry: ModelEntry) -> None:
        entry.users -= 1
        entry.last_used = time.monotonic()
        self._notify()
        if entry.ttl and not entry.users:
            asyncio.get_running_loop().call_later(entry.ttl, self._expire, entry, entry.last_used)

    def _expire(self, entry: ModelEntry, used: float) -> None:
        if entry.state == "loaded" and not entry.users and entry.last_used == used and not entry.pinned:
            log.event(_log, "expired", model=entry.names[0], ttl=entry.ttl)
            self._spawn(self.unload(entry))

    async def _load(self, entry: ModelEntry) -> None:
        try:
            async with self._loads:
                entry.state = "loading"
                started = time.monotonic()
                await self._make_room()
                entry.model = await self._open(entry)
                entry.state = "loaded"
                log.event(_log, "loaded", model=entry.names[0], seconds=round(time.monotonic() - started, 3))
        except LuceError as error:
            log.event(_log, "load failed", logging.ERROR, model=entry.names[0], error=str(error))
            raise
        finally:
            entry.task = None
            if entry.model is None:
                entry.state = "unloaded"
            self._notify()

    async def _make_room(self) -> None:
        """Retire models until one more may be loaded. Raises UnavailableError if all are pinned."""
        while self._max_loaded and len(self.loaded()) >= self._max_loaded:
            if not await self._retire_one():
                raise UnavailableError("all models that may be loaded at a time are pinned", code="pinned")

    async def _open(self, entry: ModelEntry) -> Model:
        """The model of an entry. Raises OutOfMemoryError if it does not fit beside the pinned ones."""
        while True:
            try:
                return await self._on_thread(entry)
            except OutOfMemoryError:
                if not await self._retire_one():
                    raise

    async def _on_thread(self, entry: ModelEntry) -> Model:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Model] = loop.create_future()
        assert self._opener is not None
        opener = self._opener

        def progress(share: float) -> None:
            entry.progress = share

        def open_model() -> None:
            result: Any
            try:
                settle, result = opened.set_result, opener(entry, progress)
            except BaseException as error:
                settle, result = opened.set_exception, error  # type: ignore[assignment]

            def deliver() -> None:
                if not opened.cancelled():
                    settle(result)

            # The loop is closed if a signal has ended the process meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver)

        # Not in the loop's executor: loading cannot be interrupted, and the process must be able to end during it.
        threading.Thread(target=open_model, name="luce-load", daemon=True).start()
        return await opened

    async def _retire_one(self) -> bool:
        """Unload the least recently used model, an idle one if there is any; False if all are pinned."""
        found = [entry for entry in self.loaded() if not entry.pinned and entry.state == "loaded"]
        if not found:
            return False
        await self._retire(min(found, key=lambda entry: (entry.users > 0, entry.last_used)))
        return True

    async def _retire(self, entry: ModelEntry) -> None:
        """Unload a loaded model behind its requests."""
        entry.state = "unloading"
        while entry.users:
            await self._changed.wait()
        model, entry.model = entry.model, None
        assert model is not None
        await asyncio.to_thread(model.close)
        entry.state, entry.progress = "unloaded", 0.0
        log.event(_log, "unloaded", model=entry.names[0])
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Whoever waited has got the error; nobody may wait any more.
            task.exception()
