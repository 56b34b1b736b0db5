"""The commands that `peerload demo` submits, and what each of them must print.

Real programs (sha256sum, gzip, sort, a Python that counts primes, a reader of a slow source, sleep), each with a
known answer, so that the demo can tell that every output came home unharmed.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

KINDS = ("hash", "read", "sleep", "gzip", "read", "primes", "sleep", "read", "sort", "read")
"""One round of the mix. Four of ten tasks need a processor all the time; the others mostly wait, as downloads and
tests do, so that six slots can be seen at work where there are fewer processors than slots."""

HASH_BYTES = (80_000_000, 120_000_000, 160_000_000)
GZIP_LINES = (500_000, 800_000)
SORT_LINES = (400_000, 600_000)
PRIMES_BELOW = (90_000, 140_000)
READ_PARTS = (3, 4, 5)
READ_LINES = 20_000
READ_PAUSE_S = 0.22
SLEEP_S = (0.3, 0.9, 0.6, 1.2)

_COUNT_PRIMES = "print(sum(all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range(2, {below})))"


class DemoCommand:
    """One command line: a ``name`` for people, its ``argv``, and the ``answer`` it must print (computed here when it
    is asked for)."""

    def __init__(self, name: str, argv: list[str], answer: Callable[[], str]) -> None:
        self.name = name
        self.argv = argv
        self.answer = answer


def commands(count: int) -> list[DemoCommand]:
    """The first ``count`` commands of the mix, always the same."""
    makers = {"hash": _hash, "gzip": _gzip, "sort": _sort, "primes": _primes, "read": _read, "sleep": _sleep}
    met = dict.fromkeys(makers, 0)
    chosen = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        chosen.append(makers[kind](met[kind]))
        met[kind] += 1
    return chosen


def list_schedule_s(durations_s: Iterable[float], slots: int) -> float:
    """Time that tasks of these durations take on one node that starts them in this order, ``slots`` at a time."""
    free_at = [0.0] * slots
    for duration_s in durations_s:
        heapq.heapreplace(free_at, free_at[0] + duration_s)
    return max(free_at)


def _shell(line: str) -> list[str]:
    return ["/bin/sh", "-c", line]


def _hash(number: int) -> DemoCommand:
    size = HASH_BYTES[number % len(HASH_BYTES)]
    line = f"yes peerload | head -c {size} | sha256sum"
    return DemoCommand(f"hash-{size // 1_000_000}MB", _shell(line), lambda: f"{_digest_of_repeats(size)}  -")


def _gzip(number: int) -> DemoCommand:
    lines = GZIP_LINES[number % len(GZIP_LINES)]
    line = f"seq {lines} | gzip -9 | gzip -dc | sha256sum"
    return DemoCommand(f"gzip-{lines // 1000}k", _shell(line), lambda: f"{_digest_of_numbers(lines)}  -")


def _sort(number: int) -> DemoCommand:
    lines = SORT_LINES[number % len(SORT_LINES)]
    line = f"seq {lines} | rev | sort | sha256sum"
    return DemoCommand(f"sort-{lines // 1000}k", _shell(line), lambda: f"{_digest_of_sorted(lines)}  -")


def _primes(number: int) -> DemoCommand:
    below = PRIMES_BELOW[number % len(PRIMES_BELOW)]
    argv = [sys.executable, "-I", "-S", "-c", _COUNT_PRIMES.format(below=below)]
    return DemoCommand(f"primes-{below // 1000}k", argv, lambda: str(_primes_below(below)))


def _read(number: int) -> DemoCommand:
    parts = READ_PARTS[number % len(READ_PARTS)]
    numbers = " ".join(map(str, range(parts)))
    line = f"for part in {numbers}; do sleep {READ_PAUSE_S}; seq {READ_LINES}; done | sha256sum"
    return DemoCommand(f"read-{parts}-parts", _shell(line), lambda: f"{_digest_of_numbers(READ_LINES, parts)}  -")


def _sleep(number: int) -> DemoCommand:
    seconds = SLEEP_S[number % len(SLEEP_S)]
    return DemoCommand(f"sleep-{seconds}", _shell(f"sleep {seconds}; echo slept {seconds}"), lambda: f"slept {seconds}")


@functools.cache
def _digest_of_repeats(size: int) -> str:
    block = b"peerload\n" * 100_000
    digest = hashlib.sha256()
    for _ in range(size // len(block)):
        digest.update(block)
    digest.update(block[: size % len(block)])
    return digest.hexdigest()


@functools.cache
def _digest_of_numbers(lines: int, times: int = 1) -> str:
    text = "".join(f"{number}\n" for number in range(1, lines + 1))
    return hashlib.sha256(text.encode() * times).hexdigest()


@functools.cache
def _digest_of_sorted(lines: int) -> str:
    words = sorted(str(number)[::-1] for number in range(1, lines + 1))
    return hashlib.sha256("".join(f"{word}\n" for word in words).encode()).hexdigest()


@functools.cache
def _primes_below(below: int) -> int:
    sieve = bytearray([1]) * below
    sieve[:2] = b"\0\0"
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, below, number)))
    return sum(sieve)
