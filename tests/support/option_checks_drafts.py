"""The checks of settings of drafts: see option_checks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from luce.errors import DeviceError, LuceError
from luce.runtime.step import Span
from tests.support.daemons import children, within
from tests.support.option_checks import DAEMON, FIT, GREEDY, LONG, RECURRENT, Log, Patch, Table, load, reply, steps
from tests.support.proposals import loaded_drafter
from tests.support.warm import WARM

CHECKS = checks = Table()


@functools.cache
def drafted(**settings: Any) -> list[tuple[Span, ...]]:
    """The steps in which draft rows were verified."""
    with steps() as seen, load(**{**DAEMON, "draft": str(FIT.path), **settings}) as model:
        assert reply(model, n=24, temperature=0) == RECURRENT.expected["greedy_17"][:24].tolist()
    return [step.spans for step in seen if any(span.speculative for span in step.spans)]


@checks("draft", "verify_width", "ddtree", "ddtree_budget")
def _draft(name: str, patch: Patch, path: Path, log: Log) -> None:
    chains = drafted()
    assert chains and not any(span.ancestors for spans in chains for span in spans)
    if name == "draft":
        assert not drafted(draft="")
    if name == "verify_width":
        rows = {span.rows for spans in drafted(verify_width=3) for span in spans if span.speculative}
        assert max(rows) == 3 < max(span.rows for spans in drafted(verify_width=8) for span in spans[:1])
    if name == "ddtree":
        assert any(span.ancestors for spans in drafted(ddtree=True, verify_width=16) for span in spans)
    if name == "ddtree_budget":
        trees = drafted(ddtree=True, ddtree_budget=2, verify_width=16)
        assert max(sum(span.rows for span in spans if span.speculative) for spans in trees) == 3


@functools.cache
def proposals(**settings: Any) -> list[list[int]]:
    """The verified rows of a reply to a restored prompt. The reply that saved it has ended too early to be copied."""
    given = {**DAEMON, "draft": str(FIT.path), "draft_ipc_bin": str(WARM), "verify_width": 8, "max_ctx": 512}
    with load(**{**given, **settings}) as model:
        reply(model, LONG[:130], n=1, temperature=0)
        with steps() as seen:
            reply(model, LONG[:130], n=16, temperature=0)
        return [step.tokens.tolist() for step in seen if any(span.speculative for span in step.spans)]


@checks("draft_swa", "draft_ctx_max", "draft_feature_tail")
def _draft_context(name: str, patch: Patch, path: Path, log: Log) -> None:
    # A draft that reads less proposes other tokens.
    changed = {"draft_swa": 2, "draft_ctx_max": 64, "draft_feature_tail": 0}[name]
    whole = proposals()
    # That it reads the same again proposes the same.
    assert whole and whole == proposals(chunk=2048) != proposals(**{name: changed})


@checks("draft_residency")
def _residency(patch: Patch, path: Path, log: Log) -> None:
    # Without it the drafter stays loaded; with it, it goes when the last sequence ends.
    for residency, stays in (("auto", True), ("request-scoped", False)):
        with load(**DAEMON, draft=str(FIT.path), draft_residency=residency) as model:
            assert reply(model, temperature=0) == GREEDY
            if stays:
                assert within(60, lambda: model.engine.stats().running == 0) and loaded_drafter(model) is not None
            else:
                assert within(60, lambda: loaded_drafter(model) is None)


@checks("draft_device", "draft_ipc_bin")
def _draft_device(name: str, patch: Patch, path: Path, log: Log) -> None:
    settings = {"draft": str(FIT.path), "draft_device": "cpu:5"}
    if name == "draft_ipc_bin":
        settings["draft_ipc_bin"] = str(WARM)
    before = children()
    with load(**DAEMON, **settings) as model:
        drafts = [daemon.device for daemon in model.daemons() if daemon.shard == "draft"]
        assert (drafts, len(children() - before)) == ((["cpu:5"], 2) if name == "draft_ipc_bin" else ([], 1))
        assert reply(model, temperature=0) == GREEDY
    if name == "draft_device":
        with pytest.raises(LuceError, match="hip:7"):
            load(**DAEMON, draft=str(FIT.path), draft_device="hip:7", cache_ram=0).close()
            raise DeviceError("; ".join(record.getMessage() for record in log.records))
