"""What the agent of all users needs that its service makes for it; somebody who types `peerload agent --system` is told so first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from peerload.agent.systemd.notify import ServiceManager
    from peerload.model.config import AgentConfig

HINT = "systemctl start peerload        for yourself:  peerload up"


def check_service_places(config: AgentConfig, manager: ServiceManager, service_state: str) -> None:
    """That an agent in system mode is not root where its service's files are (``service_state``), and may write to its state and
    make its socket, unless that was handed over. Raises ConfigError, and nothing was made by then."""
    if config.mode != "system":
        return
    if os.geteuid() == 0 and config.state == service_state:
        why = f"what it wrote to {config.state} would be root's, and its service could not read it"
        raise ConfigError("mode", "the agent of all users does not run as root", why=why, hint=HINT)
    _check("state", Path(config.state))
    handed_over = manager.listener(config.socket)
    if handed_over is not None:
        handed_over.close()
    else:
        _check("socket", Path(config.socket).parent)


def _check(key: str, directory: Path) -> None:
    """Raises ConfigError if we may neither write there nor make it."""
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110 -- what may not be looked at counts as not there
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"{directory} cannot be {'used' if there == directory else 'made'}"
        raise ConfigError(key, what, why=f"{there}: Permission denied for uid {os.geteuid()}", hint=HINT)
