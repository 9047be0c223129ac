"""Settings that contradict each other, or have no effect without another. No device and no file is looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from luce.config.prefill_settings import RESIDENCY
from luce.config.settings import FIELDS, flag


def _placement_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Problems of the placement settings, as in `problems`."""
    devices: tuple[str, ...] = values.get("target_devices", ())
    weights: tuple[float, ...] = values.get("target_layer_split", ())
    listed = spelled.get("target_devices", flag("target_devices"))
    named = f"{listed} {','.join(devices)}"
    if devices and "target_device" in values:
        one = f"{spelled['target_device']} {values['target_device']}"
        yield "target_devices", f"{one} and {named}: give only one of them"
    for device in sorted({device for device in devices if devices.count(device) > 1}):
        yield "target_devices", f"{named}: {device} is named twice"
    if not weights or "target_devices" in wrong:
        return
    given = f"{spelled['target_layer_split']} {','.join(f'{weight:g}' for weight in weights)}"
    if len(devices) < 2 and devices != ("auto",):
        yield "target_layer_split", f"{given}: requires {listed} with two or more devices"
    elif "auto" not in devices and len(weights) != len(devices):
        yield "target_layer_split", f"{given}: {len(weights)} weights for {len(devices)} devices"


def _planning_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Problems of settings of the planner that contradict others or have no effect, as in `problems`."""
    goal, devices = values.get("optimize", "auto"), values.get("target_devices", ())
    given = f"{spelled.get('optimize', flag('optimize'))} {goal}"
    planned = goal not in ("auto", "memory")
    if goal != "auto" and values.get("target_layer_split", ()):
        yield "optimize", f"{given}: not with {spelled['target_layer_split']}, which sets the layers"
    if planned and values.get("kvflash", "off") != "off":
        yield "optimize", f"{given}: not with {spelled['kvflash']}: contexts must be on the devices"
    if planned and "-" in values.get("experts_on", "device"):
        yield "optimize", f"{given}: not with {spelled['experts_on']} {values['experts_on']}, which sets the layers"
    automatic = goal == "auto" and devices == ("auto",) and not values.get("target_layer_split", ())
    if values.get("pin_devices", False) and not (planned or automatic):
        goals = "decode, prompt or balanced"
        yield "pin_devices", f"{spelled['pin_devices']}: requires {flag('optimize')} with {goals}"
    elif values.get("pin_devices", False) and len(devices) < 2 and devices != ("auto",) and not values.get("cluster"):
        # Those of members come on top.
        yield "pin_devices", f"{spelled['pin_devices']}: requires {flag('target_devices')} with two or more devices"


_STARTED, _DRAFTS, _NETWORK = flag("target_shard_ipc_bin"), flag("draft_ipc_bin"), "a device at tcp://HOST:PORT/"
#: settings of daemons; each requires one of these: an interpreter that starts daemons, or a device of a network daemon
_DAEMONS = {
    "isolate_shards": (_STARTED,),
    "shard_env": (_STARTED, _DRAFTS),
    "shard_transport": (_STARTED, _DRAFTS),
    "shard_key_file": (_NETWORK,),
}


def _daemon_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Problems of settings of daemons where no device is in a daemon, as in `problems`."""
    met = {flag(name) for name in ("target_shard_ipc_bin", "draft_ipc_bin") if values.get(name) or name in wrong}
    single = (values.get(name, "") for name in ("target_device", "draft_device", "prefill_drafter_device"))
    named = (*values.get("target_devices", ()), *single)
    network = [device for device in named if "/" in device]
    if network or {"target_device", "target_devices", "draft_device", "prefill_drafter_device"} & set(wrong):
        met.add(_NETWORK)
    if network and values.get("shard_transport") == "shared":
        yield "shard_transport", f"{spelled['shard_transport']} shared: {network[0]} is on another machine"
    if values.get("draft_ipc_bin") and "/" in values.get("draft_device", ""):
        daemon = f"{spelled['draft_device']} {values['draft_device']}"
        yield "draft_ipc_bin", f"{spelled['draft_ipc_bin']}: {daemon} runs in a daemon already"
    for name, required in _DAEMONS.items():
        if values.get(name, FIELDS[name].default) != FIELDS[name].default and met.isdisjoint(required):
            yield name, f"{spelled[name]}: requires {' or '.join(required)}"


#: settings of the prefix cache on disk, and of the whole prefix cache
_DISK = ("kv_cache_budget", "kv_cache_min_tokens", "kv_cache_placement", "kv_cache_flush_timeout")
_CACHE = ("cache_interval", "kv_cache_dir", *_DISK)


def disabled(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that have no effect because these values turn the prefix cache off, or its disk tier."""
    if values.get("cache_ram") == 0:
        return _CACHE
    return _DISK if values.get("kv_cache_dir") == "off" else ()


def _cache_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Problems of settings of a prefix cache that is off, as in `problems`."""
    if values.get("cache_ram") == 0:
        why = f"{spelled['cache_ram']} 0 turns the prefix cache off"
    else:
        why = f"{spelled.get('kv_cache_dir', flag('kv_cache_dir'))} off turns the prefix cache on disk off"
    for name in disabled(values):
        value = values.get(name, FIELDS[name].default)
        if value not in (FIELDS[name].default, "off"):
            yield name, f"{spelled[name]} {value}: {why}"


#: settings of drafts that have weights
_WEIGHTS = ("draft_device", "draft_ipc_bin", "draft_residency", "draft_swa", "draft_ctx_max", "draft_feature_tail")


def _draft_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Problems of draft settings without effect, as in `problems`."""
    budget = "ddtree_budget"
    if not values.get("ddtree", False) and values.get(budget, FIELDS[budget].default) != FIELDS[budget].default:
        yield budget, f"{spelled[budget]}: requires {flag('ddtree')}"
    if values.get("ddtree", False) and values.get("draft", "") in ("", "ngram", "mtp") and "draft" not in wrong:
        yield "ddtree", f"{spelled['ddtree']}: requires {flag('draft')} with a DFlash draft"
    if "draft" in wrong:
        return
    if values.get("verify_width", 0) and not values.get("draft", ""):
        yield "verify_width", f"{spelled['verify_width']}: requires {flag('draft')}"
    if values.get("draft", "") not in ("", "ngram"):
        return
    for name in _WEIGHTS:
        if name == "draft_residency" and values.get("prefill_drafter", ""):
            continue
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('draft')} with a file or mtp"


#: settings of prompt compression, which need its small model
_COMPRESSION = (
    "prefill_drafter_device",
    "prefill_threshold",
    "prefill_keep_ratio",
    "prefill_keep",
    "prefill_curve",
    "prefill_alpha",
    "prefill_layers",
    "prefill_scored_layers",
    "prefill_freeze",
    "prefill_freeze_threshold",
    "prefill_positions",
)


def _compression_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Problems of settings of prompt compression without effect, or that lack another, as in `problems`."""
    mode = values.get("prefill_compression", "off")
    if values.get("prefill_curve", ()) and "prefill_keep_ratio" in values:
        yield "prefill_keep_ratio", f"{spelled['prefill_keep_ratio']}: not with {flag('prefill_curve')}"
    if values.get("prefill_keep", "ratio").startswith("mass"):
        for name in ("prefill_keep_ratio", "prefill_curve"):
            if name in values and values[name] != FIELDS[name].default:
                yield name, f"{spelled[name]}: not with {flag('prefill_keep')} {values['prefill_keep']}"
    if values.get("prefill_drafter", "") or "prefill_drafter" in wrong:
        if "prefill_freeze_threshold" in values and not values.get("prefill_freeze", False):
            yield (
                "prefill_freeze_threshold",
                f"{spelled['prefill_freeze_threshold']}: requires {flag('prefill_freeze')}",
            )
        return
    if mode != "off":
        yield (
            "prefill_compression",
            f"{spelled['prefill_compression']} {mode}: requires {flag('prefill_drafter')} with a GGUF file",
        )
    for name in _COMPRESSION:
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('prefill_drafter')}"


def _residency_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Problems of --prefill-compression residency, which is a policy of KVFlash, as in `problems`."""
    name = "prefill_compression"
    if values.get(name, "off") != RESIDENCY:
        return
    given = f"{spelled[name]} {RESIDENCY}"
    if values.get("kvflash", "off") == "off":
        yield name, f"{given}: requires {flag('kvflash')}"
    if values.get("kvflash_policy", "drafter") != "drafter":
        yield "kvflash_policy", f"{spelled['kvflash_policy']}: not with {given}"
    if values.get("kvflash_drafter", ""):
        yield "kvflash_drafter", f"{spelled['kvflash_drafter']}: not with {given}"


def _cluster_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Problems of settings of a cluster without one, or that contradict it, as in `problems`."""
    if values.get("cluster", ""):
        if values.get("target_layer_split", ()):
            given = f"{spelled['target_layer_split']}: not with {spelled['cluster']}"
            yield "target_layer_split", f"{given}, whose members' devices are not known yet"
        return
    for name in (
        "cluster_listen",
        "cluster_announce",
        "cluster_min",
        "cluster_wait",
        "cluster_stream",
        "cluster_stream_rate",
        "cluster_resume",
        "cluster_replan",
        "cluster_on_loss",
        "cluster_on_loss_context",
        "cluster_drain",
    ):
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('cluster')}"


_PAGING = ("kvflash_policy", "kvflash_drafter", "kvflash_tau", "kvflash_host_mb")


def _paging_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Problems of KVFlash settings without effect, or that lack another, as in `problems`."""
    if values.get("kvflash", "off") != "off" or "kvflash" in wrong:
        named = values.get("kvflash_drafter", "")
        if values.get("prefill_compression") == RESIDENCY:
            return
        if values.get("kvflash_policy") == "drafter":
            reported = "kvflash_drafter" in wrong or "draft" in wrong
            if not named and values.get("draft", "") in ("", "ngram", "mtp") and not reported:
                yield "kvflash_policy", f"{spelled['kvflash_policy']} drafter: requires {flag('kvflash_drafter')}"
        elif named and "kvflash_policy" not in wrong:
            yield "kvflash_drafter", f"{spelled['kvflash_drafter']}: requires {flag('kvflash_policy')} drafter"
        return
    for name in _PAGING:
        if values.get(name, FIELDS[name].default) != FIELDS[name].default:
            yield name, f"{spelled[name]}: requires {flag('kvflash')}"


def problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of each setting that contradicts another, or has no effect without another.

    values: the settings that an origin sets. spelled: their names in that origin. wrong: fields with invalid values,
    which are reported already; settings that depend on them are not checked.
    """
    yield from _placement_problems(values, spelled, wrong)
    yield from _planning_problems(values, spelled)
    yield from _daemon_problems(values, spelled, wrong)
    yield from _draft_problems(values, spelled, wrong)
    yield from _compression_problems(values, spelled, wrong)
    yield from _residency_problems(values, spelled)
    yield from _paging_problems(values, spelled, wrong)
    yield from _cache_problems(values, spelled)
    yield from _cluster_problems(values, spelled)
