"""`pequod bench sweep`: its figures beside the limit, and its curves."""

from __future__ import annotations

import pytest

from server.cli.bench import sweep
from tests.server.cli.bench.test_client import Other


def test_the_share_is_that_of_the_time_per_token():
    point = {"limit_tpot_s": 0.04, "tpot_p50_s": 0.05, "itl_p50_s": 0.000015}
    assert sweep._share(point) == pytest.approx(0.8)
    assert sweep._share(point | {"tpot_p50_s": None}) is None


def test_the_curves_are_drawn_also_where_every_request_failed(pequod, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["--rounds", "1", "--warmup", "0", "--output-len", "4", "--plot", str(tmp_path)]
    with Other(busy_after=2).listening() as url:
        code, _, _ = pequod("sweep", "--url", url, *words, "--concurrency", "1,2", "--rate", "50", "--context", "8")
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"throughput.png", "rate.png", "context.png"}
