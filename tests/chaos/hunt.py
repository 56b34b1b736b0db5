"""`python -m tests.chaos.hunt [VARIANT …]`: the first seed at which each broken variant of the protocol is found out."""

from __future__ import annotations

import argparse
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
        if broken and not run(seed).broken:
            return seed, broken
    return 0, ""


def main(words: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.chaos.hunt", description=__doc__)
    reader.add_argument("variants", nargs="*")
    reader.add_argument("--seeds", type=int, default=SEEDS_MAX)
    reader.add_argument("--first", type=int, default=1)
    flags = reader.parse_args(words)
    missed = 0
    for name in flags.variants or VARIANTS:
        started_s = time.process_time()
        seed, broken = hunt(VARIANTS[name], range(flags.first, flags.first + flags.seeds))
        missed += not broken
        seconds = time.process_time() - started_s
        say(f"{name:28} {seed or '-':>5}  {seconds:6.1f} s  {broken or 'NOT CAUGHT'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
