"""Any text comes through byte for byte: prompts, answers, stop strings, tokens and events, by three clients.

`structured_outputs.choice` with one text makes that text come out of any model.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest
from msgspec.structs import replace

from tests.fakes import FakeEngine, model_folder
from tests.live import Server
from tests.server.wire import CHAT, COMPLETIONS, END, QUESTION, chunks, ids, joined, run

OWN = [
    " leading", "trailing ", "\t\n", "a\r\nb\rc\nd", "\u2028", "a\u2029b", "\u0085", "\v\f\x1c\x1d\x1e", "\x01\x7f",
    "\ufeffmark", "\ufffd", "e\u0301 and é", "ﬁ ① Å", "שלום, عالم",
    "\u202eback\u202c", "👩‍👩‍👧‍👦🏳️‍🌈🇦🇶", "\U0010ffff\ue000\uffff",
    "Z̸̢a̶͝l̷̋g̵͘o̴̚",
    'quote " and \\ and \\u0041', "data: [DONE]\n\n", "data: {}\n\nevent: x\n: no\n\n", "<|im_end|>", "<|endoftext|>",
    "</s><s>[INST]", "{{ 7 * 7 }}{% raw %}", "日本語の文章", "\u200b\u200d\ufe0f", "\u0131 İ ß ẞ ǆ", "\x00",
]  # fmt: skip


def corpus() -> list[str]:
    """Our own texts, and those of the corpus where it is there."""
    place = os.environ.get("PEQUOD_TEST_DATA")
    file = pathlib.Path(place or "", "prompts/naughty_strings.jsonl")
    more = [json.loads(line)["text"] for line in file.read_text("utf-8").split("\n") if line] if place else []
    return [text for text in dict.fromkeys([*OWN, *more]) if text]


TEXTS = corpus()


@pytest.fixture(scope="module")
def server():
    with Server("--max-num-seqs", "16") as running:
        yield running


def forced(text: str, stream: bool) -> dict:
    """A chat request that says `text` and is answered with it."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "structured_outputs": {"choice": [text]}, "stream": stream}


async def post_all(server: Server, path: str, bodies: list[dict]) -> list[httpx.Response]:
    """Send all of them, eight at a time."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        turn = asyncio.Semaphore(8)

        async def post(body: dict) -> httpx.Response:
            async with turn:
                return await client.post(path, json=body)

        return await asyncio.gather(*map(post, bodies))


def streamed_text(raw: bytes) -> str:
    """What a stream's events say; each of them is one line, wherever a client believes that lines end."""
    text = raw.decode()
    assert all(len(frame.splitlines()) == 1 for frame in text.removesuffix("\n\n").split("\n\n"))
    return joined(chunks(text))[0]["text"]


async def by_httpx(server: Server, texts: list[str], stream: bool) -> list[str]:
    answers = await post_all(server, CHAT, [forced(text, stream) for text in texts])
    assert {answer.status_code for answer in answers} == {200}
    if stream:
        return [streamed_text(answer.content) for answer in answers]
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


async def by_openai(server: Server, texts: list[str], stream: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        turn = asyncio.Semaphore(8)

        async def ask(text: str) -> str:
            asked = {"model": "builtin", "messages": [{"role": "user", "content": text}]}
            extra = {"structured_outputs": {"choice": [text]}}
            async with turn:
                if not stream:
                    answer = await client.chat.completions.create(**asked, extra_body=extra)
                    return answer.choices[0].message.content
                parts = await client.chat.completions.create(**asked, extra_body=extra, stream=True)
                return "".join([choice.delta.content or "" async for part in parts for choice in part.choices])

        return await asyncio.gather(*map(ask, texts))


async def by_curl(server: Server, texts: list[str], stream: bool) -> list[str]:
    """All requests by one curl, whose command file names each one's body and where its answer goes."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    place = pathlib.Path(server.scratch, "stream" if stream else "whole")
    place.mkdir()
    commands = []
    for number, text in enumerate(texts):
        (place / f"{number}.json").write_text(json.dumps(forced(text, stream), ensure_ascii=False), "utf-8")
        commands.append(
            f'url = "{server.url}{CHAT}"\nheader = "Content-Type: application/json"\nno-buffer\nfail\nsilent\n'
            f'data-binary = "@{place}/{number}.json"\noutput = "{place}/{number}.out"\n'
        )
    (place / "commands").write_text("next\n".join(commands))
    subprocess.run(["curl", "-q", "--config", str(place / "commands")], check=True)
    raw = [(place / f"{number}.out").read_bytes() for number in range(len(texts))]
    if stream:
        return [streamed_text(each) for each in raw]
    return [json.loads(each)["choices"][0]["message"]["content"] for each in raw]


Client = Callable[[Server, list[str], bool], Awaitable[list[str]]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", [by_httpx, by_openai, by_curl], ids=["httpx", "openai", "curl"])
async def test_every_text_comes_through_a_chat(server, tmp_path, client: Client, stream):
    server.scratch = tmp_path
    texts = TEXTS if client is by_httpx else OWN  # which has what a client may take for the end of a line or of a text
    assert await client(server, texts, stream) == texts


async def test_text_and_tokens_are_the_same_thing(server):
    tokens = [answer.json()["tokens"] for answer in await post_all(server, "/tokenize", [{"prompt": t} for t in TEXTS])]
    back = await post_all(server, "/detokenize", [{"tokens": each} for each in tokens])
    assert [answer.json()["prompt"] for answer in back] == TEXTS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_echo_is_the_prompt(server, stream):
    asked = [{"prompt": text, "echo": True, "max_tokens": 0, "stream": stream} for text in TEXTS]
    answers = await post_all(server, COMPLETIONS, asked)
    told = [
        joined(chunks(answer.text))[0]["text"] if stream else answer.json()["choices"][0]["text"] for answer in answers
    ]
    assert told == TEXTS


async def test_the_template_keeps_the_text(server):
    asked = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    for text, answer in zip(TEXTS, await post_all(server, "/apply-template", asked), strict=True):
        assert text.strip() in answer.json()["prompt"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
async def test_a_stop_string_cuts_at_its_first_occurrence(tmp_path, path):
    """Pieces of each text stop it; the engine says the text twice, so that something always follows."""
    # Both paths cut in the same place of the code: one of them has the whole corpus.
    texts = [text + "·" + text for text in (TEXTS if path == COMPLETIONS else OWN)]
    asked = [(text, stop) for text in texts for stop in {text[:1], text[len(text) // 3 :][:3], text[-1:]}]
    spoken = {number: [*ids(text), END] for number, (text, _) in enumerate(asked)}
    base = {"messages": QUESTION} if path == CHAT else {"prompt": "the sea"}

    async def use(client):
        told = []
        for number, (_, stop) in enumerate(asked):
            body = {**base, "stop": stop, "seed": number, "max_tokens": 4000}
            whole, stream = [await client.post(path, json={**body, "stream": way}) for way in (False, True)]
            choice = whole.json()["choices"][0]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            told.append((text, joined(chunks(stream.text))[0]["text"], choice["finish_reason"]))
        return told

    folder = model_folder(tmp_path / "fake")
    info = FakeEngine().info
    engine = FakeEngine(lambda request: spoken[request.params.seed], info=replace(info, max_len=1 << 16))
    for (text, stop), (whole, streamed, reason) in zip(asked, await run(folder, use, engine), strict=True):
        assert whole == streamed == text[: text.index(stop)], (text, stop)
        assert reason == "stop"


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "a\\udc00\\ud800b"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages": [{"role": "user", "content": "HALF"}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "stop": "HALF"}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"choice": ["HALF"]}}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "HALF": 1}'),
        (COMPLETIONS, '{"prompt": "HALF"}'),
        (COMPLETIONS, '{"prompt": "a", "bad_words": ["HALF"]}'),
        ("/tokenize", '{"prompt": "HALF"}'),
        ("/apply-template", '{"messages": [{"role": "user", "content": "HALF"}]}'),
    ],
    ids=str,
)  # fmt: skip
def test_half_a_character_is_refused(server, path, body, half):
    answer = server.client.post(path, content=body.replace("HALF", half))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
