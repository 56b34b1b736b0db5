"""The simulator: the core on a virtual clock and a simulated network, without losses. `run` is its Python interface."""

from __future__ import annotations

__all__ = ["run"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.sim.api import run


def __getattr__(name: str) -> object:
    """Import the interface on access, so that other parts of the package can be imported without it."""
    if name not in __all__:
        raise AttributeError(f"module 'peerload.sim' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 -- as above

    return getattr(import_module("peerload.sim.api"), name)
