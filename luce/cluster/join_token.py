"""What lets one host join once: the text that its user carries, the digests that the coordinator keeps, and the limit
on those who guess. Pure: the callers give the time and the random bytes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections import deque

import msgspec

from luce.decoders import msgpack_decoder
from luce.errors import LuceError, UsageError

_PREFIX, _VERSION = "luce1.", 1
ID_BYTES, SECRET_BYTES, PIN_BYTES = 8, 16, 32
#: seconds that a join token holds unless its user says otherwise
TOKEN_SECONDS = 900.0
#: most tokens that can be used at a time
MAX_OPEN = 100
#: seconds in which a host whose answer was lost gets it again
REPEAT_SECONDS = 60.0
#: refusals of an address in _WINDOW seconds after which its connections are dropped for as long
_REFUSALS, _WINDOW = 5, 60.0


class JoinToken(msgspec.Struct, array_like=True, frozen=True):
    """The content of a token."""

    version: int
    id: bytes
    #: name of the cluster
    cluster: str
    #: HOST:PORT of the coordinator, in the order to try; empty: it is looked up by mDNS (luce.cluster.discovery)
    addresses: tuple[str, ...]
    #: SHA-256 of the coordinator's certificate
    pin: bytes
    secret: bytes
    #: seconds since 1970 by the coordinator's clock, which alone decides
    expires: int


def encode_token(
    cluster: str, addresses: tuple[str, ...], pin: bytes, issued: tuple[bytes, bytes], expires: float
) -> str:
    """The text of a token. `issued`: its id and secret."""
    token = JoinToken(_VERSION, issued[0], cluster, addresses, pin, issued[1], int(expires))
    return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).decode().rstrip("=")


def decode_token(text: str) -> JoinToken:
    """The content of a token's text. Raises UsageError, which does not quote the text."""
    body = text.strip()
    try:
        if not body.startswith(_PREFIX):
            raise ValueError("it does not begin with luce1.")
        body = body.removeprefix(_PREFIX)
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        token: JoinToken = msgpack_decoder(JoinToken).decode(data)
        sizes = len(token.id), len(token.pin), len(token.secret)
        if token.version != _VERSION or sizes != (ID_BYTES, PIN_BYTES, SECRET_BYTES):
            raise ValueError("its content is not that of a token")
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise UsageError(f"TOKEN: not a join token: {error}", param="token") from None
    return token


class TokenRefusedError(LuceError):
    """A token lets nobody in. The message is for the coordinator's log; the host gets the same answer for all."""


class TokenRecord(msgspec.Struct):
    """What the coordinator keeps of a token."""

    id: bytes
    #: SHA-256 of the secret
    digest: bytes
    #: seconds since 1970
    expires: float
    label: str = ""
    used: float | None = None
    #: SHA-256 of the certificate of the host that used it
    used_by: bytes = b""


class TokenBook:
    """The tokens of a cluster. Times are in seconds since 1970."""

    def __init__(self, records: list[TokenRecord] | None = None) -> None:
        self._records = {record.id: record for record in records or []}

    @property
    def records(self) -> list[TokenRecord]:
        """What has to be kept."""
        return list(self._records.values())

    def open(self, now: float) -> list[TokenRecord]:
        """The tokens that can be used."""
        return [record for record in self._records.values() if record.used is None and now < record.expires]

    def issue(self, issued: tuple[bytes, bytes], expires: float, label: str, now: float) -> None:
        """Keep a new token, `issued` as its id and secret. Raises UsageError if there are too many."""
        kept = [*self.open(now), *(r for r in self.records if r.used is not None and now - r.used < REPEAT_SECONDS)]
        self._records = {record.id: record for record in kept}
        if len(self.open(now)) >= MAX_OPEN:
            raise UsageError(f"{MAX_OPEN} join tokens are open; wait until one is used or expires")
        id, secret = issued
        self._records[id] = TokenRecord(id, hashlib.sha256(secret).digest(), expires, label)

    def redeem(self, id: bytes, secret: bytes, certificate: bytes, now: float) -> TokenRecord:
        """Use a token for the host with this certificate. Raises TokenRefusedError with the reason.

        The host that used it last gets it again for REPEAT_SECONDS: its answer may have been lost.
        """
        record = self._records.get(id)
        digest = hashlib.sha256(secret).digest()
        # An unknown id takes as long as a wrong secret.
        right = hmac.compare_digest(digest, bytes(len(digest)) if record is None else record.digest)
        if record is None:
            raise TokenRefusedError("the token is unknown")
        if not right:
            raise TokenRefusedError(f"the secret of token {id.hex()} is wrong")
        host = hashlib.sha256(certificate).digest()
        if record.used is not None:
            if record.used_by != host or now - record.used >= REPEAT_SECONDS:
                raise TokenRefusedError(f"token {id.hex()} has been used")
            return record
        if now >= record.expires:
            raise TokenRefusedError(f"token {id.hex()} has expired")
        record.used, record.used_by = now, host
        return record


class RefusalLimit:
    """Which addresses have been refused so often that they are not listened to. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._refusals: dict[str, deque[float]] = {}

    def note(self, address: str, now: float) -> None:
        """A token from this address was refused."""
        self._refusals = {a: times for a, times in self._refusals.items() if now - times[-1] < _WINDOW}
        self._refusals.setdefault(address, deque(maxlen=_REFUSALS)).append(now)

    def blocks(self, address: str, now: float) -> bool:
        """Whether connections from this address are dropped now."""
        times = self._refusals.get(address, deque())
        return len(times) == _REFUSALS and times[-1] - times[0] < _WINDOW and now - times[-1] < _WINDOW
