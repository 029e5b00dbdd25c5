"""How often the page of metrics is rendered: what many scrapers ask for at once costs the event loop little."""

from __future__ import annotations

from server.observability.metrics import RENDER_BURST, RENDERS_PER_S
from tests.server.observability.test_metrics import Bench


def ask(bench: Bench, number: int, *, gap: float) -> list[bytes]:
    """The pages of so many scrapes, between which a request is counted."""
    pages = []
    for _ in range(number):
        bench.metrics.http("GET", "/ready", 200, 0.001)
        bench.clock.now += gap
        pages.append(bench.metrics.render())
    return pages


def test_of_many_scrapes_at_once_the_last_get_one_page():
    bench = Bench()
    pages = ask(bench, RENDER_BURST + 10, gap=0.001)
    assert len(set(pages[:RENDER_BURST])) == RENDER_BURST
    assert len(set(pages)) <= RENDER_BURST + 1
    bench.clock.now += 1.0
    assert bench.page()("http_requests_total", handler="/ready") == RENDER_BURST + 10


def test_scrapes_that_keep_to_the_rate_get_pages_of_their_own():
    bench = Bench()
    ask(bench, RENDER_BURST + 10, gap=0.001)  # the allowance is used up
    bench.clock.now += 2 / RENDERS_PER_S
    pages = ask(bench, 50, gap=1.01 / RENDERS_PER_S)
    assert len(set(pages)) == 50
