"""Every shard gets every piece: remote shards at the same time, few pieces at a time; an error ends the load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from luce.backend import restore
from luce.errors import BackendError
from luce.shard.saved_state import StatePiece
from luce.shard.shard import Shard


class Fake:
    """A shard that notes the pieces it gets."""

    def __init__(self, remote: bool, take: Callable[[int], None] = lambda number: None) -> None:
        self.remote = remote
        self.state = self
        self.got: list[int] = []
        self._take = take

    def load(self, piece: StatePiece) -> None:
        number = piece.slot
        assert number is not None
        self._take(number)
        self.got.append(number)


def pieces(count: int, made: list[int] | None = None) -> Iterator[StatePiece]:
    for number in range(count):
        if made is not None:
            made.append(number)
        yield StatePiece(number, (), range(0), {})


def load_all(shards: list[Fake], pieces_to_load: Any) -> None:
    before = set(threading.enumerate())
    try:
        restore.load(cast("list[Shard]", shards), pieces_to_load)
    finally:
        assert not set(threading.enumerate()) - before


def test_every_shard_gets_every_piece_in_order() -> None:
    shards = [Fake(False), Fake(True), Fake(True)]
    load_all(shards, pieces(20))
    assert all(shard.got == list(range(20)) for shard in shards)


def test_shards_in_other_processes_take_a_piece_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)
    load_all(
        [Fake(True, lambda number: both.wait() and None), Fake(True, lambda number: both.wait() and None)], pieces(5)
    )


def test_a_slow_shard_bounds_what_is_made() -> None:
    made: list[int] = []
    gate, most = threading.Event(), 2 + restore.WAITING

    def slow(number: int) -> None:
        assert gate.wait(20)

    def watched() -> Iterator[StatePiece]:
        for piece in pieces(30, made):
            if len(made) == most + 1:
                # The one that is made now finds no room before the first is taken.
                gate.set()
            yield piece

    thread = threading.Thread(target=load_all, args=([Fake(True, slow)], watched()))
    thread.start()
    assert not gate.wait(0.2) and len(made) <= most
    gate.set()
    thread.join(20)
    assert len(made) == 30


@pytest.mark.parametrize("remote", [False, True])
def test_an_error_of_a_shard_ends_it(remote: bool) -> None:
    def refuse(number: int) -> None:
        if number == 3:
            raise BackendError("tensor blk.0.k")

    other, made = Fake(True), list[int]()
    with pytest.raises(BackendError, match=r"blk\.0\.k"):
        load_all([other, Fake(remote, refuse)], pieces(1000, made))
    assert len(made) < 1000 and other.got == list(range(len(other.got)))


def test_an_error_of_the_pieces_ends_it() -> None:
    def torn() -> Iterator[StatePiece]:
        yield from pieces(2)
        raise ValueError("torn")

    shard = Fake(True)
    with pytest.raises(ValueError, match="torn"):
        load_all([shard], torn())
    assert shard.got == [0, 1]
