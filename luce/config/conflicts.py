"""What is wrong between settings, as far as no device or file need be looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from luce.config.settings import FIELDS, flag


def _placement_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of what is wrong between the placement settings, as far as no device need be looked at.

    Fields in `wrong` have been reported; what depends on them is left alone.
    """
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


_STARTED, _DRAFTS, _NETWORK = flag("target_shard_ipc_bin"), flag("draft_ipc_bin"), "a device at tcp://HOST:PORT/"
#: settings of daemons, and what they need one of: a program that starts some, or a device of a network daemon
_DAEMONS = {
    "isolate_shards": (_STARTED,),
    "shard_env": (_STARTED, _DRAFTS),
    "shard_transport": (_STARTED, _DRAFTS),
    "shard_key_file": (_NETWORK,),
}


def _daemon_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of settings of daemons where there are none. Fields in `wrong` have been reported."""
    there = {flag(name) for name in ("target_shard_ipc_bin", "draft_ipc_bin") if values.get(name) or name in wrong}
    named = (*values.get("target_devices", ()), values.get("target_device", ""), values.get("draft_device", ""))
    far = [device for device in named if "/" in device]
    if far or {"target_device", "target_devices", "draft_device"} & set(wrong):
        there.add(_NETWORK)
    if far and values.get("shard_transport") == "shared":
        yield "shard_transport", f"{spelled['shard_transport']} shared: {far[0]} is on another machine"
    if values.get("draft_ipc_bin") and "/" in values.get("draft_device", ""):
        daemon = f"{spelled['draft_device']} {values['draft_device']}"
        yield "draft_ipc_bin", f"{spelled['draft_ipc_bin']}: {daemon} is in a daemon already"
    for name, needs in _DAEMONS.items():
        if values.get(name, FIELDS[name].default) != FIELDS[name].default and there.isdisjoint(needs):
            yield name, f"{spelled[name]}: requires {' or '.join(needs)}"


#: settings of the directory of prompts, and of the cache in memory that it is behind
_DIRECTORY = ("kv_cache_budget", "kv_cache_min_tokens", "kv_cache_placement", "kv_cache_flush_timeout")
_KEPT = ("cache_interval", "kv_cache_dir", *_DIRECTORY)


def without_use(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that do nothing where prompts are not kept, if these values say so."""
    if values.get("cache_ram") == 0:
        return _KEPT
    return _DIRECTORY if values.get("kv_cache_dir") == "off" else ()


def _cache_problems(values: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Field and message of settings of a cache that there is not."""
    if values.get("cache_ram") == 0:
        why = f"{spelled['cache_ram']} 0 keeps no prompts"
    else:
        why = f"there is no directory with {spelled.get('kv_cache_dir', flag('kv_cache_dir'))} off"
    for name in without_use(values):
        value = values.get(name, FIELDS[name].default)
        if value not in (FIELDS[name].default, "off"):
            yield name, f"{spelled[name]} {value}: {why}"


#: settings of drafts that have weights
_DRAFT = ("draft_device", "draft_ipc_bin", "draft_residency", "draft_swa", "draft_ctx_max", "draft_feature_tail")


def _draft_problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of draft settings that would do nothing. Fields in `wrong` have been reported."""
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


def problems(
    values: Mapping[str, Any], spelled: Mapping[str, str], wrong: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Field and message of settings that contradict each other, or do nothing without another.

    values: those that were given; spelled: their names where they were given; fields in `wrong` have been reported, and
    what depends on them is left alone.
    """
    yield from _placement_problems(values, spelled, wrong)
    yield from _daemon_problems(values, spelled, wrong)
    yield from _draft_problems(values, spelled, wrong)
    yield from _pool_problems(values, spelled, wrong)
    yield from _cache_problems(values, spelled)
