"""The table of settings, each with its default, its parser, its help text and the flags it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.values import (
    Parser,
    choice,
    device,
    devices,
    filled,
    integer,
    interpreters,
    mebibytes,
    names,
    number,
    path,
    place,
    pool,
    text,
    variables,
    weights,
)


def _setting(
    default: Any, parse: Parser, help: str, *, flags: Sequence[str] = (), metavar: str = "", group: str
) -> Any:
    """A field. `flags` are aliases without dashes; a tuple default means that the flag may be repeated."""
    meta = {"parse": parse, "help": help, "flags": tuple(flags), "metavar": metavar, "group": group}
    return dataclasses.field(default=default, metadata=meta)


#: the groups in the order of the sample file; their names are headings in `--help`
GROUPS = (
    "placement",
    "peer copies",
    "daemons",
    "engine",
    "KVFlash",
    "KVFlash policy",
    "drafting",
    "limits",
    "prefix cache",
    "prefix cache on disk",
    "sampling",
    "chat template",
    "server",
    "log",
)
_CACHE_TYPES = ("auto", "f16", "bf16", "q8_0", "q4_0")


if TYPE_CHECKING:

    class _Sampling:
        """A field for each sampling value with a setting; code reads them by the names of SAMPLERS."""

else:
    _Sampling = dataclasses.make_dataclass(
        "_Sampling",
        [
            (
                name,
                sampler.kind,
                _setting(
                    sampler.setting,
                    sampler.parse,
                    f"{sampler.help}; used when a request does not set it",
                    flags=[alias.replace("_", "-") for alias in sampler.aliases[:1]],
                    metavar=sampler.metavar,
                    group="sampling",
                ),
            )
            for name, sampler in SAMPLERS.items()
            if sampler.setting is not None
        ],
        frozen=True,
    )


@dataclass(frozen=True)
class Config(_Sampling):
    """All settings. Sizes are in the unit that the help text names."""

    target_device: str = _setting(
        "auto",
        device,
        "device that holds the model: auto (the first GPU that works, else the CPU), cuda:N, hip:N, cpu:N",
        metavar="DEVICE",
        group="placement",
    )
    target_devices: tuple[str, ...] = _setting(
        (),
        devices,
        "devices that hold the model's layers, in order: cuda:N, hip:N, cpu:N, tcp://HOST:PORT/cuda:N, or auto for all "
        "GPUs",
        flags=("devices",),
        metavar="DEVICE[,DEVICE...]",
        group="placement",
    )
    target_layer_split: tuple[float, ...] = _setting(
        (),
        weights,
        "share of the layers on each of the target devices (default: by bytes, in proportion to their free memory)",
        flags=("layer-split",),
        metavar="WEIGHT[,WEIGHT...]",
        group="placement",
    )
    target_shard_ipc_bin: tuple[tuple[str, Path], ...] = _setting(
        (),
        interpreters,
        "Python interpreter, or virtual environment, that runs daemons for the GPUs of the vendor that this one does "
        "not drive; where there are none, for all devices but the first. backend=PATH: for all devices of the backend",
        flags=("shard-python",),
        metavar="PATH",
        group="daemons",
    )
    peer_access: bool = _setting(
        True,
        text,
        "let GPUs copy to each other where the pair can; --no-peer-access: always by way of host memory",
        group="peer copies",
    )
    isolate_shards: bool = _setting(
        False, text, "a daemon for each device, not one for devices of a backend side by side", group="daemons"
    )
    shard_env: tuple[str, ...] = _setting(
        (),
        variables,
        "variable that daemons of a backend get, such as hip:HSA_OVERRIDE_GFX_VERSION=11.0.0 (repeatable)",
        metavar="BACKEND:NAME=VALUE",
        group="daemons",
    )
    shard_transport: str = _setting(
        "auto",
        choice("auto", "shared", "stream"),
        "how activations reach daemons: in shared memory, in the messages themselves, or auto (shared where possible)",
        flags=("target-shard-ipc-transport",),
        metavar="WAY",
        group="daemons",
    )
    shard_activations: str = _setting(
        "f32",
        choice("f32", "f16", "bf16"),
        "what activations are in messages, over a network or with --shard-transport stream: half the bytes in 16 bits, "
        "which change results",
        metavar="TYPE",
        group="daemons",
    )
    shard_key_file: Path | None = _setting(
        None,
        path,
        "key and certificate of the network daemons at tcp://host:port/backend:index",
        metavar="FILE",
        group="daemons",
    )
    shard_timeout: float = _setting(
        60.0,
        number(0.1, 86400),
        "time that a daemon has for a request, beside 0.1 s for each row of it",
        metavar="SECONDS",
        group="daemons",
    )
    shard_start_timeout: float = _setting(
        600.0,
        number(1, 86400),
        "time that a daemon has to start, and to read each of its layers",
        metavar="SECONDS",
        group="daemons",
    )
    max_ctx: int = _setting(
        0,
        integer(0),
        "tokens of context per sequence (0: the trained length, at most 8192)",
        metavar="N",
        group="engine",
    )
    parallel: int = _setting(1, integer(1, 256), "sequences that are generated at once", metavar="N", group="engine")
    chunk: int = _setting(
        0,
        integer(0, 8192),
        "prompt rows in one step (0: 2048 on GPUs, 512 if a device is a CPU)",
        flags=("prefill-chunk",),
        metavar="N",
        group="engine",
    )
    cache_type_k: str = _setting(
        "auto",
        choice(*_CACHE_TYPES),
        "how the keys of the context are stored: auto (f16 on GPUs, f32 on the CPU), f16, bf16, q8_0, q4_0",
        metavar="TYPE",
        group="engine",
    )
    cache_type_v: str = _setting(
        "auto",
        choice(*_CACHE_TYPES),
        "how the values of the context are stored: the same types",
        metavar="TYPE",
        group="engine",
    )
    kvflash: str = _setting(
        "off",
        pool,
        "tokens of a sequence whose keys and values are on the devices; those of the others wait in host memory, and "
        "longer sequences are computed approximately. off: of all; N, rounded up to a multiple of 256; auto: as many "
        "as half of the memory left holds, 16384 at most; auto:N, N at most",
        metavar="N|auto",
        group="KVFlash",
    )
    kvflash_policy: str = _setting(
        "qk",
        choice("qk", "drafter", "lru"),
        "what stays on the devices beside a sequence's first and last tokens: qk (what the newest token would attend "
        "to), drafter (what a small model attends to when it reads the last tokens), lru (as qk, but nothing comes "
        "back)",
        metavar="POLICY",
        group="KVFlash policy",
    )
    kvflash_drafter: str = _setting(
        "",
        filled,
        "GGUF file of the small model of --kvflash-policy drafter, with any vocabulary (that of --draft unless given)",
        metavar="FILE",
        group="KVFlash policy",
    )
    kvflash_tau: int = _setting(
        64,
        integer(1),
        "tokens of a reply after which --kvflash-policy looks again, or a 45th of the sequence if that is more",
        metavar="N",
        group="KVFlash policy",
    )
    kvflash_host_mb: int = _setting(
        0,
        mebibytes,
        "MiB of host memory for what is not on the devices (0: half of what is free at the start)",
        metavar="SIZE",
        group="KVFlash policy",
    )
    prompt_weights: str = _setting(
        "auto",
        choice("auto", "packed"),
        "matrices as GPUs read prompts with them: auto (unpacked to f16 too, in up to half of the memory left), packed",
        metavar="HOW",
        group="engine",
    )
    draft: str = _setting(
        "",
        place,
        "what guesses the next tokens, so that several are computed at a time; replies stay what they are. PATH: a "
        "DFlash draft (GGUF, or a directory of safetensors) or a small model with the same tokens. mtp: the block for "
        "it in the model's own file. ngram: what followed the last time that the text ended as it does",
        metavar="PATH|mtp|ngram",
        group="drafting",
    )
    draft_device: str = _setting(
        "auto",
        device,
        "device of the draft: auto (the one with the last layers), cuda:N, hip:N, cpu:N, tcp://host:port/backend:N",
        metavar="DEVICE",
        group="drafting",
    )
    draft_ipc_bin: Path | None = _setting(
        None,
        path,
        "Python interpreter, or virtual environment, that runs a daemon for the draft on its device",
        flags=("draft-python",),
        metavar="PATH",
        group="drafting",
    )
    draft_residency: str = _setting(
        "auto",
        choice("auto", "persistent", "request-scoped"),
        "when the draft is loaded: persistent (auto: the same), or request-scoped (while requests run)",
        metavar="WHEN",
        group="drafting",
    )
    draft_swa: int = _setting(
        0,
        integer(0),
        "window of all layers of a DFlash draft but the last, where its file does not tell (0: what the file says)",
        metavar="N",
        group="drafting",
    )
    draft_ctx_max: int = _setting(
        4096, integer(64), "tokens before a guess that the draft sees at most", metavar="N", group="drafting"
    )
    draft_tail: int = _setting(
        2048,
        integer(0),
        "tokens at the end of a kept prefix whose hidden states are kept too, for drafts that read such: these go on "
        "at once behind it (0: none)",
        metavar="N",
        group="drafting",
    )
    ddtree: bool = _setting(
        False,
        text,
        "let a DFlash draft guess a tree, several tokens for a place, instead of one text",
        group="drafting",
    )
    ddtree_budget: int = _setting(
        15,
        integer(0, 64),
        "most guesses of a tree; a step computes up to 15 beside the token that it begins with, so more change nothing",
        metavar="N",
        group="drafting",
    )
    verify_width: int = _setting(
        0,
        integer(0, 16),
        "tokens of a sequence that are computed at a time where some are guessed (0: as many as measured times make "
        "worthwhile)",
        metavar="N",
        group="drafting",
    )
    threads: int = _setting(
        0,
        integer(0, 4096),
        "threads of the CPU device's matrix products (0: all cores)",
        metavar="N",
        group="limits",
    )
    max_queue: int = _setting(
        64, integer(0, 65536), "requests that may wait; further ones are answered 503", metavar="N", group="limits"
    )
    max_queue_seconds: float = _setting(
        0.0, number(0, 86400), "longest wait in the queue (0: no limit)", metavar="SECONDS", group="limits"
    )
    timeout: float = _setting(
        0.0, number(0, 86400), "longest run of one request (0: no limit)", metavar="SECONDS", group="limits"
    )
    cache_ram: int = _setting(
        4096,
        mebibytes,
        "MiB of host memory for prompts that may come again (0: none are kept, on the disk neither)",
        metavar="SIZE",
        group="prefix cache",
    )
    cache_interval: int = _setting(
        8192,
        integer(64),
        "tokens of a long prompt between states that later prompts can begin at, in models with such states",
        flags=("kv-cache-interval",),
        metavar="N",
        group="prefix cache",
    )
    kv_cache_dir: str = _setting(
        "auto",
        filled,
        "directory that keeps prompts across restarts (auto: in the user's cache directory, off: none)",
        flags=("cache-dir",),
        metavar="DIR",
        group="prefix cache on disk",
    )
    kv_cache_budget: int = _setting(
        20480,
        mebibytes,
        "MiB that the directory may take up (0: no limit)",
        flags=("cache-disk",),
        metavar="SIZE",
        group="prefix cache on disk",
    )
    kv_cache_min_tokens: int = _setting(
        512,
        integer(1),
        "shortest prompt that is written to the directory",
        flags=("cache-min-tokens",),
        metavar="N",
        group="prefix cache",
    )
    kv_cache_placement: str = _setting(
        "reshard",
        choice("reshard", "exact"),
        "which snapshots in the directory are used: those of every placement of the model (reshard), or those alone "
        "that the same devices with the same layers wrote (exact)",
        metavar="WHICH",
        group="prefix cache",
    )
    kv_cache_flush_timeout: float = _setting(
        30.0,
        number(0, 3600),
        "time for writing what is not in the directory yet when all ends",
        flags=("save-seconds",),
        metavar="SECONDS",
        group="prefix cache",
    )
    chat_template: Path | None = _setting(
        None,
        path,
        "Jinja file used instead of the model file's own template",
        flags=("chat-template-file",),
        metavar="FILE",
        group="chat template",
    )
    host: str = _setting("127.0.0.1", text, "address to listen on", metavar="ADDRESS", group="server")
    port: int = _setting(8080, integer(0, 65535), "port to listen on (0: any free one)", metavar="N", group="server")
    alias: tuple[str, ...] = _setting(
        (),
        names,
        "names of the model in replies and /v1/models",
        flags=("model-name",),
        metavar="NAME[,NAME...]",
        group="server",
    )
    strict_model: bool = _setting(False, text, "answer 404 to requests that name another model", group="server")
    api_key: tuple[str, ...] = _setting(
        (), names, "key that clients must send (repeatable)", metavar="KEY[,KEY...]", group="server"
    )
    api_key_file: Path | None = _setting(
        None, path, "file with one key per line, re-read on SIGHUP", metavar="FILE", group="server"
    )
    allowed_host: tuple[str, ...] = _setting(
        (),
        names,
        "further Host header values accepted on a loopback address without a key",
        metavar="NAME[,NAME...]",
        group="server",
    )
    cors_origin: tuple[str, ...] = _setting(
        (), names, "origins that browsers may call from, * for all", metavar="ORIGIN[,ORIGIN...]", group="server"
    )
    metrics_public: bool = _setting(False, text, "serve /metrics without a key", group="server")
    max_body_mib: int = _setting(64, integer(1, 4096), "largest request body", metavar="MIB", group="server")
    max_n: int = _setting(8, integer(1, 64), "largest `n` of a request", metavar="N", group="server")
    max_batch_prompts: int = _setting(
        64, integer(1, 1024), "most prompts in one /v1/completions request", metavar="N", group="server"
    )
    sse_ping: float = _setting(
        10.0,
        number(0.1, 3600),
        "seconds between keep-alive comments in a silent stream",
        metavar="SECONDS",
        group="server",
    )
    write_timeout: float = _setting(
        60.0,
        number(0.1, 3600),
        "seconds after which a client that does not read its stream is dropped",
        metavar="SECONDS",
        group="server",
    )
    drain_seconds: float = _setting(
        30.0, number(0, 3600), "time that running requests get after SIGTERM", metavar="SECONDS", group="server"
    )
    log_level: str = _setting(
        "info",
        choice("debug", "info", "warning", "error"),
        "least severe messages that are logged",
        metavar="LEVEL",
        group="log",
    )
    log_json: bool = _setting(False, text, "log lines as JSON objects", group="log")


FIELDS: Mapping[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config)}


def sampling_default(config: Config, name: str) -> Any:
    """The sampling value of a request that does not set `name`: the setting, or the field's default where none is."""
    return getattr(config, name, getattr(SamplingParams, name))


def flag(name: str) -> str:
    """The flag of a field: `max_ctx` is `--max-ctx`."""
    return "--" + name.replace("_", "-")


def is_bool(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is a switch."""
    return isinstance(field.default, bool)
