"""peerload: many machines as one, without a head node."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Executor", "__version__"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.client.asynchronous import AsyncClient
    from peerload.client.blocking import Client
    from peerload.client.executor import Executor

_MODULES = {"Client": "blocking", "AsyncClient": "asynchronous", "Executor": "executor"}


def __getattr__(name: str) -> object:
    """The classes of the Python interface, imported when they are asked for: every command imports this module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'peerload' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 -- as above

    return getattr(import_module(f"peerload.client.{_MODULES[name]}"), name)
