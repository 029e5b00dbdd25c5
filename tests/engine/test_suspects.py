"""Suspects: each test is a trace of engine processes and the requests that ran in each."""

from __future__ import annotations

import pytest

from engine.suspects import FAR, Suspects, halves


class Engine:
    """Runs all requests that may run, a token at a time; a killer crashes it after a number of tokens."""

    def __init__(self, ids: range | list[int], killers: dict[int, int]) -> None:
        self.suspects = Suspects()
        self.open = list(ids)
        self.killers = killers
        self.convicted: list[int] = []
        self.deaths = 0
        self.ran_alone: list[list[int]] = []  # who was running at each death

    def live(self, steps: int = 2000) -> bool:
        """Run one engine process; returns whether it crashed."""
        came: dict[int, int] = {}
        for _ in range(steps):
            for each in self.open:
                if each not in came and self.suspects.may_run(each):
                    came[each] = 0
                    self.suspects.ran(each)
            if any(came.get(each, -1) >= at for each, at in self.killers.items() if each in self.open):
                self.deaths += 1
                self.ran_alone.append([each for each in self.open if each in came])
                guilty = self.suspects.died(self.open)
                if guilty is not None:
                    self.convicted.append(guilty)
                    self.end(guilty)
                return True
            for each in list(came):
                if each in self.open:
                    came[each] += 1
                    self.suspects.came(each, 1)
        return False

    def end(self, request_id: int) -> None:
        self.open.remove(request_id)
        self.suspects.ended(request_id)


def deaths_until_peace(engine: Engine) -> int:
    for _ in range(100):
        if not engine.live():
            return engine.deaths
    raise AssertionError("the engine never stopped dying")


@pytest.mark.parametrize("killer", range(16))
def test_of_sixteen_only_the_one_that_kills_is_convicted(killer):
    engine = Engine(range(16), {killer: 0})
    assert deaths_until_peace(engine) <= 7
    assert engine.convicted == [killer]
    assert engine.ran_alone[-1] == [killer], "it was certain: nothing else was running"


def test_first_death_blames_no_request():
    engine = Engine(range(4), {2: 0})
    engine.live()
    assert all(engine.suspects.may_run(each) for each in range(4))


def test_at_the_second_death_halves_are_tried_and_the_others_wait():
    engine = Engine(range(4), {3: 0})
    engine.live()
    engine.live()
    assert [each for each in range(5) if engine.suspects.may_run(each)] == [0, 1], "a new one waits too"


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 17, 60, 200])
def test_request_that_kills_later_each_time_is_found(tokens):
    engine = Engine(range(8), {5: tokens})
    assert deaths_until_peace(engine) <= 12
    assert engine.convicted == [5]


def test_two_that_kill_are_both_found():
    engine = Engine(range(16), {3: 0, 11: 2})
    deaths_until_peace(engine)
    assert sorted(engine.convicted) == [3, 11]


def test_one_alone_is_convicted_at_its_second_death():
    engine = Engine([7], {7: 0})
    assert deaths_until_peace(engine) == 2
    assert engine.convicted == [7]


def test_external_kills_convict_no_request_that_makes_progress():
    suspects = Suspects()
    for _ in range(20):
        for each in (1, 2):
            suspects.ran(each)
            suspects.came(each, FAR)
        assert suspects.died([1, 2]) is None
        assert suspects.may_run(1) and suspects.may_run(2)


def test_a_start_that_fails_clears_nobody():
    suspects, guilty = Suspects(), None
    for _ in range(2):
        suspects.ran(1)
        guilty = suspects.died([1, 2])
        assert suspects.died([1, 2]) is None, "the next process could not be started"
        if guilty is not None:
            break
    assert guilty == 1


def test_request_that_was_not_running_is_no_suspect():
    suspects = Suspects()
    for _ in range(3):
        suspects.ran(1)
        guilty = suspects.died([1, 2])
        if guilty is not None:
            break
    assert guilty == 1
    suspects.ended(1)
    assert suspects.may_run(2)


def test_group_is_cleared_when_each_request_has_made_progress_or_ended():
    suspects = Suspects()
    for _ in range(2):
        for each in (1, 2, 3, 4):
            suspects.ran(each)
        suspects.died([1, 2, 3, 4])
    for each in (1, 2):
        suspects.ran(each)
    assert not suspects.came(1, 4)
    assert not suspects.may_run(3)
    assert suspects.ended(2), "the client has hung up: the next group may run"
    assert suspects.may_run(3) and suspects.may_run(4) and suspects.may_run(1), "and whoever runs goes on"
    assert not suspects.came(3, 4)
    assert suspects.came(4, 4)
    assert suspects.may_run(5)


def test_halves_splits_ids_into_at_most_two_groups():
    assert halves([1, 2, 3]) == [[1, 2], [3]]
    assert halves([1]) == [[1]]


def test_remaining_request_is_not_blamed_for_one_that_was_aborted():
    """A killer may be aborted while the engine, which learns of it later, still runs it."""
    suspects = Suspects()
    for each in (0, 1):
        suspects.ran(each)
    assert suspects.died([0, 1]) is None
    for each in (0, 1):
        suspects.ran(each)
    suspects.ended(1)
    assert suspects.died([0]) is None, "1 was running too"
    suspects.ran(0)
    assert suspects.died([0]) == 0, "now it was alone"


def test_request_started_after_its_end_counts_as_running():
    suspects = Suspects()
    suspects.ran(0)
    assert suspects.died([0]) is None
    suspects.ran(0)
    suspects.ran_closed()
    assert suspects.died([0]) is None
