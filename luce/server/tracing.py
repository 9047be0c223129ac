"""Traces of requests for OpenTelemetry. Imported only with --otlp-traces-endpoint: it needs the extra `otel`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from luce import __version__, log
from luce.config.environment import environment
from luce.server.genai_span import GenAISpan

_log = logging.getLogger(__name__)

# A receiver that does not answer must not hold up the end of the server.
_EXPORT_SECONDS = 5.0


class Tracing:
    """Sends a span of each request, below that of the client's `traceparent` header if it has one."""

    def __init__(self, processor: SpanProcessor) -> None:
        """processor: takes the spans that have ended."""
        name = environment("OTEL_SERVICE_NAME") or "luce"
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("luce", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # OpenTelemetry waits for locks, which the event loop must not.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="luce-traces", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                record()
            except Exception as error:
                log.failure(_log, "a trace is lost", error)

    def record(
        self, span: GenAISpan, headers: Mapping[str, str], *, arrived: float, route: str, status: int, error: str
    ) -> None:
        """Send the span of a request that ends now. arrived: monotonic time; error: its code, "" without one."""
        # The headers are gone with the request.
        parent = {name: value for name in ("traceparent", "tracestate") if (value := headers.get(name))}
        more = {"http.route": route, "http.response.status_code": status} | ({"error.type": error} if error else {})
        self._waiting.put(partial(self._send, span, parent, more, arrived, time.monotonic()))

    def _send(
        self, span: GenAISpan, parent: Mapping[str, str], more: Mapping[str, Any], arrived: float, ended: float
    ) -> None:
        # Spans have wall-clock times, in nanoseconds.
        shift = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return shift + int(seconds * 1e9)

        own = self._tracer.start_span(
            span.name,
            context=self._propagator.extract(parent),
            kind=SpanKind.SERVER,
            attributes={**span.attributes, **more},
            start_time=at(arrived),
        )
        if "error.type" in more:
            own.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(own)
        for stage in span.stages:
            attributes = {"luce.choice": stage.choice}
            child = self._tracer.start_span(
                stage.name, context=below, attributes=attributes, start_time=at(stage.start)
            )
            child.end(at(stage.end))
        own.end(at(ended))

    def close(self) -> None:
        """Send what is left. Blocks, and takes some seconds if the receiver does not answer."""
        self._waiting.put(None)
        self._thread.join()
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing:
    """Traces for an OTLP/HTTP receiver: the whole URL, such as http://localhost:4318/v1/traces."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)))
