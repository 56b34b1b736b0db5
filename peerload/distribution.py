"""The name under which peerload is distributed, and what to type for a part that is not installed."""

from __future__ import annotations

NAME = "peerload"
"""As `project.name` in pyproject.toml."""
IS_REGISTERED = False
"""Whether a package index has this name for us. Until it has, nobody is told to install it by name: another's package could
be there."""
EXTRAS = {
    "broker": ("amqtt>=0.12.1,<0.13",),
    "plot": ("matplotlib>=3.9,<4",),
    "top": ("textual>=8,<9",),
}
"""The packages of each extra of pyproject.toml."""


def how_to_add(extra: str) -> str:
    """The command that installs what this extra needs."""
    if IS_REGISTERED:
        return f"pip install '{NAME}[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in EXTRAS[extra])
