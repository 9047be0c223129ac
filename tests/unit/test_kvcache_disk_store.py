"""A directory of snapshots: chains, what is found, and what a turn stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from luce.kvcache.disk.manifest import ReplyTokens, keys
from luce.kvcache.disk.store import Store
from luce.runtime.step import PAGE
from tests.support.snapshots import MODEL, check, conversation_of, ids, sound, write


def test_keys_are_those_of_the_prefixes() -> None:
    prompt = ids(300)
    for length, key in keys(prompt, [1, 64, 65, 300]):
        assert dict(keys(prompt[:length], [length])) == {length: key}


def test_the_longest_prefix_comes_first(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3)
    snapshots = [write(store, turn) for turn in conversation]
    prompt = np.concatenate([conversation[2], ids(5, seed=9)])
    assert store.find(prompt) == snapshots[::-1]
    assert store.find(prompt, longer_than=100) == snapshots[:0:-1]
    assert store.find(conversation[1]) == snapshots[1::-1]
    assert store.find(conversation[0][:-1]) == []
    assert Store(tmp_path, "f" * 32, 0).find(prompt) == []


def test_a_turn_stores_its_own_pages_only(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(6)
    sizes = []
    for turn in conversation:
        snapshot = write(store, turn)
        assert snapshot is not None
        sizes.append(snapshot.manifest.nbytes)
        assert write(store, turn) is None
    assert max(sizes[1:]) < 1.5 * min(sizes[1:])
    for turn in conversation:
        check(store, store.find(turn)[0], turn)
        assert (store.tokens(store.find(turn)[0]) == turn).all()
    assert sound(tmp_path, conversation) == 6


def test_whole_pages_are_found_wherever_texts_diverge(tmp_path: Path) -> None:
    store, text = Store(tmp_path, MODEL, 0), ids(640)
    first = write(store, text[:200])
    whole = write(store, text)
    other = Store(tmp_path, "f" * 32, 0)
    for opened in (store, Store(tmp_path, MODEL, 0)):
        for length, holder in ((63, None), (64, first), (191, first), (192, first), (300, whole), (639, whole)):
            prompt = np.concatenate([text[:length], ids(50, seed=9)])
            found = opened.longest_prefix(prompt)
            expected = None if holder is None else (holder.manifest.id, length // PAGE * PAGE)
            assert (found and (found[0].manifest.id, found[1])) == expected
            assert other.longest_prefix(prompt) is None
        # Something is left to be read, and no more than is asked for.
        assert [opened.longest_prefix(text[:n])[1] for n in (640, 193, 192)] == [576, 192, 128]
        assert opened.longest_prefix(text, limit=150)[1] == 128 and opened.longest_prefix(text, limit=63) is None
        assert (
            opened.longest_prefix(text, longer_than=500)[1] == 576
            and opened.longest_prefix(text, longer_than=576) is None
        )
    # Pages of an evicted snapshot are found as well; an unusable snapshot is not.
    assert first is not None and whole is not None
    store.evict(first)
    assert store.longest_prefix(text[:150]) == (first, 128)
    whole.unusable = "a test"
    assert store.longest_prefix(text) == (first, 192)
    whole.unusable = ""
    store.evict(whole)
    assert store.longest_prefix(text) is None


def test_texts_that_diverge_share_their_pages(tmp_path: Path) -> None:
    store, text = Store(tmp_path, MODEL, 0), ids(640)
    one = write(store, text, interim=True)
    other = np.concatenate([text[:600], ids(1000, seed=1)])
    assert store.missing(other) == (one, 9)
    two = write(store, other)
    assert (
        one is not None and two is not None and (two.manifest.parent, two.manifest.first_page) == (one.manifest.id, 9)
    )
    # It does not supersede the snapshot that it diverges from.
    assert one.children == {two} and not one.superseded
    check(store, two, other)
    assert (store.tokens(two) == other).all()
    # Of this one too little would be shared, but for what it shares itself.
    third = np.concatenate([other[:700], ids(100, seed=2)])
    assert store.missing(third) == (one, 9)
    assert store.missing(np.concatenate([text[:300], ids(400, seed=3)])) == (None, 0)
    write(store, third)
    store.evict(one)
    assert sound(tmp_path, [text, other, third]) == 2
    # A whole beginning comes before others that have as much.
    store = Store(tmp_path, MODEL, 0)
    begun = write(store, other[: 9 * PAGE])
    assert begun is not None and begun.manifest.parent == one.manifest.id
    assert store.missing(np.concatenate([other[: 9 * PAGE], ids(100, seed=4)])) == (begun, 9)
    for snapshot in [store.exact(prompt) for prompt in (other, third, other[: 9 * PAGE])]:
        assert snapshot is not None
        store.evict(snapshot)
    assert not store.snapshots and not list((store.root / MODEL).iterdir())


def test_children_stay_readable_when_their_parents_are_evicted(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(4)
    for turn in conversation:
        write(store, turn)
    before = store.nbytes
    for turn in conversation[:3]:
        store.evict(store.find(turn)[0])
    assert store.nbytes < before
    assert [e.manifest.length for e in store.find(conversation[3])] == [400]
    assert sound(tmp_path, conversation) == 1
    # One of them comes back, without writing its pages again.
    assert store.missing(conversation[1]) == (store.chain(store.find(conversation[3])[0])[0], 200 // PAGE)
    write(store, conversation[1])
    assert sound(tmp_path, conversation) == 2
    for turn in (conversation[3], conversation[1]):
        store.evict(store.find(turn)[0])
    assert store.nbytes == 0 and not store.snapshots
    assert not list((store.root / MODEL).iterdir())


def test_replies_are_known_while_their_tokens_are_stored(tmp_path: Path) -> None:
    store, conversation = Store(tmp_path, MODEL, 0), conversation_of(3)
    for turn, (digest, begin) in zip(conversation, (("a", 30), ("b", 70), ("a", 300)), strict=True):
        write(store, turn, reply=ReplyTokens(((digest, begin, len(turn) + 1),), (7,)))
    for opened in (store, Store(tmp_path, MODEL, 0)):
        # Of two the newer one; where it ends with what no snapshot has, that too.
        assert opened.reply_tokens("b") == [*conversation[1][70:], 7]
        assert opened.reply_tokens("a") == [7] and opened.reply_tokens("c") is None
    assert Store(tmp_path, "f" * 32, 0).reply_tokens("b") is None
    store.evict(store.find(conversation[1])[0])
    store.evict(store.find(conversation[2])[0])
    assert store.reply_tokens("b") is None and store.reply_tokens("a") == [*conversation[0][30:], 7]
    write(store, conversation[1])
    store.evict(store.find(conversation[0])[0])
    # Its pages are needed still.
    assert store.reply_tokens("a") == [*conversation[0][30:], 7]
    write(store, conversation[0], reply=ReplyTokens((("d", 0, 5),), ()))
    for opened in (store, Store(tmp_path, MODEL, 0)):
        assert opened.reply_tokens("d") == conversation[0][:5].tolist()
        assert opened.reply_tokens("a") is None
    (store.find(conversation[0])[0].path / "tokens.part").unlink()
    assert store.reply_tokens("d") is None


def test_many_snapshots_are_found_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path, MODEL, 0)
    snapshot = write(store, ids(70))
    assert snapshot is not None
    for seed in range(40):
        write(store, ids(10, seed=seed + 1))
    again = Store(tmp_path, MODEL, 0)
    assert len(again.snapshots) == 41
    assert again.find(ids(70))[0].manifest == snapshot.manifest
