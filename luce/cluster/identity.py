"""A host's key and certificate, and the TLS settings of both sides, which accept pinned certificates only.

No authority signs anything: a coordinator keeps the certificates of its members, a member that of its coordinator. The
handshake would also accept what a pinned certificate has signed, so both sides compare the peer's certificate with the
pinned ones, byte for byte, after it.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from luce.errors import UsageError

#: ALPN names of the protocols on the coordinator's port
MEMBER_PROTOCOL, JOIN_PROTOCOL = "luce/1", "luce-join/1"
# A host without a clock joins too.
_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


@dataclass(frozen=True)
class Identity:
    """A key and its certificate."""

    #: PEM: the private key, then the certificate
    path: Path
    #: the certificate, DER
    certificate: bytes


def pin(certificate: bytes) -> bytes:
    """The SHA-256 of a certificate (DER), by which others know a host: 32 bytes."""
    return hashlib.sha256(certificate).digest()


def new_key_pair() -> bytes:
    """A new EC P-256 key and its self-signed certificate, PEM. Raises UsageError without the library `cryptography`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError("making keys needs the extra cluster: pip install 'luce-llm[cluster]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    # OpenSSL finds pinned certificates by their subject, so no two may have the same.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"luce {secrets.token_hex(8)}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


def read_identity(path: Path) -> Identity:
    """The identity in a file. Raises UsageError if it is none, or if other users can read the key."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text("latin-1")
        first, end, _ = text.partition(ssl.PEM_FOOTER)
        certificate = ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + end)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a private key with its certificate: {error}") from None
    if mode & 0o077:
        raise UsageError(f"{path}: other users can read the key (mode {mode:04o}): chmod 600 {path}")
    return Identity(path, certificate)


def flaw(certificate: bytes) -> str:
    """Why the certificate (DER) of a host that joins cannot be pinned; "" if it can."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        return f"its certificate cannot be read: {error}"
    found = context.cert_store_stats()
    if found["x509_ca"]:
        return "its certificate is that of an authority"
    return "" if found["x509"] == 1 else "it sent several certificates"


def coordinator_context(identity: Identity, members: Iterable[bytes]) -> ssl.SSLContext:
    """The TLS settings of the coordinator's port. Hosts that join show no certificate, so none is required here:
    `luce.cluster.gate` decides by protocol and certificate."""
    context = _context(identity, members, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    # The channel would take a session ticket for the beginning of a frame.
    context.num_tickets = 0
    context.set_alpn_protocols([MEMBER_PROTOCOL, JOIN_PROTOCOL])
    return context


def member_context(identity: Identity, coordinators: Iterable[bytes]) -> ssl.SSLContext:
    """The TLS settings of a member that connects to its coordinator, whose certificate (DER) is one of these."""
    context = _context(identity, coordinators, ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([MEMBER_PROTOCOL])
    return context


def join_context() -> ssl.SSLContext:
    """The TLS settings of a host that joins: it compares the pin of its token itself, before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([JOIN_PROTOCOL])
    return context


def _context(identity: Identity, peers: Iterable[bytes], protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is pinned; the names in it do not matter.
    context.check_hostname = False
    context.load_cert_chain(os.fspath(identity.path))
    for certificate in peers:
        context.load_verify_locations(cadata=certificate)
    return context
