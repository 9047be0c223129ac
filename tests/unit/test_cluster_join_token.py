"""Join tokens: their text, whom they let in, and when an address is not listened to."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce import cluster
from luce.cluster.join_token import (
    MAX_OPEN,
    RefusalLimit,
    TokenBook,
    TokenRecord,
    TokenRefusedError,
    decode_token,
    encode_token,
)
from luce.errors import UsageError

ISSUED = (b"identity", b"sixteen secrets!")
ID, SECRET = ISSUED
BOX, DEN = b"certificate of box", b"certificate of den"


def test_the_text_of_a_token() -> None:
    text = encode_token("home", ("10.0.0.1:7443", "[::1]:7443"), b"p" * 32, ISSUED, 1234.5)
    token = decode_token(f" {text}\n")
    assert (token.cluster, token.addresses, token.pin) == ("home", ("10.0.0.1:7443", "[::1]:7443"), b"p" * 32)
    assert (token.id, token.secret, token.expires) == (*ISSUED, 1234)
    # By the description of the format: MessagePack in base64url without padding.
    body = text.removeprefix("luce1.")
    assert msgspec.msgpack.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))[:3] == [1, ID, "home"]


@given(
    st.text(max_size=60) | st.binary(max_size=80).map(lambda data: "luce1." + base64.urlsafe_b64encode(data).decode())
)
def test_other_texts_are_no_tokens(text: str) -> None:
    with pytest.raises(UsageError, match=r"^TOKEN: not a join token: ") as caught:
        decode_token(text)
    assert len(text) < 12 or text[6:] not in str(caught.value), "it may be a token with a slip of the hand"


def test_tokens_with_values_of_other_sizes() -> None:
    for id, secret, pin in ((b"short", SECRET, b"p" * 32), (ID, b"short", b"p" * 32), (ID, SECRET, b"short")):
        with pytest.raises(UsageError, match="its content is not that of a token"):
            decode_token(encode_token("home", ("a:1",), pin, (id, secret), 0))


def book(expires: float = 100.0) -> TokenBook:
    made = TokenBook()
    made.issue(ISSUED, expires, "attic", 0.0)
    return made


def test_only_a_digest_is_kept() -> None:
    (record,) = book().records
    assert record == TokenRecord(ID, hashlib.sha256(SECRET).digest(), 100.0, "attic")
    assert SECRET not in msgspec.json.encode(record) and base64.b64encode(SECRET) not in msgspec.json.encode(record)


def test_a_token_lets_one_host_in_once() -> None:
    tokens = book()
    assert tokens.redeem(ID, SECRET, BOX, 1.0).label == "attic" and tokens.open(1.0) == []
    # The answer was lost.
    assert tokens.redeem(ID, SECRET, BOX, 60.9).used == 1.0
    for certificate, now in ((DEN, 2.0), (BOX, 61.0)):
        with pytest.raises(TokenRefusedError, match="has been used"):
            tokens.redeem(ID, SECRET, certificate, now)
    # It stays used for a coordinator that starts again.
    again = TokenBook(msgspec.json.decode(msgspec.json.encode(tokens.records), type=list[TokenRecord]))
    with pytest.raises(TokenRefusedError, match="has been used"):
        again.redeem(ID, SECRET, DEN, 2.0)


@pytest.mark.parametrize(
    ("id", "secret", "now", "reason"),
    [
        (b"\0" * 8, SECRET, 1.0, "unknown"),
        (ID, b"sixteen secrets?", 1.0, "wrong"),
        (ID, b"", 1.0, "wrong"),
        (ID, SECRET, 100.0, "expired"),
    ],
)
def test_who_is_not_let_in(id: bytes, secret: bytes, now: float, reason: str) -> None:
    tokens = book()
    with pytest.raises(TokenRefusedError, match=reason):
        tokens.redeem(id, secret, BOX, now)
    assert tokens.records[0].used is None


def test_a_used_token_stays_one_while_its_answer_may_be_repeated() -> None:
    tokens = book()
    tokens.redeem(ID, SECRET, BOX, 1.0)
    tokens.issue((b"another1", SECRET), 100.0, "", 2.0)
    assert tokens.redeem(ID, SECRET, BOX, 3.0).used == 1.0
    tokens.issue((b"another2", SECRET), 200.0, "", 61.0)
    with pytest.raises(TokenRefusedError, match="unknown"):
        tokens.redeem(ID, SECRET, BOX, 61.0)


def test_open_tokens_are_bounded() -> None:
    tokens = TokenBook()
    for number in range(MAX_OPEN):
        tokens.issue((number.to_bytes(8), SECRET), 100.0, "", 0.0)
    with pytest.raises(UsageError, match="100 join tokens are open"):
        tokens.issue(ISSUED, 100.0, "", 99.9)
    # Those that have expired are none.
    tokens.issue(ISSUED, 200.0, "", 100.0)
    assert [record.id for record in tokens.records] == [ID]


def test_five_refusals_in_a_minute_block_an_address_for_a_minute() -> None:
    limit = RefusalLimit()
    for second in range(4):
        limit.note("10.0.0.1", second)
        assert not limit.blocks("10.0.0.1", second)
    limit.note("10.0.0.1", 4.0)
    assert limit.blocks("10.0.0.1", 4.0) and limit.blocks("10.0.0.1", 63.9) and not limit.blocks("10.0.0.1", 64.0)
    assert not limit.blocks("10.0.0.2", 4.0)
    slow = RefusalLimit()
    for second in range(0, 75, 15):
        slow.note("10.0.0.1", second)
    assert not slow.blocks("10.0.0.1", 60.0)


def test_only_the_coordinator_reads_the_time_of_day() -> None:
    # Clocks of two machines are never compared: a member's may be years off.
    folder = Path(cluster.__file__).parent
    readers = {path.name for path in folder.glob("*.py") if re.search(r"time\.time\(|\.now\(", path.read_text())}
    assert readers == {"coordinator.py"}
