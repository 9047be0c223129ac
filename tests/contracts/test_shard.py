"""What a shard promises, of shards in this process, in daemons of this machine, and in daemons over TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.errors import BackendError
from luce.gguf.reader import open_gguf
from luce.runtime.draws import Draw, RowDraws
from luce.runtime.host import HostDevice
from luce.runtime.step import MAX_CANDIDATES, PAGE
from luce.shard.local import LocalShard
from luce.shard.saved_state import StatePiece
from luce.shard.sizes import activation_widths
from tests.support.daemons import devices, key_file, with_flags, within
from tests.support.drive import Driver, gathered
from tests.support.golden_checks import TREES, check_masks, check_rollback, check_tree
from tests.support.op_checks_sample import drawn_token
from tests.support.reference import Reference
from tests.support.warm import WARM
from tools.listening_daemon import listener

#: a sandwich model with a tied, scaled embedding and softcap; a recurrent one with a head of its own, quantised
REFERENCES = [Reference("gemma4-e-F32"), Reference("qwen35-b-Q4_K_M")]
PLACES = ["local", "daemon", "flags", "stream", "tcp"]
Make = Callable[[Reference], LayerSplitBackend]


@pytest.fixture(scope="module", params=PLACES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes the backend of a file on two devices, each of which is a shard of the kind that is tested."""
    made: dict[str, LayerSplitBackend] = {}
    with ExitStack() as stack:

        def one(reference: Reference) -> LayerSplitBackend:
            if reference.name in made:
                return made[reference.name]
            file = stack.enter_context(open_gguf(reference.path))
            if request.param == "local":
                opened: list[Any] = [HostDevice(0), HostDevice(1)]
            elif request.param == "tcp":
                key = key_file(tmp_path_factory.mktemp("keys") / "key")
                ports = [stack.enter_context(listener(reference.path, key, python=WARM))[0] for _ in range(2)]
                names = ",".join(f"tcp://127.0.0.1:{port}/cpu:0" for port in ports)
                opened = stack.enter_context(devices(names, target_shard_ipc_bin=(), shard_key_file=key))
            else:
                flags = request.param == "flags"
                python = with_flags(tmp_path_factory.mktemp("flags") / "python") if flags else WARM
                settings = {"target_shard_ipc_bin": (("cpu", python),), "isolate_shards": True}
                transport = "stream" if request.param == "stream" else "shared"
                opened = stack.enter_context(devices("cpu:0,cpu:1", **settings, shard_transport=transport))
            backend = LayerSplitBackend(
                file,
                reference.spec,
                opened,
                ServingOptions(slots=4, context=256, microbatch=64, verify_rows=16, rank_pages=True),
            )
            stack.callback(backend.close)
            made[reference.name] = backend
            return backend

        yield one


@pytest.fixture(params=REFERENCES, ids=lambda r: r.name)
def reference(request: pytest.FixtureRequest) -> Reference:
    """A file."""
    chosen: Reference = request.param
    return chosen


@pytest.fixture
def backend(make: Make, reference: Reference) -> LayerSplitBackend:
    """Its two shards."""
    return make(reference)


def weights(reference: Reference, *names: str) -> NDArray[np.float32]:
    """The first of these tensors that the file has, by the gguf package: float32 [rows, cols]."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(reference.path).tensors}
    tensor = next(tensors[name] for name in names if name in tensors)
    return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


def test_facts(backend: LayerSplitBackend, reference: Reference) -> None:
    first, last = backend.shards
    assert first.info.layers.start == 0 and first.info.layers.stop == last.info.layers.start
    assert last.info.layers.stop == len(reference.spec.layers)
    for shard in (first, last):
        assert shard.info.weights > 0 and shard.info.state > 0 and not shard.lost()
        assert len(shard.info.devices) == 1


def test_what_devices_have_left(backend: LayerSplitBackend) -> None:
    # A daemon's first sign of life after its start may be on its way.
    assert within(60, lambda: list(backend.memory()) == [part.device for part in backend.devices])
    for memory in backend.memory().values():
        assert memory.total == HostDevice().memory().total and 0 < memory.free <= memory.total


def test_what_passes_is_counted(backend: LayerSplitBackend, reference: Reference) -> None:
    def counted() -> list[dict[tuple[str, str], int]]:
        return [dict(daemon.moved) for daemon in backend.daemons()]

    before, waited = counted(), [daemon.waited for daemon in backend.daemons()]
    assert len(before) in (0, 2)
    driver = Driver(backend)
    rows = np.resize(reference.expected["prompt_17"], 60)
    driver.feed((driver.start(), rows))
    own = [{way: count - past[way] for way, count in now.items()} for past, now in zip(before, counted(), strict=True)]
    size = len(rows) * 4 * sum(activation_widths(reference.spec, backend.capacity.layers[1].start))
    for number, moved in enumerate(own):
        direction, other = ("sent", "received") if number else ("received", "sent")
        shared, stream = moved["shared", direction], moved["stream", direction]
        assert backend.daemons()[number].transport == ("shared" if shared else "stream")
        assert 0 < stream < size if shared == size else (shared == 0 and size < stream < 2 * size)
        # A step, or its output, which comes through shared memory if the server polls a flag there.
        assert moved["stream", other] > 0 and (number or not moved["shared", other])
    assert all(daemon.waited > past for daemon, past in zip(backend.daemons(), waited, strict=True))


def test_embed(backend: LayerSplitBackend, reference: Reference) -> None:
    first, last = backend.shards
    table = weights(reference, "token_embd.weight")
    tokens = np.array([3, 0, len(table) - 1, 3], np.int32)
    rows = np.asarray(first.ends.embed(tokens))
    assert rows.dtype == np.float32 and np.array_equal(rows, table[tokens])
    with pytest.raises(BackendError, match="only the first shard embeds"):
        last.ends.embed(tokens)
    assert np.array_equal(first.ends.embed(tokens[:1]), table[tokens[:1]])


def test_project(backend: LayerSplitBackend, reference: Reference) -> None:
    first, last = backend.shards
    head = weights(reference, "output.weight", "token_embd.weight")
    rows = np.random.default_rng(5).standard_normal((5, head.shape[1])).astype(np.float32)
    expected = rows.astype(np.float64) @ head.T.astype(np.float64)
    output = last.ends.project(rows, top=7, logits=True)()
    assert np.abs(output.logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert (output.ids == output.logits.argmax(axis=1)).all()
    order = np.argsort(-output.logits, axis=1, kind="stable")[:, :7]
    assert output.candidates is not None and (output.candidates.ids == order).all()
    assert (output.candidates.logits == np.take_along_axis(output.logits, order, axis=1)).all()
    few = last.ends.project(rows[:1])()
    assert few.ids.tolist() == output.ids[:1].tolist() and few.logits.shape == (0, len(head)) and few.candidates is None
    most = last.ends.project(rows[:2], top=MAX_CANDIDATES)()
    assert most.candidates is not None and most.candidates.ids.shape == (2, MAX_CANDIDATES)
    assert most.candidates.norms is None
    for scale, softcap in ((1.0, 0.0), (0.5, 4.0)):
        norms = last.ends.project(rows, top=3, scale=scale, softcap=softcap)().candidates
        values = expected * scale
        values = softcap * np.tanh(values / softcap) if softcap else values
        assert norms is not None and norms.norms is not None
        np.testing.assert_allclose(norms.norms, np.logaddexp.reduce(values, axis=1), rtol=1e-5)
        best = last.ends.project(rows, top=1, scale=scale, softcap=softcap)()
        assert (
            best.candidates is not None
            and best.candidates.norms is not None
            and (best.candidates.norms == norms.norms).all()
        )
        assert (best.candidates.ids == order[:, :1]).all() and (best.ids == order[:, 0]).all()
        assert (best.candidates.logits[:, 0] == output.logits.max(axis=1)).all()
    with pytest.raises(BackendError, match="only the last shard projects"):
        first.ends.project(rows)()
    assert last.ends.project(rows)().ids.tolist() == output.ids.tolist()


@pytest.mark.parametrize(("rows", "accepted"), [(2, 1), (5, 5), (16, 1), (16, 11), (16, 16)])
def test_rows_that_do_not_count_leave_no_trace(
    backend: LayerSplitBackend, reference: Reference, rows: int, accepted: int
) -> None:
    check_rollback(Driver(backend), reference.spec.vocab, rows, accepted)


@pytest.mark.parametrize("case", [0, 2])
def test_rows_of_trees_are_those_of_chains(backend: LayerSplitBackend, reference: Reference, case: int) -> None:
    # The first one begins behind whole pages of others, the second one passes from page to page.
    check_tree(Driver(backend), reference.spec.vocab, *TREES[case], length=60 if case else 20)


@pytest.mark.parametrize("accepted", [1, 6])
def test_states_are_saved_after_the_accepted_rows(backend: LayerSplitBackend, accepted: int) -> None:
    ids = np.arange(40, dtype=np.int32)
    driver = Driver(backend)
    drafted, fresh = driver.start(), driver.start()
    driver.feed((drafted, ids[:20]), (fresh, ids[:20]))
    driver.verify((drafted, ids[20:26]))
    driver.accept(drafted, accepted)
    driver.feed((fresh, ids[20 : 20 + accepted]))
    saved_state, expected = driver.save(drafted), driver.save(fresh)
    assert saved_state.keys() == expected.keys()
    rows = 20 + accepted
    for name, tensor in saved_state.items():
        # Rows of a page after the last accepted one may hold anything.
        own = slice(rows) if name.endswith((".k", ".v")) else slice(None)
        np.testing.assert_array_equal(tensor[own], expected[name][own], err_msg=name)
    after = driver.feed((drafted, ids[30:31]), (fresh, ids[30:31]))
    np.testing.assert_array_equal(*after)


def test_candidates_and_logits_of_chosen_rows(backend: LayerSplitBackend, reference: Reference) -> None:
    step = Driver(backend).step((Driver(backend).start(), reference.expected["prompt_17"]))
    rows = np.array([2, 9, 16], np.int32)
    full, top = np.array([False, True, False]), np.array([True, True, False])
    everything = backend.forward(replace(step, output_rows=rows, needs_logits=np.ones(3, np.bool_)))
    some = backend.forward(replace(step, output_rows=rows, needs_logits=full, needs_candidates=top))
    assert np.array_equal(some.ids, everything.ids) and np.array_equal(some.logits, everything.logits[full])
    order = np.argsort(-everything.logits[top], axis=1, kind="stable")[:, :MAX_CANDIDATES]
    assert some.candidates is not None and np.array_equal(some.candidates.ids, order)
    nothing = backend.forward(replace(step, output_rows=rows[:0], needs_logits=full[:0], needs_candidates=None))
    assert not len(nothing.ids) and not len(nothing.logits) and nothing.candidates is None


def test_drawn_rows(backend: LayerSplitBackend, reference: Reference) -> None:
    step = Driver(backend).step((Driver(backend).start(), reference.expected["prompt_17"]))
    rows = np.array([2, 9, 12, 16], np.int32)
    draws = [Draw(2**63 + 9, 3.0, 64), None, Draw(5, 2.0, 40, 0.9, 0.01), Draw(6, 4.0, 20)]
    full, top = np.array([False, False, True, True]), np.array([False, True, True, False])
    plain = backend.forward(replace(step, output_rows=rows, needs_logits=np.ones(4, np.bool_)))
    step = replace(step, output_rows=rows, needs_logits=full, needs_candidates=top, draws=RowDraws.of(draws))
    some = backend.forward(step)
    own = [
        drawn_token(plain.logits[row], draw, int(rows[row]) + 1) for row, draw in enumerate(draws) if draw is not None
    ]
    assert some.ids[[0, 2, 3]].tolist() == own and some.ids[1] == plain.ids[1]
    assert some.ids.tolist() != plain.ids.tolist() and np.array_equal(some.logits, plain.logits[full])
    assert some.candidates is not None and some.candidates.ids[:, 0].tolist() == plain.ids[top].tolist()
    few = backend.forward(replace(step, needs_logits=np.zeros(4, np.bool_), needs_candidates=None))
    assert few.ids.tolist() == some.ids.tolist()


def test_masked_rows(backend: LayerSplitBackend, reference: Reference) -> None:
    check_masks(Driver(backend), reference.expected["prompt_17"])


def test_save_and_restore(backend: LayerSplitBackend, reference: Reference) -> None:
    driver, prompt = Driver(backend), reference.expected["prompt_long"]
    sequence, other, third = driver.start(), driver.start(), driver.start()
    driver.feed((sequence, prompt[:90]))
    saved_state = driver.keep(sequence)
    tensors = gathered(saved_state)
    for shard in backend.shards:
        own = gathered(shard.state.save(sequence.slot, sequence.pages))
        assert own and all(int(name.split(".")[1]) in shard.info.layers for name in own)
        assert all(len(own[name]) == 2 * PAGE for name in own if name.endswith((".k", ".v")))
        assert all(np.array_equal(tensors[name], own[name]) and tensors[name].dtype == own[name].dtype for name in own)
    expected = driver.feed((sequence, prompt[90:]))[0]
    driver.feed((other, prompt[5:95]))
    driver.resume(other, saved_state)
    assert np.array_equal(driver.feed((other, prompt[90:]))[0], expected)
    driver.feed((third, prompt[3:93]))
    backend.state.load([StatePiece(third.slot, third.pages, range(len(reference.spec.layers)), tensors)])
    assert np.array_equal(driver.feed((third, prompt[90:]))[0], expected)


def test_pages_are_ranked_alike_wherever_layers_are(backend: LayerSplitBackend, reference: Reference) -> None:
    """As one shard ranks them; the row that asks may be any of a speculative span."""
    prompt = reference.expected["prompt_long"]
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(reference.path))
        alone = LayerSplitBackend(
            file, reference.spec, [HostDevice()], ServingOptions(context=256, slots=4, verify_rows=16, rank_pages=True)
        )
        stack.callback(alone.close)
        found = []
        for each in (alone, backend):
            driver, group = Driver(each), each.capacity.windows.index(None)
            other, sequence = driver.start(), driver.start()
            # No step is cut into microbatches: BLAS for AVX2 rounds products of other numbers of rows otherwise.
            driver.feed((other, prompt[7:27]))
            for first in (0, 64):
                driver.feed((sequence, prompt[first : first + 64]))
            pages = sequence.pages[group]
            each.ranking.add(sequence.slot, [1], pages[1:2])
            each.ranking.add(sequence.slot, [0], pages[:1])
            driver.verify((sequence, prompt[40:56]))
            driver.accept(sequence, 3)
            both = np.arange(2, dtype=np.int32)
            found.append([each.ranking.rank(sequence.slot, position, both) for position in range(128, 144)])
            # The contents of a page when it was added count, wherever the page goes.
            driver.feed((sequence, prompt[:3]))
            for shard in each.shards:
                tensors = gathered(shard.state.save(None, [own[:2] for own in sequence.pages]))
                zeros = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
                shard.state.load(
                    StatePiece(None, [own[:2] for own in sequence.pages], range(len(reference.spec.layers)), zeros)
                )
            found[-1].append(each.ranking.rank(sequence.slot, 128 + 2, both[1:]))
            each.ranking.add(sequence.slot, [1], pages[:1])
            found[-1].append(each.ranking.rank(sequence.slot, 128 + 5, both))
            with pytest.raises(BackendError, match="some of these pages have no statistics"):
                each.ranking.rank(sequence.slot, 128, np.arange(3, dtype=np.int32))
            with pytest.raises(BackendError, match="some of these pages have no statistics"):
                each.ranking.rank(other.slot, 19, both)
            assert sum(shard.ranking.rank(sequence.slot, 128, both).shape[0] for shard in each.shards) > 0
            assert each.capacity.ranking_bytes == alone.capacity.ranking_bytes
            if each is alone:
                (shard,) = alone.shards
                assert isinstance(shard, LocalShard)
                stored = shard.ranking.statistics[sequence.slot].moments
                assert (
                    sum(moments.nbytes for moments in stored if moments is not None)
                    == 2 * alone.capacity.ranking_bytes
                    > 0
                )
            each.ranking.add(other.slot, [0], pages[:1])
            for _ in range(2):
                each.ranking.drop(sequence.slot)
            with pytest.raises(BackendError, match="some of these pages have no statistics"):
                each.ranking.rank(sequence.slot, 128, both)
            assert each.ranking.rank(other.slot, 19, both[:1]).tolist() == [1.0]
            each.ranking.drop(other.slot)
            driver.end(sequence)
            driver.end(other)
    for expected, scores in zip(*found, strict=True):
        assert np.array_equal(expected, scores)
    shares = np.array(found[0][:16])
    assert (shares > 0).all() and (shares.sum(axis=1) >= 1 - 1e-9).all() and len(np.unique(shares)) > 16
    assert found[0][16] == [1.0] and len({tuple(scores) for scores in found[0][:16]}) == 16


def test_a_saved_state_is_read_while_steps_run(backend: LayerSplitBackend, reference: Reference) -> None:
    driver, prompt = Driver(backend), reference.expected["prompt_long"]
    sequence, other = driver.start(), driver.start()
    driver.feed((sequence, prompt[:90]))
    saved_state, saved = driver.keep(sequence), driver.save(sequence)
    for _ in range(5):
        driver.feed((other, prompt[:20]), wanted=False)
        saved_state.ready()
        windows = saved_state.windows()
        driver.feed((other, prompt[20:23]), wanted=False)
        found: dict[str, NDArray[np.generic]] = {}
        for tensors in windows:
            found |= tensors
            driver.feed((other, prompt[23:25]), wanted=False)
        assert found.keys() == saved.keys() and all(np.array_equal(saved[name], found[name]) for name in saved)
        other.length = 0


def test_what_cannot_be_filled_in_changes_nothing(backend: LayerSplitBackend, reference: Reference) -> None:
    driver, prompt = Driver(backend), reference.expected["prompt_long"]
    sequence, layers = driver.start(), range(len(reference.spec.layers))
    driver.feed((sequence, prompt[:20]))
    saved = driver.save(sequence)
    for shard in backend.shards:
        # A donor's tensors are every shard's business, so one of the shard's own.
        name = sorted(gathered(shard.state.save(sequence.slot, sequence.pages)))[-1]
        for wrong in (None, saved[name][:-1], saved[name].astype(np.int8), saved[name][..., None]):
            tensors = {key: np.zeros_like(value) for key, value in saved.items()} | {name: wrong}
            given = {key: value for key, value in tensors.items() if value is not None}
            with pytest.raises(BackendError, match=rf"cannot restore tensor {name}"):
                shard.state.load(StatePiece(sequence.slot, sequence.pages, layers, given))
    again = driver.save(sequence)
    assert all(np.array_equal(value, again[name]) for name, value in saved.items())


def test_a_failed_step_leaves_a_shard_usable(backend: LayerSplitBackend, reference: Reference) -> None:
    driver = Driver(backend)
    step = driver.step((driver.start(), reference.expected["prompt_17"]))
    expected = backend.forward(step)
    with pytest.raises(BackendError):
        # A shard that does not embed gets no activation.
        result = backend.shards[-1].forward(step, None)
        assert callable(result)
        result()
    backend.shards[-1].announce(step, None)
    again = backend.forward(step)
    assert np.array_equal(again.logits, expected.logits)
