"""Keys with which Ray's processes know each other: TLS with certificates of an authority of this cluster alone.

Whoever has a certificate of the authority is let in. The authority's key is needed only to make another machine's pair,
and stays where `luce ray keys` has made it. A certificate names the address of its machine, which Ray compares.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luce.errors import UsageError

AUTHORITY = "authority"
# A host without a clock joins too.
_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


def make_keys(folder: Path, address: str) -> list[Path]:
    """Make the pair of the machine with this IP address, and the authority if there is none. Returns what that machine
    needs. Raises UsageError if the pair is there already, or without the library `cryptography`."""
    pair = _pair(folder, address)
    if any(path.exists() for path in pair):
        raise UsageError(f"{pair[0]}: there already; remove it, and {pair[1].name}, to make new ones")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _pair(folder, AUTHORITY)
    if not authority[1].exists():
        _write(authority, *_signed("luce ray", None, None))
    try:
        signer = [path.read_bytes() for path in authority]
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; make keys where the authority's was made") from None
    _write(pair, *_signed(f"luce {secrets.token_hex(8)}", address, signer))
    return [authority[1], *pair]


def ray_settings(folder: Path, address: str) -> Mapping[str, str]:
    """Ray's environment variables for TLS on the machine with this address. Raises UsageError if a file is missing, or
    if other users can read the key."""
    key, certificate = _pair(folder, address)
    authority = _pair(folder, AUTHORITY)[1]
    for path in (key, certificate, authority):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            words = f"`luce ray keys` makes it on the head, with --node {address} for this machine"
            raise UsageError(f"head.tls_folder {path}: {error.strerror}; {words}") from None
        if path == key and mode & 0o077:
            raise UsageError(f"head.tls_folder {path}: other users can read it (mode {mode:04o}); run chmod 600")
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_CA_CERT": str(authority),
    }


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Key and certificate of an address, or of the authority."""
    return folder / f"{name}.key", folder / f"{name}.pem"


def _write(pair: tuple[Path, Path], key: bytes, certificate: bytes) -> None:
    for path, content, mode in ((pair[0], key, 0o600), (pair[1], certificate, 0o644)):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)


def _signed(name: str, address: str | None, signer: list[bytes] | None) -> tuple[bytes, bytes]:
    """A new key and its certificate, PEM. `signer`: key and certificate of the authority; None: this is the authority.
    `address`: what the certificate is for."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError("making keys needs the extra ray: pip install 'luce-llm[ray]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, issuer_key = subject, key
    if signer is not None:
        signer_key: Any = serialization.load_pem_private_key(signer[0], None)
        issuer, issuer_key = x509.load_pem_x509_certificate(signer[1]).subject, signer_key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=0 if signer is None else None), True)
    )
    if address is not None:
        # Ray's processes of one machine also talk over the loopback interface.
        hosts = [x509.IPAddress(ipaddress.ip_address(each)) for each in dict.fromkeys((address, "127.0.0.1", "::1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName([*hosts, x509.DNSName("localhost")]), False)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = builder.sign(issuer_key, hashes.SHA256())
    return private, certificate.public_bytes(serialization.Encoding.PEM)
