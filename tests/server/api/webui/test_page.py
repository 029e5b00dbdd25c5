"""The chat page in a browser, before the whole server with a fake engine."""

import contextlib

import pytest

from tests import browser
from tests.browser import ENTER, RELEASE, SHIFT, Browser, NoBrowser
from tests.fakes import FakeEngine, listening, serving, until
from tests.server.wire import END, LIBRARY, ids, saying

pytestmark = pytest.mark.skipif(browser.missing() is not None, reason=browser.missing() or "")
ANSWER = "The whale.\n\n```python\nif sea:\n    sail()\n```\n\n<img src=x onerror=alert(1)> <b>bold</b>"
MARKDOWN = """## Ships
1. **brig** `two masts`
   - [see](https://a.example/?q=1)

| a | b |
|---|---|
| 1 | ![x](https://a.example/x.png) |

[no](javascript:alert(1)) <script>alert(1)</script>"""
IDLE = "document.querySelector('#send').textContent === 'Send'"


@pytest.fixture(scope="module")
def tab():
    try:
        opened = Browser()
    except NoBrowser as error:
        pytest.skip(f"Chromium does not start: {error}")
    yield opened
    opened.close()


@contextlib.asynccontextmanager
async def page(folder, tab, engine, prefix="", **settings):
    """The server with its page open; gives the page's URL."""
    async with serving(folder, engine, root_path=prefix, **settings) as (_, app):
        async with listening(app, root_path=prefix) as url:
            await tab.open(f"{url}{prefix}/")
            await tab.until("document.querySelector('#model').length || !document.querySelector('#key-form').hidden")
            yield f"{url}{prefix}/"
            await tab.until(IDLE)
            # An error that the server sent is logged, too. Anything else is an error of the page or of its policy.
            assert not [line for line in await tab.log() if "Failed to load resource" not in line]


async def ask(tab, text):
    await tab.type("#prompt", text + ENTER)
    await tab.until(IDLE)


def prompt(engine):
    """The engine's last prompt, as the template has rendered it."""
    return LIBRARY.decode(engine.requests[-1].prompt_ids)


async def test_an_answer_is_shown_as_text_with_its_code(folder, tab):
    async with page(folder, tab, FakeEngine(saying(ANSWER))):
        await ask(tab, "Where?")
        assert await tab.texts(".prompt") == ["Where?"]
        assert await tab.texts(".text p") == ["The whale.", "<img src=x onerror=alert(1)> <b>bold</b>"]
        assert await tab.texts(".text pre") == ["if sea:\n    sail()"]


async def test_markdown_is_shown_and_can_neither_load_nor_run_anything(folder, tab):
    async with page(folder, tab, FakeEngine(saying(MARKDOWN))):
        await ask(tab, "Ships?")
        for selector, texts in {
            ".text h3": ["Ships"],
            ".text > ol > li > strong": ["brig"],
            ".text > ol > li > code": ["two masts"],
            ".text > ol > li > ul > li > a": ["see"],
            ".text th": ["a", "b"],
            ".text td": ["1", "x"],
            ".text > p": ["[no](javascript:alert(1)) <script>alert(1)</script>"],
        }.items():
            assert await tab.texts(selector) == texts, selector
        links = "[...document.querySelectorAll('.text a')]"
        assert await tab.run(f"return {links}.map((link) => [link.href, link.target, link.rel])") == [
            [href, "_blank", "noopener noreferrer"] for href in ("https://a.example/?q=1", "https://a.example/x.png")
        ]
        assert await tab.run("return document.querySelectorAll('main :is(img, script)').length") == 0
        assert await tab.run("try { document.body.innerHTML = 'x' } catch (error) { return error.name }") == "TypeError"
        assert "TrustedHTML" in (await tab.log())[0]


async def test_what_has_been_written_stays_while_the_answer_grows(folder, tab):
    tokens = [*ids("one\n\n```\ntwo"), *ids(" three\n```\n\nfour"), END]

    def say(_):
        for i, token in enumerate(tokens):
            if i == len(ids("one\n\n```\ntwo")):
                engine.hold()
            yield token

    engine = FakeEngine(say)
    async with page(folder, tab, engine):
        await tab.type("#prompt", "Count!" + ENTER)
        await tab.until("document.querySelector('.text pre')?.innerText === 'two'")
        await tab.run("window.before = [...document.querySelector('.text').children]")
        engine.let_go()
        await tab.until(IDLE)
        assert await tab.texts(".text > *") == ["one", "two three", "four"]
        assert await tab.run("return before.every((old, i) => old === document.querySelector('.text').children[i])")


async def test_an_answer_without_text_says_so(folder, tab):
    async with page(folder, tab, FakeEngine(saying(""))) as url:
        await ask(tab, "Silence?")
        assert await tab.texts(".note") == ["ended without text"]
        await tab.open(url)
        assert await tab.texts(".note") == ["ended without text"]


async def test_the_speed_is_that_of_the_tokens_after_the_first(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the whale swims"))):
        await tab.run("let now = 0; performance.now = () => (now += 2000)")  # at the start and at every token
        await ask(tab, "What?")
        count = len(ids("the whale swims")) + 1  # with the token that ends it
        assert await tab.texts(".note") == [f"{count} tokens · 0.5 tokens/s · first token after 2.00 s"]


async def test_the_conversation_and_the_settings_are_sent_and_survive_a_reload(folder, tab):
    engine = FakeEngine(saying("the sea", "the ship", "the sails"))
    async with page(folder, tab, engine) as url:
        await ask(tab, "one")
        assert prompt(engine) == "user: one\nassistant: "
        default = engine.requests[-1].params
        await tab.click("#settings-button")
        await tab.type("#system", "Be brief.")
        await tab.type("#temperature", "0.25")
        await tab.type("#max-tokens", "2")
        await ask(tab, "two")
        assert prompt(engine) == "system: Be brief.\nuser: one\nassistant: the sea\nuser: two\nassistant: "
        sent = engine.requests[-1].params
        assert (sent.temperature, sent.max_tokens) == (0.25, 2) != (default.temperature, default.max_tokens)
        assert (await tab.texts(".note"))[-1].endswith("ended at the maximum of tokens")
        shown = await tab.texts("#log section")
        await tab.open(url)
        assert await tab.texts("#log section") == shown
        await ask(tab, "three")
        assert prompt(engine).startswith("system: Be brief.\nuser: one\n")
        assert engine.requests[-1].params.max_tokens == 2
        await tab.click("#new-chat")
        assert await tab.texts("#log section") == []
        await ask(tab, "four")
        assert prompt(engine) == "system: Be brief.\nuser: four\nassistant: "


async def test_a_stopped_request_is_aborted_and_can_be_retried_or_edited(folder, tab):
    engine = FakeEngine(saying("the whale swims"))
    engine.hold()
    async with page(folder, tab, engine):
        await tab.type("#prompt", "Who?" + ENTER)
        await until(lambda: engine.open)
        await tab.type("#prompt", "next" + ENTER)  # does nothing while a request runs
        await tab.click("#send")
        await tab.until(IDLE)
        await until(lambda: engine.aborted)
        assert await tab.texts(".note") == ["stopped"]
        engine.let_go()
        await tab.click("section:last-child .actions button:first-child")
        await tab.until(IDLE + " && document.querySelector('.text').innerText")
        assert await tab.texts(".text") == ["the whale swims"]
        assert len(engine.requests) == 2
        await tab.click("section:last-child .actions button:last-child")
        assert await tab.texts("#log section") == []
        await ask(tab, " And why?")
        assert prompt(engine) == "user: Who?\nnext And why?\nassistant: "


async def test_reasoning_is_in_a_block_that_is_open_until_the_answer_begins(folder, tab):
    tokens = [*ids("<think>\nWhales are large.\n</think>\n\nYes."), END]

    def say(_):
        for i, token in enumerate(tokens):
            if i == len(ids("<think>\nWhales are")):
                engine.hold()
            yield token

    engine = FakeEngine(say)
    async with page(folder, tab, engine, reasoning_parser="think"):
        await tab.type("#prompt", "Large?" + ENTER)
        await tab.until("document.querySelector('.reasoning').innerText.startsWith('Whales')")
        assert len(await tab.texts(".reasoning")) == 1
        engine.let_go()
        await tab.until(IDLE)
        assert (await tab.texts(".reasoning"), await tab.texts(".text")) == ([], ["Yes."])
        await tab.click("summary")
        assert await tab.texts(".reasoning") == ["Whales are large."]
        engine.say = saying("Yes.")
        await ask(tab, "Sure?")
        assert "Whales" not in prompt(engine)


async def test_a_reload_keeps_what_had_arrived(folder, tab):
    engine = FakeEngine(lambda _: held())

    def held():
        yield from ids("the whale")
        engine.hold()
        yield END

    async with page(folder, tab, engine) as url:
        await tab.type("#prompt", "Who?" + ENTER)
        await tab.until("document.querySelector('.text').innerText === 'the whale'")
        await tab.click("#settings-button")
        await tab.type("#system", "Be brief.")
        await tab.open(url)
        assert (await tab.texts(".prompt"), await tab.texts(".text")) == (["Who?"], ["the whale"])
        assert [note.endswith("stopped") for note in await tab.texts(".note")] == [True]
        assert await tab.texts(".error") == []
        await tab.run("document.querySelector('#temperature').value = '0.5'")
        await tab.open(url)
        values = await tab.run("return ['system', 'temperature'].map((id) => document.getElementById(id).value)")
        assert values == ["Be brief.", "0.5"]
        await until(lambda: engine.aborted)


async def test_a_response_that_just_ends_is_an_error(folder, tab):
    async with page(folder, tab, FakeEngine()):
        chunk = 'data: {"choices": [{"delta": {"content": "the whale"}}]}\\n\\n'
        await tab.run(f"window.fetch = async () => new Response('{chunk}')")
        await ask(tab, "Who?")
        assert await tab.texts(".text") == ["the whale"]
        assert await tab.texts(".error") == ["The connection ended before the answer was complete."]


async def test_errors_are_shown_with_the_servers_message_and_are_not_sent_again(folder, tab):
    engine = FakeEngine(saying("the whale swims"))
    engine.error_at = (3, "out of memory")
    async with page(folder, tab, engine):
        await ask(tab, "cut off")
        assert await tab.texts(".error") == ["The engine could not finish this request: out of memory."]
        assert "the whale swims".startswith((await tab.texts(".text"))[0])
        engine.error_at = None
        await tab.click("#settings-button")
        await tab.type("#temperature", "7")
        await ask(tab, "too hot")
        assert (await tab.texts(".error"))[-1] == "Invalid 'temperature': must be less than or equal to 2."
        await tab.run("document.querySelector('#temperature').value = ''")
        await ask(tab, "again")
        assert "cut off" in prompt(engine) and "too hot" not in prompt(engine)


async def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab_alone(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea")), api_key=["canary"]) as url:
        assert "requires a key" in (await tab.texts("#key-message"))[0]
        await tab.type("#key", "wrong" + ENTER)
        await tab.until("document.querySelector('#key-message').innerText.includes('not one of')")
        await tab.type("#key", "canary" + ENTER)
        await tab.until("document.querySelector('#key-form').hidden")
        await ask(tab, "Where?")
        assert await tab.texts(".text") == ["the sea"]
        await tab.open(url)
        await tab.until("document.querySelector('#model').length")
        assert await tab.run("return localStorage.length + document.cookie.length") == 0


async def test_the_model_that_was_chosen_stays_while_the_models_are_not_known(folder, tab):
    settings = {"api_key": ["k"], "served_model_name": ["a", "b"]}
    async with page(folder, tab, FakeEngine(saying("the sea")), **settings) as url:
        await tab.type("#key", "k" + ENTER)
        await tab.until("document.querySelector('#model').length")
        await tab.run("document.querySelector('#model').value = 'b'")
        for key, condition in (("wrong", "!document.querySelector('#key-form').hidden"), ("k", "model.length")):
            await tab.run(f"sessionStorage.setItem('key', '\"{key}\"')")
            await tab.open(url)
            await tab.until(condition)
        assert await tab.run("return document.querySelector('#model').value") == "b"


async def test_a_key_may_have_any_characters(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea")), api_key=["clé-🔑"]):
        await tab.run("document.querySelector('#key').value = 'clé-🔑'")
        await tab.type("#key", ENTER)
        await tab.until("document.querySelector('#key-form').hidden")
        await ask(tab, "Where?")
        assert await tab.texts(".text") == ["the sea"]


NO_STORAGE = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }"
SMALL_STORAGE = """
const { setItem } = Storage.prototype;
Storage.prototype.setItem = function (name, value) {
    if (value.length > 500) throw new DOMException("full", "QuotaExceededError");
    setItem.call(this, name, value);
}"""


async def test_a_key_is_used_where_the_browser_keeps_nothing(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea")), api_key=["k"]):
        await tab.run(NO_STORAGE)
        await tab.type("#key", "k" + ENTER)
        await tab.until("document.querySelector('#key-form').hidden")
        await ask(tab, "Where?")
        assert await tab.texts(".text") == ["the sea"]
        assert await tab.texts("#storage-message") == [
            "This browser cannot keep the whole conversation: when the page is reloaded, it is lost."
        ]


async def test_of_a_conversation_that_is_too_long_the_latest_answers_are_kept(folder, tab):
    engine = FakeEngine(saying("the sea", "the ship", "the sails", "the whale"))
    async with page(folder, tab, engine) as url:
        await tab.run(SMALL_STORAGE)
        await ask(tab, "one")
        assert await tab.texts("#storage-message") == []
        engine.error_at = (0, "out of memory")
        await ask(tab, "x" * 400)  # it has no answer: it is dropped before any other
        assert await tab.texts("#storage-message") == [
            "This browser cannot keep the whole conversation: when the page is reloaded, a part of it is lost."
        ]
        engine.error_at = None
        await tab.open(url)
        assert await tab.texts(".prompt") == ["one"]
        await tab.run(SMALL_STORAGE)
        await ask(tab, "y" * 150)
        await ask(tab, "z" * 150)
        await tab.open(url)
        assert await tab.texts(".prompt") == ["z" * 150]


async def test_another_model_is_found_after_the_server_has_been_started_again(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea", "the ship")), served_model_name=["old"]):
        await ask(tab, "one")
        # The server that is there now has another model.
        await tab.run("document.querySelector('#model').options[0].value = 'gone'")
        await ask(tab, "two")
        assert len(await tab.texts(".error")) == 1
        await tab.click("section:last-child .actions button:first-child")
        await tab.until(IDLE + " && !document.querySelector('section:last-child .error').innerText")
        assert await tab.texts(".text") == ["the sea", "the ship"]
        assert await tab.run("return document.querySelector('#model').value") == "old"


async def test_a_text_from_right_to_left_is_shown_so_and_code_is_not(folder, tab):
    async with page(folder, tab, FakeEngine(saying("مرحبا\n\n- مرحبا\n\n```\n# مرحبا\n```\n\nHello"))):
        await ask(tab, "ما هي عاصمة فرنسا؟")
        shown = "[...document.querySelectorAll('.prompt, .text > *')]"
        directions = await tab.run(f"return {shown}.map((one) => getComputedStyle(one).direction)")
        assert directions == ["rtl", "rtl", "rtl", "ltr", "ltr"]
        await tab.run("document.querySelector('#prompt').value = 'مرحبا'")
        assert await tab.run("return getComputedStyle(document.querySelector('#prompt')).direction") == "rtl"


async def test_the_focus_goes_to_the_stop_button_after_a_retry(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea", "the ship"))):
        await ask(tab, "one")
        await tab.click("section:last-child .actions button:first-child")
        await tab.until(IDLE + " && document.querySelector('.text').innerText === 'the ship'")
        assert await tab.run("return document.activeElement.id") == "send"


async def test_open_settings_leave_room_for_the_conversation_on_a_low_screen(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea"))):
        await ask(tab, "one")
        await tab.click("#settings-button")
        height = await tab.run("return outerHeight - innerHeight")
        await tab.resize(640, 300 + height)
        try:
            assert await tab.run("return innerHeight") == 300
            assert await tab.run("return document.querySelector('main').clientHeight") > 30
        finally:
            await tab.resize(1000, 800)


async def test_shift_and_enter_begin_a_new_line(folder, tab):
    engine = FakeEngine(saying("the sea"))
    async with page(folder, tab, engine):
        await tab.type("#prompt", f"one{SHIFT}{ENTER}{RELEASE}two")
        assert engine.requests == []
        await ask(tab, "")
        assert prompt(engine) == "user: one\ntwo\nassistant: "


async def test_the_page_works_under_a_prefix(folder, tab):
    async with page(folder, tab, FakeEngine(saying("the sea")), prefix="/llm"):
        await ask(tab, "Where?")
        assert await tab.texts(".text") == ["the sea"]
        entries = "performance.getEntriesByType('resource')"
        paths = await tab.run(f"return {entries}.map((entry) => new URL(entry.name).pathname)")
        assert "/llm/v1/chat/completions" in paths
        assert all(path.startswith("/llm/") for path in paths), paths
