"""The libraries of the web UI: what lies in the tree is what the record says, and what npm has."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tarfile
from pathlib import Path

import pytest

from tools import vendor_webui
from tools.vendor_webui import PACKAGES, RECORD, VENDOR, Failure, fetch

DIGESTS = json.loads((VENDOR / RECORD).read_text())


def test_the_files_are_those_of_the_record() -> None:
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != RECORD
    }
    assert found == {
        f"{name}/{file}": digest for name, known in DIGESTS.items() for file, digest in known["files"].items()
    }


def test_each_library_has_its_licence() -> None:
    assert DIGESTS.keys() == PACKAGES.keys()
    for name, known in DIGESTS.items():
        assert known["license"] in ("MIT", "(MPL-2.0 OR Apache-2.0)")
        text = (VENDOR / name / "LICENSE").read_text()
        assert "Permission is hereby granted, free of charge" in text or "Apache License" in text
        assert known["version"] in "".join(p.read_text() for p in (VENDOR / name).iterdir()) or name == "uplot"


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `npm` that packs an archive as npm does, with the content of `uplot.js`; the path of that file."""
    content = tmp_path / "uplot.js"
    content.write_text("export default 1;\n")
    archive = tmp_path / "uplot-9.0.0.tgz"
    program = tmp_path / "bin/npm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1 $2" = \'pack --json\' ] && [ $3 = uplot@9.0.0 ] || {{ echo "404 $3" >&2; exit 1; }}\n'
        f'cp {archive} . && echo \'[{{"filename": "{archive.name}"}}]\'\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    files = {name: content.read_bytes() for name in PACKAGES["uplot"]}
    files["package.json"] = json.dumps({"version": "9.0.0", "license": "MIT"}).encode()
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text))
    return archive


def test_a_package_is_fetched_and_recorded(npm: Path, tmp_path: Path) -> None:
    record = fetch("uplot", "9.0.0", None, tmp_path / "vendor")
    assert (record["version"], record["license"]) == ("9.0.0", "MIT")
    assert record["integrity"].startswith("sha512-") and len(record["integrity"]) == 95
    digest = hashlib.sha256(b"export default 1;\n").hexdigest()
    assert record["files"] == {"uPlot.esm.js": digest, "uPlot.min.css": digest, "LICENSE": digest}
    assert (tmp_path / "vendor/uplot/uPlot.esm.js").read_text() == "export default 1;\n"
    assert fetch("uplot", "9.0.0", record, tmp_path / "vendor") == record


def test_other_bytes_of_a_version_are_refused(npm: Path, tmp_path: Path) -> None:
    record = fetch("uplot", "9.0.0", None, tmp_path / "first")
    for changed in (record | {"integrity": "sha512-x"}, record | {"files": {**record["files"], "LICENSE": "0"}}):
        with pytest.raises(Failure, match=r"uplot@9\.0\.0: is not what packages\.json records"):
            fetch("uplot", "9.0.0", changed, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_what_npm_lacks_is_named(npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match=r"npm pack uplot@8\.0\.0: 404 uplot@8\.0\.0"):
        fetch("uplot", "8.0.0", None, tmp_path)
    monkeypatch.setattr(vendor_webui, "PACKAGES", {"uplot": ("dist/none.js",)})
    with pytest.raises(Failure, match=r"has no file dist/none\.js"):
        fetch("uplot", "9.0.0", None, tmp_path)
