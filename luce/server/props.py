"""/props: the model, its settings, and the devices of its layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from luce import __version__
from luce.api import Model
from luce.compress.compressor import Compressor
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.settings import sampling_default
from luce.engine.drafted import DraftStats
from luce.engine.sequence import DraftState
from luce.kvcache.paging import PagingStats
from luce.runtime.step import PAGE
from luce.server.auth import is_loopback
from luce.server.prepare import names
from luce.server.schema import Common
from luce.server.state import ENDPOINTS, SERVER, Server
from luce.server.status import capabilities, json_response
from luce.server.unserved import served_fields
from luce.shard.shard import DaemonState
from luce.text.effort import efforts

# Lucebox numbers its shapes from 1. This shape has parts that Lucebox lacks, and lacks some of its parts.
_SCHEMA = 1001
#: variables of the template: /props says whether it reads them
_TEMPLATE_VARIABLES = ("tools", "tool_calls", "enable_thinking")


async def props(request: web.Request) -> web.Response:
    """GET /props. Only callers with a key, or on this machine, get paths of files."""
    server = request.app[SERVER]
    paths = server.keys.required or is_loopback(request.remote or "")
    return json_response(
        _props(server.shown_model(request.query.get("model")), server, request.app[ENDPOINTS], paths=paths)
    )


def _props(model: Model, server: Server, endpoints: tuple[str, ...], *, paths: bool) -> dict[str, Any]:
    config, template, stats = model.config, model.chat.template, model.engine.stats()
    source = "" if template is None else template.source
    first = model.placement[0]["device"]
    return {
        "server": {"name": "luce", "version": __version__, "props_schema": _SCHEMA},
        "build_info": f"luce {__version__}",
        "api": {"endpoints": endpoints},
        "model": {"arch": model.spec.family, "tokenizer_id": model.tokenizer_id},
        "model_alias": names(model)[0],
        **({"model_path": str(model.path)} if paths else {}),
        "capabilities": capabilities(model),
        "reasoning": {
            "supported": model.chat.reasons,
            "supported_efforts": efforts(model.chat),
            **dataclasses.asdict(model.envelope),
        },
        "budget_envelope": {
            "model_card_source": model.recommended_by,
            "default_max_tokens": model.envelope.default_max_tokens,
        },
        "chat_template": source,
        "chat_template_caps": {f"supports_{name}": model.chat.reads(name) for name in _TEMPLATE_VARIABLES},
        "tool_calls": {"format": model.chat.calls.format, "from": model.chat.calls_why},
        "total_slots": config.parallel,
        "default_generation_settings": {
            "n_ctx": model.context,
            **{
                (*sampler.aliases, name)[0]: sampling_default(config, name)
                for name, sampler in SAMPLERS.items()
                if sampler.setting is not None
            },
        },
        "sampling": {
            "capabilities": [
                field.name for field in dataclasses.fields(SamplingParams) if field.name in served_fields(Common)
            ]
        },
        "runtime": {
            "backend": first.rpartition("/")[2].partition(":")[0],
            "target_device": first,
            "target_sharding": _shards(model),
            "plan": None if model.plan is None else model.plan.facts,
            "daemons": [_daemon(daemon) for daemon in model.daemons()],
            "kv_cache_k": config.cache_type_k,
            "kv_cache_v": config.cache_type_v,
            "chunk": model.chunk,
        },
        "prefill_compression": compression_props(model.compression.compressor, paths=paths),
        "speculative": speculative_props(stats.draft, paths=paths),
        **({} if stats.paging is None else {"kvflash": _paging(stats.paging)}),
    }


def _shards(model: Model) -> list[dict[str, Any]]:
    """The placement, with the memory of each device, null where it is unknown."""
    known = {device: {"free": memory.free, "total": memory.total} for device, memory in model.memory().items()}
    return [{**shard, "memory": known.get(shard["device"])} for shard in model.placement]


def _daemon(state: DaemonState) -> dict[str, Any]:
    """A shard in a daemon. `gpu_waits`: its devices wait for flags in shared memory; otherwise the host starts them."""
    names = ("shard", "device", "up", "restarts", "transport", "gpu_waits")
    return {name: getattr(state, name) for name in names}


def _paging(stats: PagingStats) -> dict[str, Any]:
    """`policy`: the one in force. `resident_hits`: pages that the policy selected and that were resident already."""
    return {
        "policy": stats.policy,
        "max_resident_tokens": stats.max_resident_pages * PAGE,
        "tau": stats.tau,
        "resident_pages": stats.resident_pages,
        "host_pages": stats.host_pages,
        "host_bytes": stats.host_bytes,
        "host_bytes_limit": stats.host_budget,
        "pages_swapped_out": stats.swapped_out,
        "pages_swapped_in": stats.swapped_in,
        "swapped_bytes": stats.moved_bytes,
        "resident_hits": stats.resident_hits,
        "lost_pages": stats.lost_pages,
        "rescores": stats.rescores,
        "rescore_seconds": round(stats.rescore_seconds, 6),
    }


def compression_props(compressor: Compressor | None, *, paths: bool) -> dict[str, Any]:
    """`enabled`: whether prompts can be compressed. `state`: on, or why not; paths in it only for `paths`."""
    if compressor is None:
        return {"enabled": False}
    options, stats = compressor.options, compressor.stats()
    return {
        **{name: fact for name, fact in compressor.facts.items() if paths or name != "file"},
        "enabled": stats.state == "on",
        "state": stats.state if paths else stats.state.partition(":")[0],
        "loaded": stats.loaded,
        "mode": options.mode,
        "threshold": options.threshold,
        "keep_ratio": options.keep_ratio,
        "keep_mass": options.keep_mass,
        "keep_most": options.keep_most,
        "positions": options.positions,
        "freeze": options.freeze,
        "freeze_threshold": options.freeze_threshold,
        "curve": [list(point) for point in options.curve],
        "prompts": {verdict.value: count for verdict, count in stats.prompts.items()},
        "original_tokens": stats.original,
        "effective_tokens": stats.kept,
        "reused": stats.reused,
        "drafter_seconds": round(stats.seconds, 6),
    }


def speculative_props(draft: DraftStats | None, *, paths: bool) -> dict[str, Any]:
    """`enabled`: whether tokens are drafted. `state` names the reason if not; paths in it only for `paths`."""
    if draft is None:
        return {"enabled": False}
    return {
        **{name: fact for name, fact in draft.facts.items() if paths or name != "file"},
        "enabled": draft.on,
        "state": draft.state if paths else draft.state.partition(":")[0],
        "steps": draft.steps,
        "draft_n": draft.proposed,
        "draft_n_accepted": draft.accepted,
        "acceptance_rate": round(draft.acceptance_rate, 4),
        "tokens_per_step": round(draft.tokens_per_step, 3),
        "draft_n_copied": draft.copied,
        "sequences": {state.value: draft.states[state] for state in DraftState if draft.states.get(state)},
    }
