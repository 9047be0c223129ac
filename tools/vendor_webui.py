"""The libraries of the web UI, fetched from npm into luce/server/webui/vendor.

python -m tools.vendor_webui                  the versions of vendor/packages.json, which must be the same bytes again
python -m tools.vendor_webui marked@18.2.1    another version: changes packages.json

A library is the files of its npm package that PACKAGES names, unchanged, with its licence. Needs npm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parent.parent / "luce/server/webui/vendor"
RECORD = "packages.json"
#: what of each npm package the web UI needs, by its path there
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "dompurify": ("dist/purify.es.mjs", "LICENSE"),
    "marked": ("lib/marked.esm.js", "LICENSE"),
    "uplot": ("dist/uPlot.esm.js", "dist/uPlot.min.css", "LICENSE"),
}

Json = dict[str, Any]


class Failure(Exception):
    """A package that npm does not have, or whose bytes are not those of the record."""


def pack(package: str, folder: Path) -> Path:
    """The archive of `NAME@VERSION`, which npm downloads into a folder. Raises Failure."""
    done = subprocess.run(["npm", "pack", "--json", package], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"npm pack {package}: {done.stderr.strip()}")
    return folder / str(json.loads(done.stdout)[0]["filename"])


def integrity(content: bytes) -> str:
    """The digest of an archive as npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


def unpack(archive: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Files of an archive of npm, by their last names. Raises Failure."""
    found = {}
    with tarfile.open(archive) as packed:
        for name in names:
            try:
                file = packed.extractfile(f"package/{name}")
            except KeyError:
                file = None
            if file is None:
                raise Failure(f"{archive.name}: has no file {name}")
            found[Path(name).name] = file.read()
    return found


def described(archive: Path, files: Mapping[str, bytes]) -> Json:
    """The record of a package: version, licence, the archive's digest, and the SHA-256 of each file."""
    manifest = json.loads(unpack(archive, ("package.json",))["package.json"])
    return {
        "version": manifest["version"],
        "license": manifest["license"],
        "integrity": integrity(archive.read_bytes()),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }


def fetch(name: str, version: str, recorded: Json | None, vendor: Path = VENDOR) -> Json:
    """Fetch a package, write its files, and return its record. Raises Failure and writes nothing if `recorded` is
    another one: a version never changes."""
    with tempfile.TemporaryDirectory() as folder:
        archive = pack(f"{name}@{version}", Path(folder))
        files = unpack(archive, PACKAGES[name])
        record = described(archive, files)
    if recorded is not None and record != recorded:
        raise Failure(f"{name}@{version}: is not what {RECORD} records")
    target = vendor / name
    target.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (target / file).write_bytes(content)
    return record


def main() -> int:
    """Fetch all packages, those that are named at another version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("packages", metavar="NAME@VERSION", nargs="*")
    path = VENDOR / RECORD
    record: dict[str, Json] = json.loads(path.read_text()) if path.exists() else {}
    chosen = {name: known["version"] for name, known in record.items()}
    for package in parser.parse_args().packages:
        name, _, version = package.partition("@")
        if name not in PACKAGES or not version:
            parser.error(f"{package}: expected NAME@VERSION with one of {', '.join(PACKAGES)}")
        chosen[name] = version
    try:
        for name, version in sorted(chosen.items()):
            known = record.get(name)
            record[name] = fetch(name, version, known if known and known["version"] == version else None)
    except Failure as error:
        print(f"vendor_webui: {error}", file=sys.stderr)
        return 1
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
