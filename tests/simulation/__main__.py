"""The whole server under faults, in virtual time, from one seed.

    python -m tests.simulation --steps 200000 --seed 1 --depth 1

Real are admission, the server's generations, the engine's client, supervisor and suspects, the channel, the worker's
mail, the engine's loop, scheduler and blocks. A plan drawn from the seed says what goes wrong: clients that hang up at
any point, that read slowly or not at all, engines that die, hang or stand still, in a step, from outside and while they
load, steps without memory, rows without numbers, requests that kill each engine, a drain. Whatever comes, each admitted
request ends once, its tokens are those of an undisturbed run, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import time
from collections import Counter

from .episode import Episode, settings

PARTS = 16  # of a long run, whoever makes them: the trace must not depend on the number of processors
LONG = 50_000  # steps


def simulate(
    seed: int, first: int, stride: int, steps: int, episode_steps: int, *, depth: int = 0
) -> tuple[int, Counter[str], str]:
    """Every stride-th episode from the first one, until they have made the steps; returns steps, counts and a hash."""
    trace, counts, done, index = hashlib.sha256(), Counter[str](), 0, first
    with settings() as values:
        while done < steps:
            episode = Episode(f"{seed}/{index}", values, trace, depth=depth)
            try:
                episode.run(episode_steps)
            except BaseException:
                command = f"--seed {seed} --episode {index} --episode-steps {episode_steps} --depth {depth}"
                print(f"failed after {episode.world.steps} steps of an episode with {episode.plan}")
                print(f"replay with:\npython -m tests.simulation {command}", flush=True)
                raise
            done += episode.world.steps
            counts += Counter({f"request {name}": count for name, count in episode.outcomes.items()})
            counts += Counter({f"fault {name}": count for name, count in episode.world.faults.items()})
            counts += Counter({"episodes": 1, "lives": episode.world.lives, "preemptions": episode.world.preempted})
            counts += Counter({"streams resumed": episode.engine.status.streams_resumed})
            counts += Counter({"requests blamed": len(episode.engine.convicted), "void rows": episode.world.void})
            index += stride
    return done, counts, trace.hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="of the engine, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episode", type=int, help="run only this one, as a failure tells")
    parser.add_argument("--episode-steps", type=int, default=400)
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0, help="steps that are launched ahead")
    parser.add_argument("--loop", action="store_true", help="print the host's CPU time for a step instead")
    parser.add_argument("--rows", default="1,64,256", help="of the steps of --loop")
    parser.add_argument("--workers", type=int, default=cores(), help="processes of a long run")
    args = parser.parse_args(argv)
    if args.loop:
        from .cost import report  # needs torch, which the simulation does without

        report([int(rows) for rows in args.rows.split(",")], args.depth)
        return 0
    began = time.perf_counter()
    if args.episode is not None:
        parts = [simulate(args.seed, args.episode, 1, 1, args.episode_steps, depth=args.depth)]
    elif args.steps < LONG:
        parts = [simulate(args.seed, 0, 1, args.steps, args.episode_steps, depth=args.depth)]
    else:
        share = -(-args.steps // PARTS)
        with concurrent.futures.ProcessPoolExecutor(args.workers) as pool:
            futures = [
                pool.submit(simulate, args.seed, part, PARTS, share, args.episode_steps, depth=args.depth)
                for part in range(PARTS)
            ]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        parts = [future.result() for future in futures]
    seconds = time.perf_counter() - began
    counts = sum((part[1] for part in parts), Counter[str]())
    steps = sum(part[0] for part in parts)
    print(f"{steps} steps: every check held")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print(f"{steps / seconds:.0f} steps/s, {seconds:.0f} s")
    print(f"trace {hashlib.sha256(''.join(part[2] for part in parts).encode()).hexdigest()}")
    return 0


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    raise SystemExit(main())
