"""`pequod bench invariance`: does a request's answer depend on its company?"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..commands import Parser
from . import options
from .client import Ask, Shot
from .figures import notes
from .session import Session, opened, tell
from .show import check, give, number

LONGEST_PROMPT = 200  # tokens: several blocks and, in company, several chunks
SPREAD_S = 0.01  # seconds on average between two arrivals in company, so that prompts and answers overlap


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench invariance {options.URL_USAGE}"
    parser.description = (
        "Send each request alone, then all of them again in random order and company, and count the tokens that differ"
        " and the bits of the log-probabilities of those that do not. Half of the requests are greedy, half are drawn"
        " with a seed. The second time finds prompts in the prefix cache. Exit code 1 when the server claims to be"
        " exact and something differs."
    )
    box = parser.add_argument_group("requests")
    box.add_argument("--requests", metavar="N", type=options.whole(1), default=200, help="requests (default: 200)")
    box.add_argument(
        "--concurrency", metavar="N", type=options.whole(2), default=16, help="most of them together (default: 16)"
    )
    box.add_argument(
        "--output-len", metavar="N", type=options.whole(1), default=24, help="tokens of each answer (default: 24)"
    )
    options.add_server(parser)
    options.add_output(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    """Print what differed."""
    check(arguments)
    result = asyncio.run(measure(arguments))
    give(arguments, result, shown(result))
    return 1 if result["exact"] and (result["tokens_differing"] or result["bits_differing"]) else 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON has it."""
    async with opened(arguments) as session:
        asks = requests(session, arguments.requests, arguments.output_len)
        alone = await session.send(asks, 1, "alone")
        rng = random.Random(session.seed)
        order = rng.sample(range(len(asks)), len(asks))
        at, shuffled = 0.0, []
        for index in order:
            at += rng.expovariate(1 / SPREAD_S)
            shuffled.append(replace(asks[index], at=at))
        together = await session.send(shuffled, arguments.concurrency, "in company")
        pairs = [(alone.shots[index], shot) for index, shot in zip(order, together.shots, strict=True)]
        told = notes(session.target, [*alone.shots, *together.shots])
        found = [compare(a, b) for a, b in pairs if a.ok and b.ok]
        result = {
            "bench": "invariance",
            **session.about(),
            "workload": {
                "requests": len(asks),
                "concurrency": arguments.concurrency,
                "output_len": arguments.output_len,
            },
            "exact": session.target.version.get("exact"),
            "requests_compared": len(found),
            "requests_differing": sum(1 for each in found if each.tokens or each.logprobs),
            "tokens": sum(each.compared for each in found),
            "tokens_differing": sum(each.tokens for each in found),
            "logprobs": sum(each.scored for each in found),
            "logprobs_differing": sum(each.logprobs for each in found),
            "bits_differing": sum(each.bits for each in found),
            "largest_difference": max((each.largest for each in found), default=0.0),
            "notes": told,
        }
    tell(result["notes"])
    return result


def requests(session: Session, count: int, output_len: int) -> list[Ask]:
    """Requests of all lengths, every other one drawn."""
    rng = random.Random(f"{session.seed}/invariance")
    longest = min(LONGEST_PROMPT, (session.target.max_len or 10**9) - output_len)
    scores: dict[str, Any] = {"logprobs": 0} if session.target.api == "completions" else {"logprobs": True}
    asks = []
    for index in range(count):
        drawn = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        ask = session.prompts.ask(rng.randint(1, max(1, longest)), output_len)
        asks.append(replace(ask, body={**scores, **drawn}))
    return asks


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers to one request."""

    compared: int  # tokens
    tokens: int  # of them that differ, or that only one answer has
    scored: int  # log-probabilities of equal tokens after equal ones
    logprobs: int  # of them that differ
    bits: int
    largest: float


def compare(alone: Shot, together: Shot) -> Difference:
    """Token by token; log-probabilities up to the first token that differs, since then the texts are different ones."""
    a: Sequence[Any] = alone.token_ids or list(alone.text)
    b: Sequence[Any] = together.token_ids or list(together.text)
    length = max(len(a), len(b))
    same = next((i for i in range(length) if a[i : i + 1] != b[i : i + 1]), length)
    differing = sum(1 for i in range(length) if a[i : i + 1] != b[i : i + 1])
    scores = list(zip(alone.logprobs[:same], together.logprobs[:same], strict=False))
    unlike = [(x, y) for x, y in scores if x != y]
    return Difference(
        compared=length,
        tokens=differing,
        scored=len(scores),
        logprobs=len(unlike),
        bits=sum((bits_of(x) ^ bits_of(y)).bit_count() for x, y in unlike),
        largest=max((abs(x - y) for x, y in unlike), default=0.0),
    )


def bits_of(value: float) -> int:
    """A number's bits as float32, which nine digits give exactly."""
    return int.from_bytes(struct.pack("<f", value), "little")


def shown(result: dict[str, Any]) -> str:
    """The result in sentences."""
    work, server = result["workload"], result["server"]
    claims = {True: "says that it is exact", False: "says that it is not exact"}.get(
        result["exact"], "does not say whether it is exact"
    )
    return "\n".join(
        [
            f"{server['name']}, {server['model']}, {claims}: {work['requests']} requests alone,"
            f" then at most {work['concurrency']} together",
            f"{result['tokens_differing']:,} of {result['tokens']:,} tokens differ",
            f"{result['bits_differing']:,} bits differ, in {result['logprobs_differing']:,} of {result['logprobs']:,}"
            f" log-probabilities, by at most {number(result['largest_difference'])}",
            f"{result['requests_differing']} of {result['requests_compared']} requests were answered differently",
        ]
    )
