"""Every family with a drafter: the tokens are the reference's, on one device, on three, and with a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import luce
from luce import assembly
from luce.draft.drafter import Drafter
from luce.draft.open import PreparedDrafter
from luce.runtime.host import HostDevice
from tests.support.covering import each_kind
from tests.support.drafters import ScriptedDrafter, sometimes
from tests.support.make_driver import MakeDriver
from tests.support.reference import Reference, references
from tests.support.warm import WARM

PLACES: dict[str, dict[str, Any]] = {
    "one": {"target_devices": "cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:1,cpu:2"},
    "daemon": {"target_devices": "cpu:0,cpu:1", "target_shard_ipc_bin": str(WARM)},
}


def knowing(reference: Reference) -> Drafter:
    """A drafter that knows the expected replies, but makes mistakes."""
    texts = [
        [*reference.expected[f"prompt_{key}"].tolist(), *reference.expected[f"greedy_{key}"].tolist()]
        for key in ("long", "17")
    ]

    def known(text: Sequence[int], count: int) -> Sequence[int]:
        return next((whole[len(text) : len(text) + count] for whole in texts if whole[: len(text)] == list(text)), [])

    return ScriptedDrafter(known, vocab=reference.spec.vocab, wrong=sometimes(0.25, 4))


@pytest.mark.parametrize("place", PLACES)
@each_kind()
def test_greedy(reference: Reference, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = PreparedDrafter(None, lambda first, last: knowing(reference))
    monkeypatch.setattr(assembly, "open_drafter", lambda *_, **__: scripted)
    settings = {"max_ctx": 512, "parallel": 2, "chunk": 16, "draft": "ngram", "verify_width": 16, **PLACES[place]}
    settings["target_devices"] = reference.among(settings["target_devices"])
    with luce.load(reference.path, **settings) as model:
        for keys in (("long",), ("long", "17")):
            # Alone, and beside each other: then they share the rows of a step.
            generations = {
                key: model.generate(
                    reference.expected[f"prompt_{key}"].tolist(), max_tokens=32, temperature=0, ignore_eos=True
                )
                for key in keys
            }
            for key, generation in generations.items():
                tokens = [token.id for token in generation]
                assert tokens == reference.expected[f"greedy_{key}"].tolist()
        stats = model.engine.stats().draft
    assert stats is not None and stats.accepted > stats.steps


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32"])
def test_any_number_of_rows_may_count(name: str, make_driver: MakeDriver) -> None:
    """What is kept behind c of 16 rows is bit for bit what is kept when just these rows ran."""
    reference = Reference(name)
    driver = make_driver(reference, [HostDevice()], verify_rows=16)
    text, wrong = reference.expected["prompt_17"], reference.expected["prompt_long"][-16:]
    for accepted in range(1, 17):
        drafted, fresh = driver.start(), driver.start()
        rows = np.concatenate((text[1 : 1 + accepted], wrong[accepted:]))
        driver.feed((drafted, text[:1]), (fresh, text[:1]))
        driver.verify((drafted, rows))
        driver.accept(drafted, accepted)
        driver.feed((fresh, text[1 : 1 + accepted]))
        kept, expected = driver.save(drafted), driver.save(fresh)
        assert kept.keys() == expected.keys()
        for key, tensor in kept.items():
            own = slice(1 + accepted) if key.endswith((".k", ".v")) else slice(None)
            np.testing.assert_array_equal(tensor[own], expected[key][own], err_msg=f"{accepted}: {key}")
        driver.end(drafted)
        driver.end(fresh)


@pytest.mark.parametrize("name", ["qwen35-a-F32", "gemma4-e-F32", "qwen3-a-F32"])
def test_prompt_lookup(name: str) -> None:
    """Of a few tokens, some combinations soon come again."""
    reference, replies = Reference(name), []
    bias = dict.fromkeys((50, 60, 70), 100.0)
    for draft in ("", "ngram"):
        width = 9 if draft else 0
        with luce.load(reference.path, target_devices="cpu:0", max_ctx=512, draft=draft, verify_width=width) as model:
            for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
                prompt = reference.expected["prompt_17"].tolist()
                generation = model.generate(prompt, max_tokens=150, logit_bias=bias, ignore_eos=True, **sampling)
                replies.append([token.id for token in generation])
            stats = model.engine.stats().draft
    assert replies[:2] == replies[2:]
    assert stats is not None and stats.accepted > 10


@pytest.mark.parametrize(
    ("reference", "width", "device"),
    [
        (Reference("gemma4-e-F32"), 5, "host"),
        *(
            pytest.param(reference, width, "gpu", marks=pytest.mark.gpu)
            for reference in references()
            for width in (0, 5, 16)
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Reference) else str(value),
)
def test_a_device_gives_the_tokens_of_plain_decoding(
    reference: Reference, width: int, device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(request.getfixturevalue("gpu").name) if device == "gpu" else "cpu:0"
    prompt, replies = reference.expected["prompt_17"].tolist(), list[list[int]]()

    def known(text: Sequence[int], count: int) -> Sequence[int]:
        at = len(text) - len(prompt)
        return replies[-1][at : at + count]

    for draft in ("", "ngram"):
        drafter = ScriptedDrafter(known, vocab=reference.spec.vocab, wrong=sometimes(0.25, 4))
        prepared = PreparedDrafter(None, lambda first, last, drafter=drafter: drafter) if draft else None
        monkeypatch.setattr(assembly, "open_drafter", lambda *_, prepared=prepared, **__: prepared)
        rows = width if draft else 0
        with luce.load(reference.path, target_device=place, max_ctx=512, draft=draft, verify_width=rows) as model:
            generation = model.generate(prompt, max_tokens=128, temperature=0, ignore_eos=True)
            replies.append([token.id for token in generation])
    assert replies[0] == replies[1]
