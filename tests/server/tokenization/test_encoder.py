"""Prompts: the tokenizer's own thread, and texts that are too long before they are tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError
from server.http.errors import ApiError
from server.tokenization import encoder
from server.tokenization.encoder import Prompts, TextTooLong, characters
from server.tokenization.renderer import TemplateError
from server.tokenization.tokenizer import Tokenizer
from server.tokenization.worker_thread import NativePanic
from tests.toys import byte_fallback

Make = Callable[[str], Tokenizer]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "the sea"}]


async def test_encode_decode_tokens(made: Make) -> None:
    tokenizer = made("byte fallback")
    prompts = Prompts(tokenizer)
    ids = await prompts.encode("the sea")
    assert ids == tokenizer.encode("the sea")
    assert await prompts.encode("the sea", add_special=False) == ids[1:]
    assert await prompts.decode(ids) == "the sea"
    assert await prompts.decode(ids, skip_special=False) == "<s> the sea"
    assert await prompts.tokens(ids) == ["<s>", "▁the", "▁sea"]
    prompts.close()


@pytest.mark.parametrize("text", ["", "the sea", " the  sea; the whale", "the 🐳🐋 sea", "日本語 the sea\n"])
async def test_a_text_is_echoed_with_the_place_of_each_token(tokenizer: Tokenizer, text: str) -> None:
    ids, offsets = await Prompts(tokenizer).encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    bare = tokenizer.encode(text, add_special=False)
    if tokenizer.decode(bare, skip_special=False) != text:
        return  # a tokenizer that loses some of the text
    start = ids.index(bare[0]) if bare else 0
    for place in range(1, len(bare)):
        known = tokenizer.decode(bare[:place], skip_special=False)
        if not known.endswith("\ufffd"):
            assert offsets[start + place] == len(known)


async def test_ids_are_spelt_with_the_place_of_each_token(made: Make) -> None:
    tokenizer = made("byte level")
    ids = tokenizer.encode("the sea<|end|> whale")
    assert await Prompts(tokenizer).decode_with_offsets(ids) == ("the sea whale", [0, 3, 7, 7])
    assert await Prompts(tokenizer).decode_with_offsets(ids, False) == ("the sea<|end|> whale", [0, 3, 7, 14])


async def test_words_are_spelt_at_the_start_of_a_text_and_after_a_space(made: Make) -> None:
    tokenizer = made("byte level")
    prompts = Prompts(tokenizer)
    both = [tuple(tokenizer.encode(text)) for text in ("whale", " whale")]
    assert await prompts.encode_words(["whale", " whale"]) == both
    marked = made("byte fallback")
    assert await Prompts(marked).encode_words(["sea"]) == [tuple(marked.encode("sea", False))]


async def test_a_chat_begins_with_bos_once(folder: Callable[..., Path]) -> None:
    config = {"bos_token": "<s>", "chat_template": TEMPLATE}
    tokenizer = Tokenizer(folder(byte_fallback(), tokenizer_config=config))
    prompts = Prompts(tokenizer)
    ids = await prompts.chat(HELLO)
    assert tokenizer.encode("")[:1] == [1]  # plain prompts get their bos from the tokenizer
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert await prompts.render(HELLO) == "<s>the sea"


async def test_a_given_template_replaces_the_models(made: Make) -> None:
    prompts = Prompts(made("byte level"), chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert prompts.has_template
    assert await prompts.render(HELLO) == "<the sea>"


async def test_a_model_without_a_template_says_so(made: Make) -> None:
    prompts = Prompts(made("byte level"))
    assert not prompts.has_template
    prompts.check_template()
    with pytest.raises(TemplateError, match="--chat-template"):
        await prompts.chat(HELLO)


def test_a_broken_template_is_found_at_start(made: Make) -> None:
    with pytest.raises(TemplateError, match="syntax error in line 2"):
        Prompts(made("byte level"), chat_template="{{ bos_token }}\n{% for").check_template()


async def test_a_panic_of_the_library_is_an_error_and_not_the_end(folder: Callable[..., Path]) -> None:
    made = json.loads(byte_fallback().to_str())
    made["post_processor"]["special_tokens"] = {}  # its template names one
    prompts = Prompts(Tokenizer(folder(**{"tokenizer.json": made})))
    with pytest.raises(NativePanic):
        await prompts.encode("the sea")
    assert await prompts.decode([10]) is not None


async def test_a_chat_template_from_a_file(made: Make, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    with pytest.raises(ConfigError, match="there is no such file"):
        Prompts.load(made("byte level"), path)
    path.write_text("{% for")
    with pytest.raises(ConfigError, match="syntax error in line 1"):
        Prompts.load(made("byte level"), path)
    path.write_text("<{{ messages[0].content }}>")
    prompts = Prompts.load(made("byte level"), path)
    assert await prompts.render(HELLO) == "<the sea>"
    prompts.close()


async def test_everything_runs_on_one_other_thread(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("byte level")
    prompts = Prompts(tokenizer, chat_template=TEMPLATE)
    threads: set[str] = set()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return method(*args, **kwargs)

        return call

    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, noting(getattr(tokenizer, name)))
    work = [prompts.encode("the whale") for _ in range(20)]
    await asyncio.gather(*work, prompts.chat(HELLO), prompts.decode([1, 2]))
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


async def test_what_can_never_fit_is_not_tokenized(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("byte level")
    prompts = Prompts(tokenizer, max_len=20_000, chat_template="{{ messages[0].content }}")
    limit = 20_000 * tokenizer.longest
    assert prompts.max_characters() == limit
    assert len(await prompts.encode("." * limit, fits=False)) >= 20_000

    monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(TextTooLong, match=f"{limit + 1} characters.*at most {limit}"):
        await prompts.encode("." * (limit + 1))
    with pytest.raises(TextTooLong):
        await prompts.chat([{"role": "user", "content": "." * (limit + 1)}])


async def test_the_length_of_a_text_that_need_not_fit_is_not_that_of_the_context(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "ORDINARY", 100)
    prompts = Prompts(made("byte level"), max_len=10, chat_template="{{ messages[0].content }}")
    text = "the sea " * 1000
    assert len(text) > prompts.max_characters()
    assert await prompts.encode(text, fits=False) == prompts.tokenizer.encode(text)
    assert await prompts.chat([{"role": "user", "content": text}], fits=False) == prompts.tokenizer.encode(text)

    monkeypatch.setattr(encoder, "MAX_TOKENS", 50)
    limit = 50 * prompts.tokenizer.longest
    with pytest.raises(TextTooLong, match=rf"^A text that is .* at most 50 tokens; .* at most {limit} can fit"):
        await prompts.encode(text, fits=False)
    prompts.close()


async def test_short_texts_are_always_tokenized(made: Make) -> None:
    """Four hundred unknown characters can be one token: only long texts are judged by their length."""
    prompts = Prompts(made("metaspace"), max_len=2)
    assert len(await prompts.encode("語" * 400)) <= 2


async def test_cancelled_work_does_not_run(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("byte level")
    prompts = Prompts(tokenizer)
    seen: list[str] = []
    busy, go = threading.Event(), threading.Event()

    def encode(text: str, add_special: bool = True) -> list[int]:
        busy.set()
        go.wait(10)
        seen.append(text)
        return []

    monkeypatch.setattr(tokenizer, "encode", encode)
    first = asyncio.create_task(prompts.encode("first"))
    await asyncio.to_thread(busy.wait, 10)
    second = asyncio.create_task(prompts.encode("second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    go.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    prompts.close()
    assert seen == ["first"]


async def test_the_vocabulary_is_read_for_splitting_before_the_first_large_text(made: Make) -> None:
    prompts = Prompts(made("byte level"))
    prompts.start()
    assert await prompts._large.run("", lambda: "splitter" in vars(prompts.tokenizer))
    prompts.close()


def test_names_count_as_characters_too() -> None:
    assert characters([{"ab": ["cde", 1]}, None]) == 7


async def test_a_template_whose_process_cannot_be_started_is_no_error_of_the_server(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("server.tokenization.renderer.spawn", refuse)
    prompts = Prompts(made("byte level"), chat_template=TEMPLATE)
    with pytest.raises(ApiError) as refused:
        await prompts.chat(HELLO)
    assert (refused.value.status, refused.value.code) == (503, "templates_unavailable")
    assert refused.value.retry_after
    prompts.close()
