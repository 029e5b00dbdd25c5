"""The simulator itself: the same seed gives the same trace, and broken schedulers are caught."""

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from engine import blocks, prefix_cache, scheduler
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, Status
from tests.simulation import scheduler as simulation


def run(hash_seed: str, *args: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.simulation.scheduler", *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_trace_depends_on_the_seed_alone():
    one, two = run("1", "--steps", "5000", "--seed", "3"), run("2", "--steps", "5000", "--seed", "3")
    assert one[-1].startswith("trace ") and one[-1] == two[-1]
    assert run("1", "--steps", "5000", "--seed", "4")[-1] != one[-1]


def lost_block(patch):
    release = blocks.BlockPool.release
    patch.setattr(blocks.BlockPool, "release", lambda pool, ids: release(pool, ids[1:] if len(ids) > 3 else ids))


def early_publish(patch):
    publish = PrefixCache.publish

    def all_blocks(self, seq):
        computed, seq.num_computed = seq.num_computed, min(len(seq.tokens), seq.capacity)
        publish(self, seq)
        seq.num_computed = computed

    patch.setattr(PrefixCache, "publish", all_blocks)


def salt_forgotten(patch):
    patch.setattr(prefix_cache, "extras", lambda request, index: ())


def whole_prompt_hit(patch):
    def match(self, seq):
        hits = []
        for index in range(len(seq.tokens) // seq.block_size):
            block = self.pool.find(self.block_hash(seq, index))
            if block is None:
                break
            hits.append(block)
        return hits

    patch.setattr(PrefixCache, "match", match)


def preempted_keeps_progress(patch):
    preempt = scheduler.Scheduler._preempt

    def keep(self, seq, **reason):
        computed = seq.num_computed
        preempt(self, seq, **reason)
        seq.num_computed = computed

    patch.setattr(scheduler.Scheduler, "_preempt", keep)


def stop_before_min_tokens(patch):
    append = Sequence.append

    def early(self, sampled):
        self.request = replace(self.request, params=replace(self.request.params, min_tokens=0))
        return append(self, sampled)

    patch.setattr(Sequence, "append", early)


def first_forced_tokens_not_told(patch):
    add = scheduler.Scheduler.add

    def silent(self, request, forced=None):
        delta = add(self, request, forced)
        if request.id in self.by_id:
            seq = self.by_id[request.id]
            seq.num_delivered = len(seq.tokens)
        return delta

    patch.setattr(scheduler.Scheduler, "add", silent)


def forced_past_the_end(patch):
    append = Sequence.append

    def late(self, sampled):
        first, *others = sampled.token_ids
        reason = append(self, replace(sampled, token_ids=[first], is_last=sampled.is_last and not others))
        return append(self, replace(sampled, token_ids=others)) if others else reason

    patch.setattr(Sequence, "append", late)


def whole_answers_go_on(patch):
    append = Sequence.append
    patch.setattr(Sequence, "append", lambda self, sampled: append(self, replace(sampled, is_last=False)))


def freed_in_flight(patch):
    release = PrefixCache.release
    patch.setattr(PrefixCache, "release", lambda self, seq, step=None: release(self, seq))


def preempted_in_flight(patch):
    serve = scheduler.Scheduler._serve_running

    def impatient(self, *args):
        counts = {seq: seq.num_inflight for seq in self.running}
        for seq in counts:
            seq.num_computed = seq.start
        budget = serve(self, *args)
        for seq, count in counts.items():
            if seq.status is Status.RUNNING:
                seq.num_computed -= count
        return budget

    patch.setattr(scheduler.Scheduler, "_serve_running", impatient)


def row_after_the_last_token(patch):
    patch.setattr(Sequence, "remaining", property(lambda self: self.length - self.start))


def runner_not_told(patch):
    leave = scheduler.Scheduler._leave

    def silent(self, seq):
        leave(self, seq)
        self._left.clear()

    patch.setattr(scheduler.Scheduler, "_leave", silent)


def admits_while_preempting(patch):
    serve = scheduler.Scheduler._serve_running

    def forget(self, *args):
        budget = serve(self, *args)
        return self._admit(args[0], budget, args[1])

    patch.setattr(scheduler.Scheduler, "_serve_running", forget)


def budget_off_by_one(patch):
    top_up = scheduler.Scheduler._top_up
    patch.setattr(scheduler.Scheduler, "_top_up", lambda self, chosen, budget: top_up(self, chosen, budget + 1))


def resumed_blocks_not_sent(patch):
    batch = scheduler.Scheduler._batch

    def skip(self, chosen, *rest):
        for seq in chosen:
            if seq.status is Status.RUNNING and seq.new_to_runner:
                seq.num_sent_blocks = min(1, len(seq.block_ids) - 1)
        return batch(self, chosen, *rest)

    patch.setattr(scheduler.Scheduler, "_batch", skip)


def freed_too_early(patch):
    free = PrefixCache._free_unseen

    def early(self, seq):
        seq.num_computed += 1
        free(self, seq)
        seq.num_computed -= 1

    patch.setattr(PrefixCache, "_free_unseen", early)


def freed_while_it_is_read(patch):
    free = PrefixCache._free_unseen

    def early(self, seq):
        computed, seq.num_computed = seq.num_computed, seq.start
        free(self, seq)
        seq.num_computed = computed

    patch.setattr(PrefixCache, "_free_unseen", early)


def freed_twice(patch):
    held = PrefixCache._held
    patch.setattr(PrefixCache, "_held", lambda self, seq: seq.block_ids if seq.num_freed else held(self, seq))


def group_forgotten(patch):
    init = PrefixCache.__init__

    def forget(self, *args):
        init(self, *args)
        self._suffixes = [b"" for _ in self._suffixes]

    patch.setattr(PrefixCache, "__init__", forget)


def window_of_a_hit_forgotten(patch):
    patch.setattr(PrefixCache, "_last_missing", lambda *_: None)


def window_counted_as_free(patch):
    patch.setattr(PrefixCache, "_lacking", lambda self, *_: 0)


MUTANTS = [
    lost_block,
    early_publish,
    salt_forgotten,
    whole_prompt_hit,
    preempted_keeps_progress,
    stop_before_min_tokens,
    first_forced_tokens_not_told,
    forced_past_the_end,
    whole_answers_go_on,
    runner_not_told,
    admits_while_preempting,
    budget_off_by_one,
    resumed_blocks_not_sent,
]


AHEAD = [freed_in_flight, preempted_in_flight, row_after_the_last_token]


def test_no_check_fails_when_steps_are_launched_ahead(capsys):
    simulation.main(["--steps", "20000", "--seed", "1", "--depth", "1"])
    said = capsys.readouterr().out
    assert "every check held" in said and " 0 preemptions" not in said and " 0 void rows" not in said


@pytest.mark.parametrize("depth", ["0", "1"])
def test_no_check_fails_when_windows_free_their_blocks(depth, capsys):
    simulation.main(["--steps", "10000", "--seed", "1", "--depth", depth, "--windows"])
    said = capsys.readouterr().out
    assert "every check held" in said and " 0 preemptions" not in said


@pytest.mark.parametrize("options", [["--depth", "0"], ["--depth", "1", "--windows"]])
def test_no_check_fails_when_layers_keep_states(options, capsys):
    simulation.main(["--steps", "10000", "--seed", "1", "--states", *options])
    said = capsys.readouterr().out
    assert "every check held" in said and " 0 preemptions" not in said and " 0 sequences from a snapshot" not in said


WINDOWS = [freed_too_early, freed_twice, group_forgotten, window_of_a_hit_forgotten, window_counted_as_free]


@pytest.mark.parametrize(
    ("mutant", "options"),
    [(mutant, ["--depth", "0"]) for mutant in MUTANTS]
    + [(mutant, ["--depth", "1"]) for mutant in AHEAD]
    + [(mutant, ["--depth", "0", "--windows"]) for mutant in WINDOWS]
    + [(freed_while_it_is_read, ["--depth", "1", "--windows"])],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_a_broken_scheduler_is_caught(mutant, options, monkeypatch, capsys):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        simulation.main(["--steps", "20000", "--seed", "1", *options])
    assert "replay with:\npython -m tests.simulation.scheduler --seed 1 --episode" in capsys.readouterr().out
