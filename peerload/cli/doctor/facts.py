"""Facts that `peerload doctor` examines: this machine, the settings that an agent started now would have, and the
running agent, if there is one. They are gathered once; the checks only judge."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from peerload.client.connection import AgentConnection, default_socket_path, user_socket_path
from peerload.distribution import deployed
from peerload.model.errors import AgentUnavailable, BadRequest, ConfigError, PeerloadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from peerload.model.config import AgentConfig
    from peerload.security.cluster_dir import ClusterDirectory

AGENT_S_MAX = 5.0
"""Time that the agent may take to answer."""
OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
AS_SERVICE = (
    f"sudo peerload service install        or one of your own, with Delegate=yes:  {deployed('peerload-user.service')}"
)
"""Fix for an agent that has no cgroups for its tasks."""


class Finding(NamedTuple):
    """Result of one check. result: OK, WARN (works, but may not for long or not as it should), FAIL, or SKIP (does
    not apply here); fix: the command, or what else to do."""

    result: str
    says: str
    fix: str = ""


class Check(NamedTuple):
    """Check: its name, and its function."""

    name: str
    look: Callable[[DoctorInput], Finding]


class DoctorInput:
    """root: where /proc, /etc and the like are found; socket: of the agent, None: where clients look for it."""

    def __init__(
        self, socket: str | None = None, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = dict(os.environ if environment is None else environment)
        self.root = root
        self.now = time.time()
        self.user_id = os.getuid()
        self.config: AgentConfig | None = None
        self.config_error: PeerloadError | None = None
        self.cluster: ClusterDirectory | None = None
        self.cluster_error: PeerloadError | None = None
        self.agent_error: PeerloadError | None = None
        self.info: dict[str, Any] = {}
        self.nodes: list[dict[str, Any]] = []
        self.checkup: dict[str, Any] = {}
        self.settings: list[dict[str, Any]] = []
        self.answered_s = 0.0
        self._configure()
        self.socket = socket or self._default_socket()
        self._ask()

    @property
    def state(self) -> Path | None:
        """State directory of the running agent, or of one that would be started."""
        named = self.info.get("state") or (self.config.state if self.config is not None else "")
        return Path(str(named)) if named else None

    @property
    def security(self) -> dict[str, Any]:
        """Facts of the agent about its own security; empty without an agent that has them."""
        return dict(self.checkup.get("security") or {})

    @property
    def me(self) -> dict[str, Any]:
        """This node, as it lists itself; empty without an agent."""
        return next((node for node in self.nodes if node.get("self")), {})

    def peers(self, *states: str) -> list[dict[str, Any]]:
        """Facts of the agent about its peers in these states."""
        return [peer for peer in self.checkup.get("peers") or [] if peer["state"] in states]

    def text(self, path: str) -> str:
        """Content of a small file below the root; "" if it does not exist or cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def settings_files(self, named: str | None) -> list[Path]:
        """Configuration files of an agent of this user; named: the value of its `--config`. Raises ConfigError."""
        from peerload.config import loader

        return loader.files(named, self.environment)

    def has(self, path: str) -> bool:
        """True if this path exists below the root."""
        return (self.root / path.lstrip("/")).exists()

    def _default_socket(self) -> str:
        try:
            configured = self.config.socket if self.config is not None else ""
            found = default_socket_path()
        except PeerloadError as error:
            self.agent_error = error
            return ""
        is_named = configured and configured != user_socket_path()
        return configured if is_named and "PEERLOAD_SOCKET" not in self.environment else found

    def _configure(self) -> None:
        from peerload.cli.common.agent_process import default_state
        from peerload.config import loader
        from peerload.security import cluster_dir as cluster

        try:
            defaults = {"state": default_state(), "socket": user_socket_path()}
            self.config = loader.load({}, defaults, self.environment)
        except PeerloadError as error:
            self.config_error = error
        try:
            self.cluster = _existing(self.config.cluster if self.config is not None else "", self.environment, cluster)
        except ConfigError as error:
            self.cluster_error = error

    def _ask(self) -> None:
        if not self.socket:
            return
        began_s = time.monotonic()
        try:
            with AgentConnection(self.socket, timeout_s=AGENT_S_MAX) as client:
                self.info = client.call("info")
                self.answered_s = time.monotonic() - began_s
                self.nodes = client.call("nodes")["nodes"]
                try:
                    self.checkup = client.call("checkup")
                    self.settings = client.call("settings")["settings"]
                except BadRequest:  # an agent of another version: skip what it cannot tell
                    self.checkup = {}
        except (AgentUnavailable, BadRequest) as error:
            self.agent_error = error


def _existing(named: str, environment: dict[str, str], cluster: Any) -> ClusterDirectory | None:  # noqa: ANN401 -- a module
    """The cluster of an agent started here; None if that would make one of this user's own. Raises ConfigError."""
    home = Path(environment.get("HOME", "/"))
    base = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "peerload" / "local-cluster"
    own = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "peerload" / "cluster"
    places = (named, own, cluster.SYSTEM_DIRECTORY, base)
    if not any(place and os.path.lexists(place) for place in places) and not named:
        return None
    found: ClusterDirectory = cluster.find(named, environment)
    return found


def needs_agent(look: Callable[[DoctorInput], Finding]) -> Callable[[DoctorInput], Finding]:
    """Skip a check unless an agent runs that can tell."""

    def looked(facts: DoctorInput) -> Finding:
        if not facts.info:
            return Finding(SKIP, "no agent runs")
        if not facts.checkup:
            return Finding(SKIP, f"the agent, version {facts.info.get('version')}, does not report this")
        return look(facts)

    return looked
