"""What the chat page reads, run by node: events however their bytes are split, and Markdown, whatever it contains."""

import base64
import json
import random
import re
import shutil
import subprocess

import pytest

from server.api.webui import routes

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def module(name: str) -> str:
    """Return a script as a URL, because a file is a module for every version of node only with another suffix."""
    return json.dumps("data:text/javascript;base64," + base64.b64encode(routes.contents(name)).decode())


def node(expression: str, argument: object) -> object:
    """Return the value of an expression with `events`, `markdown`, `read` and `given`."""
    script = f"""
        const {{ events }} = await import({module("events.js")});
        const {{ markdown }} = await import({module("markdown.js")});
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


def el(tag, *children, **more):
    return {"tag": tag, "children": list(children), **more}


def p(*children):
    return el("p", *children)


def link(href, *children):
    return el("a", *children, href=href)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\n\nb\nc\n", [p("a"), p("b\nc")]),
        ("See:\n\n```python\nif a:\n    b\n```\n\nDone.", [p("See:"), el("pre", "if a:\n    b"), p("Done.")]),
        ("See:\r\n```\r\nx\r\n```\r\n", [p("See:"), el("pre", "x")]),
        ("```\nstill **writ", [el("pre", "still **writ")]),
        ("a ``` b", [p("a ``` b")]),
        ("```x``` is inline", [p(el("code", "x"), " is inline")]),
        ("````\n```\nb\n```\n````", [el("pre", "```\nb\n```")]),
        ("~~~\n```\n~~~", [el("pre", "```")]),
        ("```\n```", [el("pre", "")]),
        ("# One #\ntext\n###### Six\n#none", [el("h2", "One"), p("text"), el("h6", "Six"), p("#none")]),
        ("---\n* * *", [el("hr"), el("hr")]),
        ("> a\n> > b\n\nc", [el("blockquote", p("a"), el("blockquote", p("b"))), p("c")]),
        ("- a\n* b\n\nc", [el("ul", el("li", "a"), el("li", "b")), p("c")]),
        (
            "3. a\n\n4. b\n   - c\n     - d\n\n   e",
            [el("ol", el("li", "a"), el("li", "b", el("ul", el("li", "c", el("ul", el("li", "d")))), p("e")), start=3)],
        ),
        ("1. a\n  - b", [el("ol", el("li", "a", el("ul", el("li", "b"))), start=1)]),
        ("1. a\n   ```\n   x\n   ```", [el("ol", el("li", "a", el("pre", "x")), start=1)]),
        (
            "| a | b |\n|:--|--:|\n| **1** | x\\|y |\nend",
            [
                el(
                    "table",
                    el("tr", el("th", "a"), el("th", "b")),
                    el("tr", el("td", el("strong", "1")), el("td", "x|y")),
                ),
                p("end"),
            ],
        ),
        ("a | b", [p("a | b")]),
        ("**a *b* c** d", [p(el("strong", "a ", el("em", "b"), " c"), " d")]),
        ("***a*** ~~b~~", [p(el("strong", el("em", "a")), " ", el("del", "b"))]),
        ("_a_ snake_case_name 2 * 3 * 4 **x", [p(el("em", "a"), " snake_case_name 2 * 3 * 4 **x")]),
        ("`**a**` ``b ` c``", [p(el("code", "**a**"), " ", el("code", "b ` c"))]),
        ("\\*a\\*", [p("*", "a", "*")]),
        ("[a](https://a.example/b_(c)) b", [p(link("https://a.example/b_(c)", "a"), " b")]),
        ("see https://a.example/x.", [p("see ", link("https://a.example/x", "https://a.example/x"), ".")]),
        ("[m](mailto:a@a.example)", [p(link("mailto:a@a.example", "m"))]),
        ("![i](https://a.example/i.png)", [p(link("https://a.example/i.png", "i"))]),  # nothing is loaded
        (
            "[a **b** `c`](https://a.example/)",
            [p(link("https://a.example/", "a ", el("strong", "b"), " ", el("code", "c")))],
        ),
        (
            "[**see https://b.example/**](https://a.example/)",  # a link within a link is its text
            [p(link("https://a.example/", el("strong", "see ", "https://b.example/")))],
        ),
        ("<b>&amp;</b>", [p("<b>&amp;</b>")]),
    ],
)
def test_markdown_becomes_blocks(text, expected):
    assert node("markdown(given)", text) == expected


@pytest.mark.parametrize(
    "href",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "java\\\tscript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "vbscript:x",
        "file:///etc/passwd",
        "blob:https://a.example/x",
        "//a.example",
        "/v1/models",
        "#x",
        "https://",
    ],
)
def test_other_links_stay_text(href):
    [block] = node("markdown(given)", f"[a]({href})")
    assert block["tag"] == "p" and all(isinstance(part, str) for part in block["children"])
    assert "".join(block["children"]).replace("\\", "") == f"[a]({href})".replace("\\", "")


TAGS = {
    *("p", "pre", "hr", "blockquote", "ul", "ol", "li", "table", "tr", "th", "td", "a", "code", "strong", "em", "del"),
    *(f"h{level}" for level in range(2, 7)),
}  # fmt: skip


def test_whatever_is_written_becomes_known_elements_with_all_of_its_words():
    rng = random.Random(4)
    marks = [
        *("*", "**", "_", "`", "```", "~~", "|", "|-|", "> ", "- ", "1. ", "# ", "\n", "\n\n", " ", "    ", "<b>"),
        *("[", "](", ")", "javascript:", "https://a.example", "\\", "word", "word", "word"),
    ]
    texts = ["".join(rng.choices(marks, k=rng.randrange(1, 60))) for _ in range(3000)]
    texts += ["> " * 500 + "word", "*_" * 500 + "word", "\n".join("  " * i + "- word" for i in range(200))]

    def words(blocks):
        for block in blocks:
            if isinstance(block, str):
                yield block
                continue
            assert block["tag"] in TAGS
            assert block.keys() <= {"tag", "children", "href", "start"}
            assert block.get("href", "https:").startswith("https:")
            yield from words(block["children"])

    for text, blocks in zip(texts, node("given.map((text) => markdown(text))", texts), strict=True):
        # A link's address and the info of a fence are not shown.
        lost = sum(line.count("word") for line in re.findall(r"\]\(.*|```.*|~~~.*", text))
        assert text.count("word") - lost <= "".join(words(blocks)).count("word") <= text.count("word"), text
