"""`python -m tests.chaos.hunt [VARIANT …]`: the first seed at which each broken variant of the protocol is found out."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.chaos.campaign import Options, run
from tests.chaos.run import say
from tests.chaos.variants import VARIANTS, Variant

SEEDS_MAX = 200
NONE = range(0)


def hunt(variant: Variant, seeds: range, *, kept: range = NONE) -> tuple[int, str]:
    """→ the first of these seeds at which a promise is broken that is kept with that rule in place, and which; (0, "") if
    none is. ``kept``: seeds that are known to keep all promises with every rule in place."""
    stands_alone = variant.checks_boots and not variant.beside
    for seed in seeds:
        broken = _broken(variant, seed, variant.apply)
        if broken and ((stands_alone and seed in kept) or not _broken(variant, seed)):
            return seed, broken
    return 0, ""


def _broken(variant: Variant, seed: int, *rules: Callable[[pytest.MonkeyPatch], None]) -> str:
    """The promise that a run breaks without these rules, and without those that stand in front of them."""
    with pytest.MonkeyPatch.context() as patch:
        for leave_out in (*variant.beside, *rules):
            leave_out(patch)
        return run(seed, Options(checks_boots=variant.checks_boots)).broken


def _hunted(given: tuple[str, range]) -> tuple[str, int, str, float]:
    name, seeds = given
    started_s = time.process_time()
    seed, broken = hunt(VARIANTS[name], seeds)
    return name, seed, broken, time.process_time() - started_s


def hunt_all(names: Iterable[str], seeds: range, jobs: int) -> Iterator[tuple[str, int, str, float]]:
    """Several variants at a time, in no order → name, seed, broken promise ("": not caught), seconds of processor time."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_hunted, [(name, seeds) for name in names])


def main(words: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.chaos.hunt", description=__doc__)
    reader.add_argument("variants", nargs="*")
    reader.add_argument("--seeds", type=int, default=SEEDS_MAX)
    reader.add_argument("--first", type=int, default=1)
    reader.add_argument("--jobs", type=int, default=2, help="variants hunted at a time")
    flags = reader.parse_args(words)
    missed = 0
    seeds = range(flags.first, flags.first + flags.seeds)
    for name, seed, broken, seconds in hunt_all(flags.variants or VARIANTS, seeds, flags.jobs):
        missed += not broken
        say(f"{name:30} {seed or '-':>5}  {seconds:6.1f} s  {broken or 'NOT CAUGHT'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
