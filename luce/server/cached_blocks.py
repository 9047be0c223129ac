"""/v1/cache/blocks and /v1/cache/keys: what a router in front of several servers needs to know, for admins.

It compares the keys of a prompt's blocks with those that each server has cached (luce.kvcache.block_keys). No key
reveals a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from luce.api import Model
from luce.kvcache.block_keys import token_keys
from luce.kvcache.block_log import BlockLog
from luce.server.answer import prepared, received
from luce.server.errors import invalid
from luce.server.messages import messages_job
from luce.server.native import infill_job, native_job
from luce.server.prepare import Job, chat_job, completion_job
from luce.server.responses import responses_job
from luce.server.state import admins_server
from luce.server.status import json_response

#: by endpoint, what makes a job of its body
JOBS: Mapping[str, Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], Job]] = {
    "/chat/completions": chat_job,
    "/completions": completion_job,
    "/messages": messages_job,
    "/responses": responses_job,
    "/completion": native_job,
    "/infill": infill_job,
}


async def blocks(request: web.Request) -> web.Response:
    """GET /v1/cache/blocks: what the prefix cache in memory has gained and lost since number `after` of the life
    `life`, and how busy the server is."""
    server = admins_server(request)
    try:
        after = int(request.query.get("after", "-1"))
    except ValueError:
        raise invalid("after", "expected a number") from None
    model = server.shown_model(request.query.get("model"))
    return json_response(await server.work(_blocks, model, request.query.get("life", ""), after))


async def keys(request: web.Request) -> web.Response:
    """POST /v1/cache/keys: the keys of a prompt, from the body that the endpoint `path` gets. Generates nothing."""
    server = admins_server(request)
    path = request.query.get("path", "")
    job = JOBS.get(path.removeprefix("/v1"))
    if job is None:
        raise invalid("path", f"expected an endpoint that replies to prompts: {', '.join(JOBS)}")
    async with received(request, devices=False) as (body, model):
        answer = await prepared(request, partial(server.chat_work, partial(_keys, job)), body, model)
    return json_response(answer)


def _blocks(model: Model, life: str, after: int) -> dict[str, Any]:
    cache, stats = model.engine.cache, model.engine.stats()
    log = BlockLog() if cache is None else cache.memory.tree.block_log
    changes = log.changes(life, after)
    done = stats.finished
    computed = done.prompt_tokens - done.cached_tokens
    return {
        "object": "cache.blocks",
        "life": changes.life,
        "since": changes.since,
        "sequence": changes.sequence,
        "added": [key.hex() for key in changes.added],
        "removed": [key.hex() for key in changes.removed],
        "running": stats.running,
        "waiting": stats.waiting,
        "parallel": stats.slots,
        "prefill_seconds": done.prompt / computed if computed > 0 else 0.0,
    }


def _keys(
    job: Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], Job],
    body: bytes,
    headers: Mapping[str, str],
    model: Model,
    stopped: Callable[[], bool],
) -> dict[str, Any]:
    made = job(body, headers, model, stopped)
    ids = model.engine.prefix_ids(made.prompts[0], made.params, made.readings[0].position_ids)
    return {"object": "cache.keys", "tokens": len(ids), "keys": [key.hex() for key in token_keys(ids)]}
