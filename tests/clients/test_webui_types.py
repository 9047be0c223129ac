"""The web UI's JavaScript against TypeScript's checker, which reads the types in its comments."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

from tests.support.client_programs import need

ROOT = Path(__file__).parents[2]
FLAGS = (
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--pretty", "false"),
    *("--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable"),
)


async def mistakes(folder: Path) -> list[str]:
    """What the checker says of app.js and the modules it imports, but for the vendored ones: they have no types."""
    command = [need("tsc"), *FLAGS, "app.js"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=folder, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if not line.startswith(("vendor/", " "))]


async def test_types(tmp_path: Path) -> None:
    page = ROOT / "luce/server/webui"
    assert await mistakes(page) == []
    broken = tmp_path / "webui"
    shutil.copytree(page, broken)
    # The last module of the imports that app.js begins: the checker reaches it.
    (broken / "storage.js").write_text((broken / "storage.js").read_text() + '\nMath.max("text");\n')
    [mistake] = await mistakes(broken)
    assert mistake.startswith("storage.js") and "TS2345" in mistake
