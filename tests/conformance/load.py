"""Load clients of other projects: each run ends without an error, and its counts are those of Pequod's metrics.

A client's count of requests must equal the number of responses with status 200 on the path that it asked, and its
counts of tokens the increase of vllm:prompt_tokens_total and vllm:generation_tokens_total. sglang's count of prompt
tokens is left out, for it reports the number that it wanted, not that of the text it sent; aiperf counts no tokens of
embeddings.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.live import Server

from .place import MODEL, TOKENIZER, Place, Report, failed_run
from .verdicts import Result

REQUESTS, CONCURRENCY, PROMPT, OUTPUT = 16, 4, 64, 32
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}


@dataclass(frozen=True)
class Counts:
    """Requests and tokens; None where a client does not count them."""

    requests: int
    prompt: int | None
    generated: int | None


def measured(server: Server, path: str) -> Counts:
    """What the server has counted so far."""
    return Counts(
        int(server.metric("http_requests_total", handler=path, status="200")),
        int(server.metric("vllm:prompt_tokens_total")),
        int(server.metric("vllm:generation_tokens_total")),
    )


def checks(kind: str, client: Counts, before: Counts, after: Counts) -> Iterable[Result]:
    """One result per count that the client made."""
    names = {"requests": "requests", "prompt": "prompt tokens", "generated": "generated tokens"}
    for field, name in names.items():
        own, served = getattr(client, field), getattr(after, field) - getattr(before, field)
        if own is not None:
            message = "" if own == served else f"the client counted {own}, Pequod {served}"
            yield Result(f"{kind}: {name}", "failed" if message else "passed", message)


class Client:
    """A load client: its command for a kind of request, and how to read the file that it writes."""

    kinds: tuple[str, ...]
    packages: tuple[str, ...]

    def __init__(self, environment: pathlib.Path, url: str) -> None:
        self.bin = environment / "bin"
        self.url = url

    def command(self, kind: str, output: pathlib.Path) -> list[object]:
        raise NotImplementedError

    def counts(self, kind: str, output: pathlib.Path) -> Counts:
        """The counts in the file that the run wrote into `output`; requests are those that succeeded."""
        raise NotImplementedError

    env: dict[str, str] = {"HF_HUB_OFFLINE": "1"}


class Vllm(Client):
    kinds = ("completions", "chat", "responses", "embeddings")
    packages = ("vllm",)
    backends = {
        "completions": "openai",
        "chat": "openai-chat",
        "responses": "openai-responses",
        "embeddings": "openai-embeddings",
    }

    def command(self, kind: str, output: pathlib.Path) -> list[object]:
        generation = () if kind == "embeddings" else ("--random-output-len", OUTPUT, "--ignore-eos")
        return [
            self.bin / "vllm", "bench", "serve", "--backend", self.backends[kind], "--endpoint", PATHS[kind],
            "--base-url", self.url, "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random",
            "--random-input-len", PROMPT, *generation, "--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY,
            "--disable-tqdm", "--save-result", "--result-dir", output, "--result-filename", "result.json",
        ]  # fmt: skip

    def counts(self, kind: str, output: pathlib.Path) -> Counts:
        found = json.loads((output / "result.json").read_text())
        generated = None if kind == "embeddings" else found["total_output_tokens"]
        return Counts(found["completed"], found["total_input_tokens"], generated)


class Sglang(Client):
    kinds = ("completions", "chat", "embeddings")
    packages = ("sglang",)
    backends = {"completions": "vllm", "chat": "vllm-chat", "embeddings": "vllm-embedding"}

    def command(self, kind: str, output: pathlib.Path) -> list[object]:
        return [
            self.bin / "python", pathlib.Path(__file__).parent / "sglang_bench.py", "--backend", self.backends[kind],
            "--base-url", self.url, "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random-ids",
            "--random-input-len", PROMPT, "--random-output-len", OUTPUT, "--random-range-ratio", "1.0",
            "--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY, "--warmup-requests", 0,
            "--disable-tqdm", "--output-file", output / "result.jsonl",
        ]  # fmt: skip

    def counts(self, kind: str, output: pathlib.Path) -> Counts:
        found = json.loads((output / "result.jsonl").read_text().splitlines()[-1])
        return Counts(found["completed"], None, None if kind == "embeddings" else found["total_output_tokens"])


class Guidellm(Client):
    kinds = ("completions", "chat", "responses", "embeddings")
    packages = ("guidellm",)
    env: dict[str, str] = {**Client.env, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}

    def command(self, kind: str, output: pathlib.Path) -> list[object]:
        return [
            self.bin / "guidellm", "run",
            "--backend", f"kind=openai_http,target={self.url},model={MODEL},request_format={PATHS[kind]}",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
            "--profile", f"kind=concurrent,streams={CONCURRENCY}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--output", f"kind=json,path={output / 'result.json'}", "--disable-console",
        ]  # fmt: skip

    def counts(self, kind: str, output: pathlib.Path) -> Counts:
        [benchmark] = json.loads((output / "result.json").read_text())["benchmarks"]
        metrics: dict[str, Any] = benchmark["metrics"]
        prompt, generated = (
            round(metrics[f"{name}_token_count"]["successful"]["total_sum"]) for name in ("prompt", "output")
        )
        return Counts(metrics["request_totals"]["successful"], prompt, None if kind == "embeddings" else generated)


class Aiperf(Client):
    kinds = ("completions", "chat", "responses", "embeddings")
    packages = ("aiperf",)
    # Offline it takes every tokenizer for a name of the hub, also a folder.
    env: dict[str, str] = {}

    def command(self, kind: str, output: pathlib.Path) -> list[object]:
        length: tuple[object, ...] = ("--osl", OUTPUT, "--extra-inputs", "ignore_eos:true")
        # aiperf reads no usage from the event of a response that was cut off, so these end by themselves.
        generation = {"embeddings": (), "responses": ("--streaming",)}.get(kind, ("--streaming", *length))
        return [
            self.bin / "aiperf", "profile", "--model", MODEL, "--url", self.url, "--endpoint-type", kind,
            "--tokenizer", TOKENIZER, "--isl", PROMPT, *generation, "--request-count", REQUESTS,
            "--concurrency", CONCURRENCY, "--workers-max", 1, "--record-processors", 1, "--random-seed", 1,
            "--no-gpu-telemetry", "--ui", "none", "--artifact-dir", output,
        ]  # fmt: skip

    def counts(self, kind: str, output: pathlib.Path) -> Counts:
        found = json.loads((output / "profile_export_aiperf.json").read_text())
        requests = round(found["request_count"]["avg"])
        if kind == "embeddings":
            return Counts(requests, None, None)
        prompt, generated = (round(found[f"total_usage_{name}_tokens"]["avg"]) for name in ("prompt", "completion"))
        return Counts(requests, prompt, generated)


CLIENTS: dict[str, type[Client]] = {"vllm": Vllm, "sglang": Sglang, "guidellm": Guidellm, "aiperf": Aiperf}


def run(place: Place, name: str) -> Report:
    """Every kind of request of one client."""
    environment = place.environment(name)
    server = place.open_server
    client = CLIENTS[name](environment, server.url)
    results: list[Result] = []
    for kind in client.kinds:
        output = place.folder / f"{name}-{kind}"
        output.mkdir()
        before = measured(server, PATHS[kind])
        done = place.run(*client.command(kind, output), env=client.env)
        after = measured(server, PATHS[kind])
        try:
            counts = client.counts(kind, output)
        except (OSError, ValueError, KeyError, IndexError) as error:
            message = f"its results cannot be read ({error!r}); {failed_run(done)}"
            results.append(Result(f"{kind}: no errors", "failed", message))
            continue
        ended = done.returncode == 0 and counts.requests == REQUESTS
        message = f"{counts.requests} of {REQUESTS} requests succeeded; {failed_run(done)}"
        results.append(Result(f"{kind}: no errors", "passed" if ended else "failed", "" if ended else message))
        results += checks(kind, counts, before, after)
    return Report(place.versions(environment, *client.packages), results)
