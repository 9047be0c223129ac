"""The equalities that every reference file must pass, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luce.runtime.step import MAX_CANDIDATES, MadeMasks, RowMasks
from tests.support.drive import Driver, Sequence
from tests.support.reference import Reference, check_greedy, check_logits


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that a driver has read."""

    sequence: Sequence
    #: of the token behind it
    logits: NDArray[np.float32]


def check_logits_in_chunks(
    reference: Reference, driver: Driver, kind: str, chunk: int, at_once: int = 0
) -> dict[str, ReadPrompt]:
    """Prompts fed in pieces of `chunk` rows, the long one behind a step of `at_once` rows: expected logits. Returns the
    prompts by name."""
    rows, read = {}, {}
    for name in ("1", "17", "long"):
        prompt = reference.expected[f"prompt_{name}"]
        sequence = driver.start()
        start = at_once if name == "long" else 0
        if start:
            driver.feed((sequence, prompt[:start]))
        parts = [driver.feed((sequence, prompt[at : at + chunk]))[0] for at in range(start, len(prompt), chunk)]
        logits = np.concatenate(parts)
        rows["logits_long_last16" if name == "long" else f"logits_{name}"] = logits[-16:] if name == "long" else logits
        read[name] = ReadPrompt(sequence, logits[-1])
    check_logits(reference, kind, rows)
    return read


def typical_error(reference: Reference, driver: Driver) -> float:
    """Root mean square error of the logits of the 17-token prompt, fed token by token as when decoding."""
    sequence, prompt = driver.start(), reference.expected["prompt_17"]
    actual = np.concatenate([driver.feed((sequence, prompt[i : i + 1]))[0] for i in range(len(prompt))])
    return float(np.sqrt(((actual - reference.expected["logits_17"]) ** 2).mean()))


def greedy(driver: Driver, prompt: ReadPrompt, steps: int) -> list[int]:
    """Greedy continuation of a prompt."""
    tokens, logits = list[int](), prompt.logits
    for _ in range(steps):
        tokens.append(int(logits.argmax()))
        logits = driver.feed((prompt.sequence, np.array(tokens[-1:], np.int32)))[0][-1]
    return tokens


def check_greedy_tokens(reference: Reference, driver: Driver, prompts: dict[str, ReadPrompt], error: float) -> None:
    """Greedy continuations of both longer prompts."""
    for name in ("17", "long"):
        key = f"greedy_{name}"
        check_greedy(reference, key, greedy(driver, prompts[name], len(reference.expected[key])), error)


def check_batched(reference: Reference, driver: Driver, kind: str, error: float) -> None:
    """Four sequences of different lengths side by side: prompts in one step, then 16 decode steps together, joined by
    a fifth prompt's chunks; each continues as if it were alone."""
    prompts = {
        "17": reference.expected["prompt_17"],
        "long": reference.expected["prompt_long"],
        "1": reference.expected["prompt_1"],
        "again": reference.expected["prompt_17"],
    }
    sequences = {name: driver.start() for name in prompts}
    first = driver.feed(*((sequences[name], prompts[name]) for name in ("17", "long", "1")))
    check_logits(reference, kind, {"logits_17": first[0], "logits_long_last16": first[1][-16:], "logits_1": first[2]})
    last = {name: logits[-1] for name, logits in zip(("17", "long", "1"), first, strict=True)}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    joined = 0
    for _ in range(16):
        work = []
        for name, logits in last.items():
            tokens[name].append(int(logits.argmax()))
            work.append((sequences[name], np.array(tokens[name][-1:], np.int32)))
        names = list(last)
        if joined < len(prompts["again"]):
            work.append((sequences["again"], prompts["again"][joined : joined + 7]))
            joined += 7
            names.append("again")
        results = dict(zip(names, driver.feed(*work), strict=True))
        last = {name: logits[-1] for name, logits in results.items()}
        if joined < len(prompts["again"]):
            last.pop("again", None)
    for name in ("17", "long"):
        check_greedy(reference, f"greedy_{name}", tokens[name], error)
    assert len(tokens["again"]) > 8
    check_greedy(reference, "greedy_17", tokens["again"], error)


def check_replayed(reference: Reference, driver: Driver, eager: Driver) -> None:
    """Steps whose shapes recur, with other steps between them: the bits of a backend that replays nothing.

    Positions, slots and pages differ from step to step, sequence 0 crosses the end of a page, and one sequence is
    verified by several rows at once.
    """
    prompt = reference.expected["prompt_17"]
    ours, theirs = [driver.start() for _ in range(3)], [eager.start() for _ in range(3)]
    work = [[(0, np.resize(prompt, 59))], [(1, prompt[::-1][:3]), (2, prompt[3:12])]]
    for at in range(3):
        one, two = prompt[at : at + 1], prompt[at + 1 : at + 2]
        work += [[(0, one)], [(1, prompt[at : at + 3])], [(2, two), (at % 2, one)], [(at % 2, one), (2, prompt[:2])]]
    for step in work:
        expected = eager.feed(*((theirs[i], ids) for i, ids in step))
        actual = driver.feed(*((ours[i], ids) for i, ids in step))
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def check_rollback(driver: Driver, vocab: int, rows: int, accepted: int) -> None:
    """States and logits behind a speculative span are, bit for bit, those of the rows that count, run one by one."""
    ids = np.random.default_rng(rows).integers(0, vocab, 60).astype(np.int32)
    drafted, fresh = driver.start(), driver.start()
    driver.feed((drafted, ids[:20]), (fresh, ids[:20]))
    wrong = np.concatenate((ids[20 : 20 + accepted], ids[40 : 40 + rows - accepted]))
    (speculative,) = driver.verify((drafted, wrong))
    for row in range(accepted):
        (logits,) = driver.feed((fresh, ids[20 + row : 21 + row]))
        np.testing.assert_array_equal(speculative[row], logits[0])
    driver.accept(drafted, accepted)
    # Once more behind rows that wait, then with a long span behind them.
    at = 20 + accepted
    (again,) = driver.verify((drafted, ids[at : at + 3]))
    driver.accept(drafted, 2)
    (logits,) = driver.feed((fresh, ids[at : at + 2]))
    np.testing.assert_array_equal(again[:2], logits)
    for count in (20, 1):
        at += 2
        (one,), (two,) = (driver.feed((sequence, ids[at : at + count])) for sequence in (drafted, fresh))
        np.testing.assert_array_equal(one, two)
    driver.end(drafted)
    driver.end(fresh)


#: trees of rows in depth-first order, and the path that counts
TREES = [
    ((0, 1, 2, 1, 4, 0, 6), (0, 1, 4, 5)),
    ((0, 0, 0, 0), (0, 3)),
    ((0, 1, 2, 3, 4, 5, 6, 3, 8, 9, 1, 11, 0, 13, 13), (0, 1, 2, 3, 8, 9, 10)),
    ((0, 1, 0, 3), (0, 1)),
]


def check_tree(driver: Driver, vocab: int, parents: Many[int], path: Many[int], length: int) -> None:
    """Logits of each row of a tree behind `length` tokens are, bit for bit, those of its path run row by row; what is
    kept behind the rows that count is what a sequence keeps that never had others."""
    count = len(parents) + 1
    ids = np.random.default_rng(count).integers(0, vocab, length + 60).astype(np.int32)
    drafted = driver.start()
    driver.feed((drafted, ids[:length]))
    tokens = ids[length : length + count]
    logits = driver.tree(drafted, tokens, parents)
    paths = {0: [0]}
    for row, parent in enumerate(parents, 1):
        paths[row] = [*paths[parent], row]
    for row in set(range(count)) - set(parents):
        fresh = driver.start()
        driver.feed((fresh, ids[:length]))
        for at in paths[row]:
            (plain,) = driver.feed((fresh, tokens[at : at + 1]))
            np.testing.assert_array_equal(logits[at], plain[0], err_msg=f"row {at}")
        driver.end(fresh)
    fresh = driver.start()
    driver.feed((fresh, ids[:length]))
    for at in path:
        driver.feed((fresh, tokens[at : at + 1]))
    driver.accept_path(drafted, path)
    assert drafted.length == fresh.length
    # Once more behind rows that wait: a tree, of which only the root counts, a chain and a long span.
    more = ids[length + count :]
    again = driver.tree(drafted, more[:4], (0, 1, 0))
    driver.accept_path(drafted, (0, 3))
    (plain,) = driver.feed((fresh, more[[0, 3]]))
    np.testing.assert_array_equal(again[[0, 3]], plain)
    (again,) = driver.verify((drafted, more[4:7]))
    driver.accept(drafted, 2)
    (plain,) = driver.feed((fresh, more[4:6]))
    np.testing.assert_array_equal(again[:2], plain)
    driver.tree(drafted, more[6:10], (0, 0, 0))
    driver.accept_path(drafted, (0, 2))
    driver.feed((fresh, more[[6, 8]]))
    rows = drafted.length
    kept, expected = driver.save(drafted), driver.save(fresh)
    assert kept.keys() == expected.keys()
    for name, tensor in kept.items():
        own = slice(rows) if name.endswith((".k", ".v")) else slice(None)
        np.testing.assert_array_equal(tensor[own], expected[name][own], err_msg=name)
    for size in (1, 20):
        np.testing.assert_array_equal(*driver.feed((drafted, more[10 : 10 + size]), (fresh, more[10 : 10 + size])))
    driver.end(drafted)
    driver.end(fresh)


def check_masks(driver: Driver, prompt: NDArray[np.int32], times: int = 3) -> None:
    """Rows of a prompt of 16 tokens with few, most and half of the tokens allowed, one mask twice: ids and candidates
    are those of logits that are masked here. Rows of whole logits and rows without a mask stay as they are."""
    backend, random = driver.backend, np.random.default_rng(1)
    vocab = backend.capacity.vocab
    sequence = driver.start()
    # At position 0 recurrent states begin anew, so that the step can run again.
    step = driver.step((sequence, prompt[:16]))
    driver.end(sequence)
    rows = np.array([1, 4, 8, 11, 13, 15], np.int32)
    full, top = np.array([False, True, False, False, False, False]), np.array([True, True, False, True, True, True])
    masked = np.array([0, 2, 4, 5], np.int32)
    allowed = np.array([random.random(vocab) < share for share in (0.02, 0.98, 0.5, 0.5)])
    allowed[3], allowed[:, 0] = allowed[2], True
    words = np.packbits(np.pad(allowed, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little").view(np.uint32)
    # The first time launch by launch, then captured, then replayed.
    for _ in range(times):
        everything = backend.forward(replace(step, output_rows=rows, needs_logits=np.ones(6, np.bool_)))
        expected = everything.logits.copy()
        expected[masked] = np.where(allowed, expected[masked], -np.inf)
        order = np.argsort(-expected[top], axis=1, kind="stable")[:, :MAX_CANDIDATES]
        masks = MadeMasks(RowMasks(masked, words))
        some = backend.forward(replace(step, output_rows=rows, needs_logits=full, needs_candidates=top, masks=masks))
        assert np.array_equal(some.ids, expected.argmax(axis=1))
        assert np.array_equal(some.logits, everything.logits[full])
        assert some.candidates is not None and np.array_equal(some.candidates.ids, order)
        assert np.array_equal(some.candidates.logits, np.take_along_axis(expected[top], order, axis=1))
    plain = backend.forward(replace(step, output_rows=rows, needs_logits=np.zeros(6, np.bool_)))
    assert np.array_equal(plain.ids, everything.ids)


def check_shards(reference: Reference, drivers: Iterable[Driver]) -> None:
    """Logits of a prompt in chunks, and of tokens beside another sequence, have the same bits in each driver."""
    prompt = reference.expected["prompt_long"]
    results = []
    for driver in drivers:
        sequence, other = driver.start(), driver.start()
        parts = [driver.feed((sequence, part))[0] for part in (prompt[:100], prompt[100:-2])]
        driver.feed((other, prompt[:9]))
        parts += [driver.feed((other, prompt[:1]), (sequence, token))[1] for token in prompt[-2:, None]]
        results.append(np.concatenate(parts))
    for result in results[1:]:
        assert (results[0] == result).all()


def check_restored(reference: Reference, driver: Driver) -> None:
    """A sequence goes on with the same bits from saved state, and from its pages where they are."""
    prompt = reference.expected["prompt_long"]
    sequence = driver.start()
    driver.feed((sequence, prompt[:90]))
    kept, saved = driver.keep(sequence), driver.save(sequence)
    expected = driver.feed((sequence, prompt[90:]))[0]
    for back, what in ((driver.restore, saved), (driver.resume, kept)):
        other = driver.start()
        driver.feed((other, prompt[5:95]))
        back(other, what)
        assert (driver.feed((other, prompt[90:]))[0] == expected).all()


def check_prompts_together(driver: Driver, vocab: int, lengths: Many[int]) -> None:
    """Prompts that are read in one step have the bits of each alone, and so have the rows behind them."""
    random = np.random.default_rng(len(lengths))
    texts = [random.integers(0, vocab, length + 1, np.int32) for length in lengths]

    def read(*chosen: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits of each prompt's last row, and then of the row behind it."""
        sequences = [driver.start() for _ in chosen]
        step = driver.step(*((sequence, text[:-1]) for sequence, text in zip(sequences, chosen, strict=True)))
        ends = np.array([span.start + span.rows - 1 for span in step.spans], np.int32)
        last = driver.backend.forward(replace(step, output_rows=ends, needs_logits=np.ones(len(ends), np.bool_)))
        behind = driver.feed(*((sequence, text[-1:]) for sequence, text in zip(sequences, chosen, strict=True)))
        for sequence in sequences:
            driver.end(sequence)
        return np.stack([last.logits, np.concatenate(behind)], axis=1)

    alone = np.concatenate([read(text) for text in texts])
    np.testing.assert_array_equal(read(*texts), alone)


def check_replies_together(driver: Driver, vocab: int, count: int) -> None:
    """Rows of so many sequences, one of each in a step, have the bits that each has alone."""
    tokens = np.random.default_rng(count).integers(0, vocab, (count, 3), np.int32)

    def begin() -> list[Sequence]:
        sequences = [driver.start() for _ in tokens]
        for sequence, own in zip(sequences, tokens, strict=True):
            driver.feed((sequence, own[:1]))
        return sequences

    def read(*work: tuple[Sequence, NDArray[np.int32]]) -> NDArray[np.float32]:
        """Logits of two steps, a row of each sequence in each."""
        steps = [driver.feed(*((sequence, own[i : i + 1]) for sequence, own in work)) for i in (1, 2)]
        return np.concatenate([np.concatenate(step) for step in steps])

    sequences = begin()
    together = read(*zip(sequences, tokens, strict=True)).reshape(2, count, -1)
    for sequence in sequences:
        driver.end(sequence)
    sequences = begin()
    alone = np.stack([read(work) for work in zip(sequences, tokens, strict=True)], axis=1)
    np.testing.assert_array_equal(together, alone)
    for sequence in sequences:
        driver.end(sequence)


def check_company(driver: Driver, vocab: int, rows: int) -> None:
    """Verified rows of several sequences, `rows` in one step, have the bits of rows that are fed one by one, also
    behind rows that were accepted."""
    assert rows <= driver.backend.capacity.invariant_rows
    random = np.random.default_rng(rows)
    counts = [16] * (rows // 16) + [rows % 16] * (rows % 16 > 0)
    texts = [random.integers(0, vocab, 8 + count, np.int32) for count in counts]
    together, alone = [driver.start() for _ in counts], driver.start()
    for number, (sequence, text) in enumerate(zip(together, texts, strict=True)):
        driver.feed((sequence, text[: 5 + number]))
    begun = [sequence.length for sequence in together]
    verified = driver.verify(
        *((s, t[s.length : s.length + n]) for s, t, n in zip(together, texts, counts, strict=True))
    )
    for number, sequence in enumerate(together):
        driver.accept(sequence, min(1 + number, counts[number]))
    behind = driver.feed(*((s, t[s.length : s.length + 1]) for s, t in zip(together, texts, strict=True)))
    for number, (text, at, count) in enumerate(zip(texts, begun, counts, strict=True)):
        driver.feed((alone, text[:at]))
        every = [driver.feed((alone, text[i : i + 1]))[0] for i in range(at, at + count)]
        np.testing.assert_array_equal(verified[number], np.concatenate(every), err_msg=f"sequence {number}")
        if 1 + number < count:
            np.testing.assert_array_equal(behind[number], every[1 + number], err_msg=f"sequence {number}")
        driver.end(alone)
        alone = driver.start()
    for sequence in (alone, *together):
        driver.end(sequence)
