"""A headless Chromium for tests of pages, driven through chromedriver: the WebDriver protocol is JSON over HTTP."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from typing import Any

import httpx

from tests.live import START_S, WAIT_S, free_port

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# --no-sandbox: Chromium refuses to run as root with it. The rest keeps it from calling its makers.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1000,800",
]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, as the protocol defines it
ENTER, SHIFT, RELEASE = "\ue007", "\ue008", "\ue000"


def missing() -> str | None:
    """Return what is not installed; None if a browser can be started."""
    if shutil.which("chromedriver") is None:
        return "needs chromedriver"
    return None if any(map(shutil.which, NAMES)) else "needs Chromium"


class NoBrowser(Exception):
    """Chromium cannot be started here."""


class Browser:
    """One tab. Commands run in a thread, so that a page can be served by the event loop of the test.

    Raises NoBrowser, for example if the versions of Chromium and chromedriver differ.
    """

    def __init__(self) -> None:
        port = free_port()
        self._process = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S, trust_env=False)
        options = {"binary": next(filter(None, map(shutil.which, NAMES))), "args": FLAGS}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            end = time.monotonic() + START_S
            while not self._is_up():
                assert time.monotonic() < end and self._process.poll() is None, "chromedriver does not start"
                time.sleep(0.05)
            answer = self._client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
            if "sessionId" not in answer:
                raise NoBrowser(answer["message"].partition("\n")[0])
            self._session = f"/session/{answer['sessionId']}"
        except BaseException:
            self._process.kill()
            raise

    def _is_up(self) -> bool:
        try:
            return bool(self._client.get("/status").json()["value"]["ready"])
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.delete(self._session)
        self._process.terminate()
        self._process.wait(WAIT_S)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await asyncio.to_thread(self._client.post, self._session + path, json=body)
        value = response.json()["value"]
        assert response.is_success, f"{value['error']}: {value['message'].splitlines()[0]}"
        return value

    async def _element(self, selector: str) -> str:
        found: str = (await self._post("/element", {"using": "css selector", "value": selector}))[ELEMENT]
        return found

    async def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        await self._post("/url", {"url": url})

    async def run(self, script: str) -> Any:
        """Return what the body of a function returns."""
        return await self._post("/execute/sync", {"script": script, "args": []})

    async def click(self, selector: str) -> None:
        await self._post(f"/element/{await self._element(selector)}/click", {})

    async def type(self, selector: str, keys: str) -> None:
        await self._post(f"/element/{await self._element(selector)}/value", {"text": keys})

    async def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        await self._post("/window/rect", {"width": width, "height": height})

    async def texts(self, selector: str) -> list[str]:
        """Return the text of each visible element that has one."""
        visible = "[...document.querySelectorAll(%r)].filter((found) => found.checkVisibility() && found.innerText)"
        texts: list[str] = await self.run(f"return {visible % selector}.map((found) => found.innerText)")
        return texts

    async def until(self, condition: str) -> None:
        """Wait until an expression of the page is true."""
        end = time.monotonic() + WAIT_S
        while not await self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"not true within {WAIT_S} s: {condition}"
            await asyncio.sleep(0.02)

    async def log(self) -> list[str]:
        """Return the new messages of the browser's console: errors of scripts and what a policy has blocked."""
        return [entry["message"] for entry in await self._post("/se/log", {"type": "browser"})]
