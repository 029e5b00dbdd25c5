"""Statistics of requests: percentiles of a run, medians and quartiles of several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..openai_client import TOGETHER_S
from .client import Shot, Target
from .load import Run

Figures = dict[str, float | None]
MOST_REASONS = 3  # why requests failed, in a note; results have all


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value below which a share (0 to 1) of the values lies, interpolated linearly; None without values."""
    import numpy as np

    given = list(values)
    return float(np.quantile(given, share)) if given else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None without any."""
    return percentile((value for value in values if value is not None), 0.5)


def summarize(run: Run) -> Figures:
    """Return a run's figures in seconds, tokens, and tokens per second. None: not observed.

    `tpot` is the mean time of a request's tokens after the first, `itl` the time between two chunks of a response.
    """
    good = [shot for shot in run.shots if shot.ok]
    ttfts = [shot.ttft for shot in good if shot.ttft is not None]
    per_token = [shot.time_per_token for shot in good if shot.time_per_token is not None]
    gaps = [gap for shot in good for gap in shot.gaps]
    whole = [shot.done - shot.sent for shot in good]
    output = sum(shot.tokens for shot in good)
    return {
        "requests": len(run.shots),
        "failed": len(run.shots) - len(good),
        "wall_s": run.wall,
        "prompt_tokens": sum(shot.prompt_tokens or 0 for shot in good),
        "cached_tokens": sum(shot.cached_tokens or 0 for shot in good),
        "output_tokens": output,
        "requests_per_s": len(good) / run.wall,
        "output_tok_s": output / run.wall,
        "decode_tok_s": median(shot.decode_rate for shot in good),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p90_s": percentile(ttfts, 0.9),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "tpot_p50_s": percentile(per_token, 0.5),
        "tpot_p90_s": percentile(per_token, 0.9),
        "tpot_p99_s": percentile(per_token, 0.99),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p90_s": percentile(gaps, 0.9),
        "itl_p99_s": percentile(gaps, 0.99),
        "itl_max_s": max(gaps, default=None),
        "e2e_p50_s": percentile(whole, 0.5),
        "e2e_p99_s": percentile(whole, 0.99),
        "late_max_s": max(shot.sent - shot.at for shot in run.shots),
    }


def spread(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Return the median, quartiles, minimum and maximum of each figure over the rounds that have it."""
    found = {}
    for name in rounds[0] if rounds else ():
        values = [value for each in rounds if (value := each.get(name)) is not None]
        if values:
            found[name] = {
                "median": percentile(values, 0.5) or 0.0,
                "q1": percentile(values, 0.25) or 0.0,
                "q3": percentile(values, 0.75) or 0.0,
                "min": min(values),
                "max": max(values),
            }
    return found


def outcome(shots: Sequence[Shot]) -> dict[str, Any]:
    """Return the numbers of requests that were sent and that failed, and the number of failures by their reason."""
    errors = Counter(shot.error for shot in shots if shot.error is not None)
    return {"sent": len(shots), "failed": errors.total(), "errors": dict(errors.most_common())}


def failures(found: Mapping[str, Any]) -> str:
    """Return an outcome in words, with the most frequent reasons."""
    errors = found["errors"]
    reasons = [f"{reason} ({count})" for reason, count in errors.items()] if len(errors) > 1 else [*errors]
    more = len(reasons) - MOST_REASONS
    others = [f"and {more} other reason{'s' * (more > 1)}"] if more > 0 else []
    return f"{found['failed']} of {found['sent']} requests failed: {'; '.join([*reasons[:MOST_REASONS], *others])}"


def notes(target: Target, shots: Sequence[Shot]) -> list[str]:
    """Return what a reader must know: how the figures were counted, and what differs from the request."""
    good = [shot for shot in shots if shot.ok]
    found = list(target.notes)
    if len(good) < len(shots):
        found.append(failures(outcome(shots)))
    chunks, tokens = sum(len(shot.times) for shot in good), sum(shot.tokens for shot in good)
    if chunks and tokens > chunks * 1.02 and any(shot.streamed for shot in good):
        found.append(f"{tokens} tokens came in {chunks} chunks: a gap between chunks is not the time of a token")
    gaps = [gap for shot in good for gap in shot.gaps]
    together = sum(gap < TOGETHER_S for gap in gaps)
    if together > 0.02 * len(gaps):
        found.append(f"{together} of {len(gaps)} gaps between chunks are within one read: they are not times of tokens")
    if short := sum(1 for shot in good if shot.tokens < shot.output_len):
        found.append(f"{short} of {len(good)} outputs ended before the requested length")
    if cached := sum(shot.cached_tokens or 0 for shot in good):
        found.append(f"{cached} of {sum(shot.prompt_tokens or 0 for shot in good)} prompt tokens came from a cache")
    lengths = [(shot.prompt_tokens, shot.input_len) for shot in good if shot.prompt_tokens]
    counted, meant = sum(c for c, _ in lengths), sum(m for _, m in lengths)
    if lengths and abs(counted - meant) > 0.02 * meant:
        found.append(
            f"prompts had {counted / len(lengths):.0f} tokens on average instead of {meant / len(lengths):.0f}"
        )
    return found


def rounded(value: Any) -> Any:
    """Return a result for JSON with six significant digits, which is more than the clocks resolve."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value
