"""The files of the chat page: what is served, to whom, with which policy, and the switch that turns it off."""

import re

import httpx
import pytest

from server.api.webui import routes
from tests.fakes import serving

FILES = ["/", *(f"/webui/{name}" for name in routes.MEDIA_TYPES)]


async def test_the_page_and_each_file_that_it_names_is_served(folder):
    async with serving(folder) as (client, _):
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        named = set(re.findall(r'(?:src|href)="(webui/[^"]*)"', page.text))
        named |= {f"webui/{name}" for name in re.findall(r'from "\./(.*?)"', (await client.get("/webui/page.js")).text)}
        assert named == {path[1:] for path in FILES if path != "/"}
        for path in named:
            response = await client.get(f"/{path}")
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(routes.MEDIA_TYPES[path.removeprefix("webui/")])


@pytest.mark.parametrize("path", FILES)
async def test_every_file_has_the_policy(folder, path):
    async with serving(folder) as (client, _):
        headers = (await client.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
        "require-trusted-types-for": "'script'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_nothing_comes_from_elsewhere_and_nothing_is_put_in_as_markup(folder):
    async with serving(folder) as (client, _):
        texts = {path: (await client.get(path)).text for path in FILES}
    for path, text in texts.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", text), path
    assert not re.search(r"<style|\son\w+=|style=", texts["/"]), "the policy would not let it act"


async def test_the_files_need_no_key_and_their_apis_do(folder):
    async with serving(folder, api_key=["k"]) as (client, _):
        assert {(await client.get(path)).status_code for path in FILES} == {200}
        assert (await client.get("/v1/models")).status_code == 401


async def test_no_other_file_of_the_folder_is_served(folder):
    async with serving(folder) as (client, _):
        for name in (
            "routes.py",
            "index.html",
            "__init__.py",
            "..%2fops%2fdocs.html",
            "%2e%2e/ops/docs.html",
            "",
            "x/y",
        ):
            response = await client.get(f"/webui/{name}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), name


async def test_the_switch_removes_the_page(folder):
    async with serving(folder, webui=False) as (client, _):
        index = await client.get("/")
        assert (index.status_code, index.headers["location"]) == (307, "/docs")
        assert {(await client.get(path)).status_code for path in FILES[1:]} == {404}


async def test_hosts_that_are_refused_do_not_get_the_page(folder):
    async with serving(folder, allowed_hosts=["llm.org"]) as (client, _):
        for path in FILES:
            assert (await client.get(path)).json()["error"]["code"] == "invalid_host"
            assert (await client.get(path, headers={"Host": "llm.org"})).status_code == 200


async def test_the_addresses_in_the_page_hold_under_a_prefix(folder):
    async with serving(folder, root_path="/llm") as (_, app):
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            page = await client.get("/llm/")
            for path in re.findall(r'(?:src|href)="([^"]*)"', page.text):
                assert (await client.get(page.url.join(path))).status_code == 200, path
    async with serving(folder, root_path="/llm", webui=False) as (_, app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path="/llm")) as client:
            assert (await client.get("http://localhost/llm/")).headers["location"] == "/llm/docs"


async def test_the_metrics_count_the_page_under_its_routes(folder):
    async with serving(folder) as (client, _):
        for path in ("/", "/webui/page.js", "/webui/page.css", "/webui/missing.js"):
            await client.get(path)
        text = (await client.get("/metrics")).text
    counted = dict(re.findall(r'^http_requests_total\{handler="(.*?)",method="GET",status="(\d+)"\}', text, re.M))
    assert counted["/"] == "200"
    assert {handler for handler in counted if "webui" in handler} == {"/webui/{name}"}
