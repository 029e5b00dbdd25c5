"""Compiler: a thread that compiles and caches grammars, with the stack that deeply nested ones need."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from llguidance import LLMatcher

from ..fair_lock import FairLock
from . import GrammarError, limits, shown, source
from .table import Table

# A compiled grammar takes about 110 bytes for each byte of its source, and seldom less than the minimum (measured on
# the schemas of the JSON Schema test suite and of MaskBench: 75 MB for 647 schemas of 677 kB).
COMPILED_FACTOR = 128
COMPILED_LEAST = 64 << 10
CACHED_BYTES = 32 << 20  # for each compiler
# Compiling recurses along a grammar's references, and a stack overflow would kill the process. The deepest chain in a
# schema or grammar of 64 KiB needs less than 64 MB, and longer grammars are made of such schemas, side by side.
# Untouched pages cost nothing. If virtual memory is limited, a smaller stack is used.
STACKS = (512 << 20, 128 << 20, 64 << 20)


class Compiler:
    """Compiles each grammar once; errors are cached too. Only its thread accesses `known`."""

    def __init__(self, name: str) -> None:
        self.turns = FairLock()  # callers wait here, in fair order, not in the thread's queue
        self.thread = thread_with_large_stack(name)
        self.known: OrderedDict[tuple[str, str], LLMatcher | GrammarError] = OrderedDict()  # least recently used first
        self._bytes = 0

    def compile(self, table: Table, grammar: tuple[str, str]) -> LLMatcher:
        """Return a matcher in its initial state, for copying. Runs on the thread. Raises GrammarError."""
        if grammar in self.known:
            self.known.move_to_end(grammar)
        else:
            self.known[grammar] = compiled(table, grammar)
            self._bytes += _cost(grammar)
            while self._bytes > CACHED_BYTES and len(self.known) > 1:
                oldest, _ = self.known.popitem(last=False)
                self._bytes -= _cost(oldest)
        result = self.known[grammar]
        if isinstance(result, GrammarError):
            raise GrammarError(str(result))
        return result

    def close(self) -> None:
        """Shut down without waiting for grammars that are being compiled."""
        self.thread.shutdown(wait=False, cancel_futures=True)


def thread_with_large_stack(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, started with the largest of STACKS that the system allows."""
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
    """Compile a grammar; returns errors, so that they are cached too."""
    try:
        matcher = LLMatcher(table.library, source(*grammar), limits=limits(), log_level=0)
        matcher.compute_bitmask()  # the first mask is the most expensive; copies include it
    except GrammarError as error:
        return error
    if matcher.is_error():
        return GrammarError(f"the grammar cannot be used: {shown(matcher.get_error())}")
    return matcher


def _cost(grammar: tuple[str, str]) -> int:
    return COMPILED_LEAST + COMPILED_FACTOR * sum(map(len, grammar))
