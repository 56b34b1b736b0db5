"""`make deploy-test`: install peerload on a machine of its own, with systemd, and try what its services promise; ends with a table.

`make deploy-test SUITE=trixie` does so on a Debian 13 instead of a Debian 12; ONLY="install lease" makes some of the steps alone.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.deploy import machine
from tests.deploy.trial import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_COMING_UP = "raise SystemExit(3)"
ONLY = os.environ.get("ONLY", "")


def steps() -> Iterator[dict[str, Any]]:
    """Each step as the machine tells it: `step passed says took_s`, and what the journal says if it failed. Raises CannotBeMade."""
    machine.check()
    built = {
        "first": machine.wheel("0.1.0"),
        "second": machine.wheel("0.1.1"),
        "broken": machine.wheel("0.1.2", NOT_COMING_UP),
    }
    files = {"deploy": machine.ROOT / "deploy", "wheels": machine.wheels()}
    files |= {name: wheel.parent for name, wheel in built.items()}
    return machine.boot(files, machine.installed(*built.values()), ONLY)


def main() -> int:
    """0 if every step passed, 1 if one failed, 2 if no machine could be made."""
    failed = passed = 0
    began_s = time.monotonic()
    try:
        for told in steps():
            passed += told["passed"]
            failed += not told["passed"]
            says = " ".join(told["says"].split())
            sys.stdout.write(
                f"{'ok' if told['passed'] else 'FAILED':7} {told['took_s']:6.1f} s  {told['step']:24} {says}\n"
            )
            sys.stdout.write("".join(f"        {line}\n" for line in told.get("journal", "").splitlines()))
            sys.stdout.flush()
    except machine.CannotBeMade as error:
        sys.stderr.write(f"no machine can be made here: {error}\n")
        return 2
    minutes = (time.monotonic() - began_s) / 60
    expected = len([step for step in STEPS if not ONLY or step.__name__ in ONLY.split()])
    untold = expected - passed - failed
    sys.stdout.write(
        f"{machine.SUITE}: {passed} passed, {failed} failed{f', {untold} not told of' * bool(untold)}; {minutes:.0f} minutes\n"
    )
    return 0 if (passed, failed) == (expected, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
