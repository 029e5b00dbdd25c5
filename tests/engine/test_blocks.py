"""BlockPool: allocation, sharing, publishing and eviction."""

import pytest

from engine.blocks import BlockPool
from engine.prefix_cache import chain


def test_blocks_are_allocated_and_released():
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks is not None and len(set(blocks)) == 3
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 3)
    assert pool.take(2) is None, "None: not now"
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 0, 0)
    pool.check()


def test_published_block_is_found_after_its_release():
    pool = BlockPool(4)
    content = chain(b"", [1, 2])
    blocks = pool.take(1)
    pool.publish(blocks[0], content)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 1, 0)
    assert pool.find(content) == blocks[0]
    pool.share(blocks[0])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 0, 1)
    pool.share(blocks[0])
    pool.release(blocks)
    assert pool.num_held == 1, "one reference is left"
    pool.release(blocks)
    pool.check()


def test_least_recently_released_block_is_evicted_first_and_a_tail_before_its_head():
    pool = BlockPool(4)
    hashes = [chain(b"", [i]) for i in range(4)]
    first, second = pool.take(2), pool.take(2)
    for block, content in zip([*first, *second], hashes, strict=True):
        pool.publish(block, content)
    pool.release(second)
    pool.release(first)
    assert pool.take(1) == [second[1]]
    assert pool.take(1) == [second[0]]
    assert pool.take(1) == [first[1]]
    assert [pool.find(content) for content in hashes] == [first[0], None, None, None]
    pool.check()


def test_first_of_two_blocks_with_equal_content_stays_published():
    pool = BlockPool(2)
    content = chain(b"", [7])
    one, two = pool.take(1), pool.take(1)
    pool.publish(one[0], content)
    pool.publish(two[0], content)
    assert pool.find(content) == one[0]
    pool.release(two)
    assert pool.num_free == 1, "the copy is worth nothing"
    pool.release(one)
    assert pool.forget() == 1
    assert pool.find(content) is None
    pool.check()


def test_releasing_a_block_twice_is_an_error():
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)
