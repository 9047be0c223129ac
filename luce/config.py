"""Every setting of Luce: one dataclass field is one flag, TOML key, environment variable and keyword of luce.load.

Precedence: flag or keyword, then `LUCE_<FIELD>`, then the TOML file named by `--config`, then the default. This is the
only module that reads the environment. Values are checked here, whatever their origin, and all errors of one start are
reported together.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from luce.errors import UsageError

Parser = Callable[[str], Any]


def _integer(low: int, high: int = 2**31 - 1) -> Parser:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high}")
        return value

    return parse


def _number(low: float, high: float, *, above: bool = False) -> Parser:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or not value <= high:
            raise ValueError(f"expected a number in {'(' if above else '['}{low:g}, {high:g}]")
        return value

    return parse


_SUFFIXES = {"mib": 1, "gib": 1 << 10, "tib": 1 << 20}


def _mebibytes(text: str) -> int:
    """`512`, `512MiB`, `4GiB`, `1TiB` as a number of MiB."""
    number, factor = text.lower(), 1
    for suffix, value in _SUFFIXES.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), value
    if not number.isascii() or not number.isdigit() or int(number) * factor > 1 << 40:
        raise ValueError("expected a size such as 512MiB or 4GiB")
    return int(number) * factor


def _choice(*names: str) -> Parser:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("expected " + " or ".join(names))
        return text

    return parse


def _text(text: str) -> str:
    return text


def _filled(text: str) -> str:
    if not text:
        raise ValueError("expected a path, auto or off")
    return text


def _pool(text: str) -> str:
    if not re.fullmatch(r"off|auto|(auto:)?0*[1-9][0-9]*", text, re.ASCII):
        raise ValueError("expected off, a number of tokens, auto or auto:N")
    return text


def _path(text: str) -> Path:
    if not text:
        raise ValueError("expected a path")
    return Path(text).expanduser()


def _names(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError("expected names separated by commas, none of them empty")
    return parts


_DEVICE = re.compile(r"(auto|(?:tcp://[^/,\s]+:[0-9]{1,5}/)?(?:cuda|hip|cpu)):(0|[1-9][0-9]*)", re.ASCII)
_LAST_INDEX = 2**31 - 1


def _is_device(text: str) -> bool:
    match = _DEVICE.fullmatch(text)
    return text == "auto" or (match is not None and int(match[2]) <= _LAST_INDEX)


def _device(text: str) -> str:
    if not _is_device(text):
        raise ValueError("expected auto or backend:index (auto:N, cuda:N, hip:N, cpu:N)")
    return text


def _devices(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not all(map(_is_device, parts)):
        raise ValueError(
            "expected backend:index[,backend:index...] (auto:N, cuda:N, hip:N, cpu:N), or auto for all GPUs"
        )
    return parts


def _interpreters(text: str) -> tuple[tuple[str, Path], ...]:
    """A path for all backends, as kind "", or a path for each of some."""
    if "=" not in text:
        return (("", _path(text)),)
    parts = [part.partition("=") for part in text.split(",")]
    kinds = [kind for kind, _, _ in parts]
    if not set(kinds) <= {"cuda", "hip", "cpu"} or len(set(kinds)) < len(kinds) or not all(p for _, _, p in parts):
        raise ValueError("expected a path, or backend=PATH[,backend=PATH...] with cuda, hip or cpu")
    return tuple((kind, _path(path)) for kind, _, path in parts)


_VARIABLE = re.compile(r"(cuda|hip|cpu):([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)


def _variables(text: str) -> tuple[str, ...]:
    # A repeated flag arrives joined by commas, which values may have too.
    parts = re.split(r",(?=[a-z]+:[A-Za-z0-9_]+=)", text)
    if not all(map(_VARIABLE.fullmatch, parts)):
        raise ValueError("expected backend:NAME=VALUE with cuda, hip or cpu")
    return tuple(parts)


_WEIGHT = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?", re.ASCII)


def _weights(text: str) -> tuple[float, ...]:
    parts = text.split(",")
    values = tuple(float(part) if _WEIGHT.fullmatch(part) else 0.0 for part in parts)
    if not all(0 < value < math.inf for value in values):
        raise ValueError("expected positive finite numbers separated by commas")
    return values


def _setting(
    default: Any, parse: Parser, help: str, *, flags: Sequence[str] = (), metavar: str = "", group: str
) -> Any:
    """A field. `flags` are aliases without dashes; a tuple default means that the flag may be repeated."""
    meta = {"parse": parse, "help": help, "flags": tuple(flags), "metavar": metavar, "group": group}
    return dataclasses.field(default=default, metadata=meta)


def user_cache_directory() -> Path:
    """`$CACHE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(os.environ.get("CACHE_DIRECTORY") or platformdirs.user_cache_dir("luce"))


def user_state_directory() -> Path:
    """`$STATE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(os.environ.get("STATE_DIRECTORY") or platformdirs.user_state_dir("luce"))


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child process: with these variables, without settings of Luce."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LUCE_")} | dict(variables)


def environment(name: str) -> str | None:
    """A variable that the operating system or systemd hands over (NOTIFY_SOCKET, EDITOR, ...), not a Luce setting."""
    return os.environ.get(name) or None


_CACHE_TYPES = ("auto", "f16", "bf16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Config:
    """All settings. Sizes are in the unit that the help text names."""

    target_device: str = _setting(
        "auto",
        _device,
        "device that holds the model: auto (the first GPU that works, else the CPU), cuda:N, hip:N, cpu:N",
        metavar="DEVICE",
        group="placement",
    )
    target_devices: tuple[str, ...] = _setting(
        (),
        _devices,
        "devices that hold the model's layers, in order: cuda:N, hip:N, cpu:N, tcp://HOST:PORT/cuda:N, or auto for all "
        "GPUs",
        flags=("devices",),
        metavar="DEVICE[,DEVICE...]",
        group="placement",
    )
    target_layer_split: tuple[float, ...] = _setting(
        (),
        _weights,
        "share of the layers on each of the target devices (default: by bytes, in proportion to their free memory)",
        flags=("layer-split",),
        metavar="WEIGHT[,WEIGHT...]",
        group="placement",
    )
    target_shard_ipc_bin: tuple[tuple[str, Path], ...] = _setting(
        (),
        _interpreters,
        "Python interpreter, or virtual environment, that runs daemons for the GPUs of the vendor that this one does "
        "not drive; where there are none, for all devices but the first. backend=PATH: for all devices of the backend",
        flags=("shard-python",),
        metavar="PATH",
        group="remote",
    )
    isolate_shards: bool = _setting(
        False, _text, "a daemon for each device, not one for devices of a backend side by side", group="remote"
    )
    shard_env: tuple[str, ...] = _setting(
        (),
        _variables,
        "variable that daemons of a backend get, such as hip:HSA_OVERRIDE_GFX_VERSION=11.0.0 (repeatable)",
        metavar="BACKEND:NAME=VALUE",
        group="remote",
    )
    shard_transport: str = _setting(
        "auto",
        _choice("auto", "shared", "stream"),
        "how activations reach daemons: in shared memory, in the messages themselves, or auto (shared where possible)",
        flags=("target-shard-ipc-transport",),
        metavar="WAY",
        group="remote",
    )
    shard_activations: str = _setting(
        "f32",
        _choice("f32", "f16", "bf16"),
        "what activations are in messages, over a network or with --shard-transport stream: half the bytes in 16 bits, "
        "which change results",
        metavar="TYPE",
        group="remote",
    )
    shard_key_file: Path | None = _setting(
        None,
        _path,
        "key and certificate of the network daemons at tcp://host:port/backend:index",
        metavar="FILE",
        group="remote",
    )
    shard_timeout: float = _setting(
        60.0,
        _number(0.1, 86400),
        "time that a daemon has for a request, beside 0.1 s for each row of it",
        metavar="SECONDS",
        group="remote",
    )
    shard_start_timeout: float = _setting(
        600.0, _number(1, 86400), "time that a daemon has to start and to load", metavar="SECONDS", group="remote"
    )
    max_ctx: int = _setting(
        0,
        _integer(0),
        "tokens of context per sequence (0: the trained length, at most 8192)",
        metavar="N",
        group="engine",
    )
    parallel: int = _setting(1, _integer(1, 256), "sequences that are generated at once", metavar="N", group="engine")
    chunk: int = _setting(
        0,
        _integer(0, 8192),
        "prompt rows in one step (0: 2048 on GPUs, 512 if a device is a CPU)",
        flags=("prefill-chunk",),
        metavar="N",
        group="engine",
    )
    cache_type_k: str = _setting(
        "auto",
        _choice(*_CACHE_TYPES),
        "how the keys of the context are stored: auto (f16 on GPUs, f32 on the CPU), f16, bf16, q8_0, q4_0",
        metavar="TYPE",
        group="engine",
    )
    cache_type_v: str = _setting(
        "auto",
        _choice(*_CACHE_TYPES),
        "how the values of the context are stored: the same types",
        metavar="TYPE",
        group="engine",
    )
    kvflash: str = _setting(
        "off",
        _pool,
        "tokens of a sequence whose keys and values are on the devices; those of the others wait in host memory, and "
        "longer sequences are computed approximately. off: of all; N, rounded up to a multiple of 256; auto: as many "
        "as half of the memory left holds, 16384 at most; auto:N, N at most",
        metavar="N|auto",
        group="pool",
    )
    kvflash_policy: str = _setting(
        "qk",
        _choice("qk", "drafter", "lru"),
        "what stays on the devices beside a sequence's first and last tokens: qk (what the newest token would attend "
        "to), drafter (what a small model attends to when it reads the last tokens), lru (what came last)",
        metavar="POLICY",
        group="residency",
    )
    kvflash_drafter: str = _setting(
        "",
        _filled,
        "GGUF file of the small model of --kvflash-policy drafter, with any vocabulary (that of --draft unless given)",
        metavar="FILE",
        group="residency",
    )
    kvflash_tau: int = _setting(
        64,
        _integer(1),
        "tokens of a reply after which --kvflash-policy looks again, or a 45th of the sequence if that is more",
        metavar="N",
        group="residency",
    )
    kvflash_host_mb: int = _setting(
        0,
        _mebibytes,
        "MiB of host memory for what is not on the devices (0: half of what is free at the start)",
        metavar="SIZE",
        group="residency",
    )
    prompt_weights: str = _setting(
        "auto",
        _choice("auto", "packed"),
        "matrices as GPUs read prompts with them: auto (unpacked to f16 too, in up to half of the memory left), packed",
        metavar="HOW",
        group="engine",
    )
    draft: str = _setting(
        "",
        _text,
        "what guesses the next tokens, so that several are computed at a time; replies stay what they are. PATH: a "
        "DFlash draft (GGUF, or a directory of safetensors) or a small model with the same tokens. mtp: the block for "
        "it in the model's own file. ngram: what followed the last time that the text ended as it does",
        metavar="PATH|mtp|ngram",
        group="draft",
    )
    draft_device: str = _setting(
        "auto",
        _device,
        "device of the draft: auto (the one with the last layers), cuda:N, hip:N, cpu:N, tcp://host:port/backend:N",
        metavar="DEVICE",
        group="draft",
    )
    draft_ipc_bin: Path | None = _setting(
        None,
        _path,
        "Python interpreter, or virtual environment, that runs a daemon for the draft on its device",
        flags=("draft-python",),
        metavar="PATH",
        group="draft",
    )
    draft_residency: str = _setting(
        "auto",
        _choice("auto", "persistent", "request-scoped"),
        "when the draft is loaded: persistent (auto: the same), or request-scoped (while requests run)",
        metavar="WHEN",
        group="draft",
    )
    draft_swa: int = _setting(
        0,
        _integer(0),
        "window of all layers of a DFlash draft but the last, where its file does not tell (0: what the file says)",
        metavar="N",
        group="draft",
    )
    draft_ctx_max: int = _setting(
        4096, _integer(64), "tokens before a guess that the draft sees at most", metavar="N", group="draft"
    )
    draft_tail: int = _setting(
        2048,
        _integer(0),
        "tokens at the end of a kept prefix whose hidden states are kept too, for drafts that read such: these go on "
        "at once behind it (0: none)",
        metavar="N",
        group="draft",
    )
    ddtree: bool = _setting(
        False,
        _text,
        "let a DFlash draft guess a tree, several tokens for a place, instead of one text",
        group="draft",
    )
    ddtree_budget: int = _setting(
        15,
        _integer(0, 64),
        "most guesses of a tree; a step computes up to 15 beside the token that it begins with, so more change nothing",
        metavar="N",
        group="draft",
    )
    verify_width: int = _setting(
        0,
        _integer(0, 16),
        "tokens of a sequence that are computed at a time where some are guessed (0: as many as measured times make "
        "worthwhile)",
        metavar="N",
        group="draft",
    )
    threads: int = _setting(
        0,
        _integer(0, 4096),
        "threads of the CPU device's matrix products (0: all cores)",
        metavar="N",
        group="limits",
    )
    max_queue: int = _setting(
        64, _integer(0, 65536), "requests that may wait; further ones are answered 503", metavar="N", group="limits"
    )
    max_queue_seconds: float = _setting(
        0.0, _number(0, 86400), "longest wait in the queue (0: no limit)", metavar="SECONDS", group="limits"
    )
    timeout: float = _setting(
        0.0, _number(0, 86400), "longest run of one request (0: no limit)", metavar="SECONDS", group="limits"
    )
    cache_ram: int = _setting(
        4096,
        _mebibytes,
        "MiB of host memory for prompts that may come again (0: none are kept, on the disk neither)",
        metavar="SIZE",
        group="cache",
    )
    cache_interval: int = _setting(
        8192,
        _integer(64),
        "tokens of a long prompt between states that later prompts can begin at, in models with such states",
        flags=("kv-cache-interval",),
        metavar="N",
        group="cache",
    )
    kv_cache_dir: str = _setting(
        "auto",
        _filled,
        "directory that keeps prompts across restarts (auto: in the user's cache directory, off: none)",
        flags=("cache-dir",),
        metavar="DIR",
        group="disk cache",
    )
    kv_cache_budget: int = _setting(
        20480,
        _mebibytes,
        "MiB that the directory may take up (0: no limit)",
        flags=("cache-disk",),
        metavar="SIZE",
        group="disk cache",
    )
    kv_cache_min_tokens: int = _setting(
        512,
        _integer(1),
        "shortest prompt that is written to the directory",
        flags=("cache-min-tokens",),
        metavar="N",
        group="cache",
    )
    kv_cache_flush_timeout: float = _setting(
        30.0,
        _number(0, 3600),
        "time for writing what is not in the directory yet when all ends",
        flags=("save-seconds",),
        metavar="SECONDS",
        group="cache",
    )
    temperature: float = _setting(
        0.7, _number(0, 2), "default of requests that name none (0: greedy)", metavar="T", group="sampling"
    )
    top_k: int = _setting(40, _integer(0), "default of requests that name none (0: off)", metavar="N", group="sampling")
    top_p: float = _setting(
        0.95, _number(0, 1, above=True), "default of requests that name none", metavar="P", group="sampling"
    )
    min_p: float = _setting(0.0, _number(0, 1), "default of requests that name none", metavar="P", group="sampling")
    repetition_penalty: float = _setting(
        1.0,
        _number(0, 10, above=True),
        "default of requests that name none",
        flags=("repeat-penalty",),
        metavar="X",
        group="sampling",
    )
    chat_template: Path | None = _setting(
        None,
        _path,
        "Jinja file used instead of the model file's own template",
        flags=("chat-template-file",),
        metavar="FILE",
        group="text",
    )
    host: str = _setting("127.0.0.1", _text, "address to listen on", metavar="ADDRESS", group="server")
    port: int = _setting(8080, _integer(0, 65535), "port to listen on (0: any free one)", metavar="N", group="server")
    alias: tuple[str, ...] = _setting(
        (),
        _names,
        "names of the model in replies and /v1/models",
        flags=("model-name",),
        metavar="NAME[,NAME...]",
        group="server",
    )
    strict_model: bool = _setting(False, _text, "answer 404 to requests that name another model", group="server")
    api_key: tuple[str, ...] = _setting(
        (), _names, "key that clients must send (repeatable)", metavar="KEY[,KEY...]", group="server"
    )
    api_key_file: Path | None = _setting(
        None, _path, "file with one key per line, re-read on SIGHUP", metavar="FILE", group="server"
    )
    allowed_host: tuple[str, ...] = _setting(
        (),
        _names,
        "further Host header values accepted on a loopback address without a key",
        metavar="NAME[,NAME...]",
        group="server",
    )
    cors_origin: tuple[str, ...] = _setting(
        (), _names, "origins that browsers may call from, * for all", metavar="ORIGIN[,ORIGIN...]", group="server"
    )
    metrics_public: bool = _setting(False, _text, "serve /metrics without a key", group="server")
    max_body_mib: int = _setting(64, _integer(1, 4096), "largest request body", metavar="MIB", group="server")
    max_n: int = _setting(8, _integer(1, 64), "largest `n` of a request", metavar="N", group="server")
    max_batch_prompts: int = _setting(
        64, _integer(1, 1024), "most prompts in one /v1/completions request", metavar="N", group="server"
    )
    sse_ping: float = _setting(
        10.0,
        _number(0.1, 3600),
        "seconds between keep-alive comments in a silent stream",
        metavar="SECONDS",
        group="server",
    )
    write_timeout: float = _setting(
        60.0,
        _number(0.1, 3600),
        "seconds after which a client that does not read its stream is dropped",
        metavar="SECONDS",
        group="server",
    )
    drain_seconds: float = _setting(
        30.0, _number(0, 3600), "time that running requests get after SIGTERM", metavar="SECONDS", group="server"
    )
    log_level: str = _setting(
        "info",
        _choice("debug", "info", "warning", "error"),
        "least severe messages that are logged",
        metavar="LEVEL",
        group="log",
    )
    log_json: bool = _setting(False, _text, "log lines as JSON objects", group="log")


FIELDS: Mapping[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config)}
#: shares belong to a list of devices, so an origin that names devices replaces all of these of the weaker origins
_PLACEMENT = ("target_device", "target_devices", "target_layer_split")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def flag(name: str) -> str:
    """The flag of a field: `max_ctx` is `--max-ctx`."""
    return "--" + name.replace("_", "-")


def _is_bool(field: dataclasses.Field[Any]) -> bool:
    return isinstance(field.default, bool)


def _parse(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    """Check one value from any origin. Raises UsageError naming the origin."""
    if value is None and field.default is None:
        return None
    if _is_bool(field):
        if isinstance(value, bool):
            return value
        lowered = str(value).lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise UsageError(f"{origin}: expected true or false, got {value!r}", param=field.name)
    if isinstance(value, bool):
        raise UsageError(f"{origin}: expected {field.metadata['metavar']}, got {value!r}", param=field.name)
    if isinstance(value, list | tuple):
        if not isinstance(field.default, tuple):
            raise UsageError(f"{origin}: expected one value, got {value!r}", param=field.name)
        if not value:
            return ()
        value = ",".join(str(v) for v in value)
    try:
        return field.metadata["parse"](str(value))
    except ValueError as error:
        raise UsageError(f"{origin}: {error}, got {str(value)!r}", param=field.name) from None


def add_flags(parser: argparse.ArgumentParser, groups: Iterable[str]) -> None:
    """Add the flags of the named groups (and `--config`) to a parser; absent flags stay out of the namespace."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, default=argparse.SUPPRESS, help="TOML file with settings"
    )
    for group in groups:
        section = parser.add_argument_group(group)
        for field in FIELDS.values():
            meta = field.metadata
            if meta["group"] != group:
                continue
            names = [flag(field.name), *("--" + alias for alias in meta["flags"])]
            options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
            if _is_bool(field):
                section.add_argument(*names, action=argparse.BooleanOptionalAction, help=meta["help"], **options)
                continue
            shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            text = (
                meta["help"]
                if shown in (None, "") or "default" in meta["help"]
                else f"{meta['help']} (default: {shown})"
            )
            if isinstance(field.default, tuple):
                options["action"] = "append"
            section.add_argument(*names, metavar=meta["metavar"], help=text.replace("%", "%%"), **options)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}", param="config") from None


def resolve(
    given: Mapping[str, Any], *, spell: Callable[[str], str] = flag, env: Mapping[str, str] | None = None
) -> Config:
    """The Config from flags or keywords, environment and file. Raises one UsageError that holds every problem found.

    `spell` names a given field in messages: as a flag by default, luce.load passes the bare keyword.
    """
    env = os.environ if env is None else env
    given = dict(given)
    problems: list[str] = []
    params: list[str] = []
    layers: list[tuple[dict[str, Any], Callable[[str], str]]] = []
    path = given.pop("config", None) or env.get("LUCE_CONFIG")
    if path:
        try:
            content = {key.replace("-", "_"): value for key, value in _read_file(Path(path)).items()}
            layers.append((content, lambda name: f"{path}: {name}"))
        except UsageError as error:
            problems.append(str(error))
            params.append("config")
    layers.append(
        ({n: env[f"LUCE_{n.upper()}"] for n in FIELDS if f"LUCE_{n.upper()}" in env}, lambda n: f"LUCE_{n.upper()}")
    )
    layers.append((given, spell))
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for content, name_of in layers:
        if "target_device" in content or "target_devices" in content:
            for name in _PLACEMENT:
                values.pop(name, None)
        for name, value in content.items():
            spelled[name] = name_of(name)
            try:
                if name not in FIELDS:
                    raise UsageError(f"{name_of(name)}: no such setting", param=name)
                values[name] = _parse(FIELDS[name], value, name_of(name))
            except UsageError as error:
                problems.append(str(error))
                params.append(name)
    for name, problem in (
        *_placement_problems(values, spelled, frozenset(params)),
        *_draft_problems(values, spelled, frozenset(params)),
        *_pool_problems(values, spelled, frozenset(params)),
    ):
        problems.append(problem)
        params.append(name)
    if problems:
        raise UsageError("; ".join(problems), param=params[0])
    return Config(**values)


def cache_directory(config: Config) -> Path | None:
    """The directory of --kv-cache-dir, None if there is to be none."""
    if config.kv_cache_dir == "off":
        return None
    if config.kv_cache_dir == "auto":
        return user_cache_directory() / "prefixes"
    return Path(config.kv_cache_dir).expanduser()


def _placement_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of what is wrong between the placement settings, as far as no device need be looked at.

    Fields in `wrong` have been reported; what depends on them is left alone.
    """
    devices: tuple[str, ...] = values.get("target_devices", ())
    weights: tuple[float, ...] = values.get("target_layer_split", ())
    if devices and "target_device" in values:
        yield "target_devices", f"{spelled['target_device']} and {spelled['target_devices']}: give only one of them"
    for device in sorted({device for device in devices if devices.count(device) > 1}):
        yield "target_devices", f"{spelled['target_devices']}: {device} is named twice"
    if not weights or "target_devices" in wrong:
        return
    if len(devices) < 2 and devices != ("auto",):
        devices_flag = spelled.get("target_devices", flag("target_devices"))
        yield "target_layer_split", f"{spelled['target_layer_split']}: requires {devices_flag} with two or more devices"
    elif "auto" not in devices and len(weights) != len(devices):
        yield (
            "target_layer_split",
            f"{spelled['target_layer_split']}: {len(weights)} weights for {len(devices)} devices",
        )


#: settings of drafts that have weights
_DRAFT = ("draft_device", "draft_ipc_bin", "draft_residency", "draft_swa", "draft_ctx_max", "draft_tail")


def _draft_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of draft settings that would do nothing. Fields in `wrong` have been reported."""
    budget = "ddtree_budget"
    if not values.get("ddtree", False) and values.get(budget, FIELDS[budget].default) != FIELDS[budget].default:
        yield budget, f"{spelled[budget]}: requires {flag('ddtree')}"
    if values.get("ddtree", False) and values.get("draft", "") in ("", "ngram", "mtp") and "draft" not in wrong:
        yield "ddtree", f"{spelled['ddtree']}: requires {flag('draft')} with a DFlash draft"
    if values.get("ddtree", False) and values.get("kvflash", "off") != "off" and "kvflash" not in wrong:
        yield "ddtree", f"{spelled['ddtree']}: not together with {flag('kvflash')}"
    if values.get("draft", "") not in ("", "ngram") or "draft" in wrong:
        return
    for name in _DRAFT:
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('draft')} with a file or mtp"


_RESIDENCY = ("kvflash_policy", "kvflash_drafter", "kvflash_tau", "kvflash_host_mb")


def _pool_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of residency settings that would do nothing, or lack something. Fields in `wrong` have been
    reported."""
    if values.get("kvflash", "off") != "off" or "kvflash" in wrong:
        named = values.get("kvflash_drafter", "")
        if values.get("kvflash_policy") == "drafter":
            reported = "kvflash_drafter" in wrong or "draft" in wrong
            if not named and values.get("draft", "") in ("", "ngram", "mtp") and not reported:
                yield "kvflash_policy", f"{spelled['kvflash_policy']} drafter: requires {flag('kvflash_drafter')}"
        elif named and "kvflash_policy" not in wrong:
            yield "kvflash_drafter", f"{spelled['kvflash_drafter']}: requires {flag('kvflash_policy')} drafter"
        return
    for name in _RESIDENCY:
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('kvflash')}"


def override(config: Config, given: Mapping[str, Any]) -> Config:
    """A Config with some fields replaced by keyword values. Raises UsageError naming the keyword."""
    return dataclasses.replace(config, **{name: _parse(FIELDS[name], value, name) for name, value in given.items()})


def sample() -> str:
    """The sample TOML file: every setting, commented out, with its default (systemd/luce.toml is this text)."""
    lines = ["# Settings of Luce. Each line shows the default; the same names work as flags and as LUCE_<NAME>."]
    group = ""
    for field in FIELDS.values():
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            lines += ["", f"# --- {group}"]
        default = field.default
        if isinstance(default, bool):
            shown = str(default).lower()
        elif isinstance(default, tuple):
            shown = "[" + ", ".join(f'"{v}"' if isinstance(v, str) else f"{v:g}" for v in default) + "]"
        elif default is None:
            shown = '""'
        else:
            shown = f'"{default}"' if isinstance(default, str) else f"{default:g}"
        lines += [f"# {field.metadata['help']}", f"# {field.name} = {shown}"]
    return "\n".join(lines) + "\n"
