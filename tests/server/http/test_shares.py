"""Shares: no caller can take all of what there is, and whoever comes next finds some of it left."""

from __future__ import annotations

import pytest

from server.http import admission as limits_module
from server.http.admission import SMALL_BODY, Caller, Limits
from server.http.auth import address_of
from server.http.errors import ApiError
from server.http.shares import FairShares
from server.settings import Settings

MB = 1 << 20


def make(seqs: int = 16, queued: int = 100, **settings) -> Limits:
    return Limits(Settings(max_num_seqs=seqs, max_num_queued_reqs=queued, **settings), lambda: 100.0)


def fill(limits: Limits, flow: str, weight: float = 1.0) -> int:
    """Admit a caller's requests until one is refused; returns how many got in."""
    for count in range(10_000):
        try:
            limits.admit(Caller(flow, flow, weight), 1)
        except ApiError:
            return count
    raise AssertionError("nothing was ever refused")


def refusal(limits: Limits, flow: str, choices: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limits.admit(Caller(flow, flow), choices)
    return caught.value


@pytest.mark.parametrize(("others", "share"), [(0, 80), (1, 45), (2, 31), (3, 24), (9, 10)])
def test_the_more_callers_are_at_work_the_less_is_one_callers_share(others, share):
    shared = FairShares(100)
    for i in range(others):
        shared.acquire(f"other {i}", 1)
    assert shared.share("mine") == share


def test_a_share_goes_by_weight():
    shared = FairShares(90)
    shared.acquire("one", 1, 1.0)
    shared.acquire("heavy", 1, 2.0)
    assert (shared.share("heavy", 2.0), shared.share("one", 1.0)) == (54, 27)


def test_a_released_amount_belongs_to_no_caller():
    shared = FairShares(10)
    shared.acquire("a", 4)
    shared.acquire("a", 2)
    shared.release("a", 4)
    assert (shared.open, shared.of("a")) == (2, 2)
    shared.release("a", 2)
    assert (shared.open, shared.of("a"), shared.share("b")) == (0, 0, 8)


def test_one_caller_cannot_fill_the_queue():
    limits = make(seqs=16, queued=100)
    assert fill(limits, "greedy") == 16 + 80
    error = refusal(limits, "greedy")
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.retry_after >= 1
    assert limits.rejections["share"] == 2
    assert fill(limits, "modest") == 100 + 16 - 96, "what is left is for those who come next"
    assert refusal(limits, "modest").status == 503, "now the server itself is full"
    assert refusal(limits, "third").code == "queue_full"


def test_a_caller_above_its_share_gets_no_more_until_it_has_less():
    limits = make(seqs=4, queued=100)
    tickets = [limits.admit(Caller("a", "a"), 1) for _ in range(84)]
    limits.admit(Caller("b", "b"), 1)
    assert refusal(limits, "a").status == 429
    for ticket in tickets[:35]:
        ticket.release()
    assert refusal(limits, "a").status == 429, "49 of 4 + 45 are open"
    tickets[35].release()
    limits.admit(Caller("a", "a"), 1)


def test_a_single_request_cannot_ask_for_more_than_a_share():
    limits = make(seqs=16, queued=256)
    error = refusal(limits, "a", 272)
    assert (error.status, error.param) == (400, "n")
    limits.admit(Caller("a", "a"), 16 + 205)


@pytest.mark.parametrize("queued", [1, 2, 3, 4])
def test_a_single_caller_may_fill_a_short_queue(queued):
    limits = make(seqs=2, queued=queued)
    assert fill(limits, "a") == 2 + queued
    assert refusal(limits, "a").status == 503


def test_the_key_of_twice_the_weight_gets_twice_the_queue():
    limits = make(seqs=1, queued=900)
    limits.admit(Caller("light", "light", 1.0), 1)
    heavy = fill(limits, "heavy", 2.0)
    light = fill(limits, "light", 1.0) + 1
    assert (heavy, light) == (1 + 534, 1 + 267)


def test_prompt_tokens_have_shares_too(monkeypatch):
    monkeypatch.setattr(limits_module, "MAX_OPEN_TOKENS", 1000)
    limits = make()
    limits.admit(Caller("a", "a"), 1, 900)  # what a caller has alone is the engine's business
    with pytest.raises(ApiError) as caught:
        limits.admit(Caller("a", "a"), 1, 10)
    assert caught.value.status == 429
    limits.admit(Caller("b", "b"), 1, 100)
    with pytest.raises(ApiError) as caught:
        limits.admit(Caller("c", "c"), 1, 10)
    assert (caught.value.status, caught.value.code) == (503, "prompt_tokens")


def test_one_caller_cannot_take_all_bytes_of_bodies():
    limits = make(max_body_bytes=8 * MB)
    idle = Caller("idle", "idle")
    num_full = 0
    with pytest.raises(ApiError) as caught:
        while True:
            limits.count_bytes(idle, 8 * MB - 1, 0)
            num_full += 1
    assert (caught.value.status, num_full) == (429, 25)
    limits.count_bytes(Caller("other", "other"), 8 * MB, 0)


def test_ordinary_bodies_get_in_while_others_upload():
    limits = make(max_body_bytes=8 * MB)
    for i in range(28):
        limits.count_bytes(Caller(str(i), str(i)), 8 * MB, 0)
    with pytest.raises(ApiError) as caught:
        limits.count_bytes(Caller("x", "x"), SMALL_BODY + 1, 0)
    assert (caught.value.status, caught.value.code) == (503, "body_bytes")
    limits.count_bytes(Caller("x", "x"), SMALL_BODY, 0)
    with pytest.raises(ApiError):
        limits.count_bytes(Caller("x", "x"), 1, SMALL_BODY)


def test_a_single_body_of_the_largest_size_always_fits_a_share():
    limits = make(max_body_bytes=8 * MB)
    for i in range(20):
        limits.count_bytes(Caller(str(i), str(i)), MB, 0)
    limits.count_bytes(Caller("x", "x"), 8 * MB, 0)
    assert limits.bytes.of("x") == 8 * MB


@pytest.mark.parametrize(
    ("client", "flow"),
    [
        (("192.0.2.7", 4711), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4711), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 80), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 80), "fe80::/64"),
        (("testclient", 50000), "testclient"),
        (None, ""),
    ],
)
def test_without_keys_a_caller_is_a_client_address(client, flow):
    assert address_of({"client": client}) == flow
