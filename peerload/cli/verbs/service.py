"""`peerload service`: install, upgrade and uninstall the service for all users of this machine, by the scripts in deploy/.

The scripts are those of the source tree that `--from` names, else those of this peerload.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.cli.common.options import Options
from peerload.distribution import deploy_directory
from peerload.model.errors import PeerloadError, UsageError
from peerload.text.format import print_json

if TYPE_CHECKING:
    from argparse import Namespace

TAKES = {
    "install": ("--from", "--wheels", "--prefix", "--root", "--no-start"),
    "upgrade": ("--from", "--wheels", "--prefix", "--root", "--no-start"),
    "uninstall": ("--prefix", "--root", "--purge"),
}
SYSTEMD = Path("/run/systemd/system")
"""Directory that exists if systemd runs the machine."""
HINT = "peerload service install|upgrade|uninstall        usage:  peerload service --help"


def main(words: list[str]) -> int:
    """Run the verb → the exit code of the script."""
    reader = Options(
        "service",
        "The service for all users of this machine, for root. It runs the scripts of this peerload.\n\n"
        "  peerload service install      install and start it; again: update what differs\n"
        "  peerload service upgrade      update an installed service; tasks go on\n"
        "  peerload service uninstall    remove it; running tasks end; tasks, keys and settings stay without --purge",
        usage="install|upgrade|uninstall [flags]",
        json_says="print JSON, one object; the output of the script goes to stderr",
    )
    reader.add_argument("what", nargs="?", default="", metavar="install|upgrade|uninstall")
    reader.flag("--from FILE", help="a wheel or a source tree (default: the one that this runs from)", dest="source")
    reader.flag("--wheels DIR", help="directory of the packages that it needs; nothing is downloaded")
    reader.flag("--prefix DIR", help="where it is installed (default /opt/peerload)")
    reader.flag("--root DIR", help="install into the root file system of an image at DIR; nothing is started")
    reader.switch("--no-start", help="do not start or enable it")
    reader.switch("--purge", help="with uninstall: also remove tasks, outputs, keys, settings and accounts")
    flags = reader.read(words)
    given = _given(flags)
    _check_possible(flags, words)
    code = _run(_scripts(flags) / flags.what, given, is_quiet=flags.json)
    if flags.json:
        print_json({"what": flags.what, "exit_code": code})
    return code


def _given(flags: Namespace) -> list[str]:
    """The flags for the script. Raises UsageError for flags that the script does not accept."""
    if flags.what not in TAKES:
        raise UsageError(
            f"service: unknown action: {flags.what[:60]!r}" if flags.what else "service: the action is missing",
            hint=HINT,
        )
    valued = {"--from": flags.source, "--wheels": flags.wheels, "--prefix": flags.prefix, "--root": flags.root}
    given = {flag: [value] for flag, value in valued.items() if value is not None}
    given |= {flag: [] for flag, is_on in (("--no-start", flags.no_start), ("--purge", flags.purge)) if is_on}
    for flag in given:
        if flag not in TAKES[flags.what]:
            raise UsageError(f"service: {flags.what} takes no {flag}", hint=HINT)
    return [word for flag, values in given.items() for word in (flag, *values)]


def _check_possible(flags: Namespace, words: list[str]) -> None:
    """Raise PeerloadError for users other than root, and if no service can be started here."""
    if os.geteuid() != 0:
        command = Path(sys.prefix, "bin/peerload")  # it may not be on the PATH of sudo
        again = shlex.join([str(command) if command.exists() else "peerload", "service", *words])
        alone = "" if flags.what == "uninstall" else "        for yourself alone:  peerload up"
        raise PeerloadError("only root can do this", why="the service is for all users", hint=f"sudo {again}{alone}")
    if flags.what != "uninstall" and not (flags.no_start or flags.root or SYSTEMD.is_dir()):
        raise PeerloadError(
            "a service cannot be started here",
            why="systemd does not run this machine",
            hint="without starting it:  --no-start        for yourself alone:  peerload up",
        )


def _scripts(flags: Namespace) -> Path:
    """The directory of the scripts. Raises PeerloadError if it or the package to install is missing."""
    source = Path(flags.source) if flags.source else None
    if source and (source / "deploy/install").is_file():
        return (source / "deploy").absolute()
    found = deploy_directory()
    if not found:
        why = "this peerload was installed without its deploy/ directory"
        where = f"in a source tree of this version:  deploy/{flags.what}"
        raise PeerloadError("the scripts are not on this machine", why=why, hint=where)
    if flags.what != "uninstall" and not source and not Path(found, "../pyproject.toml").is_file():
        raise PeerloadError(
            "nothing to install",
            why="this peerload does not run from a source tree",
            hint=f"peerload service {flags.what} --from WHEEL        or a source tree:  --from DIR",
        )
    return Path(found)


def _run(script: Path, words: list[str], *, is_quiet: bool) -> int:
    """Run the script → its exit code. Ctrl-C goes to the script, which undoes its changes."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        done = subprocess.run(  # noqa: S603 -- our own script, with arguments of root
            [script, *words],
            env=os.environ | {"DEPLOY_AS": "peerload service "},
            stdout=2 if is_quiet else None,
            check=False,
        )
    except OSError as error:
        raise PeerloadError(f"{script} cannot be run", why=error.strerror or str(error)) from None
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
