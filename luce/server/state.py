"""The state that all handlers share: settings, keys, metrics, worker threads, and the model once it is loaded."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from luce.api import Model
from luce.config.settings import Config
from luce.engine.engine_options import EngineStats
from luce.errors import UnavailableError
from luce.server.auth import Cors, HostCheck, Keys
from luce.server.metrics import Metrics

Result = TypeVar("Result")

_WORKERS = 4
#: seconds without progress after which the engine counts as dead
STALLED_SECONDS = 60.0


@dataclass
class Call:
    """One request: the server's data about it."""

    id: str
    #: monotonic time at which the headers had arrived
    arrived: float
    log_fields: dict[str, Any] = field(default_factory=dict)
    #: the client disconnected in the middle of a response
    client_gone: bool = False
    #: pattern of the route
    route: str = "other"


class Server:
    """One per process. `model` is None until it is loaded; `draining` refuses new work. Used on the event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = Keys(config)
        self.host_check = HostCheck(config)
        self.cors = Cors(config, keyed=self.keys.required)
        self.model: Model | None = None
        #: share of the model that is loaded; the loading thread writes it
        self.progress = 0.0
        self.metrics = Metrics(self.stats, lambda: self.model)
        self.draining = False
        self.started = int(time.time())
        #: requests whose handler has not returned; `idle` is set while there are none
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._pool = ThreadPoolExecutor(_WORKERS, "luce-work")
        self._chat_pool = ThreadPoolExecutor(_WORKERS, "luce-chat")
        self._text_pool = ThreadPoolExecutor(_WORKERS, "luce-text")

    def ready_model(self) -> Model:
        """The model. Raises UnavailableError while loading or draining."""
        if self.draining:
            raise UnavailableError("the server is shutting down", code="draining")
        if self.model is None:
            raise UnavailableError("the model is being loaded")
        return self.model

    def serving_model(self) -> Model:
        """The model, for requests that need its devices. Also raises UnavailableError if a shard is lost for good."""
        model = self.ready_model()
        if why := model.down():
            raise UnavailableError(why, code="shard_lost")
        return model

    def stats(self) -> EngineStats | None:
        """The engine's counters, None without a model. Any thread may call it."""
        return None if self.model is None else self.model.engine.stats()

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        if self.draining:
            return 503, {"status": "draining"}
        stats = self.stats()
        if stats is None:
            return 503, {"status": "loading", "progress": round(self.progress, 3)}
        if self.model is not None and (why := self.model.down()):
            return 503, {"status": "error", "reason": why}
        if self.model is not None and self.model.chat.template is not None and (why := self.model.chat.template.down()):
            return 503, {"status": "error", "reason": why}
        if stats.stalled > STALLED_SECONDS:
            return 503, {"status": "error", "reason": f"no progress for {stats.stalled:.0f} s"}
        return 200, {"status": "ok"}

    def request_started(self) -> None:
        """A handler has started."""
        self.active += 1
        self.idle.clear()

    def request_ended(self) -> None:
        """A handler has returned."""
        self.active -= 1
        if not self.active:
            self.idle.set()

    async def work(self, function: Callable[..., Result], /, *args: Any) -> Result:
        """The result of a function that computes, called in a worker thread."""
        return await _on_thread(self._pool, function, *args)

    async def chat_work(self, function: Callable[..., Result], /, *args: Any) -> Result:
        """As `work`, on threads of their own: a function that renders a chat template waits for another process."""
        return await _on_thread(self._chat_pool, function, *args)

    async def text_work(self, function: Callable[..., Result], /, *args: Any) -> Result:
        """As `work`, on threads of their own: a function that tokenises what a client sent, or expands it, may take
        seconds."""
        return await _on_thread(self._text_pool, function, *args)

    def close(self) -> None:
        """Release the worker threads without waiting for the calls that still run."""
        for pool in (self._pool, self._chat_pool, self._text_pool):
            pool.shutdown(wait=False, cancel_futures=True)


async def _on_thread(pool: ThreadPoolExecutor, function: Callable[..., Result], *args: Any) -> Result:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, function, *args)


SERVER = web.AppKey("server", Server)
#: `METHOD path` of the supported routes
ENDPOINTS = web.AppKey("endpoints", tuple[str, ...])
CALL = web.RequestKey("call", Call)
