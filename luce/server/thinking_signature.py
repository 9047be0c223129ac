"""Signatures of thinking blocks: a client returns them with the block, and one may carry the block's text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

_PERSON = b"luce thinking"
_DIGEST = 32


def sign(text: str, model: str, *, carries: bool) -> str:
    """The signature of a reasoning by the model with this fingerprint; `carries`: it holds the text too.

    Not secret: whoever knows the model can make one. It distinguishes own blocks from changed and foreign ones, after a
    restart as well.
    """
    data = text.encode(errors="surrogatepass")
    return base64.urlsafe_b64encode(_digest(data, model) + (data if carries else b"")).decode()


def carried(signature: str, model: str) -> str | None:
    """The text that a signature of `sign` carries; None if it carries none, was changed, or has another origin."""
    try:
        found = base64.b64decode(signature.encode(), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    digest, data = found[:_DIGEST], found[_DIGEST:]
    if not data or not hmac.compare_digest(digest, _digest(data, model)):
        return None
    return data.decode(errors="surrogatepass")


def _digest(data: bytes, model: str) -> bytes:
    return hmac.digest(_PERSON + model.encode(), data, hashlib.sha256)
