"""The share to keep by a prompt's length."""

from __future__ import annotations

import pytest

from luce.compress.compression_options import CompressionOptions
from luce.compress.selection import Keep
from luce.config.resolve import resolve
from luce.errors import UsageError


def test_without_a_curve_all_lengths_have_one_share() -> None:
    options = CompressionOptions.of(resolve({"prefill_drafter": "a.gguf", "prefill_keep_ratio": "0.2"}, env={}))
    assert [options.ratio_for(n) for n in (1, 32000, 10**6)] == [0.2] * 3


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(0, 0.2), (1000, 0.2), (1500, 0.15), (2000, 0.1), (3000, 0.075), (4000, 0.05), (10**6, 0.05)],
)
def test_a_curve_is_linear_between_its_points(tokens: int, share: float) -> None:
    curve = {"prefill_drafter": "a.gguf", "prefill_curve": "4000:0.05,1000:0.2,2000:0.1"}
    assert CompressionOptions.of(resolve(curve, env={})).ratio_for(tokens) == pytest.approx(share)


def test_sessions_have_ratios_of_their_own_if_asked_for() -> None:
    options = [
        CompressionOptions.of(resolve({"prefill_drafter": "a.gguf", "prefill_keep": keep}, env={}))
        for keep in ("ratio", "mass:0.9", "session")
    ]
    assert [each.by_session for each in options] == [False, False, True] and not options[2].keep_mass
    both = {"prefill_drafter": "a.gguf", "prefill_keep": "session", "prefill_keep_ratio": "0.2"}
    assert CompressionOptions.of(resolve(both, env={})).ratio_for(9) == 0.2


def test_a_share_of_the_scores_gives_way_to_a_requests_ratio() -> None:
    options = CompressionOptions.of(resolve({"prefill_drafter": "a.gguf", "prefill_keep": "mass:0.95"}, env={}))
    assert options.keep_for(1000) == Keep(0.95, mass=True) and options.keep_for(1000, 0.3) == Keep(0.3)
    assert CompressionOptions(keep_ratio=0.2).keep_for(1000) == Keep(0.2)
    bounded = CompressionOptions.of(resolve({"prefill_drafter": "a.gguf", "prefill_keep": "mass:0.95:0.2"}, env={}))
    assert bounded.keep_for(1000) == Keep(0.95, mass=True, most=0.2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prefill_curve": "1000:0.1,1000:0.2"}, "prefill-curve: 1000 is named twice"),
        ({"prefill_curve": "1000"}, "prefill-curve: expected N:SHARE"),
        ({"prefill_curve": "1000:0.1,"}, "prefill-curve: expected N:SHARE"),
        ({"prefill_curve": "-1:0.1"}, "prefill-curve: expected an integer in 0.."),
        ({"prefill_curve": "many:0.1"}, "prefill-curve: expected an integer in 0.."),
        ({"prefill_curve": "1000:0"}, r"prefill-curve: expected a number in \(0, 1\]"),
        ({"prefill_curve": "1000:nan"}, r"prefill-curve: expected a number in \(0, 1\]"),
        ({"prefill_keep_ratio": "0"}, r"prefill-keep-ratio: expected a number in \(0, 1\]"),
        ({"prefill_keep_ratio": "-0.1"}, r"prefill-keep-ratio: expected a number in \(0, 1\]"),
        ({"prefill_keep_ratio": "1.01"}, r"prefill-keep-ratio: expected a number in \(0, 1\]"),
        ({"prefill_keep_ratio": "nan"}, r"prefill-keep-ratio: expected a number in \(0, 1\]"),
        ({"prefill_keep_ratio": "0.2", "prefill_curve": "1000:0.1"}, "prefill-keep-ratio: not with --prefill-curve"),
        (
            {"prefill_freeze_threshold": "0", "prefill_freeze": True},
            "prefill-freeze-threshold: expected an integer in 1..",
        ),
        ({"prefill_freeze_threshold": "9"}, "prefill-freeze-threshold: requires --prefill-freeze"),
        ({"prefill_compression": "residency"}, "prefill-compression residency: requires --kvflash"),
        (
            {"prefill_compression": "residency", "kvflash": "4096", "kvflash_policy": "qk"},
            "kvflash-policy: not with --prefill-compression residency",
        ),
        (
            {"prefill_compression": "residency", "kvflash": "4096", "kvflash_drafter": "b.gguf"},
            "kvflash-drafter: not with --prefill-compression residency",
        ),
        ({"prefill_alpha": "-0.1"}, r"prefill-alpha: expected a number in \[0, 1\]"),
        ({"prefill_alpha": "nan"}, r"prefill-alpha: expected a number in \[0, 1\]"),
        ({"prefill_keep": "mass:0"}, r"prefill-keep: expected a number in \(0, 1\]"),
        ({"prefill_keep": "mass:1.5"}, r"prefill-keep: expected a number in \(0, 1\]"),
        ({"prefill_keep": "mass:nan"}, r"prefill-keep: expected a number in \(0, 1\]"),
        ({"prefill_keep": "mass:0.5:0"}, r"prefill-keep: expected a number in \(0, 1\]"),
        ({"prefill_keep": "mass:1:1:1"}, "prefill-keep: expected ratio"),
        ({"prefill_keep": "mass"}, "prefill-keep: expected ratio, mass:SHARE, mass:SHARE:MOST or session"),
        ({"prefill_keep": "0.5"}, "prefill-keep: expected ratio, mass:SHARE, mass:SHARE:MOST or session"),
        ({"prefill_keep": "mass:0.9", "prefill_keep_ratio": "0.2"}, "keep-ratio: not with --prefill-keep mass:0.9"),
        ({"prefill_keep": "mass:0.9", "prefill_curve": "9:0.2"}, "prefill-curve: not with --prefill-keep mass:0.9"),
        ({"prefill_compression": "on"}, "prefill-compression: expected off or auto or always"),
        ({"prefill_threshold": "0"}, "prefill-threshold: expected an integer in 1.."),
    ],
)
def test_values_that_are_refused(given: dict[str, str | bool], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        resolve({"prefill_drafter": "a.gguf", **given}, env={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_compression", "always"),
        ("prefill_drafter_device", "cpu:0"),
        ("prefill_threshold", "5"),
        ("prefill_keep_ratio", "0.5"),
        ("prefill_curve", "9:0.5"),
        ("prefill_keep", "mass:0.5"),
        ("prefill_alpha", "0.3"),
        ("prefill_layers", "3"),
        ("prefill_scored_layers", "3"),
        ("prefill_freeze", True),
    ],
)
def test_settings_without_a_small_model(name: str, value: str | bool) -> None:
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')}.*: requires --prefill-drafter"):
        resolve({name: value}, env={})


def test_residency_needs_a_small_model_or_a_draft() -> None:
    given = {"draft_residency": "request-scoped"}
    assert resolve({**given, "prefill_drafter": "a.gguf"}, env={}).draft_residency == "request-scoped"
    with pytest.raises(UsageError, match="draft-residency: requires --draft"):
        resolve(given, env={})
