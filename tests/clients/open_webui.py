"""Open WebUI in a browser: what is typed into its page, and what the page shows.

Open WebUI runs as a program from an environment of its own. A headless Chromium is driven through Selenium.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import httpx
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.live import PacedServer, eventually, free_port

from .place import ENDLESS, LONG, QUESTION, SAID, THINKS, THOUGHT, Place

START_S = 600.0
WAIT_S = 120.0
BUILTIN = pathlib.Path(__file__).parents[2] / "engine" / "builtin" / "model"
STORY = str(LONG["messages"][0]["content"])
# The tools that Open WebUI offers with every message are about 12,400 tokens of the built-in model, whose context holds
# 2,048: the server leaves them out. The same weights with a longer context answer nonsense there, so that what they
# say is prescribed, whichever model the place has.
LONG_MODEL, LONG_CONTEXT = "long", 32768

# Open WebUI asks for title, tags and follow-up questions in words, and reads each from a JSON object. This model writes
# no JSON by itself; the three requests get the same object.
TITLE, TAG, FOLLOW_UPS = "Whales at sea", "Whales", ["What is a block?", "What is 8 + 5?"]
TASK = json.dumps({"title": TITLE, "tags": [TAG], "follow_ups": FOLLOW_UPS})
TASKS = {"structured_outputs": {"grammar": f"start: {json.dumps(TASK)}"}}
# The first answer to a message must be a call of this tool, and the one to its result a text. The two requests differ
# in nothing but their messages, so that a filter, which is Open WebUI's way to change requests, prescribes them.
CALLED = "get_current_timestamp"
CALL = f'<tool_call>\n{{"name": "{CALLED}", "arguments": {{}}}}\n</tool_call>'
FILTER = f"""
class Filter:
    def request(self, body):
        has_result = body["messages"][-1]["role"] == "tool"
        said = {json.dumps(SAID)!r} if has_result else {json.dumps(CALL)!r}
        body["structured_outputs"] = {{"grammar": "start: " + said}}
        return body
"""
ANSWERS = "#response-content-container"
STOP = 'button[aria-label="Stop"]'
CHROMIUM = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --window-size=1280,900
"""


def entries(model: str) -> list[tuple[str, str | None, dict[str, Any], dict[str, Any]]]:
    """What an administrator enters as models: id, model of the server, parameters of its requests, the rest."""
    return [
        (model, None, {}, {}),
        # With a long prompt: without it the answer grows faster than the page can show it and find its Stop button.
        ("endless", LONG_MODEL, ENDLESS, {}),
        ("hot", model, {"temperature": 3}, {}),
        ("thinker", LONG_MODEL, THINKS, {}),
        ("caller", LONG_MODEL, {}, {"filterIds": ["calls"]}),
    ]


def missing(place: Place) -> str | None:
    """Why the client cannot run on this machine; None: it can."""
    if place.webui is None or not place.webui.is_file():
        return f"Open WebUI is not installed at {place.webui}."
    absent = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} not found in PATH; on Debian: apt-get install chromium chromium-driver."
    return None


def version(place: Place) -> str:
    assert place.webui is not None
    packages = [str(path) for path in place.webui.parent.parent.glob("lib/python*/site-packages")]
    return next(iter(importlib.metadata.distributions(name="open-webui", path=packages))).version


class WebUI:
    """Open WebUI in front of two servers, with a browser: the place's, and one with a long context."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> WebUI:
        with contextlib.ExitStack() as stack:
            self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            self.long = stack.enter_context(self._long_server())
            self.url = self._program(stack)
            self._api = stack.enter_context(httpx.Client(base_url=self.url, timeout=60))
            self._set_up()
            self.browser = self._browser(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _long_server(self) -> PacedServer:
        model = self.folder / "model"
        shutil.copytree(BUILTIN, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG_CONTEXT}))
        flags = ("--served-model-name", LONG_MODEL, "--reasoning-parser", "think")
        return PacedServer(str(model), *flags, "--api-key", self._place.key, python=self._place.python)

    def _program(self, stack: contextlib.ExitStack) -> str:
        """The address of a running Open WebUI that looks for nothing outside this machine."""
        program = self._place.webui
        assert program is not None
        port = free_port()
        data = self.folder / "data"
        data.mkdir()
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DATA_DIR": str(data),
            "WEBUI_AUTH": "false",
            "WEBUI_SECRET_KEY": "whale",
            "OPENAI_API_BASE_URLS": f"{self._place.v1};{self.long.url}/v1",
            "OPENAI_API_KEYS": f"{self._place.key};{self._place.key}",
            "ENABLE_OLLAMA_API": "false",
            # Embeddings come from Pequod; the default is a model from a hub.
            "RAG_EMBEDDING_ENGINE": "openai",
            "RAG_OPENAI_API_BASE_URL": self._place.v1,
            "RAG_OPENAI_API_KEY": self._place.key,
            "RAG_EMBEDDING_MODEL": self._place.model,
            "TASK_MODEL_EXTERNAL": self._place.model,
            "TASK_MODEL_PARAMS": json.dumps({"custom_params": TASKS}),
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
            "ANONYMIZED_TELEMETRY": "false",
            "DO_NOT_TRACK": "true",
            "SCARF_NO_ANALYTICS": "true",
        }
        log = stack.enter_context(open(self.folder / "open-webui.log", "w+b"))
        process = subprocess.Popen(
            [str(program.absolute()), "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=self.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"Open WebUI ended with {process.returncode}:\n{log.read().decode()[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").status_code == 200
            return False

        eventually(is_up, START_S, every=0.2)
        return url

    def _set_up(self) -> None:
        """What an administrator does once: the models' settings, the filter; and the release notes have been read."""
        token = self._post("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
        self._api.headers["authorization"] = f"Bearer {token}"
        release = self._api.get("/api/version").json()["version"]
        self._post("/api/v1/users/user/settings/update", {"ui": {"version": release}})
        self._post("/api/v1/functions/create", {"id": "calls", "name": "calls", "content": FILTER, "meta": {}})
        self._post("/api/v1/functions/id/calls/toggle", {})
        for name, base, params, meta in entries(self._place.model):
            entry = {"id": name, "name": name, "base_model_id": base, "meta": meta, "params": {"custom_params": params}}
            self._post("/api/v1/models/create", entry)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._api.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def _browser(self, stack: contextlib.ExitStack) -> webdriver.Chrome:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*CHROMIUM.split(), f"--user-data-dir={self.folder / 'chromium'}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=service)
        stack.callback(browser.quit)
        return browser


class Chat:
    """A new chat in the page."""

    def __init__(self, place: Place, model: str | None = None) -> None:
        webui, model = place.once(WebUI), model or place.model
        self.browser = webui.browser
        self._folder = webui.folder
        self.browser.get(f"{webui.url}/?models={model}")
        self.until(lambda: self.texts(f'button[aria-label="Selected model: {model}"]'))

    def texts(self, selector: str) -> list[str]:
        """The text of each such element that is visible."""
        # In one script: the page replaces its elements at any time.
        elements = "[...document.querySelectorAll(arguments[0])].filter(element => element.checkVisibility())"
        texts: list[str] = self.browser.execute_script(f"return {elements}.map(element => element.innerText)", selector)
        return texts

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    @property
    def answers(self) -> list[str]:
        return self.texts(ANSWERS)

    def until(self, check: Callable[[], Any]) -> None:
        """Wait until something is so; a failure has the page's text."""
        try:
            eventually(check, WAIT_S, every=0.05)
        except AssertionError:
            raise AssertionError(f"the page shows: {self.text('body')}") from None

    def click(self, selector: str) -> None:
        """Click the first such element, as soon as there is one that nothing covers."""

        def is_clicked() -> bool:
            try:
                self.browser.find_element(By.CSS_SELECTOR, selector).click()
            except WebDriverException:
                return False
            return True

        self.until(is_clicked)

    def attach(self, name: str, text: str) -> None:
        """Attach a file to the next message."""
        (self._folder / name).write_text(text)
        self.browser.find_element(By.CSS_SELECTOR, 'input[type="file"]').send_keys(str(self._folder / name))
        self.until(lambda: name in self.text("#message-input-container"))
        self.until(lambda: not self.texts('#message-input-container [class^="spinner"]'))

    def send(self, text: str) -> None:
        self.click("#chat-input")
        self.browser.find_element(By.ID, "chat-input").send_keys(text, Keys.ENTER)

    def ask(self, text: str) -> str:
        """Send a message; returns the complete answer to it."""
        before = len(self.answers)
        self.send(text)
        self.until(lambda: len(self.answers) > before)
        return self.answer()

    def answer(self) -> str:
        """The last answer, when it is complete."""
        self.until(lambda: "".join(self.answers[-1:]).strip() and not self.texts(STOP))
        return self.answers[-1]


def models(place: Place) -> None:
    chat = Chat(place)
    chat.click("#model-selector-model-button")
    chat.until(lambda: {place.model, LONG_MODEL} <= {*chat.text("body").splitlines()})


def chat_stream(place: Place) -> None:
    assert place.answers(Chat(place).ask(QUESTION))
    chat = Chat(place, "endless")
    chat.send(STORY)
    for _ in range(3):
        shown = len("".join(chat.answers))
        chat.until(lambda shown=shown: len("".join(chat.answers)) > shown)
    chat.click(STOP)
    chat.until(lambda: not chat.texts(STOP))


def chat_turns(place: Place) -> None:
    chat = Chat(place)
    assert place.answers(chat.ask(QUESTION))
    assert place.answers(chat.ask("What is 8 + 5?"), "13")
    assert place.answers(chat.answers[0])


def chat_tools_stream(place: Place) -> None:
    shown = Chat(place, "caller").ask(QUESTION)
    assert CALLED in shown and shown.endswith(SAID), shown


def chat_reasoning(place: Place) -> None:
    chat = Chat(place, "thinker")
    shown = chat.ask(QUESTION)
    assert shown.endswith(SAID) and THOUGHT not in shown, shown
    chat.click(f"{ANSWERS} button")
    chat.until(lambda: THOUGHT in chat.answers[0])


def chat_title(place: Place) -> None:
    chat = Chat(place)
    chat.ask(QUESTION)
    chat.until(lambda: chat.browser.title.startswith(TITLE))


def chat_tags(place: Place) -> None:
    chat = Chat(place)
    chat.ask(QUESTION)
    chat.click("#chat-context-menu-button")
    chat.until(lambda: TAG in chat.text("body").splitlines())


def chat_follow_ups(place: Place) -> None:
    chat = Chat(place)
    chat.ask(QUESTION)
    chat.until(lambda: chat.texts('button[aria-label^="Follow up:"]') == FOLLOW_UPS)
    chat.click(f'button[aria-label="Follow up: {FOLLOW_UPS[1]}"]')
    chat.until(lambda: len(chat.answers) == 2)
    assert place.answers(chat.answer(), "13")


def embeddings(place: Place) -> None:
    chat = Chat(place)
    before = embedded(place)
    chat.attach("note.txt", "The whale is white.")
    chat.ask(QUESTION)
    chat.until(lambda: "Retrieved 1 source" in chat.text("#messages-container"))
    assert embedded(place) >= before + 2, "the note and the question"


def embedded(place: Place) -> float:
    """Requests for embeddings that the server has answered."""
    return place.server.metric("http_requests_total", handler="/v1/embeddings", status="200")


def bad_field(place: Place) -> None:
    chat = Chat(place, "hot")
    chat.send(QUESTION)
    chat.until(lambda: any("'temperature'" in text for text in chat.answers))


def hang_up(place: Place) -> None:
    chat = Chat(place, "endless")
    with place.at(place.once(WebUI).long).hung_up():
        chat.send(STORY)
        chat.until(lambda: any(chat.answers))
        chat.click(STOP)
        chat.until(lambda: not chat.texts(STOP))
    assert chat.answers[0]
