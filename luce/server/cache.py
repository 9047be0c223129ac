"""/v1/cache: lists and clears the prefix cache. Shows no token of a prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from luce.api import Model
from luce.server.state import admins_server
from luce.server.status import json_response


async def listing(request: web.Request) -> web.Response:
    """GET /v1/cache: every checkpoint, and the counters of both tiers."""
    server = admins_server(request)
    return json_response(await server.work(_listing, server.shown_model(request.query.get("model"))))


async def purge(request: web.Request) -> web.Response:
    """DELETE /v1/cache: remove all checkpoints, in memory and on the disk."""
    server = admins_server(request)
    removed = await server.work(_forget, server.shown_model(request.query.get("model")))
    return json_response({"object": "cache.deleted", "deleted": True, "removed": removed})


def _forget(model: Model) -> int:
    model.chat.memory.forget()
    return model.engine.clear_cache()


def _listing(model: Model) -> dict[str, Any]:
    entries = model.engine.cached_prefixes()
    stats = dataclasses.asdict(model.engine.stats().cache)
    disk = stats.pop("disk")
    return {
        "object": "list",
        "data": [
            {"object": "cache.prefix", **{k: v for k, v in dataclasses.asdict(entry).items() if v not in (None, "")}}
            for entry in entries
        ],
        "tiers": {"ram": stats, **({} if disk is None else {"disk": disk})},
    }
