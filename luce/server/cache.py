"""/v1/cache: lists and clears the prefix cache. Shows no token of a prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from luce.api import Model
from luce.server.state import SERVER, Server
from luce.server.status import json_response


async def listing(request: web.Request) -> web.Response:
    """GET /v1/cache: every checkpoint, and the counters of both tiers."""
    server = _admins_server(request)
    return json_response(await server.work(_listing, server.ready_model()))


async def purge(request: web.Request) -> web.Response:
    """DELETE /v1/cache: remove all checkpoints, in memory and on the disk."""
    server = _admins_server(request)
    removed = await server.work(_forget, server.ready_model())
    return json_response({"object": "cache.deleted", "deleted": True, "removed": removed})


def _admins_server(request: web.Request) -> Server:
    """The server. Raises ForbiddenError unless the request is an admin's."""
    server = request.app[SERVER]
    server.keys.check_admin(request.headers, request.remote or "")
    if not server.keys.required:
        # A page of another site reaches an address that is not loopback's under its own name.
        server.host_check.check_admin(request.headers.get("Host"))
    return server


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
