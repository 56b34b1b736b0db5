"""What is tried out on a machine of its own, by a service of its process 1, as root: peerload installed for all users, used, held to
its limits, restarted, reloaded, upgraded and removed. It runs there with Debian's Python alone, and tells what came of each step
on the disk that it is given (told.py)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.deploy import trial_limits, trial_services
from tests.deploy.told import tell
from tests.deploy.trial_tools import CONFIG, DROP_IN, MORE_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (
    trial_services.install,
    trial_services.units,
    trial_services.status,
    trial_services.who_is_not_in_the_group,
    trial_services.doctor,
    trial_limits.memory,
    trial_limits.processes,
    trial_limits.shares,
    trial_services.restart,
    trial_services.crash,
    trial_services.reload_settings,
    trial_services.watchdog,
    trial_services.activation,
    trial_services.upgrade,
    trial_services.upgrade_that_fails,
    trial_services.launcher_killed,
    trial_limits.joined,
    trial_limits.guest,
    trial_limits.lease,
    trial_limits.left,
    trial_services.uninstall,
)
JOURNAL_LINES_MAX = 40
ONLY = Path("/trial/only")
"""If it is there, these steps alone."""
LONG_S = 120.0
"""So often it is said on the console what is going on."""


def chosen() -> list[Callable[[], str]]:
    """The steps that are to be made."""
    only = ONLY.read_text().split() if ONLY.exists() else []
    return [step for step in STEPS if not only or step.__name__ in only]


def main() -> None:
    """Each step, also after one that failed."""
    threading.Thread(target=watch, daemon=True).start()
    settings = ""
    for number, step in enumerate(chosen()):
        began_s = time.monotonic()
        if not settings and CONFIG.exists():
            settings = CONFIG.read_text()
        said = {"step": step.__name__, "passed": True, "says": ""}
        try:
            said["says"] = step().strip()
        except Exception as error:  # noqa: BLE001 -- told, and the next step is tried, on a machine in order
            mend(settings)
            frames = [at for at in traceback.extract_tb(error.__traceback__) if "trial" in at.filename]
            lines = ", ".join(f"{at.name} {at.lineno}" for at in frames[1:])
            said |= {"passed": False, "says": f"{type(error).__name__}: {error} ({lines})", "journal": journal()}
        said["took_s"] = round(time.monotonic() - began_s, 1)
        tell(sys.argv[1], number, said)


def mend(settings: str) -> None:
    """Have the machine be as it was before a step that failed."""
    if settings and CONFIG.parent.is_dir():
        CONFIG.write_text(settings)
    for file in (DROP_IN, MORE_CONFIG):
        file.unlink(missing_ok=True)


def watch() -> None:
    """Say now and then who is at work, for somebody who looks at the console of a machine that is stuck."""
    while True:
        time.sleep(LONG_S)
        words = ["ps", "-eo", "pcpu,stat,etimes,args", "--sort=-pcpu"]
        busy = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()[:8]
        sys.stdout.write("\n".join(line[:150] for line in busy) + "\n")


def journal() -> str:
    """The end of what agent and launcher have said."""
    words = ["journalctl", "-b", "-u", "peerload*", "--no-pager", "-n", str(JOURNAL_LINES_MAX), "-o", "cat"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    main()
