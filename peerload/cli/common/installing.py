"""The line that installs this very peerload on a machine that has nothing, and has it join: made from where this one came.

Installers write down where a distribution came from (`direct_url.json`, PEP 610): an index needs no such file; a source
tree and a file lie on this machine alone, so that the line is typed here and carries them over ssh.
"""

from __future__ import annotations

import json
import os
import shlex
from importlib.metadata import Distribution, packages_distributions
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from peerload import distribution

PACKAGE = "peerload"
TREE = "tar -C {tree} --exclude=./.venv --exclude=./.git -cz . | ssh OTHER {there}"
"""What `make setup` needs of a source tree, carried to another machine."""
UNPACKED = "mkdir -p peerload && tar -xz -C peerload"
IN_TREE = UNPACKED + " && make -C peerload setup && peerload/.venv/bin/{join}"
AS_ROOT = " && ssh -t OTHER {there}"
"""A second time, with a terminal: sudo may ask for a password."""
IN_WHEEL = "peerload-wheel/{release}.data/data/share/peerload/deploy/install"
"""Where the script is in a wheel that was unpacked to that directory."""
INSTALLERS = ("pipx install", "uv tool install")
IN_HOME = "~/.local/bin/{join}"
"""pipx and uv put commands there; a shell that ssh starts need not have it on its PATH."""


class Line(NamedTuple):
    """One line to type; is_typed_here: on this machine, with the other's name for OTHER."""

    text: str
    is_typed_here: bool


def lines(join: str, *, is_system: bool) -> list[Line]:
    """The ways to install and to run ``join``, a command of peerload, on a machine that has nothing; none if it is not
    known where this peerload came from."""
    name = packages_distributions().get(PACKAGE, [""])[0]
    if not name:
        return []
    came_from = Distribution.from_name(name)
    told = came_from.read_text("direct_url.json")
    direct_url = json.loads(told) if told else {}
    release = f"{name}=={came_from.version}"
    return lines_for(join, release, direct_url, is_system=is_system, kept_wheel=distribution.kept_wheel())


def lines_for(
    join: str, release: str, direct_url: dict[str, object], *, is_system: bool, kept_wheel: str = ""
) -> list[Line]:
    """The same for a distribution of this release that came from there. kept_wheel: the file that it was installed from, where
    it is kept."""
    url = str(direct_url.get("url") or "")
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if kept_wheel and not os.path.exists(path):  # noqa: PTH110 -- as the rest of the package
        path = kept_wheel
    if path and os.path.isfile(os.path.join(path, "Makefile")):  # noqa: PTH113, PTH118 -- as the rest of the package
        there = UNPACKED if is_system else IN_TREE.format(join=join)
        text = TREE.format(tree=shlex.quote(path), there=shlex.quote(there))
        if is_system:
            text += AS_ROOT.format(there=shlex.quote(f"sudo peerload/deploy/install && sudo {join}"))
        return [Line(text, is_typed_here=True)]
    if path and os.path.isfile(path):  # noqa: PTH113
        file = shlex.quote(os.path.basename(path))  # noqa: PTH119
        if is_system:
            unpacked = f"cat > {file} && python3 -m zipfile -e {file} peerload-wheel"
            script = shlex.quote(IN_WHEEL.format(release="-".join(os.path.basename(path).split("-")[:2])))  # noqa: PTH119
            installed = f"sudo sh {script} --from {file} && sudo {join}"
            text = f"ssh OTHER {shlex.quote(unpacked)} < {shlex.quote(path)}"
            return [Line(text + AS_ROOT.format(there=shlex.quote(installed)), is_typed_here=True)]
        ways = [f"cat > {file} && {install} ./{file} && {IN_HOME.format(join=join)}" for install in INSTALLERS]
        return [Line(f"ssh OTHER {shlex.quote(way)} < {shlex.quote(path)}", is_typed_here=True) for way in ways]
    if is_system or path or not (url or distribution.IS_REGISTERED):
        return []  # the service is made from a wheel or a source tree, and nobody knows where one is
    what = shlex.quote(_requirement(release, url, direct_url.get("vcs_info")))
    return [Line(f"{install} {what} && {IN_HOME.format(join=join)}", is_typed_here=False) for install in INSTALLERS]


def _requirement(release: str, url: str, vcs: object) -> str:
    """What an installer is given: a release of an index, or an address."""
    if isinstance(vcs, dict) and url:
        return f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return url or release
