"""What the chat page parses, run by node: events however their bytes are split, and the code blocks of a text."""

import base64
import json
import shutil
import subprocess

import pytest

from server.api.webui import routes

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
# In a URL, because a file is a module for every version of node only with another suffix.
MODULE = "data:text/javascript;base64," + base64.b64encode(routes.contents("parse.js")).decode()


def node(expression: str, argument: object) -> object:
    """Return the value of an expression with `events`, `parts`, `read` and `given`."""
    script = f"""
        const {{ events, parts }} = await import({json.dumps(MODULE)});
        const given = {json.dumps(argument)};
        const read = async (pieces) => {{
            const found = [];
            for await (const data of events(new ReadableStream({{
                pull(c) {{ pieces.length ? c.enqueue(pieces.shift()) : c.close(); }},
            }}))) found.push(data);
            return found;
        }};
        console.log(JSON.stringify(await ({expression})));
    """
    done = subprocess.run(
        ["node", "--input-type=module"], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EVERY_SPLIT = """(async () => {
    const bytes = new TextEncoder().encode(given), found = new Set();
    for (let size = 1; size <= bytes.length; size++) {
        const pieces = [];
        for (let i = 0; i < bytes.length; i += size) pieces.push(bytes.slice(i, i + size));
        found.add(JSON.stringify(await read(pieces)));
    }
    return [...found].map(JSON.parse);
})()"""


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ('data: {"a":1}\n\ndata: [DONE]\n\n', ['{"a":1}', "[DONE]"]),
        ("data: 🐳 é\r\n\r\ndata: b\r\n\r\n", ["🐳 é", "b"]),
        ("data: a\r\ndata: b\r\n\r\n", ["a\nb"]),
        ("data: a\r\rdata: b\r\r", ["a", "b"]),
        (": keep-alive\n\nevent: x\nid: 1\ndata:a\ndata:  b\n\n: x\n\n\n", ["a\n b"]),
        ("data: a: b\ndata\n\n", ["a: b\n"]),
        ("data: a\n\ndata: cut off", ["a"]),
        (": keep-alive\n\n", []),
    ],
)
def test_events_do_not_depend_on_how_their_bytes_are_split(stream, expected):
    assert node(EVERY_SPLIT, stream) == [expected]


def test_a_reader_that_leaves_cancels_the_stream():
    cancelled = node(
        """(async () => {
            let cancelled = false;
            const stream = new ReadableStream({
                pull(c) { c.enqueue(new TextEncoder().encode("data: a\\n\\n")); },
                cancel() { cancelled = true; },
            });
            for await (const data of events(stream)) break;
            return cancelled;
        })()""",
        None,
    )
    assert cancelled is True


def test_the_error_of_a_stream_reaches_the_reader():
    message = node(
        """(async () => {
            try {
                for await (const _ of events(new ReadableStream({ pull() { throw new TypeError("cut"); } })));
            } catch (error) { return error.message; }
        })()""",
        None,
    )
    assert message == "cut"


def prose(text):
    return {"code": False, "text": text}


def code(text):
    return {"code": True, "text": text}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\n\nb\n", [prose("a\n\nb")]),
        ("See:\n\n```python\nif a:\n    b\n```\n\nDone.", [prose("See:"), code("if a:\n    b"), prose("Done.")]),
        ("```\nstill writ", [code("still writ")]),
        ("a ``` b\n`c`", [prose("a ``` b\n`c`")]),
        ("```x``` is inline", [prose("```x``` is inline")]),
        ("````\n```\nb\n```\n````", [code("```\nb\n```")]),
        ("~~~\n```\n~~~", [code("```")]),
        ("1. item\n   ```\n   x\n   ```", [prose("1. item"), code("   x")]),
        ("```\n```", [code("")]),
        ("<b>&amp;</b>", [prose("<b>&amp;</b>")]),
    ],
)
def test_code_between_fences_is_set_apart(text, expected):
    assert node("parts(given)", text) == expected
