"""The web page on a machine of several users: who sees what, who may act, and whom a token is shown to (rules L1, L2)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.integration.cluster import ended, program
from tests.integration.test_notifications import Receiver, receiving
from tests.security.service import PEERLOAD, ServiceAgent, ServiceCluster
from tests.security.users import ACCOUNTS, ADMINS, GROUP, needs_root
from tests.support import kept_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root
GROUPS = {"alice": f"{GROUP}", "bob": f"{GROUP}", "carol": f"{GROUP},{ADMINS}"}


class Machine:
    """One node with a web server of its agent, hooks, and users."""

    def __init__(self, cluster: ServiceCluster, agent: ServiceAgent, port: int, hooked: Receiver) -> None:
        self.cluster = cluster
        self.agent = agent
        self.port = port
        self.hooked = hooked

    def start(self, user: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a verb as this user of the machine, or as root."""
        agent = self.agent
        who = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUPS[user]}"] if user != "root" else []
        home = self.cluster.directory / "homes" / user
        if not home.exists():
            home.mkdir(mode=0o700)
            shutil.chown(home, ACCOUNTS.get(user, 0), ACCOUNTS.get(user, 0))
        more = {"PEERLOAD_SOCKET": agent.socket, "HOME": str(home), "XDG_STATE_HOME": "", "BROWSER": "true"}
        words = ("nsenter", f"--target={agent.pid}", "--mount", "--", *who, *program(), *words)
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**self.cluster.environment, **more}, cwd="/"
        )

    @contextlib.contextmanager
    def visit(self, user: str, *words: str) -> Iterator[tuple[Visit, subprocess.Popen[bytes]]]:
        """`peerload web` as this user, and a browser that has followed its URL."""
        process = self.start(user, "web", "--json", *words)
        with ended(process):
            assert process.stdout is not None
            told = process.stdout.readline()
            if not told:
                raise AssertionError(process.communicate()[1].decode())
            yield Visit(json.loads(told)["url"]), process


class Visit:
    """A browser without a window."""

    def __init__(self, url: str) -> None:
        self.url = urlsplit(url)
        self.cookie = ""
        self.cookie = self.get(f"{self.url.path}?{self.url.query}")[1].get("set-cookie", "").partition(";")[0]

    def _ask(self, method: str, path: str) -> tuple[int, dict[str, str], Any]:
        link = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=60)
        with contextlib.closing(link):
            link.request(method, path, headers={"Cookie": self.cookie})
            answer = link.getresponse()
            headers = {key.lower(): value for key, value in answer.getheaders()}
            is_json = headers["content-type"] == "application/json"
            body = b"" if headers["content-type"] == "text/event-stream" else answer.read()
        return answer.status, headers, json.loads(body) if is_json else body

    def get(self, path: str) -> tuple[int, dict[str, str], Any]:
        return self._ask("GET", path)

    def post(self, path: str) -> int:
        return self._ask("POST", path)[0]

    def tasks(self) -> set[str]:
        """Those that the page shows, and those of each list of the API, which also has some that have ended."""
        paths = ("/api/v1/cluster", "/api/v1/tasks", "/api/v1/tasks?cluster=1")
        shown, listed, everywhere = ({task["id"] for task in self.get(path)[2]["tasks"]} for path in paths)
        assert shown <= listed == everywhere
        return listed


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with ServiceCluster() as cluster, kept_port() as port, receiving() as (server, url):
        sendmail = cluster.directory / "sendmail"
        sendmail.write_text(f"#!/bin/sh\n(id -u; echo $@) >>{cluster.directory}/mails/$(id -u)\n")
        sendmail.chmod(0o755)
        (cluster.directory / "mails").mkdir()
        (cluster.directory / "mails").chmod(0o1777)
        secret = cluster.directory / "hook.secret"
        secret.write_text("s")
        secret.chmod(0o400)
        shutil.chown(secret, PEERLOAD)
        hooks = [f"{url}/hook", f"id -u >{cluster.directory}/mails/hook", "mail:ops@example.org"]
        settings = f'[web]\nlisten = "127.0.0.1:{port}"\n[hooks]\non_end = {json.dumps(hooks)}\n'
        settings += f'secret_file = "{secret}"\nsendmail = "{sendmail}"\n'
        agent = cluster.node("ws1", settings=settings).start()
        wait_until((agent.state / "web" / "address").exists, what="the agent's own web server")
        yield Machine(cluster, agent, port, server)


def test_a_user_sees_and_stops_only_what_is_its_own_and_an_administrator_everything(machine: Machine) -> None:
    cluster, agent = machine.cluster, machine.agent
    own, other, third = (cluster.submit(agent, user, "exec sleep 600") for user in ("alice", "bob", "bob"))
    over = cluster.run(agent, "bob", "echo hidden")["id"]
    asker = cluster.user(agent, "bob")
    wait_until(lambda: {task["state"] for task in asker.call("show", tasks=[other, third])["tasks"]} == {"running"})
    with machine.visit("alice") as (alice, _), machine.visit("carol") as (carol, _):
        assert alice.url.port != machine.port
        assert alice.tasks() == {own}
        assert alice.get("/api/v1/history")[2]["tasks"] == []
        for task in (other, over, "ws1/999"):
            for part in ("", "/why", "/trace", "/output"):
                assert alice.get(f"/api/v1/tasks/{task}{part}")[0] == 404
            for action in ("cancel", "hold", "release"):
                assert alice.post(f"/api/v1/tasks/{task}/{action}") == 404
        assert alice.post("/api/v1/nodes/ws1/drain") == 403
        assert [alice.get(f"/api/v1/tasks/{own}{part}")[0] for part in ("", "/why", "/trace", "/output")] == [200] * 4
        assert alice.post(f"/api/v1/tasks/{own}/cancel") == 200

        assert carol.tasks() >= {own, other, third}
        assert over in {task["id"] for task in carol.get("/api/v1/history")[2]["tasks"]}
        assert carol.get(f"/api/v1/tasks/{over}/trace")[0] == 200
        assert carol.post(f"/api/v1/tasks/{other}/cancel") == 200
        assert carol.post("/api/v1/nodes/ws1/drain") == 200
        assert carol.post("/api/v1/nodes/ws1/undrain") == 200
    for user, task in (("alice", own), ("bob", other)):
        assert cluster.ended(agent, user, task)["state"] == "cancelled"

    # The agent's own server has an administrator's rights: root may use it, others not.
    with machine.visit("root", "--open") as (root, process):
        assert (root.url.port, process.wait(60)) == (machine.port, 0)
        assert third in root.tasks()
        assert root.post(f"/api/v1/tasks/{third}/cancel") == 200
    with machine.visit("carol", "--open") as (carol, _):
        assert carol.url.port != machine.port
    refused = machine.start("bob", "web", "--tokens", str(agent.state / "web"))
    with ended(refused):
        assert refused.wait(60) != 0
    link = http.client.HTTPConnection("127.0.0.1", machine.port, timeout=60)
    with contextlib.closing(link):
        link.request("GET", "/api/v1/cluster")
        assert link.getresponse().status == 401


def test_a_server_is_opened_again_and_nobody_else_at_its_port_gets_the_token(machine: Machine) -> None:
    with machine.visit("bob") as (first, server):
        with machine.visit("bob", "--open") as (again, opener):
            assert (again.url.port, opener.wait(60)) == (first.url.port, 0)
            assert again.get("/api/v1/session")[2]["may_act"]
        with machine.visit("alice", "--open") as (own, _):
            assert own.url.port != first.url.port
        port = first.url.port
        server.kill()
        server.wait()
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            thief.setblocking(False)
            with machine.visit("bob", "--open") as (elsewhere, _):
                assert elsewhere.url.port != port
            with pytest.raises(BlockingIOError):
                thief.accept()


def test_root_reads_no_secret_that_is_not_of_the_agent(machine: Machine) -> None:
    """Its own user could put a link there."""
    token = machine.agent.state / "web" / "token"
    kept = token.read_text()
    token.rename(token.with_name("kept"))
    try:
        for make in (
            lambda: token.symlink_to("/etc/hostname"),
            lambda: os.mkfifo(token),
            lambda: token.write_text(kept),
        ):
            make()
            opener = machine.start("root", "web", "--open")
            with ended(opener):
                assert opener.wait(60) == 125
            token.unlink()
    finally:
        token.with_name("kept").rename(token)


def test_hooks_are_of_the_agent_and_notifications_of_their_user(machine: Machine) -> None:
    cluster, agent, server = machine.cluster, machine.agent, machine.hooked
    url = f"http://localhost:{server.server_port}/notify"
    mails = cluster.directory / "mails"
    first = cluster.run(agent, "alice", "true", terms={"notify": url.encode()}, name="<script>")["id"]
    cluster.run(agent, "bob", "true", terms={"notify": b"mail:bob@example.org"})
    wait_until(lambda: server.of("/notify"), what="the message")
    wait_until(lambda: first in {one["task_id"] for one in server.of("/hook")}, what="the hook")
    found = {path: headers for path, headers, body in server.got if json.loads(body)["task_id"] == first}
    assert "x-peerload-signature" in found["/hook"]
    assert "x-peerload-signature" not in found["/notify"], "the secret is the agent's"
    (told,) = server.of("/notify")
    assert (told["task_id"], told["name"], told["state"]) == (first, "<script>", "done")

    def read(name: str) -> list[str]:
        path = mails / name
        return path.read_text().split() if path.exists() else []

    wait_until(lambda: "bob@example.org" in read(str(ACCOUNTS["bob"])), what="a mail as bob")
    wait_until(lambda: "ops@example.org" in read(str(PEERLOAD)), what="a mail as the agent")
    wait_until(lambda: read("hook") == [str(PEERLOAD)], what="a command as the agent")
    events = cluster.user(agent, "alice").call("events", what=["hook"])["events"]
    assert [event for event in events if event["what"] == "hook"] == []
