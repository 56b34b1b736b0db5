"""`peerload trace` and trace contexts, with two agents."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.integration.cluster import Cluster
from tests.support import wait_until

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_task_that_ran_elsewhere_is_told_from_both_nodes_and_has_a_span_of_its_own() -> None:
    with Cluster() as cluster:
        home, _ = cluster.linked(2)
        words = ("submit", "--node", "n2", "--name", "<b>", "sh", "-c", "echo $TRACEPARENT; sleep 0.3")
        task = home.cli(*words, env={**os.environ, "TRACEPARENT": GIVEN}).stdout.decode().strip()
        home.wait(task)
        given = home.output(task)[0].decode().strip()
        trace = home.show(task)["trace"]
        assert given == f"00-{trace['trace_id']}-{trace['span_id']}-01"
        assert (trace["trace_id"], trace["parent_id"]) == (GIVEN[3:35], GIVEN[36:52])
        assert trace["span_id"] != trace["parent_id"]

        def told() -> dict[str, Any]:
            return json.loads(home.cli("trace", "--json", task).stdout)  # type: ignore[no-any-return]

        wait_until(lambda: [span for span in told()["spans"] if span["name"] == "output home" and span["ended"]])
        spans = told()["spans"]
        # Whether the home asked the other node, "searched", before it heard of the start depends on which came first.
        own = [span["name"] for span in spans if span["own_clock"] and span["name"] != "searched"]
        assert own == ["waits", "handed over", "runs", "done"]
        theirs = [span for span in spans if not span["own_clock"]]
        assert {span["node"] for span in theirs} == {"n2"}
        assert [span["name"] for span in theirs] == ["starts", "runs", "output home"]
        runs = theirs[1]
        assert runs["ended"] > runs["began"]
        text = home.cli("trace", task).stdout.decode()
        assert len(text.splitlines()) == len(spans) + 3
        plain = home.submit("true")
        home.wait(plain)
        assert home.show(plain)["trace"] is None
        assert home.cli("trace", home.cli("submit", "--array", "1-2", "true").stdout.decode().strip()).returncode == 2
