"""The store of responses: owners, bounds and fair shares, and what happens when its disk is slow, full or broken."""

import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest

from server.api.responses.store import MAX_FAILURES, Shares, Store
from server.api.responses.store_file import ROW_BYTES
from server.http.errors import ApiError
from tests.fakes import FakeEngine, model_folder, serving, until
from tests.server.api.responses.stores import FULL, Faulty, blocked, names, record, reopened, written
from tests.server.wire import RESPONSES, ask, saying


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """A store of either kind."""
    path = None if request.param == "memory" else tmp_path / "store.db"
    return lambda count=100, size=1 << 20: Store(path, count, size)


def totals(store):
    return store._stored.count, store._stored.num_bytes


def check_shares(store):
    """What is counted is what is in the database."""
    query = "SELECT owner, count(*), sum(size) FROM responses GROUP BY owner"
    shares = {owner: (count, size) for owner, count, size in store._db.execute(query)}
    assert {owner: share[:2] for owner, share in store._stored._owners.items()} == shares
    assert totals(store) == tuple(map(sum, zip((0, 0), *shares.values(), strict=True)))


async def test_what_is_put_is_found_at_once_and_by_its_owner_alone(make):
    store = make()
    with contextlib.closing(store):
        for each in (record("one"), record("two", owner="b")):
            store.put(each)
            assert await store.get(each.id, each.owner) == each
            assert await store.get(each.id, "c") is None
            assert await store.delete(each.id, "c") is False
            await written(store)
            assert await store.get(each.id, each.owner) == each
            assert await store.get(each.id, "c") is None
            assert await store.delete(each.id, "c") is False
        assert await store.get("two", "a") is None
        assert await store.get("three", "a") is None


async def test_a_later_record_takes_the_place_of_an_earlier_one(make):
    store = make()
    with contextlib.closing(store):
        store.put(record("one", is_open=True))
        await written(store)
        store.put(record("one", 20))
        assert await store.get("one", "a") == record("one", 20)
        await written(store)
        assert totals(store) == (1, record("one", 20).num_bytes)
        assert await store.delete("one", "a") is True
        assert await store.get("one", "a") is None
        assert await store.delete("one", "a") is False
        assert totals(store) == (0, 0)


async def test_a_deleted_record_is_not_written_later(make):
    store = make()
    with contextlib.closing(store):
        is_free = threading.Event()
        task = await blocked(store, is_free)
        store.put(record("one"))
        gone = asyncio.create_task(store.delete("one", "a"))
        await asyncio.sleep(0)
        assert await store.get("one", "a") is None
        is_free.set()
        assert await gone is True
        assert await store.get("one", "a") is None
        assert totals(store) == (0, 0)
        await task


async def test_a_client_that_hangs_up_does_not_stop_a_deletion(make):
    store = make()
    with contextlib.closing(store):
        store.put(record("one", is_open=True))
        await written(store)
        is_free = threading.Event()
        task = await blocked(store, is_free)
        store.put(record("one"))
        deleting = asyncio.create_task(store.delete("one", "a"))
        reading = asyncio.create_task(store.get("none", "a"))
        await asyncio.sleep(0)
        for each in (deleting, reading):
            each.cancel()
        is_free.set()
        await task
        await asyncio.gather(deleting, reading, return_exceptions=True)
        assert await names(store, "one") == []


# Bounds and shares


async def test_what_was_used_longest_ago_goes_first(make):
    store = make(count=3)
    with contextlib.closing(store):
        for name in ("one", "two", "three"):
            store.put(record(name))
        await written(store)
        assert await names(store, "one") == ["one"]
        store.put(record("four"))
        await written(store)
        assert await names(store, "one", "two", "three", "four") == ["one", "three", "four"]


async def test_what_waits_to_be_written_is_used_too(make):
    store = make(count=3)
    with contextlib.closing(store):
        is_free = threading.Event()
        task = await blocked(store, is_free)
        for name in ("one", "two", "three"):
            store.put(record(name))
        assert await names(store, "one") == ["one"]
        store.put(record("four"))
        assert await names(store, "one") == ["one"]
        is_free.set()
        await task
        await written(store)
        store.put(record("five"))
        await written(store)
        assert await names(store, "one", "two", "three", "four", "five") == ["one", "four", "five"]


@pytest.mark.parametrize("is_slow", [False, True], ids=["written", "unwritten"])
async def test_open_records_stay_and_count_once_they_are_closed(make, is_slow):
    store = make(count=2)
    with contextlib.closing(store):
        is_free = threading.Event()
        task = await blocked(store, is_free) if is_slow else None
        for name in ("open", "one", "two", "three"):
            store.put(record(name, is_open=name == "open"))
            if not is_slow:
                await written(store)
        assert await names(store, "open", "one", "two", "three") == ["open", "two", "three"]
        store.put(record("open"))
        if task is not None:
            is_free.set()
            await task
        await written(store)
        assert await names(store, "open", "one", "two", "three") == ["open", "three"]
        check_shares(store)


async def test_bytes_are_bounded_too(make):
    size = 1000 + len(b"[]") + ROW_BYTES
    store = make(size=3 * size)
    with contextlib.closing(store):
        for name in ("one", "two", "three", "four"):
            store.put(record(name, 1000))
        await written(store)
        assert await names(store, "one", "two", "three", "four") == ["two", "three", "four"]
        assert store._stored.num_bytes == 3 * size
        store.put(record("huge", 10_000))
        await written(store)
        assert await names(store, "huge", "four") == ["four"], "what never fits drives nothing out"


async def test_what_is_too_large_is_refused_before_it_drives_out_what_waits_to_be_written(make, caplog):
    store = make(size=10_000)
    with contextlib.closing(store):
        store.put(record("old", is_open=True))
        await written(store)
        is_free = threading.Event()
        task = await blocked(store, is_free)
        store.put(record("one"))
        store.put(record("two", is_open=True))
        for name in ("huge", "two", "old"):
            store.put(record(name, 10_000))
        assert await names(store, "one", "two", "old", "huge") == ["one"], "an older one is out of date"
        is_free.set()
        await task
        await written(store)
        assert await names(store, "one", "two", "old", "huge") == ["one"]
        assert totals(store) == (1, record("one").num_bytes)
    assert caplog.text.count("is larger than --max-stored-bytes and is not kept") == 3


@pytest.mark.parametrize("is_slow", [False, True], ids=["written", "unwritten"])
@pytest.mark.parametrize("bound", ["records", "bytes"])
async def test_a_large_owner_drives_out_its_own_records_alone(make, bound, is_slow):
    one = record("", 1000).num_bytes
    store = make(count=6) if bound == "records" else make(size=6 * one)
    with contextlib.closing(store):
        is_free = threading.Event()
        task = await blocked(store, is_free) if is_slow else None
        store.put(record("small", 1000, owner="b"))
        for i in range(20):
            store.put(record(f"a{i}", 1000))
            if not is_slow:
                await written(store)
        for owner in ("c", "d"):  # newcomers get their share from the owner of most
            store.put(record(owner, 1000, owner=owner))
        if not is_slow:
            await written(store)
        assert await names(store, *(f"a{i}" for i in range(20))) == ["a17", "a18", "a19"]
        for name, owner in (("small", "b"), ("c", "c"), ("d", "d")):
            assert await names(store, name, owner=owner) == [name]
        if task is not None:
            is_free.set()
            await task
            await written(store)
            assert await names(store, "small", owner="b") == ["small"]
            check_shares(store)


async def test_the_owner_of_most_is_that_of_what_there_is_too_much_of(make):
    store = make(count=5, size=10_000)
    with contextlib.closing(store):
        for i in range(3):
            store.put(record(f"many{i}", 10, owner="b"))
        store.put(record("big", 6000))
        await written(store)
        store.put(record("c", 2000, owner="c"))  # too many bytes
        await written(store)
        assert await names(store, "big") == []
        assert await names(store, "many0", "many1", "many2", owner="b") == ["many0", "many1", "many2"]
        for i in range(2):
            store.put(record(f"d{i}", 10, owner="d"))  # too many records
        await written(store)
        assert await names(store, "many0", "many1", "many2", owner="b") == ["many1", "many2"]
        assert await names(store, "c", owner="c") == ["c"]


async def test_a_record_that_is_larger_than_all_others_of_its_size_goes_itself(make):
    store = make(size=10_000)
    with contextlib.closing(store):
        for owner in ("b", "c", "d"):
            store.put(record(owner, 2000, owner=owner))
        store.put(record("a", 8000))
        await written(store)
        assert await names(store, "a") == []
        for owner in ("b", "c", "d"):
            assert await names(store, owner, owner=owner) == [owner]


async def test_more_owners_than_records_take_turns(make):
    store = make(count=2)
    with contextlib.closing(store):
        for owner in ("a", "b", "c", "b", "a"):
            store.put(record(owner, owner=owner))
            await written(store)
            assert await names(store, owner, owner=owner) == [owner]
        assert await names(store, "c", owner="c") == [], "it has not changed for longest"


async def test_shares_hold_after_a_restart(tmp_path):
    first = Store(tmp_path / "store.db", 6, 1 << 20)
    with contextlib.closing(first):
        first.put(record("small", owner="b"))
        for i in range(5):
            first.put(record(f"a{i}"))
    second = Store(tmp_path / "store.db", 4, 1 << 20)
    with contextlib.closing(second):
        check_shares(second)
        second.put(record("c", owner="c"))
        second.put(record("a5"))
        await written(second)
        check_shares(second)
        assert await names(second, *(f"a{i}" for i in range(6))) == ["a4", "a5"]
        assert await names(second, "small", owner="b") == ["small"]


def slow_victim(owners, max_count, max_bytes):
    """Shares.victim, the obvious way; `owners` are in the order in which they changed."""
    for column, bound in ((1, max_bytes), (0, max_count)):
        if sum(share[column] for share in owners.values()) > bound:
            return max(owners, key=lambda owner: owners[owner][column])  # the first of equals
    return None


async def test_without_keys_shares_are_those_of_the_addresses_that_pay(make):
    """Everybody may see all of the records then, and nobody can drive out those of others."""
    store = make(3)
    with contextlib.closing(store):
        store.put(record("mine")._replace(payer="x"))
        for i in range(5):
            store.put(record(f"many{i}")._replace(payer="y"))
            await written(store)
        assert await names(store, "mine", *(f"many{i}" for i in range(5))) == ["mine", "many3", "many4"]
        assert await store.get("mine", "a") == record("mine")._replace(payer="x")


def test_the_victim_is_the_first_owner_of_the_largest_share():
    rng = random.Random(0)
    shares, owners = Shares(20, 2000), {}
    victims = set()
    for _ in range(5000):
        owner = rng.choice("abcdefgh")
        count, size = owners.pop(owner, (0, 0))
        if count and rng.random() < 0.5:
            change = (-1, -size if count == 1 else -rng.randint(0, size))
        else:
            change = (1, 10 * rng.randint(1, 20))
        shares.add(owner, *change)
        if count + change[0]:
            owners[owner] = (count + change[0], size + change[1])
        assert (shares.count, shares.num_bytes) == tuple(map(sum, zip((0, 0), *owners.values(), strict=True)))
        assert shares.victim() == slow_victim(owners, 20, 2000)
        victims.add(shares.victim())
    assert victims == {None, *"abcdefgh"}


async def test_who_has_at_most_an_equal_part_of_the_bounds_never_loses_a_record(make):
    rng = random.Random(1)
    store = make(count=12, size=12 * 1000)
    with contextlib.closing(store):
        small = [record(f"s{i}", 1000 - ROW_BYTES - 2, owner="small") for i in range(4)]
        for each in small:
            store.put(each)
        for i in range(300):
            store.put(record(str(i), rng.randint(1, 3000), owner=rng.choice("ab")))
            if rng.random() < 0.1:
                await written(store)
                check_shares(store)
        await written(store)
        assert [await store.get(each.id, "small") for each in small] == small


async def test_a_write_takes_no_more_steps_with_many_records_and_owners():
    async def steps(count):
        done = 0

        def step():
            nonlocal done
            done += 1

        with contextlib.closing(Store(None, count, 1 << 30)) as store:
            for i in range(count):
                store.put(record(str(i), owner=str(i % (count // 4))), False)
            await written(store)
            assert store._stored.count == count
            store._db.set_progress_handler(step, 1)
            for i in range(20):
                store.put(record(f"new {i}", owner="new"), False)
                await written(store)
            assert store._stored.count == count
        return done

    assert await steps(5000) < 2 * await steps(100)


# Disks that are full


@pytest.fixture
def impatient(monkeypatch):
    """Attempts follow each other within milliseconds."""
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("server.api.responses.store.MAX_DELAY_S", 0.02)


def test_nothing_is_lost_on_a_disk_that_was_full(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, to mount a small disk")
    script = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -m tests.server.api.responses.stores "$1"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, f'mount -t tmpfs none "{tmp_path}"'], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    done = subprocess.run(
        [*inside, script, "sh", tmp_path, sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all written\n"
    assert FULL in done.stderr


async def test_what_a_full_disk_refuses_is_written_when_there_is_space_again(tmp_path, impatient, caplog):
    caplog.set_level("INFO")
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        disk.is_full = True
        for i in range(30):
            store.put(record(str(i)))
        await written(store)
        assert store._num_pending() == (30, 0)
        await until(lambda: disk.refused > 3 * MAX_FAILURES)
        assert len(await names(store, *map(str, range(30)))) == 30
        disk.is_full = False
        await until(lambda: store._num_pending() == (0, 0))
        await written(store)
        check_shares(store)
        refused = disk.refused
        disk.is_full = True
        await written(store)
        assert disk.refused == refused, "nothing is left to try"
    assert f"cannot be written: {FULL}" in caplog.text
    assert "written to --response-store again" in caplog.text
    assert "Lost" not in caplog.text
    assert await reopened(tmp_path / "store.db", 30) == [str(i) for i in range(30)]


async def test_attempts_become_rare_and_try_a_few_records_each(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("server.api.responses.store.MAX_DELAY_S", 0.04)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        disk.is_full = True
        for i in range(50):
            store.put(record(str(i)))
        await until(lambda: caplog.text.count("cannot be written") >= 5)
        delays = [line.partition("next attempt in ")[2].split()[0] for line in caplog.messages]
        assert delays[:5] == ["0.01", "0.02", "0.04", "0.04", "0.04"]
        assert disk.refused <= (len(caplog.messages) + 1) * MAX_FAILURES
        disk.is_full = False


async def test_new_records_make_no_attempts_of_their_own_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 1000)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        disk.is_full = True
        for i in range(50):
            store.put(record(str(i)))
            await written(store)
        assert disk.refused <= MAX_FAILURES
        disk.is_full = False
    assert len(await reopened(tmp_path / "store.db")) == 50, "written at the end"


async def test_a_new_record_brings_the_next_attempt_forward(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("server.api.responses.store.MAX_DELAY_S", 1000)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    store._delay_s = 1000
    with contextlib.closing(store):
        disk.is_full = True
        store.put(record("one"))
        await written(store)
        disk.is_full = False
        assert store._flush_at > time.monotonic() + 500
        store.put(record("two"))
        await until(lambda: store._num_pending() == (0, 0))


async def test_what_cannot_be_written_stays_in_memory_within_the_bounds(tmp_path, impatient, caplog):
    store = Store(tmp_path / "store.db", 2, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        store.put(record("two", is_open=True))
        store.put(record("zero"))
        await written(store)
        disk.is_full = True
        for name in ("one", "two", "three", "four"):
            store.put(record(name))
        await written(store)
        assert [*store._unwritten["a"]] == ["three", "four"]
        assert await names(store, "zero", "one", "two", "three", "four") == ["zero", "three", "four"], (
            "what the file has of two is out of date"
        )
        disk.is_full = False
        await until(lambda: store._num_pending() == (0, 0))
        assert await names(store, "zero", "one", "two", "three", "four") == ["three", "four"]


async def test_unwritten_records_have_a_bound_of_their_own_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 1000)
    monkeypatch.setattr("server.api.responses.store.MAX_UNWRITTEN_BYTES", 3 * record("").num_bytes)
    store = Store(tmp_path / "store.db", 100, 1 << 30)
    disk = Faulty(store)
    with contextlib.closing(store):
        store.put(record("large", 10_000))
        await written(store)
        assert await names(store, "large") == ["large"]
        disk.is_full = True
        for i in range(10):
            store.put(record(str(i)), is_replacement=False)
        await written(store)
        assert await names(store, *map(str, range(10))) == ["7", "8", "9"]
        store.put(record("larger", 20_000))
        assert [*store._unwritten["a"]] == ["larger"]
        disk.is_full = False


async def test_records_that_were_evicted_unwritten_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 1000)
    store = Store(tmp_path / "store.db", 10, 1 << 20)
    disk = Faulty(store)
    disk.damaged = [str(i) for i in range(1000)]
    with contextlib.closing(store):
        for i in range(1000):
            store.put(record(str(i)), is_replacement=False)
        await written(store)
        assert len(store._changes) == 10


async def test_a_damaged_part_of_the_file_does_not_keep_the_rest_from_being_written(tmp_path, impatient):
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    disk.damaged = [str(i) for i in range(2 * MAX_FAILURES)]
    with contextlib.closing(store):
        for i in range(40):
            store.put(record(str(i)))
        await until(lambda: store._num_pending() == (2 * MAX_FAILURES, 0))
        store.put(record("later"))
        await until(lambda: store._num_pending() == (2 * MAX_FAILURES, 0))
        check_shares(store)


async def test_small_records_are_written_where_large_ones_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.FIRST_DELAY_S", 1000)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    disk.damaged = [f"large {i}" for i in range(2 * MAX_FAILURES)]
    with contextlib.closing(store):
        is_free = threading.Event()
        task = await blocked(store, is_free)
        for name in disk.damaged:
            store.put(record(name, 1000))
        store.put(record("small"))
        is_free.set()
        await task
        await written(store)
        assert "small" not in store._changes


async def test_a_deleted_record_never_comes_back(tmp_path, impatient):
    path = tmp_path / "store.db"
    store = Store(path, 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        for name in ("old", "1", "2", "3"):
            store.put(record(name))
        await written(store)
        disk.is_full = True
        store.put(record("2", 20))  # a newer version, which waits
        for name in ("old", "2", "old"):
            with pytest.raises(ApiError) as caught:
                await store.delete(name, "a")
            assert (caught.value.status, caught.value.code) == (503, "store_failed")
            assert await names(store, name) == [], "it is not found, though it is in the file"
        assert await store.delete("old", "b") is False
        assert store._num_pending() == (0, 2)
        disk.is_full = False
        assert await store.delete("old", "a") is True
        await until(lambda: store._num_pending() == (0, 0))
        check_shares(store)
        disk.is_full = True
        with pytest.raises(ApiError):
            await store.delete("3", "a")
        disk.is_full = False  # and the server ends before the next attempt
    assert await reopened(path) == ["1"]


async def test_two_deletions_of_a_record_wait_for_the_file_both(tmp_path):
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        store.put(record("one"))
        await written(store)
        disk.is_full = True
        failed = await asyncio.gather(*(store.delete("one", "a") for _ in range(2)), return_exceptions=True)
        assert [error.status for error in failed] == [503, 503]
        disk.is_full = False


async def test_what_was_rolled_back_is_not_counted(tmp_path, impatient):
    store = Store(tmp_path / "store.db", 3, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        for name in ("one", "two", "three"):
            store.put(record(name, owner=name))
        await written(store)
        disk.is_full = True
        store.put(record("four"))  # it would drive out one
        store.put(record("two", 100, owner="two"))
        await until(lambda: disk.refused >= 4)
        check_shares(store)
        disk.is_full = False
        await until(lambda: store._num_pending() == (0, 0))
        check_shares(store)
        assert store._stored.count == 3


async def test_what_is_lost_is_counted_in_the_log(tmp_path, caplog):
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        for name in ("one", "two"):
            store.put(record(name))
        await written(store)
        disk.is_full = True
        with pytest.raises(ApiError):
            await store.delete("one", "a")
        for i in range(3):
            store.put(record(str(i)))
    assert "Lost responses: 3, deleted responses that are still in the file: 1" in caplog.text


async def test_an_end_while_the_disk_hangs_comes_soon(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("server.api.responses.store.CLOSE_S", 0.05)
    monkeypatch.setattr("server.api.responses.store.INTERRUPT_S", 0.05)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    is_free = threading.Event()
    with contextlib.closing(store):
        task = await blocked(store, is_free)
        store.put(record("one"))
        store.close()
        assert not is_free.is_set()
        assert "did not close within 0.1 s" in caplog.text
        assert "Lost responses: 1" in caplog.text
        is_free.set()
        await task
        store._thread.join()


async def test_an_end_interrupts_a_statement_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.store.CLOSE_S", 0.05)
    monkeypatch.setattr("server.api.responses.store.INTERRUPT_S", 60.0)
    store = Store(tmp_path / "store.db", 100, 1 << 20)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with contextlib.closing(store):
        begun = threading.Event()
        store._db.set_progress_handler(begun.set, 1000)
        task = asyncio.create_task(store._run(lambda: store._db.execute(endless).fetchone()))
        await until(begun.is_set)
        store.close()
        assert not store._thread.is_alive()
        with pytest.raises(ApiError):
            await task


# Files that break


async def test_a_file_that_fails_is_a_503_and_no_crash(tmp_path):
    store = Store(tmp_path / "store.db", 2, 1 << 20)
    with contextlib.closing(store):
        await store._run(lambda: store._db.execute("DROP TABLE responses"))
        for failing in (store.get("one", "a"), store.delete("one", "a")):
            with pytest.raises(ApiError) as caught:
                await failing
            assert (caught.value.status, caught.value.code) == (503, "store_failed")


async def test_a_full_disk_can_be_read(tmp_path):
    store = Store(tmp_path / "store.db", 2, 1 << 20)
    disk = Faulty(store)
    with contextlib.closing(store):
        store.put(record("one"))
        await written(store)
        disk.is_full = True
        assert await names(store, "one", "two") == ["one"]


async def test_a_closed_store_keeps_nothing_more(make):
    store = make()
    store.close()
    store.put(record("one"))
    with contextlib.closing(store):
        with pytest.raises(ApiError) as caught:
            await store.get("one", "a")
        assert (caught.value.status, caught.value.code) == (503, "draining")


async def test_a_response_is_answered_though_the_file_fails(tmp_path):
    folder = model_folder(tmp_path / "fake")
    engine = FakeEngine(saying("the whale"))
    path = tmp_path / "store.db"
    assert (await ask(folder, RESPONSES, {"input": "a"}, engine, response_store=path)).status_code == 200
    async with serving(folder, FakeEngine(saying("the whale")), response_store=path) as (client, _):
        disk = Faulty(client._transport.app.state.responses.store)
        disk.is_full = True
        made = await client.post(RESPONSES, json={"input": "a"})
        assert made.status_code == 200
        assert (await client.get(f"{RESPONSES}/{made.json()['id']}")).json() == made.json()
