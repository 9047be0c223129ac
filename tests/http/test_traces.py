"""Traces of requests: what their spans say, in memory and at a receiver on loopback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from luce.config.settings import Config
from luce.errors import UsageError
from luce.server.state import Server
from tests.support.http_server import running

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from luce.server.tracing import Tracing

CHAT = "/v1/chat/completions"
SECRET = "a very secret prompt"
HI = [{"role": "user", "content": SECRET}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


async def traced(spans: InMemorySpanExporter, path: str, body: Any, headers: Any = None) -> tuple[Any, list[Any]]:
    """The span of a request, and those below it."""
    async with running() as here:
        here.server.tracing = await asyncio.to_thread(Tracing, SimpleSpanProcessor(spans))
        async with here.client.post(here.url + path, json=body, headers=headers or {}) as response:
            await response.read()
        # What needs no job has no span.
        await here.get("/v1/models")
    found = await asyncio.to_thread(spans.get_finished_spans)
    (own,) = [span for span in found if span.kind.name == "SERVER"]
    return own, [span for span in found if span is not own]


async def test_a_chat(spans: InMemorySpanExporter) -> None:
    body = {"messages": HI, "max_tokens": 3, "temperature": 0.5, "seed": 7, "model": "m"}
    own, stages = await traced(spans, CHAT, body, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    said = dict(own.attributes)
    assert own.name == f"chat {said['gen_ai.request.model']}"
    assert (said["gen_ai.operation.name"], said["gen_ai.provider.name"]) == ("chat", "luce")
    assert said["gen_ai.response.id"].startswith("chatcmpl-")
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (3, 0.5)
    assert said["gen_ai.request.seed"] == 7 and said["gen_ai.request.stream"] is False
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["gen_ai.usage.output_tokens"] == 3 and said["gen_ai.usage.input_tokens"] > len(SECRET)
    assert (said["http.route"], said["http.response.status_code"]) == (CHAT, 200)
    assert "error.type" not in said
    # Below the span of the client.
    assert f"{own.context.trace_id:032x}" == TRACE and f"{own.parent.span_id:016x}" == PARENT
    assert [span.name for span in stages] == ["queue", "prefill", "decode"]
    assert all(span.parent.span_id == own.context.span_id for span in stages)
    times = [own.start_time, *(t for span in stages for t in (span.start_time, span.end_time)), own.end_time]
    assert times == sorted(times) and times[0] > 1.7e18
    assert SECRET not in repr([span.to_json() for span in (own, *stages)])
    assert own.resource.attributes["service.name"] == "luce"


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}, "text_completion"),
        ("/v1/messages", {"messages": HI, "max_tokens": 2, "stream": True}, "chat"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, "chat"),
        ("/completion", {"prompt": "a", "n_predict": 2, "temperature": 0}, "text_completion"),
    ],
)
async def test_every_api(spans: InMemorySpanExporter, path: str, body: Any, operation: str) -> None:
    own, stages = await traced(spans, path, body)
    assert (own.attributes["gen_ai.operation.name"], own.attributes["gen_ai.usage.output_tokens"]) == (operation, 2)
    assert own.parent is None and len(stages) == (6 if path == "/v1/completions" else 3)
    assert own.attributes.get("gen_ai.request.choice.count") == (2 if path == "/v1/completions" else None)


async def test_a_request_that_is_refused(spans: InMemorySpanExporter) -> None:
    own, _ = await traced(spans, "/v1/completions", {"prompt": "x" * 600, "max_tokens": 1})
    assert own.attributes["http.response.status_code"] == 400 and own.attributes["error.type"] == "400"
    assert own.status.status_code.name == "ERROR"


class Receiver:
    """An OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, ExportTraceServiceRequest]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportTraceServiceRequest.FromString(body)
                outer.requests.append((self.path, self.headers["Content-Type"], message))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


async def test_a_receiver_gets_the_spans_at_the_latest_at_the_end(receiver: Receiver) -> None:
    endpoint = f"http://127.0.0.1:{receiver.server.server_port}/v1/traces"
    async with running(otlp_traces_endpoint=endpoint) as here:
        await here.chat(max_tokens=2)
    ((path, kind, message),) = receiver.requests
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    (resource,) = message.resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names)[:1] == ["chat scripted"] and len(names) == 4
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"] == "luce"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "luce.server.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match=r"^--otlp-traces-endpoint: needs opentelemetry\S*; install luce-llm\[otel\]$"):
        Server(Config(otlp_traces_endpoint="http://localhost:4318/v1/traces"))


def test_it_is_not_imported_unless_asked_for() -> None:
    code = "import sys, luce.cli.serve; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
