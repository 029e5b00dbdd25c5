"""PrefixCache: which blocks a sequence finds, fills, publishes and returns."""

from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache, chain, extras
from engine.sequence import Sequence
from engine.types import EngineRequest, SamplingParams


def sequence(number: int, tokens, salt: str = "", **params) -> Sequence:
    params = SamplingParams(max_tokens=9, **params)
    request = EngineRequest(id=number, prompt_ids=tuple(tokens), params=params, cache_salt=salt)
    return Sequence(request, arrival=number, arrived=0.0, block_size=4, max_length=100)


def compute(cache: PrefixCache, seq: Sequence, num_tokens: int) -> None:
    """Give the sequence its blocks, and publish them as after a collected step."""
    assert cache.grow(seq, num_tokens)
    seq.num_computed = num_tokens
    cache.publish(seq)


def test_a_sequence_finds_the_full_blocks_of_a_computed_prefix():
    cache = PrefixCache(BlockPool(8))
    first = sequence(1, range(10))
    cache.start(first, cache.match(first))
    compute(cache, first, 10)
    assert cache.match(sequence(2, range(10))) == first.block_ids[:2]
    assert cache.match(sequence(2, [*range(4), 9, 9, 9, 9, 9])) == first.block_ids[:1]
    assert cache.match(sequence(2, range(8))) == first.block_ids[:1], "the last token is left to compute"
    assert cache.match(sequence(2, range(10), salt="x")) == []
    assert cache.match(sequence(2, range(10), prompt_logprobs=0)) == [], "a cached token has no logits"
    cache.release(first)
    assert cache.match(sequence(2, range(10))) is not None and cache.pool.num_cached == 2
    cache.check([])


def test_a_block_that_is_being_filled_is_worth_waiting_for():
    cache = PrefixCache(BlockPool(8))
    first, second = sequence(1, range(10)), sequence(2, range(10))
    cache.start(first, [])
    assert cache.match(second) is None
    compute(cache, first, 5)
    assert cache.match(second) is None, "the second block is not full"
    cache.release(first)
    assert cache.match(second) == [0], "nothing fills it any more"


def test_a_disabled_cache_shares_nothing_and_waits_for_nothing():
    cache = PrefixCache(BlockPool(8), is_enabled=False)
    first = sequence(1, range(10))
    cache.start(first, [])
    compute(cache, first, 10)
    assert cache.match(sequence(2, range(10))) == []
    cache.release(first)
    assert (cache.pool.num_free, cache.pool.num_cached) == (8, 0)


def test_a_waiting_sequence_fits_beside_what_is_reserved():
    cache = PrefixCache(BlockPool(4))
    first = sequence(1, range(10))
    cache.start(first, [])
    compute(cache, first, 10)
    second = sequence(2, range(10))
    hits = cache.match(second)
    assert cache.fits(second, hits, reserved=0)
    assert not cache.fits(second, hits, reserved=1)
    assert not cache.fits(sequence(3, range(20, 30)), [], reserved=0)
    assert not cache.grow(sequence(3, range(20, 30)), 10)
    cache.release(first)
    assert cache.fits(second, hits, reserved=1)
    assert not cache.fits(second, hits, reserved=2), "its own hits are among the blocks that are available"


def test_the_hash_of_a_block_depends_on_everything_that_determines_its_content():
    tokens = [1, 2, 3, 1 << 20]
    hashes = {
        chain(b"", tokens),
        chain(b"", tokens, ("salt:x",)),
        chain(b"", tokens, ("salt:x", "image:y")),
        chain(b"", tokens, ("salt:x\0image:y",)),
        chain(chain(b"", tokens), tokens),
        chain(b"", [1, 2, 3, 4]),
        chain(b"", [1, 2, 3]),
        chain(b"", [1, 2, 3, 1 << 20, 0]),
    }
    assert len(hashes) == 8


def test_the_salt_belongs_to_the_first_block_and_reaches_all_others_through_it():
    cache = PrefixCache(BlockPool(8))
    salted, plain = sequence(1, range(12), salt="x"), sequence(2, range(12))
    assert extras(salted.request, 0) == ("salt:x",)
    assert extras(salted.request, 1) == extras(plain.request, 0) == ()
    cache.block_hash(salted, 2), cache.block_hash(plain, 2)
    assert not set(salted.hashes) & set(plain.hashes)
