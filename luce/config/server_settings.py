"""The settings of the server and of its log: a part of the table of settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from luce.config.field import setting
from luce.config.values import choice, choices, http_url, integer, names, number, origins, path, text


@dataclass(frozen=True)
class ServerSettings:
    """The fields of Config in the groups "server" and "log"."""

    tool_grammar: str = setting(
        "auto", choice("auto", "on", "off"), "grammar for calls in free text (auto: of special tokens)", group="server"
    )
    tools_none: str = setting(
        "hide",
        choice("hide", "keep"),
        "tools of a request with tool_choice none: hide (the model does not see them), keep (the prompt stays cached)",
        metavar="MODE",
        group="server",
    )
    json_spacing: str = setting(
        "flexible",
        choice("flexible", "compact"),
        "white space of JSON that a grammar holds: flexible (the model's), compact (a space behind commas and colons)",
        metavar="MODE",
        group="server",
    )
    schema_max_kib: int = setting(
        256, integer(1, 65536), "largest schema or grammar of a request", metavar="KIB", group="server"
    )
    tools_max_kib: int = setting(
        2048, integer(1, 65536), "largest tools of a request that a grammar holds", metavar="KIB", group="server"
    )
    strict_schemas: bool = setting(False, text, "enforce every JSON schema or refuse it", group="server")
    reasoning_format: str = setting(
        "separate",
        choice("separate", "inline", "drop"),
        "reasoning of chat replies: separate (in a field of its own), inline (in the text, between the model's "
        "markers), drop (left out)",
        metavar="FORM",
        group="server",
    )
    reasoning_details: bool = setting(
        False, text, "give the reasoning of chat replies as `reasoning_details` too", group="server"
    )
    compat: tuple[str, ...] = setting(
        (),
        choices("openai", "lucebox"),
        "what replies have as another server's do: openai (a named function ends with `stop`), lucebox "
        "(`usage.timings`)",
        metavar="NAME[,NAME...]",
        group="server",
    )
    host: tuple[str, ...] = setting(
        ("127.0.0.1",), names, "address to listen on (repeatable)", metavar="ADDRESS[,ADDRESS...]", group="server"
    )
    port: int = setting(8080, integer(0, 65535), "port to listen on (0: any free one)", metavar="N", group="server")
    alias: tuple[str, ...] = setting(
        (),
        names,
        "names of the model in responses and /v1/models",
        flags=("model-name",),
        metavar="NAME[,NAME...]",
        group="server",
    )
    api_key: tuple[str, ...] = setting(
        (),
        names,
        "key that clients must send (repeatable); ps shows it to all users, so prefer --api-key-file or the "
        "environment variable LUCE_API_KEY",
        metavar="KEY[,KEY...]",
        group="server",
    )
    api_key_file: Path | None = setting(
        None,
        path,
        "file with one key per line, which other users cannot read; SIGHUP reads it again",
        metavar="FILE",
        group="server",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        names,
        "further Host header values accepted on a loopback address without a key",
        metavar="NAME[,NAME...]",
        group="server",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        origins,
        "origins whose pages may call the server; * for all",
        metavar="ORIGIN[,ORIGIN...]",
        group="server",
    )
    webui: bool = setting(True, text, "serve the web UI at / to browsers", group="server")
    metrics_public: bool = setting(False, text, "serve /metrics without a key", group="server")
    metrics_compat: bool = setting(
        False, text, "give metrics also by the names that other dashboards read, llamacpp:...", group="server"
    )
    otlp_traces_endpoint: str = setting(
        "",
        http_url,
        "URL of an OpenTelemetry receiver (OTLP over HTTP) that gets a trace of each request, such as "
        "http://localhost:4318/v1/traces; needs the extra otel",
        metavar="URL",
        group="server",
    )
    max_body_mib: int = setting(64, integer(1, 4096), "largest request body", metavar="MIB", group="server")
    max_n: int = setting(8, integer(1, 64), "largest `n` of a request", metavar="N", group="server")
    max_batch_prompts: int = setting(
        64, integer(1, 1024), "most prompts in one /v1/completions request", metavar="N", group="server"
    )
    sse_ping: float = setting(
        10.0,
        number(0.1, 3600),
        "seconds between keep-alive comments in a silent stream",
        metavar="SECONDS",
        group="server",
    )
    write_timeout: float = setting(
        60.0,
        number(0.1, 3600),
        "seconds after which a client that does not read its stream is disconnected",
        metavar="SECONDS",
        group="server",
    )
    drain_seconds: float = setting(
        30.0, number(0, 3600), "time that running requests have after SIGTERM", metavar="SECONDS", group="server"
    )
    idle_exit: float = setting(
        0.0,
        number(0, 1e6),
        "time without requests after which the server ends (0: never); a socket of systemd starts it again with the "
        "next connection",
        metavar="SECONDS",
        group="server",
    )
    warmup: bool = setting(
        True,
        text,
        "before the first request, generate a token, measure what drafts cost and prepare grammars; --no-warmup: the "
        "first requests wait for it",
        group="server",
    )
    log_level: str = setting(
        "info", choice("debug", "info", "warning", "error"), "lowest level that is logged", metavar="LEVEL", group="log"
    )
    log_json: bool = setting(False, text, "write log lines as JSON objects", group="log")
