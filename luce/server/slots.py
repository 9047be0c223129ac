"""/slots: what each slot does, in llama.cpp's form. Shows no text and no token of a prompt or reply."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from luce.engine.drafted import SequenceDrafts
from luce.engine.engine_options import SlotStats
from luce.errors import UnavailableError
from luce.server.state import SERVER
from luce.server.status import json_response


async def slots(request: web.Request) -> web.Response:
    """GET /slots; with `fail_on_no_slot=1` 503 if no slot is free."""
    model = request.app[SERVER].shown_model(request.query.get("model"))
    stats, busy = model.engine.stats(), {slot.slot: slot for slot in model.engine.slots()}
    if request.query.get("fail_on_no_slot") == "1" and len(busy) >= stats.slots:
        raise UnavailableError("no slot is free", code="no_slot")
    drafts = stats.draft is not None and stats.draft.on
    return json_response([_slot(i, busy.get(i), model.context, drafts=drafts) for i in range(stats.slots)])


def _slot(number: int, busy: SlotStats | None, context: int, *, drafts: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": number, "n_ctx": context, "speculative": drafts, "is_processing": busy is not None}
    if busy is None:
        return shown
    return {
        **shown,
        "id_task": busy.number,
        "n_prompt_tokens": busy.prompt_tokens,
        "n_prompt_tokens_processed": busy.prompt_done,
        "next_token": {
            "has_next_token": busy.remaining_tokens > 0,
            "n_remain": busy.remaining_tokens,
            "n_decoded": busy.predicted_tokens,
        },
        **({} if busy.drafts is None else {"draft": _draft(busy.drafts, busy.predicted_tokens)}),
    }


def _draft(drafts: SequenceDrafts, predicted: int) -> dict[str, Any]:
    """What drafting did for a sequence so far; `share`: of its tokens, those that were drafted."""
    return {
        "state": drafts.state.value,
        "draft_n": drafts.proposed,
        "draft_n_accepted": drafts.accepted,
        "accept_rate": round(drafts.accepted / drafts.proposed, 4) if drafts.proposed else 0.0,
        "tokens_per_step": round(1 + drafts.accepted / drafts.steps, 3) if drafts.steps else 0.0,
        "share": round(min(1.0, drafts.accepted / predicted), 4) if predicted else 0.0,
    }
