"""The simulation of routers, and the recordings that it reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from luce.kvcache.block_keys import TOKENS
from tools.router_traffic import COMMON, Recording, Request, drawn
from tools.simulate_router import CELL, POLICIES, Simulation, Speeds, even_cells

#: tokens of a recorded block, and blocks of the prefix cache in it
BLOCK = 512
SPREAD = BLOCK // TOKENS


def recorded(path: Path, lines: list[dict[str, Any]]) -> Recording:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Recording(path, BLOCK)


def line(seconds: float, *blocks: int, tokens: int = 0) -> dict[str, Any]:
    length = tokens or len(blocks) * BLOCK
    return {"timestamp": 1000 * seconds, "input_length": length, "output_length": 20, "hash_ids": blocks}


def requests(recording: Recording, share: float, seconds: float = 1e9) -> list[Request]:
    return [request for _, turns in recording.arrivals(share, seconds) for request in turns]


def test_a_recording_gives_prompts_with_what_they_share(tmp_path: Path) -> None:
    lines = [line(0, 7, 1), line(1, 7, 2), line(2, 7, 1, 3, tokens=3 * BLOCK - 1), line(90, 7, 4)]
    recording = recorded(tmp_path / "trace.jsonl", lines)
    assert recording.common == {7}
    assert [each.conversation for each in recording.requests] == [1, 2, 1, 4]
    first, second, third = requests(recording, 1, seconds=90)
    assert len(first.keys) == 2 * SPREAD and third.keys[: 2 * SPREAD] == first.keys
    # The last block of a prompt is not whole.
    assert len(third.keys) == 3 * SPREAD - 1
    assert second.keys[:SPREAD] == first.keys[:SPREAD] and not set(second.keys[SPREAD:]) & set(first.keys)
    assert [each.repeated for each in (first, second, third)] == [0, SPREAD, 2 * SPREAD]
    assert first.session == third.session != second.session and first.reply == 20


def test_more_replicas_get_a_recording_several_times_and_fewer_a_part(tmp_path: Path) -> None:
    lines = [line(n, 7, 100 + n) for n in range(2 * COMMON)] + [
        line(2 * COMMON + n, 7, 100 + n) for n in range(2 * COMMON)
    ]
    recording = recorded(tmp_path / "trace.jsonl", lines)
    once, thrice, half = (requests(recording, share) for share in (1, 3, 0.5))
    assert len(once) == len(lines) and len(thrice) == 3 * len(lines)
    assert len({each.session for each in thrice}) == 3 * len({each.session for each in once})
    # Instructions are the same for all; what is a conversation's own is not.
    assert len({each.keys[0] for each in thrice}) == 1
    assert len({each.keys[-1] for each in thrice}) == 3 * len({each.keys[-1] for each in once})
    # A conversation is there with all its turns or not at all.
    assert 0.4 < len(half) / len(once) < 0.6
    assert {sum(each.session == name for each in half) for name in {each.session for each in half}} == {2}


@pytest.mark.parametrize("text", ["{", "[]", '{"timestamp": 1}', '{"timestamp": "a", "hash_ids": []}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(0, 1)) + "\n" + text + "\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: no recorded request"):
        Recording(path)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_answers_all_requests(policy: str) -> None:
    replicas = 2 * CELL if policy == "cells" else 3
    simulation = Simulation(policy, replicas, Speeds(), 1)
    sent = [(n / 10, iter([each])) for n, each in enumerate(_turns(60))]
    outcome = simulation.run(sent, 600)
    assert len(outcome.first) == 60 and 0 < outcome.cached <= outcome.repeated


@pytest.mark.parametrize("replicas, cells", [(1, 1), (CELL, 1), (CELL + 1, 2), (1000, 32)])
def test_cells_have_the_same_size(replicas: int, cells: int) -> None:
    found = even_cells([str(number) for number in range(replicas)])
    sizes = [len(each) for each in found]
    assert len(sizes) == cells and max(sizes) <= CELL and max(sizes) - min(sizes) <= 1
    assert [name for each in found for name in each] == [str(number) for number in range(replicas)]


def _turns(count: int) -> list[Request]:
    """Prompts of ten conversations, each longer than the one before."""
    found = []
    for number in range(count):
        session, turn = number % 10, number // 10
        keys = [b"%d-%d" % (session, n) for n in range(40 * (turn + 1))]
        found.append(Request(session, keys, keys, 10, 40 * turn, iter(())))
    return found


def test_the_router_that_knows_finds_more_than_one_that_does_not() -> None:
    found = {}
    for policy in ("round_robin", "prefix"):
        outcome = Simulation(policy, 4, Speeds(), 1).run(drawn(0.2, 200, random.Random(3)), 200)
        found[policy] = outcome.cached / outcome.repeated
    assert found["prefix"] > found["round_robin"]
