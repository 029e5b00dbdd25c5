"""`pequod bench invariance`: checks whether a completion depends on the other requests in its batch."""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..commands import Parser
from . import options
from .client import Ask, Shot
from .figures import notes
from .session import Session, opened
from .show import Result, number, report, server_and_model

LONGEST_PROMPT = 200  # tokens: several blocks and, in a batch, several chunks
SPREAD_S = 0.01  # mean seconds between two arrivals in a batch, so that prefill and decode overlap


def add_arguments(parser: Parser) -> None:
    parser.usage = f"pequod bench invariance {options.URL_USAGE}"
    parser.description = (
        "Send each request alone, then all of them again in random order and together, and count the tokens that differ"
        " and the bits that differ in the log-probabilities of equal tokens. Half of the requests are greedy, half are"
        " sampled with a seed. The second time, prompts are in the prefix cache. Characters are compared where the"
        " server returns no token ids. The exit code is 1 if a request failed, or if the server reports that it is"
        " exact and something differs."
    )
    box = parser.add_argument_group("requests")
    options.add_number(box, "--requests", 200, "requests")
    options.add_number(box, "--concurrency", 16, "maximum open requests", minimum=2)
    options.add_number(box, "--output-len", 24, "tokens of each output")
    options.add_server(parser)
    options.add_output(parser, plots=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Returns 1 if an exact server has any, or if not every request could be compared."""
    result = report(arguments, measure, shown)
    is_wrong = result["exact"] and (result["tokens_differing"] or result["bits_differing"])
    return 1 if is_wrong or result["requests_compared"] < result["workload"]["requests"] else 0


async def measure(arguments: argparse.Namespace) -> Result:
    async with opened(arguments) as session:
        asks = requests(session, arguments.requests, arguments.output_len)
        alone = await session.send(asks, 1, "alone")
        rng = random.Random(session.seed)
        order = rng.sample(range(len(asks)), len(asks))
        at, shuffled = 0.0, []
        for index in order:
            at += rng.expovariate(1 / SPREAD_S)
            shuffled.append(replace(asks[index], at=at))
        together = await session.send(shuffled, arguments.concurrency, "together")
        pairs = [(alone.shots[index], shot) for index, shot in zip(order, together.shots, strict=True)]
        good = [(a, b) for a, b in pairs if a.ok and b.ok]
        found = [compare(a, b) for a, b in good]
        return {
            "bench": "invariance",
            **session.about(),
            "workload": options.chosen(arguments, "requests", "concurrency", "output_len"),
            "exact": session.target.version.get("exact"),
            "unit": "tokens" if any(has_ids(*pair) for pair in good) else "characters",  # of the counts of tokens
            "requests_compared": len(found),
            "requests_differing": sum(1 for each in found if each.tokens or each.logprobs),
            "tokens": sum(each.compared for each in found),
            "tokens_differing": sum(each.tokens for each in found),
            "logprobs": sum(each.scored for each in found),
            "logprobs_differing": sum(each.logprobs for each in found),
            "bits_differing": sum(each.bits for each in found),
            "largest_difference": max((each.largest for each in found), default=0.0),
            "notes": notes(session.target, [*alone.shots, *together.shots]),
        }


def requests(session: Session, count: int, output_len: int) -> list[Ask]:
    """Return requests with prompts of random lengths; every other request is sampled, the rest are greedy."""
    rng = random.Random(f"{session.seed}/invariance")
    longest = min(LONGEST_PROMPT, (session.target.max_len or 10**9) - output_len)
    scores: dict[str, Any] = {"logprobs": 0} if session.target.api == "completions" else {"logprobs": True}
    asks = []
    for index in range(count):
        sampling = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        ask = session.prompts.ask(rng.randint(1, max(1, longest)), output_len)
        asks.append(replace(ask, body={**scores, **sampling}))
    return asks


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two completions of a request."""

    compared: int  # tokens
    tokens: int  # that differ, or that only one completion has
    scored: int  # log-probabilities of the tokens before the first difference
    logprobs: int  # that differ
    bits: int
    largest: float


def compare(alone: Shot, together: Shot) -> Difference:
    """Compare tokens, and the log-probabilities up to the first token that differs: after it the contexts differ."""
    a: Sequence[Any] = alone.text
    b: Sequence[Any] = together.text
    if has_ids(alone, together):
        a, b = alone.token_ids, together.token_ids
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


def has_ids(*shots: Shot) -> bool:
    """Return whether the server has returned the ids of all tokens."""
    return all(shot.token_ids for shot in shots)


def bits_of(value: float) -> int:
    """Return the bits of a number as float32, which the nine digits of a response determine."""
    return int.from_bytes(struct.pack("<f", value), "little")


def shown(result: Result) -> str:
    work = result["workload"]
    claims = {True: "reports that it is exact", False: "reports that it is not exact"}
    claim = claims.get(result["exact"], "does not report whether it is exact")
    return "\n".join(
        [
            f"{server_and_model(result)}, {claim}: {work['requests']} requests alone,"
            f" then at most {work['concurrency']} together",
            f"{result['tokens_differing']:,} of {result['tokens']:,} {result['unit']} differ",
            f"{result['bits_differing']:,} bits differ, in {result['logprobs_differing']:,} of {result['logprobs']:,}"
            f" log-probabilities, by at most {number(result['largest_difference'])}",
            f"{result['requests_differing']} of {result['requests_compared']} requests have different responses;"
            f" {work['requests'] - result['requests_compared']} of {work['requests']} could not be compared",
        ]
    )
