"""/props: what is served, with which settings, and where its layers are."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from aiohttp import web

from luce import __version__
from luce.api import Model
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.settings import sampling_default
from luce.engine.speculate import DraftStats
from luce.kvcache.paging import PagingStats
from luce.runtime.step import PAGE
from luce.server.auth import is_loopback
from luce.server.schema import Common
from luce.server.state import ENDPOINTS, SERVER, Server
from luce.server.status import capabilities, json_response, names
from luce.shard.shard import DaemonState

_SCHEMA = 2
#: variables that clients ask about: whether the template reads them
_TEMPLATE_VARIABLES = ("tools", "tool_calls", "enable_thinking")


async def props(request: web.Request) -> web.Response:
    """GET /props. Paths of files are for callers with a key, and for those on this machine."""
    server = request.app[SERVER]
    paths = server.keys.required or is_loopback(request.remote or "")
    return json_response(_props(server.ready_model(), server, request.app[ENDPOINTS], paths=paths))


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
        "reasoning": {"supported": bool(source) and model.spec.dialect.reasoning is not None},
        "chat_template": source,
        "chat_template_caps": {
            f"supports_{name}": re.search(rf"\b{name}\b", source) is not None for name in _TEMPLATE_VARIABLES
        },
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
                field.name for field in dataclasses.fields(SamplingParams) if field.name in Common.__struct_fields__
            ]
        },
        "runtime": {
            "backend": first.rpartition("/")[2].partition(":")[0],
            "target_device": first,
            "target_sharding": _shards(model),
            "daemons": [_daemon(daemon) for daemon in model.daemons()],
            "kv_cache_k": config.cache_type_k,
            "kv_cache_v": config.cache_type_v,
            "chunk": model.chunk,
        },
        "speculative": _speculative(stats.draft, paths=paths),
        **({} if stats.residency is None else {"kvflash": _residency(stats.residency)}),
    }


def _shards(model: Model) -> list[dict[str, Any]]:
    """Where the layers are, and what the devices have left, null where that is not known."""
    left = {device: {"free": memory.free, "total": memory.total} for device, memory in model.memory().items()}
    return [{**shard, "memory": left.get(shard["device"])} for shard in model.placement]


def _daemon(state: DaemonState) -> dict[str, Any]:
    """A daemon's shard. `gpu_waits`: as DaemonState.words; otherwise the host tells its devices when to go on."""
    names = ("shard", "device", "up", "restarts", "transport")
    return {name: getattr(state, name) for name in names} | {"gpu_waits": state.words}


def _residency(stats: PagingStats) -> dict[str, Any]:
    """`policy`: the one in force. Pages of PAGE tokens; `recall_hits` of the pages that the policy wanted."""
    return {
        "policy": stats.policy,
        "pool": stats.max_resident_pages * PAGE,
        "tau": stats.tau,
        "pages_resident": stats.resident_pages,
        "pages_host": stats.host_pages,
        "host_bytes": stats.host_bytes,
        "host_budget": stats.host_budget,
        "page_outs": stats.swapped_out,
        "page_ins": stats.swapped_in,
        "moved_bytes": stats.moved_bytes,
        "recall_hits": stats.resident_hits,
        "lost_pages": stats.lost_pages,
        "rescores": stats.rescores,
        "rescore_seconds": round(stats.rescore_seconds, 6),
    }


def _speculative(draft: DraftStats | None, *, paths: bool) -> dict[str, Any]:
    """`enabled`: whether tokens are drafted. What went wrong may name a file."""
    if draft is None:
        return {"enabled": False}
    return {
        **{name: fact for name, fact in draft.facts.items() if paths or name != "file"},
        "enabled": draft.on,
        "state": draft.state if paths else draft.state.partition(":")[0],
        "steps": draft.steps,
        "draft_n": draft.proposed,
        "draft_n_accepted": draft.accepted,
        "accept_rate": round(draft.accept_rate, 4),
        "tokens_per_step": round(draft.tokens_per_step, 3),
    }
