"""The agent behind the web server: requests at its control socket, one connection each, and its refusals as HTTP statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.client.asynchronous import AsyncClient
from peerload.client.connection import joined
from peerload.client.operations import Call, Stream
from peerload.model.errors import AgentUnavailable, NoSuchTask, PeerloadError
from peerload.web.http import error_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peerload.web.http import Response

TIMEOUT_S = 10.0
TAIL_BYTES = 1 << 20
"""Of each stream of an output; what was written before is not sent."""


class AgentLink:
    """One agent, by the path of its socket."""

    def __init__(self, socket_path: str) -> None:
        self._client = AsyncClient(socket_path, timeout_s=TIMEOUT_S)

    async def ask(self, verb: str, **fields: object) -> dict[str, Any]:
        """The answer to one request. Raises PeerloadError."""
        return await self._client.call(Call(verb, fields, joined))

    async def one_task(self, task: str) -> dict[str, Any]:
        """Everything about one task. Raises PeerloadError."""
        found: list[dict[str, Any]] = (await self.ask("show", tasks=[task]))["tasks"]
        if not found:
            raise NoSuchTask(f"no task {task}")
        return found[0]

    def output(self, task: str, *, follow: bool) -> AsyncIterator[dict[str, Any]]:
        """The last pieces of the output of a task so far, those that follow, then its end as ``{"end": …}``. Raises PeerloadError."""
        fields: dict[str, object] = {"task": task, "follow": follow, "tail_bytes": TAIL_BYTES}
        return self._client.stream(Stream("output", fields, lambda piece: [piece], lambda end: [{"end": end}]))


def status_of(error: PeerloadError) -> int:
    """The HTTP status for a refusal of the agent."""
    if isinstance(error, AgentUnavailable):
        return 503
    if isinstance(error, NoSuchTask):
        return 404
    return 403 if error.code == "not-allowed" else 429 if error.code == "slow-down" else 400


def refusal(error: PeerloadError) -> Response:
    """The answer where the agent refuses, or is away."""
    return error_response(status_of(error), error.what, error.why, error.hint)
