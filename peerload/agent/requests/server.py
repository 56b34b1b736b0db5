"""The path of a request: its checks in their order, and its dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.agent.control.quotas import waits_for
from peerload.model.errors import SlowDown

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from peerload.agent.control.authorization import Authorization
    from peerload.agent.control.connection import Connection
    from peerload.agent.control.quotas import Quotas
    from peerload.agent.forwarding.request_router import RequestRouter
    from peerload.agent.node_info import NodeInfo
    from peerload.agent.requests.dispatch import Dispatcher
    from peerload.agent.run_state import RunState
    from peerload.agent.security_events import SecurityEvents
    from peerload.wire import control


class RequestServer:
    """Serves the clients of one agent: those at its socket, and those of other nodes."""

    def __init__(
        self,
        access: Authorization,
        quotas: Quotas,
        router: RequestRouter,
        dispatcher: Dispatcher,
        info: NodeInfo,
        security: SecurityEvents,
        run: RunState,
    ) -> None:
        self._access = access
        self._quotas = quotas
        self._router = router
        self._dispatcher = dispatcher
        self.counters = info.counters
        self._security = security
        self._run = run

    def handle(self, connection: Connection, request: control.Request) -> None:
        """Check a request, in this order, and have it carried out. Requests that queue tasks then have to pass
        `SubmissionChecks.check`: the quota of tasks, output files, disk space, and the directory."""
        try:
            # Bound of one client: requests that are not answered yet.
            connection.check_pending()
            # Rate of its user.
            self._quotas.check_rate(connection, request)
            # Authorization: the right to ask for this, and the ownership of the tasks that are named.
            request = self._access.authorize(connection.caller, request)
            # Routing: the work at other nodes, if they have a part in it.
            work = self._router.work(connection, request)
            # Dispatch: what carries it out here. Most of it is work that waits until all before it is durable.
            if work is None:
                work = self._dispatcher.work(connection, request)
            # Quota of what is waited for, by user and by node.
            if work is not None:
                self._begin(connection, request, work)
        except Exception as error:  # noqa: BLE001 -- `report_failure` tells errors from bugs
            connection.report_failure(request.id, error)

    def _begin(self, connection: Connection, request: control.Request, work: Coroutine[Any, Any, None]) -> None:
        """Begin the work, within the quota of what is waited for. Raises SlowDown."""
        try:
            charge = self._quotas.charge(connection, waits_for(request))
        except SlowDown:
            work.close()
            raise
        connection.spawn(request.id, work).add_done_callback(lambda _: charge.end())

    def refused(self, connection: Connection, name: str, rule: str, what: str) -> None:
        """Count a violation of a security rule."""
        self.counters[name] += 1
        self._security.tell(rule, connection.from_node or f"uid {connection.uid}", what)

    def broke(self, why: str) -> None:
        """Stop the agent after a bug."""
        self._run.fail(why)
