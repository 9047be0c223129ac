"""Drafting may lose a share of the time and no more, whatever the drafter does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from luce.engine.draft_account import SHARE, DraftAccount


def test_plain_steps_earn_a_share_of_their_time() -> None:
    account = DraftAccount()
    assert account.affords(0.0) and not account.affords(1e-9) and not account.overdrawn
    for _ in range(100):
        account.book_plain(1.0)
    # Three are a loan.
    assert account.affords(3 + 100 * SHARE - 1e-9) and not account.affords(3 + 100 * SHARE + 1e-9)


def test_losses_before_the_first_plain_step_count() -> None:
    account = DraftAccount()
    account.book_drafted(5.0, 1, 1, 1.0)
    assert account.overdrawn
    account.book_plain(1.0)
    assert account.overdrawn
    for _ in range(int(1 / SHARE)):
        account.book_plain(1.0 + 1e-6)
    assert not account.overdrawn


def test_what_drafts_gain_and_lose() -> None:
    account = DraftAccount()
    account.book_plain(1.0)
    # Two sequences: six tokens in two seconds, where three steps without drafts take three.
    account.book_drafted(2.0, 6, 2, 1.0)
    assert account.affords(4.0) and not account.affords(4.1)
    account.book_drafted(6.0, 2, 2, 1.0)
    assert account.overdrawn
    # Gains and losses count for so much time at most.
    account.book_drafted(1.0, 1000, 2, 1.0)
    assert account.affords(8.0) and not account.affords(8.1)
    account.book_drafted(1000.0, 2, 2, 1.0)
    for _ in range(int(8 / SHARE) - 1):
        account.book_plain(1.0)
    assert account.overdrawn
    account.book_plain(1.0 + 1e-6)
    assert not account.overdrawn


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 8)), min_size=1, max_size=40))
def test_no_drafter_loses_more_than_its_share(steps: list[tuple[float, int]]) -> None:
    """Each step that is not overdrawn drafts: it takes so much longer, and gives so many more tokens."""
    account, drafted, plain = DraftAccount(), 0.0, 0.0
    for longer, more in steps * (400 // len(steps)):
        if account.overdrawn:
            account.book_plain(1.0)
            drafted, plain = drafted + 1.0, plain + 1.0
        else:
            account.book_drafted(1.0 + longer, 1 + more, 1, 1.0)
            drafted, plain = drafted + 1.0 + longer, plain + 1.0 + more
    # The loan, the last step, and the share.
    assert drafted <= plain * (1 + SHARE) + 3 + 3.0 + 1e-6
