"""Debian's Prometheus scrapes three agents that it finds by /http_sd of one, with the alert rules of deploy/."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require_program
from tests.integration.cluster import Cluster, ended
from tests.integration.test_web import serve
from tests.support import kept_port, wait_until

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus-alerts.yml"
CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: peerload
    authorization: {{type: Bearer, credentials_file: {tokens}/view.token}}
    http_sd_configs:
      - url: http://127.0.0.1:{port}/http_sd
        refresh_interval: 1s
        authorization: {{type: Bearer, credentials_file: {tokens}/view.token}}
"""


@pytest.mark.long
def test_prometheus_finds_and_scrapes_all_agents_by_one() -> None:
    prometheus = require_program("prometheus", "prometheus")
    with Cluster() as cluster, kept_port() as port, kept_port() as own, contextlib.ExitStack() as stack:
        tokens = cluster.directory / "tokens"
        first = cluster.agent("n1")
        others = [
            cluster.agent(f"n{number}", "--listen", f"127.0.0.{number}:0", "--peer", first.listen) for number in (2, 3)
        ]
        agents = [first, *others]
        cluster.await_acquainted(agents)
        servers = []
        for number, agent in enumerate(agents, 1):
            process, _ = serve(agent, "--listen", f"127.0.0.{number}:{port}", "--tokens", str(tokens))
            servers.append(stack.enter_context(ended(process)))
        config = cluster.directory / "prometheus.yml"
        config.write_text(CONFIG.format(rules=RULES, tokens=tokens, port=port))
        words = [str(prometheus), f"--config.file={config}", f"--storage.tsdb.path={cluster.directory}/tsdb"]
        log = stack.enter_context((cluster.directory / "prometheus.log").open("wb"))
        words += [f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn"]
        stack.enter_context(ended(subprocess.Popen(words, stdout=log, stderr=log, cwd=cluster.directory)))

        def api(path: str) -> Any:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/{path}", timeout=10) as answer:
                    return json.load(answer)["data"]
            except OSError:
                return {}

        def value(query: str) -> float | None:
            found = api("query?query=" + urllib.parse.quote(query)).get("result") or []
            return float(found[0]["value"][1]) if len(found) == 1 else None

        wait_until(lambda: value("sum(up)") == 3, what="three targets")
        for agent in agents:
            for _ in range(2):
                agent.wait(agent.submit("true"))
        wait_until(lambda: value("sum(peerload_tasks_submitted_total)") == 6, what="the sum over all agents")
        wait_until(lambda: value('sum(peerload_peers{state="alive"})') == 6, what="each to see all")
        assert value("count(count by (node) (peerload_agent_info))") == 3
        targets = api("targets")["activeTargets"]
        assert {target["labels"]["node"] for target in targets} == {"n1", "n2", "n3"}
        assert not [target["lastError"] for target in targets if target["lastError"]]
        rules = [rule for group in api("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 5
        wait_until(lambda: {rule["health"] for g in api("rules")["groups"] for rule in g["rules"]} == {"ok"})

        others[1].kill()  # its server is there, and says that its agent is not
        wait_until(lambda: value("sum(up)") == 2, what="the loss of an agent")
        names = '{__name__=~"peerload_.+", node="n1"}'
        assert (value(f"count({names})") or 0) <= 300
        assert all(server.poll() is None for server in servers)
