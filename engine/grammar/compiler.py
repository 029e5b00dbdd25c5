"""Compiler: one thread that compiles grammars, each once, with the stack that a deep one needs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from llguidance import LLMatcher

from ..fair import FairLock
from . import GrammarError, limits, shown, source
from .table import Table

# A compiled grammar holds about 110 bytes for each one of its source, and seldom less than this (measured on the
# schemas of the JSON Schema test suite and of MaskBench: 75 MB for 647 schemas of 677 kB).
COMPILED_FACTOR = 128
COMPILED_LEAST = 64 << 10
CACHED_BYTES = 32 << 20  # of each compiler
# Compiling recurses along the references of a grammar, where an overflow would end the process. The deepest chains that
# fit into the largest grammar need less than 64 MB; what is not touched costs nothing. A system that has bounded
# virtual memory gives less.
STACKS = (512 << 20, 128 << 20, 64 << 20)


class Compiler:
    """Compiles grammars, each once: also what cannot be used is remembered. `known` is its thread's alone."""

    def __init__(self, name: str) -> None:
        self.turns = FairLock()  # callers wait here and not in the thread's queue
        self.thread = thread_with_large_stack(name)
        self.known: OrderedDict[tuple[str, str], LLMatcher | GrammarError] = OrderedDict()  # oldest use first
        self._bytes = 0

    def compile(self, table: Table, grammar: tuple[str, str]) -> LLMatcher:
        """On the thread: a matcher at its beginning, to be copied; raises GrammarError."""
        if grammar in self.known:
            self.known.move_to_end(grammar)
        else:
            self.known[grammar] = compiled(table, grammar)
            self._bytes += _cost(grammar)
            while self._bytes > CACHED_BYTES and len(self.known) > 1:
                oldest, _ = self.known.popitem(last=False)
                self._bytes -= _cost(oldest)
        found = self.known[grammar]
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def close(self) -> None:
        """What still compiles is not waited for."""
        self.thread.shutdown(wait=False, cancel_futures=True)


def thread_with_large_stack(name: str) -> ThreadPoolExecutor:
    """An executor of one thread, started now with the largest of STACKS that the system grants."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    usual = threading.stack_size()
    try:
        for size in STACKS:
            threading.stack_size(size)
            with suppress(RuntimeError):  # the thread cannot be started
                executor.submit(int).result()
                break
    finally:
        threading.stack_size(usual)
    return executor


def compiled(table: Table, grammar: tuple[str, str]) -> LLMatcher | GrammarError:
    """What became of a grammar; an error too is something to remember."""
    try:
        matcher = LLMatcher(table.library, source(*grammar), limits=limits(), log_level=0)
        matcher.compute_bitmask()  # the first mask is the most expensive; all copies begin after it
    except GrammarError as error:
        return error
    if matcher.is_error():
        return GrammarError(f"the grammar cannot be used: {shown(matcher.get_error())}")
    return matcher


def _cost(grammar: tuple[str, str]) -> int:
    return COMPILED_LEAST + COMPILED_FACTOR * sum(map(len, grammar))
