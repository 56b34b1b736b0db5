"""`make fuzz`: every target in turn under atheris, which looks for bytes that reach code not yet reached.

    python -m tests.fuzz.run --seconds 60 [--runs 1000000] [--target NAME] [--corpus DIR]

What a target does not survive is kept as DIR/NAME/crash-…; the exit code is the number of such targets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ONE_SECOND_MAX = 5
MEMORY_MIB_MAX = 1024


def main() -> int:
    """Each target in a process of its own: the fuzzer ends its process."""
    reader = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    reader.add_argument("--seconds", type=int, default=60, help="for each target")
    reader.add_argument("--runs", type=int, default=0, help="for each target; 0: as many as there is time for")
    reader.add_argument("--target", default="", help="only this one")
    reader.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    reader.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    flags = reader.parse_args()
    if flags.child:
        fuzz(flags.target, flags.seconds, flags.runs, flags.corpus)
        return 0
    from tests.fuzz.targets import targets

    known = targets()
    if flags.target and flags.target not in known:
        reader.error(f"no target {flags.target}; there are: {' '.join(known)}")
    failed = []
    for name in [flags.target] if flags.target else known:
        corpus = flags.corpus / name
        corpus.mkdir(parents=True, exist_ok=True)
        for number, raw in enumerate(known[name].examples):
            (corpus / f"example-{number}").write_bytes(raw)
        command = [sys.executable, "-m", "tests.fuzz.run", "--child", "--target", name]
        command += ["--seconds", str(flags.seconds), "--runs", str(flags.runs), "--corpus", str(corpus)]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        told = [line for line in result.stderr.splitlines() if "Done" in line or "stat::number_of_executed" in line]
        sys.stdout.write(f"{name:14} {'ok' if result.returncode == 0 else 'FAILED'}   {' '.join(told)}\n")
        sys.stdout.flush()
        if result.returncode:
            sys.stdout.write(result.stderr[result.stderr.find(" === Uncaught") :][:4000])
            failed.append(name)
    return len(failed)


def fuzz(name: str, seconds: int, runs: int, corpus: Path) -> None:
    """Try one target until time is up, or so many runs (0: any) are done; does not return."""
    import atheris

    with atheris.instrument_imports(include=["peerload"]):
        from tests.fuzz.targets import targets

    target = targets()[name]

    def try_it(raw: bytes) -> None:
        try:
            target.reads(raw)
        except target.raises:
            return

    limits = [
        f"-max_total_time={seconds}",
        f"-runs={runs or -1}",
        f"-timeout={ONE_SECOND_MAX}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
    ]
    atheris.Setup([sys.argv[0], *limits, "-max_len=4096", f"-artifact_prefix={corpus}/", str(corpus)], try_it)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
