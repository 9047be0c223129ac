"""What of conversations comes from the prefix cache, by Luce's router and by Ray Serve's own: CL-A11.

Two rooms of a replica's cache: for all of the sixteen conversations, and for most of them. With room for all, Ray's
router finds two thirds with two replicas, by chance (share_by_chance). The figures are printed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.support.ray_cluster import ray_cluster
from tests.support.ray_conversations import cached_share, held, share_by_chance

#: of a replica's prefix cache, in MiB: a conversation takes 1.2 MB, and its checkpoints
ALL, MOST = 1024, 20
#: how far the mean of three runs may be from what chance gives: some four times its spread
CHANCE = 0.12
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize(
    "routing, room, least, most",
    [("prefix", ALL, 0.95, 1.0), ("default", ALL, 0.0, 1.0), ("prefix", MOST, 0.9, 1.0), ("default", MOST, 0.0, 0.6)],
)
def test_the_share_of_repeated_tokens_that_is_cached(
    tmp_path: Path, routing: str, room: int, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--cache-ram", str(room))
    with ray_cluster(tmp_path, replicas=2, devices=2, routing=routing, flags=flags) as cluster:
        runs = [held(cluster, seed) for seed in range(3)]
        shares = [cached_share(each) for each in runs]
        chance = statistics.mean(share_by_chance(each, 2) for each in runs)
        with capsys.disabled():
            words = ", ".join(f"{share:.1%}" for share in shares)
            print(f"\n{routing}, {room} MiB: {words}; mean {statistics.mean(shares):.1%}; by chance {chance:.1%}")
        assert least <= statistics.mean(shares) <= most
        if (routing, room) == ("default", ALL):
            assert abs(statistics.mean(shares) - chance) <= CHANCE
