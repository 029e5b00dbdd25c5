"""`make agents`: every coding agent of the table against Pequod; prints the table, exits with 1 on a failure.

All above the engine is Pequod's: HTTP, the APIs, the chat template, the parsers. What the model says is written here,
because a model small enough for a test cannot work with an agent's instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import tokenizers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import engine.builtin
from engine import EngineRequest
from tests.fakes import INFO, FakeEngine, listening, serving, until

from .programs import AGENTS, CONTEXT, KEY, MODEL, Agent

BUILTIN = pathlib.Path(engine.builtin.__file__).parent / "model"
LIMIT_S = 120.0

HELLO, GREETING = "Say hello.", "There she blows."
WRITE, WRITTEN = "Write the log of the ship.", "The log is written."
AGAIN, FAREWELL = "Say farewell.", "Fair winds."
THOUGHT = "A calm sea."
ENTRY = "all-well"


class Place:
    """The app, what the agent is asked there, and what came of it."""

    def __init__(self, agent: Agent, program: pathlib.Path, folder: pathlib.Path, context: int) -> None:
        self.agent = agent
        self.program = program
        self.home, self.work = folder / "home", folder / "work"
        self.log = self.work / "ship.log"
        self.context = context
        self.tokenizer = tokenizers.Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
        self.model = folder / "model"
        self.url = ""
        self.answers: list[tuple[str, int]] = []  # paths and statuses
        self.refusals: list[str] = []
        info = msgspec.structs.replace(
            INFO, max_len=context, vocab_size=self.tokenizer.get_vocab_size(), num_blocks=2 * context // INFO.block_size
        )
        self.engine = FakeEngine(self.say, info=info, delay=0.001)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        for path in (self.home, self.work):
            path.mkdir(parents=True)
        subprocess.run(["git", "init", "-q", self.work], check=True)
        shutil.copytree(BUILTIN, self.model)
        serve = serving(
            self.model,
            self.engine,
            served_model_name=[MODEL],
            max_model_len=self.context,
            api_key=[KEY],
            reasoning_parser="think",
        )
        async with (
            serve as (_, app),
            listening(self.watched(app)) as self.url,  # type: ignore[arg-type]
        ):
            for name, text in self.agent.settings(self.url).items():
                path = self.home / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            yield

    def watched(self, app: ASGIApp) -> ASGIApp:
        async def watch(scope: Scope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.answers.append((scope["path"], message["status"]))
                elif self.answers[-1][1] >= 400:
                    self.refusals.append(f"{self.answers[-1]} {message['body'].decode()}")
                await send(message)

            await app(scope, receive, sent)

        return watch

    def prompt(self, request: EngineRequest) -> str:
        return self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)

    def say(self, request: EngineRequest) -> list[int]:
        """What the model says: by the last message, or by the last that a person wrote before an agent's own."""
        prompt = self.prompt(request)
        asked = max((WRITE, HELLO, AGAIN), key=prompt.rfind)
        name, arguments = self.agent.tool(self.log, ENTRY)
        said = {HELLO: GREETING, AGAIN: FAREWELL, WRITE: GREETING}[asked]
        if asked == WRITE and prompt.rfind("<|im_start|>tool\n") > prompt.rfind(WRITE):
            said = WRITTEN
        elif asked == WRITE and f'"name": "{name}"' in prompt:  # the call for a title of the chat has no tools
            said = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        text = f"<think>\n{THOUGHT}\n</think>\n\n{said}"
        return list(self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids)

    async def start(self, prompt: str, arguments: Sequence[str]) -> asyncio.subprocess.Process:
        inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return await asyncio.create_subprocess_exec(
            self.program,
            *arguments,
            prompt,
            cwd=self.work,
            env={**inherited, "HOME": str(self.home), "NO_COLOR": "1", **self.agent.environment(self.url)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def told(self, prompt: str, arguments: Sequence[str] | None = None) -> str:
        """What the agent prints until it ends."""
        process = await self.start(prompt, arguments or self.agent.ask)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"the agent did not end within {LIMIT_S:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return output.decode(errors="replace")

    def check(self, output: str, *wanted: str) -> None:
        """The output has all of this, and the server refused nothing."""
        assert not self.refusals, f"refused: {self.refusals}"
        for text in wanted:
            assert text in output, f"no {text!r} in what the agent printed:\n{output[-2000:]}"
        assert any(path == self.agent.api for path, _ in self.answers), f"asked for: {self.answers}"


async def answers(place: Place) -> None:
    """A question is answered, and the answer is streamed to the agent's output."""
    place.check(await place.told(HELLO), GREETING)


async def calls_a_tool(place: Place) -> None:
    """A tool is called, its result is sent back, and the answer after it comes through."""
    place.check(await place.told(WRITE), WRITTEN)
    assert place.log.read_text().split() == [ENTRY]


async def goes_on(place: Place) -> None:
    """The next prompt of a conversation has the turns before it."""
    await place.told(HELLO)
    place.check(await place.told(AGAIN, place.agent.ask_again), FAREWELL)
    assert any(GREETING in place.prompt(request) for request in place.engine.requests), "the conversation was lost"


async def hangs_up(place: Place) -> None:
    """An agent that is ended takes its requests with it."""
    place.engine.hold()
    process = await place.start(HELLO, place.agent.ask)
    try:
        await until(lambda: place.engine.open)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: not place.engine.open)
    assert place.engine.aborted
    place.engine.let_go()


async def recognizes_too_long(place: Place) -> None:
    """A prompt longer than the context is an error that the agent understands, and tells or acts upon."""
    output = await place.told(HELLO)
    assert (place.agent.api, 400) in place.answers, f"asked for: {place.answers}"
    assert re.search(r"context|too long", output, re.IGNORECASE), f"what the agent printed:\n{output[-2000:]}"


ROWS: dict[str, tuple[Callable[[Place], Awaitable[None]], int]] = {
    "answers": (answers, CONTEXT),
    "calls a tool until the answer": (calls_a_tool, CONTEXT),
    "goes on with a conversation": (goes_on, CONTEXT),
    "stops the work when it is ended": (hangs_up, CONTEXT),
    "recognizes that a prompt is too long": (recognizes_too_long, 256),
}


async def run(agent: Agent, program: pathlib.Path, row: str) -> tuple[str | None, int]:
    """A failure or None, and the characters of the longest prompt."""
    check, context = ROWS[row]
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
        place = Place(agent, program, pathlib.Path(folder), context)
        try:
            async with place.open():
                await check(place)
        except Exception as error:
            return str(error) or "".join(traceback.format_exception(error)), 0
        return None, max((len(place.prompt(request)) for request in place.engine.requests), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--packages", type=pathlib.Path, required=True, help="the folder with node_modules")
    parser.add_argument("--agent", action="append", choices=AGENTS, help="only this one; several times")
    parser.add_argument("--row", action="append", choices=ROWS, help="only this check; several times")
    options = parser.parse_args()
    modules = options.packages.resolve() / "node_modules"
    chosen = {name: AGENTS[name] for name in options.agent or AGENTS}
    rows = options.row or list(ROWS)
    headings, failures, lengths = [], [], {name: 0 for name in chosen}
    table: dict[str, list[str]] = {row: [] for row in rows}
    for name, agent in chosen.items():
        version = json.loads((modules / agent.package / "package.json").read_text())["version"]
        headings.append(f"{name} {version}")
        for row in rows:
            if ROWS[row][0] is goes_on and agent.ask_again is None:
                table[row].append("-")
                continue
            failure, length = asyncio.run(run(agent, modules / ".bin" / agent.program, row))
            lengths[name] = max(lengths[name], length)
            table[row].append("failed" if failure else "ok")
            print(f"{name}: {row}: {table[row][-1]}", file=sys.stderr, flush=True)
            if failure:
                failures.append(f"\n{headings[-1]}, {row}: {failure}")
    print(f"| | {' | '.join(headings)} |\n|{'---|' * (len(headings) + 1)}")
    print(f"| API | {' | '.join(f'`{agent.api}`' for agent in chosen.values())} |")
    for row, cells in table.items():
        print(f"| {row} | {' | '.join(cells)} |")
    print(f"| characters of a prompt, thousands | {' | '.join(str(round(n / 1000)) for n in lengths.values())} |")
    print("".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
