"""`python -m tests.chaos.hunt [VARIANT …]`: the first seed at which each broken variant of the protocol is found out."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import pytest

from tests.chaos.campaign import Options, run
from tests.chaos.run import say
from tests.chaos.variants import VARIANTS, Variant

SEEDS_MAX = 200


def hunt(variant: Variant, seeds: range) -> tuple[int, str]:
    """→ the first of these seeds at which a promise is broken that is kept without the variant, and which; (0, "") if none
    is."""
    options = Options(checks_boots=variant.checks_boots)
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            variant.apply(patch)
            broken = run(seed, options).broken
        if broken and not run(seed, options).broken:
            return seed, broken
    return 0, ""


def _hunted(given: tuple[str, range]) -> tuple[str, int, str, float]:
    name, seeds = given
    started_s = time.process_time()
    seed, broken = hunt(VARIANTS[name], seeds)
    return name, seed, broken, time.process_time() - started_s


def main(words: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.chaos.hunt", description=__doc__)
    reader.add_argument("variants", nargs="*")
    reader.add_argument("--seeds", type=int, default=SEEDS_MAX)
    reader.add_argument("--first", type=int, default=1)
    reader.add_argument("--jobs", type=int, default=2, help="variants hunted at a time")
    flags = reader.parse_args(words)
    seeds = range(flags.first, flags.first + flags.seeds)
    missed = 0
    with multiprocessing.get_context("spawn").Pool(flags.jobs) as pool:
        wanted = [(name, seeds) for name in flags.variants or VARIANTS]
        for name, seed, broken, seconds in pool.imap_unordered(_hunted, wanted):
            missed += not broken
            say(f"{name:30} {seed or '-':>5}  {seconds:6.1f} s  {broken or 'NOT CAUGHT'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
