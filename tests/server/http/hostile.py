"""What has hurt servers of this kind, or could: requests that must get their 4xx while everybody else is served.

BODIES are JSON requests, each with the status and the `param` of its refusal; LONG_TEXTS are such requests for a model
with a long context and a large vocabulary; RAW are bytes for a socket. New ones are added here:
tests/server/http/test_hostile.py sends them, benchmarks/hostile.py measures what they cost.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.grammar.shapes import DEEP
from tests.server.wire import CHAT, COMPLETIONS, QUESTION, RESPONSES

MB = 1 << 20
HUGE = 10**400


class Body(NamedTuple):
    """A POST that is refused."""

    name: str
    path: str
    make: Callable[[], Any]  # bytes, or what becomes JSON
    param: str | None
    status: int = 400
    headers: dict[str, str] = {}

    @property
    def content(self) -> bytes:
        made = self.make()
        return made if isinstance(made, bytes) else json.dumps(made).encode()


class Raw(NamedTuple):
    """Bytes that are no request, or a bad one. `statuses`: the first answer's; 0: the connection is just closed."""

    name: str
    data: Callable[[], bytes]
    statuses: tuple[int, ...]


def chat(name: str, param: str | None, **fields: Any) -> Body:
    return Body(name, CHAT, lambda: {"messages": QUESTION, **fields}, param)


def completion(name: str, param: str | None, **fields: Any) -> Body:
    return Body(name, COMPLETIONS, lambda: {"prompt": "a", **fields}, param)


def text(name: str, body: str) -> Body:
    """JSON that no serializer writes."""
    return Body(name, COMPLETIONS, lambda: body.encode("utf-8", "surrogatepass"), None)


def nested(depth: int, keyword: str = "items") -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {keyword: inner} if keyword != "anyOf" else {"anyOf": [inner]}
    return inner


def schema(name: str, inner: Any) -> Body:
    field = "response_format.json_schema.schema"
    made = {"type": "json_schema", "json_schema": {"name": "a", "schema": inner}}
    return chat(f"schema: {name}", field, response_format=made)


def grammar(name: str, kind: str, value: Any) -> Body:
    return chat(f"{kind}: {name}", f"structured_outputs.{kind}", structured_outputs={kind: value})


def custom(name: str, param: str, definition: str, syntax: str = "lark") -> Body:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {"input": "a", "tools": [{"type": "custom", "name": "f", "format": format}]}
    return Body(f"custom tool: {name}", RESPONSES, lambda: body, param)


def deep(name: str) -> Body:
    kind, make = DEEP[name]
    if kind == "lark":
        return grammar(f"deep {name}", "grammar", make())
    return schema(f"deep {name}", json.loads(make()))


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


NUMBERS = b"[" + b"1," * (4 * MB - 100) + b"1]"
BIG = 2**31

BODIES = [
    # Numbers of answers, tokens and log-probabilities (GHSA-3mwp-wvh9-7528 and best_of before it; sglang #40076)
    *(chat(f"n {n}"[:20], "n", n=n) for n in (10**6, BIG, HUGE, -1, 0)),
    completion("best_of", "best_of", best_of=10**6),
    completion("n times prompts", "n", n=16, prompt=["a"] * 256),
    chat("top_logprobs", "top_logprobs", logprobs=True, top_logprobs=10**6),
    completion("logprobs", "logprobs", logprobs=BIG),
    completion("prompt_logprobs", "prompt_logprobs", prompt_logprobs=10**6),
    completion("prompt_logprobs of a long prompt", "prompt_logprobs", prompt=[[5] * 500] * 16, prompt_logprobs=20),
    completion("echo of logprobs times n", "logprobs", prompt=[5] * 600, n=16, echo=True, logprobs=20),
    completion("max_tokens", "max_tokens", max_tokens=BIG),
    completion("max_tokens", "max_tokens", max_tokens=-2),
    completion("min_tokens above max_tokens", "min_tokens", min_tokens=10**6),
    # Tokens that the model does not have (vllm #16529, sglang #7670)
    completion("prompt ids too high", "prompt", prompt=[10**6]),
    completion("prompt ids negative", "prompt.0", prompt=[-1]),
    completion("prompt ids beyond 64 bits", "prompt.0", prompt=[2**70]),
    completion("no prompt ids", "prompt.0", prompt=[[]]),
    completion("mixed prompt", "prompt.1", prompt=[1, "a"]),
    Body("detokenize", "/detokenize", lambda: {"tokens": [10**9]}, "tokens"),
    completion("logit_bias too high", "logit_bias", logit_bias={"1000000": 1}),
    completion("logit_bias negative", "logit_bias.-1", logit_bias={"-1": 1}),
    completion("logit_bias beyond float32", "logit_bias.5", logit_bias={"5": 1e39}),
    completion("logit_bias of 10,000", "logit_bias", logit_bias={str(i): 1 for i in range(10**4)}),
    completion("logit_bias of a word", "logit_bias.a", logit_bias={"a": 1}),
    completion("allowed_token_ids too high", "allowed_token_ids", allowed_token_ids=[10**6]),
    completion("allowed_token_ids of 300,000", "allowed_token_ids", allowed_token_ids=[1] * 300_000),
    completion("allowed_token_ids of 500,000", None, allowed_token_ids=[1] * 500_000),
    completion("stop_token_ids too high", "stop_token_ids", stop_token_ids=[10**6]),
    completion("stop_token_ids of 300,000", "stop_token_ids", stop_token_ids=[1] * 300_000),
    completion("stop_token_ids of 500,000", None, stop_token_ids=[1] * 500_000),
    # Values that no float32, no clock and no generator holds
    *(completion(f"temperature {value}", "temperature", temperature=value) for value in (-1, 1e300, "1", True)),
    completion("repetition_penalty", "repetition_penalty", repetition_penalty=1e-300),
    *(completion(f"seed {seed}"[:20], "seed", seed=seed) for seed in (2**64, -(2**63) - 1, HUGE, 1.5)),
    completion("top_k", "top_k", top_k=BIG),
    completion("top_p", "top_p", top_p=-0.5),
    completion("priority", "priority", priority=2**63),
    Body("deadline", CHAT, lambda: {"messages": QUESTION}, "X-Deadline-Ms", headers={"X-Deadline-Ms": "9" * 40}),
    # Texts without an end
    completion("a million stop strings", None, stop=["a"] * 10**6),
    completion("100,000 stop strings", "stop", stop=["a"] * 10**5),
    completion("a stop string of 8 MB", "stop", stop="a" * 8 * 10**6),
    completion("bad_words", "bad_words", bad_words=["a"] * 10**5),
    completion("cache_salt", "cache_salt", cache_salt="a" * MB),
    chat("metadata", "metadata", metadata={str(i): "" for i in range(10**4)}),
    completion("a prompt of 8 MB", "prompt", prompt="a " * 4 * 10**6),
    completion("a prompt of one 8 MB word", "prompt", prompt="a" * 8 * 10**6),
    completion("a prompt of 7 MB of emoji", "prompt", prompt="🐋" * 580_000),
    Body("tokenize 8 MB", "/tokenize", lambda: {"prompt": " " * 8 * 10**6}, "prompt"),
    Body("10,000 messages", CHAT, lambda: {"messages": QUESTION * 10_000}, "messages"),
    # Chat templates (CVE-2025-62426, CVE-2025-61620)
    chat("template", "chat_template", chat_template="{% for i in range(10**9) %}{% endfor %}"),
    *(
        chat(f"template variable {name}", "chat_template_kwargs", chat_template_kwargs={name: True})
        for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
    ),
    chat("template variable: a list", "chat_template_kwargs.a", chat_template_kwargs={"a": [[[]]]}),
    chat("10,000 template variables", "chat_template_kwargs", chat_template_kwargs={str(i): 1 for i in range(10**4)}),
    Body("roles", CHAT, lambda: {"messages": [{"role": "{{ 7 * 7 }}", "content": "a"}]}, "messages.0.role"),
    Body(
        "arguments without an end",
        CHAT,
        lambda: {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 10**6}}]}]},
        "messages",
    ),
    # Tools (CVE-2025-48944)
    chat("1,000 tools", "tools", tools=[tool({})] * 1000),
    chat("a tool without a name", "tools.0.function.name", tools=[{"type": "function", "function": {}}]),
    chat("a tool of no type", "tools.0.type", tools=[{"function": {"name": "f"}}]),
    chat("a bad pattern in a tool", "tools[0].function.parameters", tool_choice="required",
         tools=[tool({"properties": {"a": {"type": "string", "pattern": "("}}})]),
    chat("a bad type in a tool", "tools[0].function.parameters", tool_choice="required",
         tools=[tool({"properties": {"a": {"type": "something"}}})]),
    chat("a deep tool", "tools[0].function.parameters", tool_choice="required", tools=[tool(nested(90))]),
    chat("a large tool", "messages", tool_choice="required",
         tools=[tool({"enum": ["a" * 100 + str(i) for i in range(5000)]})]),
    chat("a choice of no tool", "tool_choice", tool_choice={"type": "function", "function": {"name": "g"}}),
    # Schemas (CVE-2025-48942, CVE-2025-57809, llama.cpp #26600)
    schema("deep", nested(90)),
    schema("deep by anyOf", nested(90, "anyOf")),
    schema("long", {"enum": ["a" * 20 + str(i) for i in range(10_000)]}),
    schema("no schema", {"type": "stsring"}),
    schema("refers to itself", {"$ref": "#"}),
    schema("refers to nothing", {"$ref": "#/$defs/a"}),
    schema("refers to the network", {"$ref": "http://169.254.169.254/latest"}),
    schema("refers to a file", {"$ref": "file:///etc/passwd"}),
    schema("bad pattern", {"type": "string", "pattern": "(?<=a"}),
    schema("looks ahead", {"type": "string", "pattern": "^(?=a)(?!b)"}),
    schema("an intersection of patterns", {"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijkl"]}),
    schema("lengths that cannot be", {"type": "string", "minLength": 10, "maxLength": 1}),
    # Expressions (CVE-2025-48943) and grammars (llama.cpp #3878, #4492)
    grammar("unbalanced", "regex", "(" * 5000),
    grammar("a huge repeat", "regex", "a{1000000000}"),
    grammar("a huge repeat of repeats", "regex", "(a{1000}){1000}"),
    schema("a huge repeat in a pattern", {"type": "object", "properties": {"a": {"pattern": "^a{1000000}$"}}}),
    grammar("refers back", "regex", r"(a)\1"),
    grammar("64 KB and more", "regex", "a" * 70_000),
    grammar("no rule", "grammar", "root ::= a"),
    grammar("deep", "grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    grammar("calls itself first", "grammar", 'start: start start | "a" | missing'),
    custom("deep", "tools", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    custom("doubles", "tools", "start: a0\n" + "".join(f"a{i}: a{i + 1}~2 a{i + 1}\n" for i in range(60)) + 'a60: "b"'),
    custom("calls itself", "tools", 'start: "a" start | "b"'),
    custom("64 KB and more", "tools", "a" * 70_000, "regex"),
    custom("a huge repeat", "tools[0].format.definition", 'start: "a"~1000000000'),
    grammar("of nothing", "choice", []),
    grammar("100,000", "choice", ["a"] * 10**5),
    chat("two grammars", "structured_outputs.choice", structured_outputs={"regex": "a", "choice": ["a"]}),
    # JSON
    *(text(f"number {value}", f'{{"prompt": "a", "temperature": {value}}}') for value in ("NaN", "-Infinity", "1e400")),
    text("digits", '{"prompt": "a", "temperature": ' + "9" * 10**6 + "}"),
    text("deep arrays", '{"prompt": ' + "[" * 10**6 + "]" * 10**6 + "}"),
    text("deep objects", '{"prompt": ' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}"),
    text("half a character", '{"prompt": "\\ud800"}'),
    text("surrogates in UTF-8", '{"prompt": "\ud800"}'),
    text("a mark of byte order", '\ufeff{"prompt": "a"}'),
    text("an end too early", '{"prompt": "a"'),
    text("two documents", '{"prompt": "a"}{"prompt": "b"}'),
    text("a zero byte", '{"prompt": "a\0"}'),
    text("nothing", ""),
    Body("no UTF-8", COMPLETIONS, lambda: b'{"prompt": "\xff\xfe"}', None),
    Body("UTF-16", COMPLETIONS, lambda: '{"prompt": "a"}'.encode("utf-16"), None),
    Body("4 M numbers", COMPLETIONS, lambda: b'{"prompt":' + NUMBERS + b"}", None),
    Body("4 M numbers in a field of none", CHAT, lambda: b'{"a":' + NUMBERS + b"}", None),
    Body("2 M texts", COMPLETIONS, lambda: b'{"prompt":["",' + b'"",' * (2 * MB) + b'""]}', None),
    Body("quotation marks", COMPLETIONS, lambda: b'"' * 8 * MB, None),
    Body("backslashes", COMPLETIONS, lambda: b'"' + b"\\" * (8 * MB - 2), None),
    Body("a million names", CHAT, lambda: {str(i): 1 for i in range(400_000)}, None),
    text("backslashes and an escaped mark", '{"prompt": "' + "\\" * (8 * 10**6) + '\\"'),
    completion("300,000 ids and a text", "prompt.300000", prompt=[1] * 300_000 + ["a"]),
    completion("300,000 ids and a negative one", "prompt.300000", prompt=[5000] * 300_000 + [-1]),
    completion("500,000 ids and a text", None, prompt=[1] * 500_000 + ["a"]),
    Body("300,000 ids and a text to embed", "/v1/embeddings",
         lambda: {"input": [[1] * 300_000 + ["a"]]}, "input.0.300000"),
    Body("300,000 ids and a text to detokenize", "/detokenize",
         lambda: {"tokens": [1] * 300_000 + ["a"]}, "tokens.300000"),
    Body("20,000 items of no type", "/v1/responses", lambda: {"input": [{"type": "a"}] * 20_000}, "input.0.type"),
    Body("20,000 bad items", "/v1/responses", lambda: {"input": [{"role": "user", "content": 1}] * 20_000},
         "input.0.content"),
    Body("20,000 bad messages", "/v1/messages",
         lambda: {"max_tokens": 1, "messages": [{"role": "user", "content": 1}] * 20_000}, "messages.0.content"),
    Body("60,000 unknown names in a message", CHAT,
         lambda: {"messages": [{**QUESTION[0], **{str(i): 1 for i in range(60_000)}}]}, "messages.0.0"),
    Body("60,000 unknown names", CHAT, lambda: {"messages": QUESTION, **{str(i): 1 for i in range(60_000)}}, "0"),
    Body("a million objects", CHAT, lambda: b'{"messages":[' + b"{}," * MB + b"{}]}", None),
    Body("compressed", COMPLETIONS, lambda: gzip.compress(b" " * 10**6), None, 415, {"Content-Encoding": "gzip"}),
    Body("a form", COMPLETIONS, lambda: b"prompt=a&max_tokens=1", None),
    Body("too long", COMPLETIONS, lambda: b" " * (8 * MB + 1), None, 413),
    # Grammars of 64 KB that are deep by their references: each overflowed the stack of the process that compiled it
    *(deep(name) for name in ("anyOf", "oneOf", "rules after a text", "alternatives", "optional rules")),
    *(deep(name) for name in ("repeated rules", "repeated terminals")),
    # Names of models
    *(
        Body(f"model {name}"[:30], CHAT, lambda name=name: {"messages": QUESTION, "model": name}, "model", 404)
        for name in ("../../etc/passwd", "/etc/passwd", "a\0b", "{{7*7}}", "\r\nX: 1", "%2e%2e")
    ),
    Body("a long model", CHAT, lambda: {"messages": QUESTION, "model": "a" * 10**6}, "model"),
]  # fmt: skip


# For a context of 131,072 tokens, each of up to 128 characters: no text of 8 MB is refused by its length alone. Most of
# these cannot be split into pieces.
LONG_TEXTS = [
    Body("one word", COMPLETIONS, lambda: {"prompt": "a" * 7_900_000}, "prompt"),
    Body("digits", COMPLETIONS, lambda: {"prompt": "1" * 7_900_000, "echo": True}, "prompt"),
    Body("no spaces", COMPLETIONS, lambda: b'{"prompt": "%s"}' % ("日本語" * 800_000).encode(), "prompt"),
    Body("one word in a message", CHAT,
         lambda: {"messages": [{"role": "user", "content": "a" * 7_900_000}]}, "messages"),
    Body("numbers to spell", "/tokenize", lambda: {"prompt": "ab1 " * 1_900_000, "return_token_strs": True}, "prompt"),
    Body("numbers to count", f"{RESPONSES}/input_tokens", lambda: {"input": "a1 1 1 1 " * 840_000}, "input"),
    Body("tags in 4,001 messages", "/apply-template",
         lambda: {"messages": [{"role": ("user", "assistant")[i % 2], "content": "</think>x" * 100}
                               for i in range(4001)]}, "messages"),
]  # fmt: skip


def long_context_model(data: Path, folder: Path) -> Path:
    """Write a model of one small layer with Qwen3's tokenizer, to be served with `--load-format dummy`."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(data / "tokenizers" / "qwen3" / name)
    config = json.loads((data / "configs" / "qwen3-0.6b" / "config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    written = {**config, **small, **heads, "max_position_embeddings": 131_072}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


# Odd, and no reason to refuse: answered like any other request, with at most 8 tokens here.
ODD = {
    "the coldest temperature": {"temperature": 5e-324},
    "the smallest top_p": {"top_p": 5e-324},
    "the strongest penalty": {"repetition_penalty": 1e-9, "presence_penalty": -2, "frequency_penalty": -2},
    "the largest seed": {"seed": 2**64 - 1},
    "the smallest seed": {"seed": -(2**63)},
    "a key that stands twice": b'{"prompt": "a", "max_tokens": 2147483647, "max_tokens": 8}',
    "repeats of repeats": {"structured_outputs": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}},
    "a billion items": {"structured_outputs": {"json": {"type": "array", "minItems": 10**12}}},
    "a pattern that others search for ever": {"structured_outputs": {"regex": "(a|a)*(a|aa)+$"}},
    "all stop strings": {"stop": ["\u2028" * 1024] * 16},
    "all choices and log-probabilities": {"n": 16, "logprobs": 20},
    "a prompt of zero bytes": {"prompt": "\0" * 100},
    "a prompt of marks": {"prompt": "<|im_start|><|im_end|><|endoftext|>" * 20},
    "a prompt that is a template": {"prompt": "{% for i in range(10**9) %}{{ i }}{% endfor %}"},
    "white space": b" " * MB + b'{"prompt": "a", "max_tokens": 8}' + b"\n" * MB,
}


for _name in ("items", "anyOf of one", "allOf", "rules", "terminals", "terminals after a text"):
    _kind, _make = DEEP[_name]
    _written = _make()
    ODD[f"deep {_name}"] = {
        "structured_outputs": {"grammar": _written} if _kind == "lark" else {"json": json.loads(_written)}
    }


def head(*lines: str, first: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join([first, "Host: localhost", *lines, "", ""]).encode("latin-1")


JSON = "Content-Type: application/json"

RAW = [
    Raw("no HTTP", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, (400,)),
    Raw("a line of words", lambda: b"call me ishmael\r\n\r\n", (400,)),
    Raw("HTTP/2 at once", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Raw("an upgrade to HTTP/2", lambda: head(
        "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", JSON,
        "Content-Length: 15") + b'{"prompt": "a"}', (200,)),
    Raw("an upgrade to websockets", lambda: head(
        "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA",
        first="GET /v1/completions HTTP/1.1"), (405,)),
    Raw("a method of its own", lambda: head(first="BREW /v1/completions HTTP/1.1"), (400,)),
    Raw("TRACE", lambda: head(first="TRACE /v1/completions HTTP/1.1"), (405,)),
    Raw("CONNECT", lambda: head(first="CONNECT example.org:443 HTTP/1.1"), (400, 404, 405)),
    Raw("OPTIONS of everything", lambda: head(first="OPTIONS * HTTP/1.1"), (400, 404, 405)),
    Raw("another host's address", lambda: head(first="GET http://example.org/ready HTTP/1.1"), (200, 400)),
    Raw("two hosts", lambda: head("Host: b", first="GET /ready HTTP/1.1"), (400,)),
    Raw("a foreign host", lambda: b"GET /ready HTTP/1.1\r\nHost: evil.example\r\n\r\n", (400,)),
    Raw("a path out of the tree", lambda: head(first="GET /../../etc/passwd HTTP/1.1"), (404,)),
    Raw("an escaped path", lambda: head(first="GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1"), (404,)),
    Raw("a zero byte in the path", lambda: head(first="GET /v1/models/a%00b HTTP/1.1"), (404,)),
    Raw("a path of 1 MB", lambda: head(first=f"GET /{'a' * MB} HTTP/1.1"), (400, 404, 431)),
    Raw("a header of 100 KB", lambda: head("X-A: " + "a" * 100_000), (431,)),
    Raw("a header of 1 MB", lambda: head("X-A: " + "a" * MB), (431,)),
    Raw("a header without an end", lambda: head().removesuffix(b"\r\n") + b"X-A: " + b"a" * 2 * MB, (431,)),
    Raw("20,000 headers", lambda: head(*[f"X-{i}: a" for i in range(20_000)]), (431,)),
    Raw("a header with a zero byte", lambda: head("X-A: \0"), (400,)),
    Raw("a header over two lines", lambda: head("X-A: a", " b", first="GET /ready HTTP/1.1"), (200, 400)),
    Raw("two lengths", lambda: head(JSON, "Content-Length: 15", "Content-Length: 16") + b'{"prompt": "a"}', (400,)),
    Raw("a length and chunks", lambda: head(JSON, "Content-Length: 4", "Transfer-Encoding: chunked")
        + b"0\r\n\r\nGET /ready HTTP/1.1\r\n\r\n", (400,)),
    Raw("a length of 10 GB", lambda: head(JSON, f"Content-Length: {10**10}"), (413,)),
    Raw("a length of many digits", lambda: head(JSON, "Content-Length: " + "9" * 100), (400,)),
    Raw("a negative length", lambda: head(JSON, "Content-Length: -1"), (400,)),
    Raw("a length that is too short", lambda: head(JSON, "Content-Length: 3") + b'{"prompt": "a"}', (400,)),
    Raw("a chunk of no size", lambda: head(JSON, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n", (0, 400)),
    Raw("chunks without an end", lambda: head(JSON, "Transfer-Encoding: chunked") + b"10000\r\n" * 0
        + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 130, (413,)),
    Raw("a chunk of 16 EB", lambda: head(JSON, "Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n", (0, 400)),
    Raw("another encoding", lambda: head(JSON, "Transfer-Encoding: gzip"), (400,)),
    Raw("trailers without an end", lambda: head(JSON, "Transfer-Encoding: chunked")
        + b"0\r\n" + b"X-A: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 20_000, (400, 431)),
]  # fmt: skip
