"""The table of mutants fits the code, and some of them are tried; `make mutants` tries all."""

import pytest

from tests.mutants.__main__ import last_error, tried
from tests.mutants.table import CHECKS, ROOT, SAMPLER, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place_and_is_python(mutant):
    compile(mutant.source(), mutant.file, "exec")
    assert mutant.source() != (ROOT / mutant.file).read_text()
    assert mutant.check in CHECKS or (ROOT / mutant.check.partition("::")[0]).exists()


@pytest.mark.parametrize("name", SAMPLER.split(" or "))
def test_the_sampler_check_selects_tests_that_exist(name):
    tests = (ROOT / "tests/engine/test_sampler.py").read_text()
    assert any(name in line for line in tests.splitlines() if line.startswith("def test_"))


def test_there_are_mutants_of_each_part():
    assert len(MUTANTS) >= 40 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    files = {mutant.file for mutant in MUTANTS}
    assert {f"engine/{name}.py" for name in ("scheduler", "blocks", "client", "supervisor", "runner/sampler")} <= files
    kernels = ("attention", "layers", "matmul", "shortlist", "single", "skinny", "storing")
    assert {f"engine/kernels/gpu/{name}.py" for name in kernels} <= files


def named(name):
    return next(mutant for mutant in MUTANTS if mutant.name == name)


@pytest.mark.parametrize("name", ["shared-block-freed-at-once", "received-tokens-not-kept"])
def test_a_mutant_is_caught(name):
    verdict = tried(named(name))
    assert verdict.is_caught and verdict.said


def test_a_mutant_of_a_kernel_is_caught_in_the_interpreter():
    pytest.importorskip("triton")
    assert tried(named("padding-token-stored")).is_caught


def test_a_check_that_fails_for_want_of_a_file_has_caught_nothing():
    strange = MUTANTS[0]._replace(check="tests/nothing_of_this_name.py")
    assert not tried(strange).is_caught


def test_what_a_check_says_at_last_is_its_exception():
    assert last_error("Traceback\n  File\nAssertionError: a block is lost\n") == "a block is lost"
    assert last_error("E       AssertionError: assert 1 == 2\n= short test summary =\n1 failed\n") == "assert 1 == 2"
