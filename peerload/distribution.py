"""Distribution of peerload: its name, commands that install missing extras, and the directory of its service files."""

from __future__ import annotations

import os
import sysconfig

NAME = "peerload"
"""Name of the distribution, as in pyproject.toml."""
IS_REGISTERED = False
"""True once the package index has this name for us. Until then, no hint installs it by name, because the package could
be someone else's."""
EXTRAS = {
    "broker": ("amqtt>=0.12.1,<0.13",),
    "parquet": ("pyarrow>=18,<27",),
    "plot": ("matplotlib>=3.9,<4",),
    "top": ("textual>=8,<9",),
    "web": ("h11>=0.16,<1", "prometheus-client>=0.22,<1"),
}
"""The packages of each extra of pyproject.toml."""


def how_to_add(extra: str) -> str:
    """The command that installs what this extra needs."""
    if IS_REGISTERED:
        return f"pip install '{NAME}[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in EXTRAS[extra])


def deploy_directory() -> str:
    """The directory of the scripts, units and broker files that belong to this peerload, "" if it came without: that of the
    source tree that it runs from, else that of the wheel."""
    tree = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 -- pathlib costs a quick start
    places = (os.path.join(tree, "deploy"), os.path.join(sysconfig.get_path("data"), "share", NAME, "deploy"))  # noqa: PTH118
    return next((place for place in places if os.path.isfile(os.path.join(place, "install"))), "")  # noqa: PTH113, PTH118


def kept_wheel() -> str:
    """The wheel that this peerload was installed from, where deploy/install keeps it; "" elsewhere."""
    directory = os.path.join(sysconfig.get_path("data"), "share", NAME, "wheel")  # noqa: PTH118
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []  # noqa: PTH112, PTH208
    return next((os.path.join(directory, name) for name in names if name.endswith(".whl")), "")  # noqa: PTH118


def deployed(name: str) -> str:
    """Path of this file of `deploy/`, for hints; its name in a source tree if it is not on this machine."""
    return os.path.join(deploy_directory() or "deploy", name)  # noqa: PTH118
