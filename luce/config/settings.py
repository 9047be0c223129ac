"""The table of settings, each with its default, its parser, its help text and the flags it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luce.config.cluster_settings import ClusterSettings
from luce.config.field import setting
from luce.config.planning_settings import PlanningSettings
from luce.config.pool_settings import PoolSettings
from luce.config.prefill_settings import PrefillSettings
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.server_settings import ServerSettings
from luce.config.values import (
    choice,
    device,
    devices,
    efforts,
    integer,
    interpreters,
    mebibytes,
    number,
    path,
    path_or_mode,
    path_or_name,
    resident_tokens,
    text,
    tokens,
    variables,
    weights,
)

#: the groups in the order of the sample file; their names are headings in `--help`
GROUPS = (
    "placement",
    "planning",
    "peer copies",
    "daemons",
    "engine",
    "KVFlash",
    "KVFlash policy",
    "drafting",
    "prompt compression",
    "limits",
    "prefix cache",
    "prefix cache on disk",
    "sampling",
    "model cards",
    "reasoning",
    "chat template",
    "server",
    "cluster",
    "log",
)
_CACHE_TYPES = ("auto", "f16", "bf16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Config(ServerSettings, ClusterSettings, PoolSettings, PlanningSettings, PrefillSettings):
    """All settings. Sizes are in the unit that the help text names."""

    target_device: str = setting(
        "auto",
        device,
        "device that runs the model: auto (the first GPU that works, else the CPU), cuda:N, hip:N, cpu:N",
        metavar="DEVICE",
        group="placement",
    )
    target_devices: tuple[str, ...] = setting(
        (),
        devices,
        "devices that the model's layers are split over, in order: cuda:N, hip:N, cpu:N, tcp://HOST:PORT/cuda:N, or "
        "auto for all GPUs",
        flags=("devices",),
        metavar="DEVICE[,DEVICE...]",
        group="placement",
    )
    target_layer_split: tuple[float, ...] = setting(
        (),
        weights,
        "share of the layers on each of the target devices (default: in proportion to their free memory)",
        flags=("layer-split",),
        metavar="WEIGHT[,WEIGHT...]",
        group="placement",
    )
    target_shard_ipc_bin: tuple[tuple[str, Path], ...] = setting(
        (),
        interpreters,
        "Python interpreter or virtual environment that runs daemons for the GPUs of the other vendor; if there are "
        "none, for all devices but the first. backend=PATH: for all devices of that backend",
        flags=("shard-python",),
        metavar="PATH",
        group="daemons",
    )
    peer_access: bool = setting(
        True,
        text,
        "let GPUs copy directly to each other where they can; --no-peer-access: always copy through host memory",
        group="peer copies",
    )
    isolate_shards: bool = setting(
        False, text, "start one daemon per device, not one for all neighbouring devices of a backend", group="daemons"
    )
    shard_env: tuple[str, ...] = setting(
        (),
        variables,
        "environment variable for the daemons of a backend, such as hip:HSA_OVERRIDE_GFX_VERSION=11.0.0 (repeatable)",
        metavar="BACKEND:NAME=VALUE",
        group="daemons",
    )
    shard_transport: str = setting(
        "auto",
        choice("auto", "shared", "stream"),
        "how activations reach daemons: shared (shared memory), stream (inside the messages), auto (shared where "
        "possible)",
        flags=("target-shard-ipc-transport",),
        metavar="TRANSPORT",
        group="daemons",
    )
    shard_activations: str = setting(
        "f32",
        choice("f32", "f16", "bf16"),
        "type of activations inside messages (over a network, or with --shard-transport stream): f16 and bf16 halve "
        "the bytes and change results",
        metavar="TYPE",
        group="daemons",
    )
    shard_key_file: Path | None = setting(
        None,
        path,
        "file with the key and certificate for network daemons at tcp://HOST:PORT/BACKEND:N",
        metavar="FILE",
        group="daemons",
    )
    shard_timeout: float = setting(
        60.0,
        number(0.1, 86400),
        "seconds in which a daemon must answer a request, plus 0.1 s per row of the request",
        metavar="SECONDS",
        group="daemons",
    )
    shard_start_timeout: float = setting(
        600.0,
        number(1, 86400),
        "seconds in which a daemon must start, and in which it must read each of its layers",
        metavar="SECONDS",
        group="daemons",
    )
    max_ctx: int = setting(
        0,
        tokens(0),
        "context length of a sequence in tokens (0: the trained length, at most 8192)",
        metavar="N",
        group="engine",
    )
    parallel: int = setting(
        1, integer(1, 256), "sequences that are generated at the same time", metavar="N", group="engine"
    )
    chunk: int = setting(
        0,
        tokens(0, 8192),
        "prompt tokens in one step (0: 2048 on GPUs, 8192 if each GPU has 70 GiB; 512 with a CPU)",
        flags=("prefill-chunk",),
        metavar="N",
        group="engine",
    )
    cache_type_k: str = setting(
        "auto",
        choice(*_CACHE_TYPES),
        "type in which keys are stored: auto (f16 on GPUs, f32 on the CPU), f16, bf16, q8_0, q4_0",
        metavar="TYPE",
        group="engine",
    )
    cache_type_v: str = setting(
        "auto",
        choice(*_CACHE_TYPES),
        "type in which values are stored: the same choices as for keys",
        metavar="TYPE",
        group="engine",
    )
    kvflash: str = setting(
        "off",
        resident_tokens,
        "keys and values on the devices, per sequence; further ones are swapped out to host memory, and longer "
        "sequences are computed approximately. off: all tokens stay on the devices; N: at most N tokens, rounded up "
        "to 256; auto: at most 16384, and at most half of the free memory; auto:N: the same with at most N",
        metavar="N|auto",
        group="KVFlash",
    )
    kvflash_policy: str = setting(
        "qk",
        choice("qk", "drafter", "lru"),
        "which pages stay on the devices beside a sequence's first and last ones: qk (those that the newest token "
        "attends to most), drafter (those that a small model attends to while it reads the newest tokens), lru (as "
        "qk, but no page is swapped in again)",
        metavar="POLICY",
        group="KVFlash policy",
    )
    kvflash_drafter: str = setting(
        "",
        path_or_mode,
        "GGUF file of the small model for --kvflash-policy drafter, with any vocabulary (default: the model of "
        "--draft)",
        metavar="FILE",
        group="KVFlash policy",
    )
    kvflash_tau: int = setting(
        64,
        tokens(1),
        "tokens of a reply after which --kvflash-policy scores the pages again, or 1/45 of the sequence if that is "
        "more",
        metavar="N",
        group="KVFlash policy",
    )
    kvflash_host_mb: int = setting(
        0,
        mebibytes,
        "MiB of host memory for pages that are swapped out (0: half of the memory that is free at the start)",
        metavar="SIZE",
        group="KVFlash policy",
    )
    prompt_weights: str = setting(
        "auto",
        choice("auto", "packed"),
        "weights that GPUs use for prompts: auto (also unpacked to f16, in up to half of the free memory), packed",
        metavar="FORMAT",
        group="engine",
    )
    prompt_precision: str = setting(
        "fp16",
        choice("fp16", "int8"),
        "type in which GPUs multiply prompts: fp16, int8 (faster, less exact; NVIDIA GPUs alone)",
        metavar="TYPE",
        group="engine",
    )
    draft: str = setting(
        "",
        path_or_name,
        "drafter for speculative decoding, which does not change replies. PATH: a DFlash draft (GGUF file, "
        "or directory of safetensors) or a small model with the same vocabulary. mtp: the multi-token-prediction "
        "layer in the model's own file. ngram: the tokens that followed the last time that the text ended in the same "
        "way",
        metavar="PATH|mtp|ngram",
        group="drafting",
    )
    draft_device: str = setting(
        "auto",
        device,
        "device that runs the draft: auto (that of the last layers), cuda:N, hip:N, cpu:N, tcp://HOST:PORT/BACKEND:N",
        metavar="DEVICE",
        group="drafting",
    )
    draft_ipc_bin: Path | None = setting(
        None,
        path,
        "Python interpreter or virtual environment that runs a daemon for the draft on its device",
        flags=("draft-python",),
        metavar="PATH",
        group="drafting",
    )
    draft_residency: str = setting(
        "auto",
        choice("auto", "persistent", "request-scoped"),
        "when the draft's weights are loaded: persistent (always), request-scoped (only while requests run), auto "
        "(persistent). Those of --prefill-drafter: persistent, request-scoped (one layer after the other, while a "
        "prompt is read), auto (persistent, unless the model fits only beside request-scoped ones)",
        metavar="MODE",
        group="drafting",
    )
    draft_swa: int = setting(
        0,
        tokens(0),
        "sliding window of all layers of a DFlash draft but the last, if its file does not name one (0: as in the "
        "file)",
        metavar="N",
        group="drafting",
    )
    draft_ctx_max: int = setting(
        4096, tokens(64), "most tokens of context that the draft reads", metavar="N", group="drafting"
    )
    draft_feature_tail: int = setting(
        2048,
        tokens(0),
        "tokens at the end of a cached prefix whose features (hidden states) are cached too, so that drafts that read "
        "them need not wait (0: none)",
        metavar="N",
        group="drafting",
    )
    ddtree: bool = setting(
        False,
        text,
        "let a DFlash draft propose a tree with several tokens for a position, not one sequence",
        group="drafting",
    )
    ddtree_budget: int = setting(
        15,
        integer(0, 64),
        "most draft tokens in a tree; a step verifies at most 15 per sequence, so a larger budget changes nothing",
        metavar="N",
        group="drafting",
    )
    verify_width: int = setting(
        0,
        integer(0, 16),
        "tokens of a sequence that one step verifies (0: chosen from measured times)",
        metavar="N",
        group="drafting",
    )
    threads: int = setting(
        0,
        integer(0, 4096),
        "threads for matrix products on the CPU device (0: one for each physical core)",
        metavar="N",
        group="limits",
    )
    cpu_weights: str = setting(
        "packed", choice("packed", "float32"), "weights on the CPU: as in the file, or as float32", group="limits"
    )
    grammar_threads: int = setting(0, integer(0, 256), "threads for token masks (0: auto)", metavar="N", group="limits")
    grammar_mask_ms: int = setting(
        50, integer(1, 60000), "longest time for a token mask; the second slower one ends a reply", group="limits"
    )
    grammar_seconds: float = setting(
        5.0, number(0.1, 600), "longest time to compile a schema or grammar", metavar="SECONDS", group="limits"
    )
    max_queue: int = setting(
        64, integer(0, 65536), "requests that may wait; further ones are answered with 503", metavar="N", group="limits"
    )
    max_queue_seconds: float = setting(
        0.0, number(0, 86400), "longest wait in the queue (0: no limit)", metavar="SECONDS", group="limits"
    )
    timeout: float = setting(
        0.0, number(0, 86400), "longest run of one request (0: no limit)", metavar="SECONDS", group="limits"
    )
    cache_ram: int = setting(
        4096,
        mebibytes,
        "MiB of host memory for the prefix cache (0: no prefix cache, on disk neither)",
        metavar="SIZE",
        group="prefix cache",
    )
    cache_interval: int = setting(
        8192,
        tokens(64),
        "tokens between checkpoints in a long prompt, for models with recurrent state",
        flags=("kv-cache-interval",),
        metavar="N",
        group="prefix cache",
    )
    kv_cache_dir: str = setting(
        "auto",
        path_or_mode,
        "directory of the prefix cache on disk, which survives restarts (auto: in the user's cache directory; off: "
        "none)",
        flags=("cache-dir",),
        metavar="DIR",
        group="prefix cache on disk",
    )
    kv_cache_budget: int = setting(
        20480,
        mebibytes,
        "MiB that the prefix cache on disk may use (0: no limit)",
        flags=("cache-disk",),
        metavar="SIZE",
        group="prefix cache on disk",
    )
    kv_cache_min_tokens: int = setting(
        512,
        tokens(1),
        "shortest prompt that is written to disk",
        flags=("cache-min-tokens",),
        metavar="N",
        group="prefix cache",
    )
    kv_cache_placement: str = setting(
        "reshard",
        choice("reshard", "exact"),
        "which snapshots on disk are used: reshard (those of every placement of the model), exact (only those of the "
        "same devices with the same layers)",
        metavar="MODE",
        group="prefix cache",
    )
    kv_cache_flush_timeout: float = setting(
        30.0,
        number(0, 3600),
        "longest time at shutdown for writing snapshots that are not on disk yet",
        flags=("save-seconds",),
        metavar="SECONDS",
        group="prefix cache",
    )
    model_cards: Path | None = setting(
        None,
        path,
        "directory of model cards (JSON files): what the makers of models recommend, used where nobody sets anything; "
        "they win over those that come with Luce",
        metavar="DIR",
        group="model cards",
    )
    reasoning: str = setting(
        "auto",
        choice("auto", "on", "off"),
        "whether replies reason where a request does not say so: auto (as the chat template has it), on, off",
        metavar="MODE",
        group="reasoning",
    )
    think_max_tokens: int = setting(
        -1,
        integer(-1),
        "most tokens of the reasoning of a reply, whatever a request asks for; then Luce ends it as the family does "
        "(-1: no limit but that of the request)",
        flags=("reasoning-budget",),
        metavar="N",
        group="reasoning",
    )
    hard_limit_reply_budget: int | None = setting(
        None,
        tokens(0),
        "tokens of a reply's limit that a limited reasoning leaves to the text, at most half of them (default: as the "
        "model card has it, else 4096)",
        metavar="N",
        group="reasoning",
    )
    effort: tuple[tuple[str, int], ...] = setting(
        (),
        efforts,
        "most tokens of the reasoning at an effort: minimal, low, medium, high, xhigh, max (repeatable; default: as "
        "the model's family has it)",
        metavar="NAME=N[,NAME=N...]",
        group="reasoning",
    )
    chat_template: Path | None = setting(
        None,
        path,
        "Jinja file used instead of the model file's own template",
        flags=("chat-template-file",),
        metavar="FILE",
        group="chat template",
    )
    tool_format: str = setting(
        "auto", text, "format of tool calls: auto (the template's or the family's), or a name", group="chat template"
    )


FIELDS: Mapping[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Config)}


def sampling_default(config: Config, name: str) -> Any:
    """The sampling value of a request that does not set `name`: the setting, or Luce's default where none is."""
    value, default = getattr(config, name, None), SAMPLERS[name].setting
    if value is not None:
        return value
    return getattr(SamplingParams, name) if default is None else SAMPLERS[name].kind(default)


def flag(name: str) -> str:
    """The flag of a field: `--max-ctx` for `max_ctx`."""
    return "--" + name.replace("_", "-")


def is_bool(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is a switch."""
    return isinstance(field.default, bool)
