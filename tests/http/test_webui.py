"""The files of the web UI over HTTP: who gets them, how they are cached, and what a browser may do with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from luce.server import static_files
from tests.support.http_server import Running, running

FOLDER = Path(static_files.__file__).with_name("webui")
#: what Chromium and Firefox send for an address that a person opens
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


async def opened(here: Running, path: str = "/", **headers: str) -> tuple[int, str, Any]:
    """Status, text and headers for a browser."""
    async with here.client.get(here.url + path, headers={"Accept": BROWSER, **headers}) as response:
        return response.status, await response.text(), response.headers


async def test_browsers_get_the_page_and_others_the_health() -> None:
    async with running() as here:
        status, text, headers = await opened(here)
        assert status == 200 and text == (FOLDER / "index.html").read_text()
        assert headers["Content-Type"] == "text/html; charset=utf-8" and headers["Vary"] == "Accept"
        for accept in ("*/*", "application/json", "", "text/plain, image/png"):
            status, body, headers = await here.get("/", headers={"Accept": accept})
            assert (status, body) == (200, {"status": "ok"}) and headers["Vary"] == "Accept"
        async with here.client.head(here.url + "/") as response:
            assert response.status == 200 and response.content_type == "application/json"
        # Another endpoint stays what it is, whoever asks.
        assert (await opened(here, "/health"))[1] == '{"status":"ok"}'


async def test_every_file_is_served_as_it_is() -> None:
    kinds = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert len(paths) > 20
    async with running() as here:
        for path in paths:
            name = path.relative_to(FOLDER).as_posix()
            async with here.client.get(f"{here.url}/webui/{name}") as response:
                assert response.status == 200 and await response.read() == path.read_bytes()
                assert response.content_type == kinds.get(path.suffix, response.content_type)
                assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_what_files_name_is_there() -> None:
    async with running() as here:
        linked = re.findall(r'(?:href|src)="(webui/[^"]+)"', (FOLDER / "index.html").read_text())
        for path in FOLDER.glob("*.js"):
            linked += [f"webui/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
        assert len(linked) > 30
        for name in set(linked):
            assert (await here.get(f"/{name}"))[0] == 200, name


async def test_nothing_else_of_the_machine_is_served() -> None:
    assert (FOLDER.parent / "static_files.py").exists()
    async with running() as here:
        for name in (
            "nothing.js",
            "../static_files.py",
            "%2e%2e/static_files.py",
            "..%2fstatic_files.py",
            "vendor",
            "",
        ):
            status, body, _ = await here.get(f"/webui/{name}")
            assert status == 404 and body["error"]["code"] == "unknown_endpoint", name


async def test_a_browser_asks_whether_a_file_has_changed() -> None:
    async with running() as here:
        for path in ("/", "/webui/app.js"):
            _, text, headers = await opened(here, path)
            assert headers["Cache-Control"] == "no-cache" and text
            for known in (headers["ETag"], f'"other", {headers["ETag"]}', f"W/{headers['ETag']}", "*"):
                status, text, again = await opened(here, path, **{"If-None-Match": known})
                assert (status, text, again["ETag"]) == (304, "", headers["ETag"]), known
                assert again["Content-Security-Policy"] == headers["Content-Security-Policy"]
            assert (await opened(here, path, **{"If-None-Match": '"other"'}))[0] == 200
        assert (await opened(here, "/"))[2]["ETag"] != (await opened(here, "/webui/app.js"))[2]["ETag"]


async def test_a_browser_runs_the_files_of_this_server_alone() -> None:
    async with running() as here:
        for path in ("/", "/webui/app.js"):
            policy = (await opened(here, path))[2]["Content-Security-Policy"]
            rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
            assert rules["default-src"] == "'none'"
            for kind in ("script-src", "style-src", "connect-src", "img-src"):
                assert rules[kind] == "'self'"
            assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]* src=)|\son\w+=|\sstyle=|https?://", text)


async def test_the_page_needs_no_key_and_its_numbers_do() -> None:
    async with running(api_key=("k",)) as here:
        for path in ("/", "/webui/app.js"):
            assert (await opened(here, path))[0] == 200
        for path in (
            "/webui",
            "/webui/none",
            "//webui/app.js",
            "/webui//app.js",
            "/webui/../props",
            "/webui%2f../props",
        ):
            assert (await opened(here, path))[0] in (401, 404), path
        for path in ("/props", "/slots", "/metrics", "/v1/models", "//props", "/webui/..//props"):
            assert (await opened(here, path))[0] == 401, path


async def test_while_the_model_is_loaded() -> None:
    async with running(loaded=False) as here:
        assert (await opened(here))[0] == 200
        assert (await here.get("/"))[:2] == (503, {"status": "loading", "progress": 0})


async def test_another_site_gets_none_of_it() -> None:
    async with running() as here:
        assert (await opened(here, "/webui/app.js", Origin="https://evil.example"))[0] == 403
        assert (await opened(here, "/", Host="evil.example"))[0] == 403
        _, _, headers = await opened(here, "/", Origin="http://localhost:1")
        assert headers["Vary"] == "Accept, Origin"


async def test_it_can_be_turned_off() -> None:
    async with running(webui=False) as here:
        status, text, headers = await opened(here)
        assert (status, text, headers["Content-Type"]) == (200, '{"status":"ok"}', "application/json")
        assert (await opened(here, "/webui/app.js"))[0] == 404
        assert "GET /webui/{path}" not in (await here.get("/props"))[1]["api"]["endpoints"]
