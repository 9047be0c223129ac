"""The state that all handlers share: settings, keys, metrics, worker threads, and the model once it is loaded."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from luce.api import Model
from luce.cluster.wire import Status
from luce.config.settings import Config, flag
from luce.errors import UnavailableError, UsageError
from luce.server.auth import Cors, HostCheck, Keys
from luce.server.metrics import Metrics
from luce.server.model_pool import ModelEntry, ModelPool

if TYPE_CHECKING:
    # OpenTelemetry, and what imports this module.
    from luce.server.genai_span import GenAISpan
    from luce.server.tracing import Tracing

Result = TypeVar("Result")

_WORKERS, _COMPRESSING_WORKERS = 4, 32
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
    #: a process in between passes its stream on, in frames (luce.server.relay)
    relayed: bool = False
    #: the record of the stream that it continues; empty without one
    record: bytes = b""
    #: what its trace says, for a request that has a job
    span: GenAISpan | None = None


class Server:
    """One per process. `draining` refuses new work. Used on the event loop."""

    def __init__(
        self, config: Config, pool: ModelPool | None = None, cluster: Callable[[], Status] | None = None
    ) -> None:
        """Without `pool` the server has one model, which the caller sets. `cluster`: what returns the state of its
        cluster, None without one."""
        self.config = config
        self.cluster = cluster
        self.pool = ModelPool([ModelEntry("", "", config, named=False)]) if pool is None else pool
        self.keys = Keys(config)
        self.host_check = HostCheck(config)
        self.cors = Cors(config, keyed=self.keys.required)
        self.metrics = Metrics(self._measured, compat=config.metrics_compat, cluster=cluster)
        #: where traces go; None: there are none
        self.tracing = _tracing(config)
        self.draining = False
        self.started = int(time.time())
        #: requests whose handler has not returned; `idle` is set while there are none
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._pool = ThreadPoolExecutor(_WORKERS, "luce-work")
        # A small model reads one long prompt at a time, for seconds; the threads of others wait, and short prompts
        # need threads too.
        compresses = any(entry.config.prefill_drafter for entry in self.pool.entries)
        prompts = _COMPRESSING_WORKERS if compresses else _WORKERS
        self._chat_pool = ThreadPoolExecutor(prompts, "luce-chat")
        self._text_pool = ThreadPoolExecutor(prompts, "luce-text")

    @property
    def model(self) -> Model | None:
        """The model of requests that name none; None while it is not loaded."""
        return self.pool.default.model

    @model.setter
    def model(self, model: Model) -> None:
        self.pool.default.model, self.pool.default.state = model, "loaded"
        self.pool.starting = False

    def check_open(self, *, devices: bool = False) -> None:
        """Raises UnavailableError while the server starts or drains. `devices`: also if the only model has lost a shard
        for good."""
        if self.draining:
            raise UnavailableError("the server is shutting down", code="draining")
        if self.pool.starting:
            raise UnavailableError("the model is being loaded")
        if devices and not self.pool.several and self.model is not None:
            check_devices(self.model)

    def shown_model(self, name: str | None) -> Model:
        """A loaded model, for requests that ask about it: that of a name, or without one the default, else the last
        used. Raises UnavailableError if it is not loaded, or while the server starts or drains, and NotFoundError."""
        self.check_open()
        entry = self.pool.entry(name)
        if entry.model is None and name is None and (loaded := self.pool.loaded()):
            entry = loaded[0]
        if entry.model is None:
            raise UnavailableError(f"the model {entry.names[0]} is not loaded", code="not_loaded")
        return entry.model

    def stalled(self) -> float:
        """The longest time without progress of an engine that has work, in seconds. Any thread may call it."""
        return max((model.engine.stats().stalled for _, model in self._measured()), default=0.0)

    def _measured(self) -> list[tuple[str | None, Model]]:
        """The loaded models, with their names if there are several. Any thread may call it."""
        found = [(entry, entry.model) for entry in self.pool.entries]
        return [(e.names[0] if self.pool.several else None, model) for e, model in found if model is not None]

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        if self.draining:
            return 503, {"status": "draining"}
        if self.pool.starting:
            entry = self.pool.default
            waiting = {"reason": entry.waiting} if entry.waiting else {}
            return 503, {"status": "loading", "progress": round(entry.progress, 3), **waiting}
        for name, model in self._measured():
            why = model.down() or ("" if model.chat.template is None else model.chat.template.down())
            stalled = model.engine.stats().stalled
            if not why and stalled > STALLED_SECONDS:
                why = f"no progress for {stalled:.0f} s"
            if why:
                return 503, {"status": "error", "reason": why if name is None else f"{name}: {why}"}
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

    async def send_traces(self) -> None:
        """Send the last traces. Takes some seconds if their receiver does not answer."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def close(self) -> None:
        """Release the worker threads without waiting for the calls that still run."""
        for pool in (self._pool, self._chat_pool, self._text_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _tracing(config: Config) -> Tracing | None:
    """What sends traces. Raises UsageError without the extra."""
    if not config.otlp_traces_endpoint:
        return None
    try:
        from luce.server.tracing import open_tracing
    except ModuleNotFoundError as error:
        what = f"{flag('otlp_traces_endpoint')}: needs {error.name}; install luce-llm[otel]"
        raise UsageError(what, param="otlp_traces_endpoint") from None
    return open_tracing(config.otlp_traces_endpoint)


def admins_server(request: web.Request) -> Server:
    """The server. Raises ForbiddenError unless the request is an admin's."""
    server = request.app[SERVER]
    server.keys.check_admin(request.headers, request.remote or "")
    if not server.keys.required:
        # A page of another site reaches an address that is not loopback's under its own name.
        server.host_check.check_admin(request.headers.get("Host"))
    return server


def check_devices(model: Model) -> None:
    """Raises UnavailableError if a shard of a model is lost for good."""
    if why := model.down():
        raise UnavailableError(why, code="shard_lost")


async def _on_thread(pool: ThreadPoolExecutor, function: Callable[..., Result], *args: Any) -> Result:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, function, *args)


SERVER = web.AppKey("server", Server)
#: `METHOD path` of the supported routes
ENDPOINTS = web.AppKey("endpoints", tuple[str, ...])
CALL = web.RequestKey("call", Call)
