"""Builders of environments: detection of uv, Python with venv and pip, and micromamba on a node, and their command lines.

An environment is built once for each lock, interpreter and platform, identified by `Plan.key`. The builder runs as the
user, in the directory of the environment: `lock/` has the files of the lock, `client/` the node's modules that
tasks of `peerload.Executor` need, `env/` becomes the environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from peerload.model.task import EnvironmentLock

LOOK_S_MAX = 10.0
"""Timeout for an interpreter to report its version."""
MINORS = range(20, 8, -1)
CONDAS = ("micromamba", "mamba", "conda")
_ASK = """\
import sys, venv
try:
    from pip import __version__ as pip
except ImportError:
    pip = "0"
print(*sys.version_info[:3], pip)
"""
PIP_MIN = (22, 3)
"""The first pip version that can install into another interpreter's environment, so that the environment needs no pip."""
_TERM = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?\Z")

_INSTALL = "install --no-input --disable-pip-version-check -r lock/requirements.txt\n"
_PIP = f'"$1" -m venv --without-pip env\n"$1" -m pip --python env/bin/python {_INSTALL}'
_OLD_PIP = f'"$1" -m venv env\nenv/bin/python -m pip {_INSTALL}'
_UV_PIP = """\
"$2" venv --no-project --python "$1" env
"$2" pip install --python env/bin/python -r lock/requirements.txt
"""
_UV_SYNC = 'UV_PROJECT_ENVIRONMENT="$PWD/env" "$2" sync --frozen --no-install-project --project lock --python "$1"\n'
_CONDA = 'for lock in lock/*; do "$2" create --yes --prefix "$PWD/env" --file "$lock"; done\n'
_CLIENT = """\
for site in env/lib/python*/site-packages; do
    if [ -d "$site" ]; then printf '%s\\n' "$PWD/client" > "$site/peerload-client.pth"; fi
done
"""
"""Lets functions of `peerload.Executor` import the required parts of peerload, after all packages of the lock."""


class Plan(NamedTuple):
    """Build plan of one environment on this node. key: its name; argv: the command to run in its directory; is_conda: tasks get
    its path in CONDA_PREFIX, otherwise in VIRTUAL_ENV."""

    key: str
    argv: tuple[bytes, ...]
    is_conda: bool


def kinds() -> tuple[str, ...]:
    has_uv = shutil.which("uv") is not None
    has_pip = all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))
    has_conda = any(shutil.which(name) for name in CONDAS)
    return tuple(kind for kind, there in (("pip", has_uv or has_pip), ("uv", has_uv), ("conda", has_conda)) if there)


def plan_of(lock: EnvironmentLock) -> Plan | str:
    """The build plan of this node for a lock, or the reason why there is none. Blocks, since it runs interpreters for their version."""
    tool = next(filter(None, map(shutil.which, CONDAS if lock.kind == "conda" else ("uv",))), "")
    chosen, has_pip = ("", False) if lock.kind == "conda" else _interpreter(lock.python)
    if lock.kind == "conda":
        script = _CONDA
    elif tool:
        script = _UV_SYNC if lock.kind == "uv" else _UV_PIP
    else:
        script = _PIP if has_pip else _OLD_PIP
    if not tool and lock.kind != "pip":
        return f"no builder there for {lock.name}"
    if not tool and not chosen:
        return f"no Python {lock.python} there for {lock.name}"
    interpreter = chosen.partition(" ")[0] or lock.python or "python3"
    libc = "-".join(platform.libc_ver())
    facts = (lock.manifest.hex(), lock.kind, tool, chosen or lock.python, platform.machine(), libc)
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
    words = ("/bin/sh", "-ec", f"rm -rf env\n{script}{_CLIENT}", "sh", interpreter, tool)
    return Plan(key, tuple(map(os.fsencode, words)), lock.kind == "conda")


def _interpreter(wanted: str) -> tuple[str, bool]:
    """Path and version of the first suitable interpreter of this node, "" if there is none; and True if its pip is new enough."""
    own = getattr(sys, "_base_executable", sys.executable)
    paths = (shutil.which("python3"), own, *(shutil.which(f"python3.{minor}") for minor in MINORS))
    for path in dict.fromkeys(filter(None, paths)):
        ask = [path, "-I", "-c", _ASK]
        try:
            done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=LOOK_S_MAX)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            continue
        *version, pip = done.stdout.split()
        if fits(tuple(map(int, version)), wanted):
            numbers = re.findall("[0-9]+", pip)
            return f"{path} {'.'.join(version)}", tuple(map(int, numbers[:2])) >= PIP_MIN
    return "", False


def fits(version: tuple[int, ...], wanted: str) -> bool:
    """True if a Python version satisfies `requires-python`, or if that cannot be parsed: then the builder decides."""
    return all(_fits_one(version, term.strip()) for term in wanted.split(",") if term.strip())


def _fits_one(version: tuple[int, ...], term: str) -> bool:
    match = _TERM.match(term)
    if match is None:
        return True
    sign, number, star = match.groups()
    limit = tuple(map(int, number.split(".")))
    begins = version[: len(limit)] == limit
    filled = limit + (0,) * (len(version) - len(limit))
    match sign:
        case "~=":
            return version >= filled and version[: len(limit) - 1] == limit[:-1]
        case "==" | "===":
            return begins if star else version == filled
        case "!=":
            return not begins if star else version != filled
        case "<":
            return version < filled
        case ">":
            return version > filled
        case "<=":
            return version <= filled
        case _:
            return version >= filled
