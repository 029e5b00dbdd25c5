"""Rendering in a process of its own: hostile templates end with a sentence, within bounds of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.tokenization.renderer import (
    FAILED,
    MAX_BYTES,
    TOO_LARGE,
    TOO_LONG,
    TOO_SLOW,
    PromptTooLong,
    Renderer,
    TemplateError,
)
from tests.fakes import model_folder, serving
from tests.live import alive, eventually

ROOT = Path(__file__).parents[3]

RANGE = "{% set r = range(100000) | list %}"
LARGE = "{% set large = 'abcdefgh' * 250000 %}"  # two million characters
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"
NESTED = "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"

# What one filter, test, global, operator or method can do to time and memory.
HOSTILE = {
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of a list": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 9 ** 999999999 }}",
    "numbers that double": DOUBLED.replace("'ab'", "3").replace("EXPRESSION", "ns.x * ns.x"),
    "concatenation": DOUBLED.replace("EXPRESSION", "ns.x ~ ns.x"),
    "sum": DOUBLED.replace("EXPRESSION", "ns.x + ns.x"),
    "replace": DOUBLED.replace("EXPRESSION", "ns.x.replace('a', 'aa')").replace("range(60)", "range(40)"),
    "replace, the filter": DOUBLED.replace("EXPRESSION", "ns.x | replace('a', 'aa')"),
    "replace, once": LARGE + "{{ large.replace('', large) }}",
    "map of replace": LARGE + "{{ range(100000) | map('string') | map('replace', '', large) | list | length }}",
    "map of map": "{{ range(100000) | map('string') | map('center', 100000) | list | length }}",
    "join": LARGE + "{{ range(100000) | join(large) }}",
    "join, the method": LARGE + "{{ large.join(large) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "center, the method": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "rjust": "{{ 'a'.rjust(10 ** 10) }}",
    "zfill": "{{ '1'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "format, the filter": "{{ '%010000000000d' | format(1) }}",
    "format, the operator": "{{ '%*d' % (2000000000, 1) }}",
    "format, the method": "{{ '{:>9999999999}'.format(1) }}",
    "indent": LARGE + "{{ (large | replace('a', '\n')) | indent(100000) }}",
    "indent by text": LARGE + "{{ (large | replace('a', '\n')) | indent(large) }}",
    "wordwrap": LARGE + "{{ large | wordwrap(1, wrapstring=large) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10 ** 9) | list | length }}",
    "tojson": "{{ messages | tojson(indent=10 ** 10) }}",
    "tojson, nested": NESTED + "{{ ns.x | tojson }}",
    "tojson, separators": LARGE + "{{ range(100000) | list | tojson(separators=(large, large)) }}",
    "text of nested lists": NESTED + "{{ ns.x }}",
    "pprint": NESTED + "{{ ns.x | pprint }}",
    "comparison of nested lists": NESTED + "{% set a = ns.x %}" + NESTED + "{{ a == ns.x }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') | length }}",
    "translate": LARGE + "{{ large.translate({97: large}) }}",
    "encode": LARGE + "{% for i in range(100000) %}{% set x = large.encode('punycode') %}{% endfor %}",
    "search": "{% set a = 'a' * 1000000 %}{{ (a * 4).rfind(a ~ 'b' ~ a) }}",
    "sort in a loop": RANGE + "{% for i in r %}{% set x = r | sort %}{% endfor %}",
    "group in a loop": RANGE + "{% for i in r %}{% set x = r | groupby('real') %}{% endfor %}",
    "unique": "{% for i in range(100000) %}{% set x = range(100000) | unique | list %}{% endfor %}",
    "sums of lists": RANGE + "{{ range(100000) | map('string') | map('list') | sum(start=r) }}",
    "lists in a namespace": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "captured text": RANGE + "{% set x %}{% for i in r %}{% for j in r %}abcdefgh{% endfor %}{% endfor %}{% endset %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macro of text": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}abcdefgh{% endif %}{% endmacro %}"
    "{% set x = m(60) %}",
    "caller": "{% macro m() %}{% for i in range(100000) %}{{ caller() }}{% endfor %}{% endmacro %}"
    + LARGE
    + "{% set x %}{% call m() %}{{ large }}{% endcall %}{% endset %}",
    "block of a filter": LARGE + "{% filter replace('', large) %}abcdefgh{% endfilter %}",
    "loops": RANGE + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "loop that calls itself": "{% for i in [[[]]] recursive %}{{ loop([[i, i]]) }}{% endfor %}",
    "cycler": "{% set c = cycler(*range(100000)) %}{% for a in range(100000) %}{% for b in range(100000) %}"
    "{% set x = c.next() %}{% endfor %}{% endfor %}",
    "arguments": "{{ dict(**dict(range(100000) | map('string') | batch(2))) | tojson(indent=10 ** 9) }}",
    "endless text": "{% for i in range(100000) %}" + "x" * 200 + "{% endfor %}",
    "nesting": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "a chain of attributes": "{{ messages" + ".a" * 100_000 + " }}",
    "a chain of sums": "{{ 1" + "+1" * 100_000 + " }}",
    "blocks": "{% if 1 %}" * 100_000 + "{% endif %}" * 100_000,
    "statements": "{% set a = 1 %}" * 60_000,
    "lone surrogate": r"{{ '\ud800' }}",
}

# Renders each of the templates that come on standard input in a process with these limits, and prints what came of it.
PROGRAM = """
import json, resource, sys
from server.tokenization.renderer import Renderer, TemplateError

def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended
    return used.ru_utime + used.ru_stime

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # for a renderer that has no limit of its own
for line in sys.stdin:
    renderer = Renderer({"default": json.loads(line)}, {}, max_seconds=0.4)
    began = cpu_seconds()
    try:
        text = f"{len(renderer.render([{'role': 'user', 'content': 'hello'}]))} characters"
    except TemplateError as error:
        text = str(error)
    renderer.close()
    seconds = cpu_seconds() - began
    print(json.dumps([text, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]), flush=True)
"""


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[str, float, int]]:
    """For each hostile template: the sentence, CPU seconds, and the largest memory of any renderer so far."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps(source) + "\n" for source in HOSTILE.values()),
        capture_output=True,
        text=True,
        timeout=1150,
        cwd=ROOT,
        check=True,
    )
    return dict(zip(HOSTILE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.timeout(1200)  # the first one renders them all
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_within_its_bounds(name: str, results: dict[str, tuple[str, float, int]]) -> None:
    sentence, seconds, memory = results[name]
    assert sentence in (TOO_SLOW, TOO_LARGE, TOO_LONG, FAILED) or "syntax error" in sentence
    assert seconds < 30, "the alarm comes after 0.4 s"
    assert memory < MAX_BYTES


def render(renderer: Renderer, content: str) -> str:
    return renderer.render([{"role": "user", "content": content}])


def test_a_prompt_that_is_too_long_has_an_error_of_its_own() -> None:
    renderer = Renderer(
        {"default": f"{{{{ raise_exception({TOO_LONG!r}) if messages[0].content == '-' else 'ab' }}}}"}, {}
    )
    with pytest.raises(PromptTooLong):
        renderer.render([{"role": "user", "content": "x"}], limit=1)
    with pytest.raises(TemplateError) as error:
        render(renderer, "-")
    assert type(error.value) is TemplateError, "a template may write the same sentence"
    renderer.close()


def refused(renderer: Renderer, content: str) -> str:
    with pytest.raises(TemplateError) as error:
        render(renderer, content)
    return str(error.value)


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    """One whose template does what the message says."""
    source = (
        "{% set says = messages[0].content %}"
        "{% if says == 'memory' %}{{ 'a' * 10 ** 10 }}"
        "{% elif says == 'time' %}{% set a = 'a' * 1000000 %}{{ (a * 4).rfind(a ~ 'b' ~ a) }}"
        "{% else %}{{ says }}{% endif %}"
    )
    made = Renderer({"default": source}, {}, max_seconds=60)
    yield made
    made.close()


def test_a_rendering_over_its_bounds_costs_only_its_own_request(renderer: Renderer) -> None:
    assert render(renderer, "é🐳" * 1000) == "é🐳" * 1000
    assert refused(renderer, "memory") == TOO_LARGE
    assert render(renderer, "one") == "one"
    renderer._end()
    renderer._max_seconds = 0.4  # of the next process; others may need more, in a pause of the machine
    assert refused(renderer, "time") == TOO_SLOW
    renderer._max_seconds = 60
    assert render(renderer, "two") == "two"


def test_a_renderer_that_was_killed_is_replaced(renderer: Renderer) -> None:
    assert render(renderer, "one") == "one"
    assert renderer.pid is not None
    os.kill(renderer.pid, signal.SIGKILL)
    eventually(lambda: not alive(renderer.pid))
    assert render(renderer, "two") == "two"


def test_closing_ends_a_rendering_that_is_under_way() -> None:
    renderer = Renderer({"default": HOSTILE["loops"]}, {}, max_seconds=60)
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refused(renderer, "")))
    thread.start()
    pid = eventually(lambda: renderer.pid)
    renderer.close()
    thread.join(30)
    assert errors == [FAILED]
    assert not alive(pid)
    assert refused(renderer, "") == FAILED
    assert renderer.pid is None, "a closed renderer starts no process"


def test_a_renderer_ends_with_its_parent() -> None:
    program = (
        "from server.tokenization.renderer import Renderer\n"
        "renderer = Renderer({'default': 'x'}, {})\n"
        "renderer.check()\n"
        "print(renderer.pid, flush=True)\n"
        "input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    eventually(lambda: not alive(pid))


def test_ctrl_c_does_not_end_a_renderer_that_is_starting() -> None:
    renderer = Renderer({"default": "{{ messages[0].content }}"}, {})
    renderer.start()
    first = renderer.pid
    assert first is not None
    os.kill(first, signal.SIGINT)  # as a terminal does, which sends it to all processes of the command
    assert render(renderer, "one") == "one"
    os.kill(first, signal.SIGINT)
    assert render(renderer, "two") == "two"
    assert renderer.pid == first
    renderer.close()


def test_a_renderer_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('imported')")
    program = "from server.tokenization.renderer import Renderer; Renderer({'default': 'x'}, {}).check()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_a_request_over_the_bounds_is_a_400_and_the_server_goes_on(tmp_path: Path) -> None:
    template = "{{ 'a' * 10 ** 10 if messages[0].content == 'memory' else 'hello' }}"
    folder = model_folder(tmp_path / "model", tokenizer_config={"eos_token": "<|end|>", "chat_template": template})
    async with serving(folder) as (client, _):

        async def post(content: str) -> httpx.Response:
            body = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
            return await client.post("/v1/chat/completions", json=body)

        refused, answered = await post("memory"), await post("hello")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, TOO_LARGE)
        assert answered.status_code == 200
