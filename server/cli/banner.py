"""Prints the progress of loading, and the banner when the server is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO
from urllib.parse import urlsplit

from ..settings import Settings, with_flags

if TYPE_CHECKING:
    from engine import Engine, EngineInfo

REFRESH_S = 0.1
ANYWHERE = ("0.0.0.0", "::")
QUESTION = "What is continuous batching?"
NOTES = {
    "builtin": "This small model was trained for demonstration: it can answer a few questions about Pequod, no more."
    " `pequod pull smollm2` downloads a chat model of 94 MB, which is then the default.",
    "smollm2": "This model is small: a larger one, named as MODEL, answers better.",
}
NAMES = "; names with a dot, such as host.docker.internal, need --allowed-hosts or an API key"
EXACT = "exact: a request has the same bits alone and in any batch"
INEXACT = "equal up to rounding: a batch's other requests can change the last bits of a sum"

log = logging.getLogger("pequod")


def url(settings: Settings, where: tuple[str, int] | Path) -> str:
    """Return the server's URL for clients on this machine. `where`: the address or the socket that it listens on."""
    scheme = "https" if settings.ssl_certfile else "http"
    if isinstance(where, Path):
        return f"{scheme}://localhost"
    host = "localhost" if settings.host in ANYWHERE else settings.host
    return f"{scheme}://[{host}]:{where[1]}" if ":" in host else f"{scheme}://{host}:{where[1]}"


def curl(settings: Settings, where: tuple[str, int] | Path, has_template: bool) -> str:
    """Return a curl command that sends a request to this server."""
    words = ["curl"]
    if isinstance(where, Path):
        words += ["--unix-socket", str(where)]
    if settings.ssl_certfile:
        words += ["--cacert", str(settings.ssl_certfile)]
    base = url(settings, where)
    host = base.split("://")[1].rsplit(":", 1)[0].strip("[]")
    if settings.hosts is not None and host not in settings.hosts:
        words += ["-H", f"Host: {settings.hosts[0]}"]
    name = settings.names[0]
    body: dict[str, object] = {"model": name, "max_tokens": 100}
    path = "chat/completions" if has_template else "completions"
    body |= {"messages": [{"role": "user", "content": QUESTION}]} if has_template else {"prompt": "Once upon a time"}
    words += [f"{base}/v1/{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    line = " ".join(shlex.quote(word) for word in words)
    # The shell inserts the first key, so that it does not appear on the screen.
    key = "$PEQUOD_API_KEY" if len(settings.api_key) <= 1 else "${PEQUOD_API_KEY%%,*}"
    return line + (f' -H "Authorization: Bearer {key}"' if settings.keys else "")


def chat_page(settings: Settings, where: tuple[str, int] | Path) -> str | None:
    """Return the URL of the chat page for a browser on this machine; None if none can open it."""
    if not settings.webui or isinstance(where, Path):
        return None
    address = url(settings, where) + "/"
    if settings.hosts is None or urlsplit(address).hostname in settings.hosts:
        return address
    return None


def count(number: int, unit: str) -> str:
    """Return a number with its unit: `1 block`, `2 blocks`, `12,000 tokens`."""
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def size(num_bytes: float) -> str:
    """Return bytes in a readable unit: `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def parameters(number: int) -> str:
    """Return a parameter count in a readable unit: `1.5 M`, `8.0 B`."""
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def full_length_users(info: EngineInfo) -> str:
    """Return the number of requests of full length that the cache holds at once."""
    users = info.num_tokens / info.max_len
    number = f"{users:.1f}".removesuffix(".0") if users < 10 else f"{users:,.0f}"
    return f"{number} user" + ("" if number == "1" else "s")


def facts(info: EngineInfo, settings: Settings, where: tuple[str, int] | Path, seconds: float) -> list[tuple[str, str]]:
    """Return the banner's lines: label and text."""
    base = url(settings, where)
    kept = info.dtype if info.quantization == "none" else f"{info.quantization}, computed in {info.dtype}"
    if info.weight_packing != "none":
        kept += " compressed without loss"
    weights = f"{parameters(info.num_params)} parameters, {size(info.weights_bytes)} in {kept} on {info.device}"
    lines = [
        ("model", f"{', '.join(settings.names)} ({info.architecture}, {info.implementation} code)"),
        ("weights", weights),
        (
            "KV cache",
            f"{count(info.num_blocks, 'block')} of {info.block_size} = {count(info.num_tokens, 'token')}"
            f" in {info.kv_dtype} = {full_length_users(info)} at the full {info.max_len:,} tokens",
        ),
        (
            "steps",
            f"{count(info.max_seqs, 'request')} at once, {info.max_batched_tokens:,} tokens per step,"
            f" {info.attention} attention, {info.product} products" + (", CUDA graphs" if info.graphs else ""),
        ),
        ("results", EXACT if info.exact else INEXACT),
        ("API", f"{base}/v1" + (f" on the socket {where}" if isinstance(where, Path) else "")),
        ("pages", f"{base}/docs  {base}/metrics  {base}/ready"),
        ("started", f"in {seconds:.1f} s, of which loading took {info.load_seconds:.1f} s"),
    ]
    if settings.host in ANYWHERE and settings.uds is None:
        names = "" if settings.hosts is not None or settings.allows_any_host else NAMES
        lines.append(("network", f"listens on every address of this machine, port {base.rsplit(':', 1)[1]}{names}"))
    if not settings.keys and not settings.is_loopback:
        lines.append(("warning", "anyone who can reach this port can use the server; set --api-key"))
    if info.product_note:
        lines.append(("note", with_flags("; ".join(filter(None, [info.product_note, info.product_fix])))))
    lines += [("note", with_flags(note)) for note in info.notes]
    if settings.model in NOTES:
        lines.append(("note", NOTES[settings.model]))
    return lines


def announce(
    info: EngineInfo,
    settings: Settings,
    where: tuple[str, int] | Path,
    seconds: float,
    has_template: bool,
    *,
    stream: TextIO | None = None,
) -> None:
    """Print the banner: with colours on a terminal, as plain lines elsewhere, as a log line with --log-format json."""
    if settings.log_format == "json":
        fields = {"model": settings.names[0], "url": url(settings, where), "seconds": round(seconds, 3)}
        names = ("dtype", "device", "num_blocks", "block_size", "max_len", "quantization", "product", "exact")
        fields |= {name: getattr(info, name) for name in names}
        fields |= {"product_note": with_flags(info.product_note), "notes": [*map(with_flags, info.notes)]}
        log.info("ready", extra={"fields": fields})
        return
    stream = stream or sys.stdout
    lines = facts(info, settings, where, seconds)
    command = curl(settings, where, has_template)
    heading = "Try it, with a key in PEQUOD_API_KEY:" if settings.keys else "Try it:"
    if has_template and (page := chat_page(settings, where)):
        heading = f"Chat in a browser: {page}\n{heading}"
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        _print_rich(lines, heading, command, stream)
        return
    print("Pequod is ready", file=stream)
    for label, text in lines:
        print(f"  {label:<9} {text}", file=stream)
    print(f"{heading}\n  {command}", file=stream, flush=True)


def _print_rich(lines: list[tuple[str, str]], heading: str, command: str, stream: TextIO) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)  # rich itself honours NO_COLOR
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, Text(text, style="yellow" if label in ("warning", "note") else ""))
    console.print(Panel(table, title="[bold]Pequod is ready[/bold]", title_align="left", expand=False))
    console.print(heading)
    console.print(Text(command, style="green"), soft_wrap=True)  # one line, to be copied
    stream.flush()


@contextlib.asynccontextmanager
async def loading(engine: Engine, settings: Settings, stream: TextIO | None = None) -> AsyncIterator[None]:
    """Show the progress of loading on stderr: a bar on a terminal, a log line elsewhere."""
    stream = stream or sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb" or settings.log_format == "json":
        log.info("loading", extra={"fields": {"model": settings.model}})
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        bar = progress.add_task(f"loading {settings.model}", total=1.0)

        async def follow() -> None:
            while True:
                progress.update(bar, completed=engine.status.share)
                await asyncio.sleep(REFRESH_S)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()
