"""Notifications with a real web server, a recorded sendmail and agents: `--notify` and `[hooks]`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import signal
import ssl
import stat
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from peerload import notification
from peerload.agent.completion import hooks
from peerload.agent.runtime import run_command
from peerload.model.config import HooksSettings
from peerload.model.task import TaskState
from tests.integration.cluster import Agent, Cluster
from tests.integration.test_web import certificate
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Receiver(ThreadingHTTPServer):
    """Keeps each request; answers with the status in its path, once for each of those listed there (`/503-200`)."""

    daemon_threads = True

    def __init__(self, pem: tuple[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.release = threading.Event()
        if pem is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*pem)
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def of(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(body) for where, _, body in self.got if where == path]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        before = len(self.server.of(self.path))
        self.server.got.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        word = self.path.rpartition("/")[2]
        if word == "hang":
            self.server.release.wait()
        statuses = [int(part) for part in word.split("-") if part.isdigit()] or [200]
        self.send_response(statuses[min(before, len(statuses) - 1)])
        self.send_header("Location", "/stolen")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def receiving(pem: tuple[str, str] | None = None) -> Iterator[tuple[Receiver, str]]:
    """A running receiver and its URL."""
    with Receiver(pem) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server, f"{'http' if pem is None else 'https'}://localhost:{server.server_port}"
        finally:
            server.release.set()
            server.shutdown()


def sendmail_in(directory: Path, code: int = 0) -> str:
    """A sendmail that keeps what it is given."""
    path = directory / f"sendmail-{code}"
    path.write_text(f'#!/bin/sh\n(echo "$@"; cat) >>{directory}/mails\necho sorry >&2\nexit {code}\n')
    path.chmod(0o755)
    return str(path)


def deliver(target: str, **more: str) -> tuple[int, str]:
    """Exit code and words of one delivery."""
    facts = {
        "PEERLOAD_TASK_ID": "n1/1",
        "PEERLOAD_NAME": "it's\n<b>",
        "PEERLOAD_STATE": "failed",
        "PEERLOAD_EXIT_CODE": "3",
    }
    environment = {"PEERLOAD_NOTIFY_TARGET": target, "PATH": "/usr/bin:/bin", "PEERLOAD_KEY": "secret", **facts, **more}
    words = [sys.executable, "-E", "-P", "-m", "peerload.notification"]
    done = subprocess.run(words, env=environment, capture_output=True, check=False, cwd="/")
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.decode()


def test_a_webhook_is_signed_json_and_each_answer_has_an_outcome(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"hidden\n")
    with receiving() as (server, url):
        code, says = deliver(f"{url}/private/200", PEERLOAD_NOTIFY_SECRET_FILE=str(secret))
        assert (code, "private" in says) == (0, False)
        _, headers, body = server.got[0]
        assert headers["x-peerload-signature"] == "sha256=" + hmac.new(b"hidden", body, hashlib.sha256).hexdigest()
        told = json.loads(body)
        assert (told["task_id"], told["name"], told["exit_code"], "key" in told) == ("n1/1", "it's\n<b>", 3, False)
        for status, outcome in ((302, 1), (307, 1), (404, 1), (429, notification.LATER), (503, notification.LATER)):
            assert deliver(f"{url}/{status}")[0] == outcome
        assert not server.of("/stolen")
        assert deliver(f"{url}/200", PEERLOAD_NOTIFY_SECRET_FILE=str(tmp_path / "gone"))[0] == 1
        assert len({headers["x-peerload-delivery"] for _, headers, _ in server.got}) == 1
    assert deliver(f"{url}/200")[0] == notification.LATER  # nobody listens


def test_a_webhook_that_hangs_is_given_up_and_tried_again_later() -> None:
    shorter = "import sys, peerload.notification as one; one.TRY_S_MAX = int(sys.argv[1]); sys.exit(one.main())"
    with receiving() as (server, url):
        environment = {"PEERLOAD_NOTIFY_TARGET": f"{url}/hang", "PATH": "/usr/bin:/bin"}
        for limit_s in ("1", "10", "60"):  # on a machine that stands still the request may not have come before
            words = [sys.executable, "-c", shorter, limit_s]
            done = subprocess.run(words, env=environment, capture_output=True, check=False)
            assert done.returncode == notification.LATER
            if server.of("/hang"):
                break
        assert server.of("/hang")


def test_https_trusts_only_its_authorities_and_ntfy_and_mail_have_their_forms(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "localhost")
    with receiving(pem) as (server, url):
        assert deliver(f"{url}/200")[0] == notification.LATER
        assert not server.got
        assert deliver(f"ntfy:{url}/ops", SSL_CERT_FILE=pem[0])[0] == 0
        assert server.of("/")[0]["topic"] == "ops"
    sendmail = sendmail_in(tmp_path)
    assert deliver("mail:me@example.org", PEERLOAD_NOTIFY_SENDMAIL=sendmail)[0] == 0
    lines = (tmp_path / "mails").read_text().splitlines()
    assert lines[0] == "-i -- me@example.org"
    assert "Subject: [peerload] n1/1 it's <b> failed" in lines
    code, says = deliver("mail:me@example.org", PEERLOAD_NOTIFY_SENDMAIL=sendmail_in(tmp_path, 69))
    assert (code, "69" in says) == (notification.LATER, True)
    assert deliver("mail:me@example.org", PEERLOAD_NOTIFY_SENDMAIL=str(tmp_path / "none"))[0] == 1


@pytest.mark.parametrize(
    "target",
    [
        "https://",
        "https://user:word@host/",
        "https://host/a b",
        "ntfy:",
        "ntfy:a/b/c",
        "mail:",
        "mail:-f@x",
        "mail:a@b c",
        "nfty:x",
        "mailto:me@example.org",
        "htps://host/x",
        "HTTPS://host/x",
        " ",
    ],
)
def test_what_is_no_target_is_refused_without_being_shown(target: str) -> None:
    assert notification.objection(target)
    assert notification.shown("https://host/SECRET?key=SECRET") == "webhook at host"


@pytest.mark.parametrize("command", ["notify-send done", ": nothing", "echo:x y", "a:b", "./ntfy:x", "curl ntfy.sh/x"])
def test_a_command_that_looks_like_no_target_is_one(command: str) -> None:
    assert not notification.objection(command)


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[Agent, Receiver, str]]:
    """An agent with hooks, and who receives them."""
    with receiving() as (server, url), Cluster() as cluster:
        config = cluster.directory / "hooks.toml"
        secret = cluster.directory / "hook.secret"
        secret.write_bytes(b"s")
        secret.chmod(stat.S_IRUSR)
        hooks = {
            "on_end": [
                f"{url}/end",
                f'echo "$PEERLOAD_TASK_ID $PEERLOAD_NAME $PEERLOAD_STATE" >>{cluster.directory}/ends',
            ],
            "on_fail": [f"{url}/fail/503-200", f"{url}/TOKEN/302", "mail:me@example.org"],
            "on_node_dead": [f"{url}/dead"],
            "secret_file": str(secret),
            "sendmail": sendmail_in(cluster.directory),
        }
        config.write_text("[hooks]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in hooks.items()))
        n1 = cluster.agent("n1", "--config", str(config))
        yield n1, server, url


def events(agent: Agent, what: str) -> list[dict[str, Any]]:
    return [event for event in agent.call("events", what=[what])["events"] if event["what"] == what]


def test_hooks_tell_of_ends_and_failures_and_their_own_failures_are_events(told: tuple[Agent, Receiver, str]) -> None:
    agent, server, _ = told
    done = agent.submit("true", name="fine")
    failed = agent.submit("sh", "-c", "exit 4", name="<script>")
    agent.wait(done, failed)
    wait_until(lambda: {one["task_id"] for one in server.of("/end")} >= {done, failed})
    wait_until(lambda: len(server.of("/fail/503-200")) == 2, what="a second try")
    first = server.of("/fail/503-200")[0]
    assert (first["event"], first["name"], first["exit_code"], first["state"]) == ("on_fail", "<script>", 4, "failed")
    ends = agent.cluster.directory / "ends"
    wait_until(lambda: ends.exists() and {done, failed} <= {line.split()[0] for line in ends.read_text().splitlines()})
    wait_until((agent.cluster.directory / "mails").exists, what="a mail")
    wait_until(lambda: len(events(agent, "hook")) > 0, what="the event about the redirect")
    (about,) = events(agent, "hook")
    assert (about["state"], about["task"], "302" in about["reason"]) == ("failed", failed, True)
    shown = json.dumps(agent.call("settings")) + json.dumps(events(agent, "hook")) + agent.log_end()
    assert "TOKEN" not in shown
    wait_until(lambda: agent.counters().get('hooks_total{outcome="failed"}') == 1)


def test_notify_sends_a_message_and_tries_again(told: tuple[Agent, Receiver, str]) -> None:
    agent, server, url = told
    asked = agent.cli("submit", "--notify", f"{url}/notify/503-200", "true")
    assert asked.returncode == 0, asked.stderr
    task = asked.stdout.decode().strip()
    wait_until(lambda: len(server.of("/notify/503-200")) == 2, what="a second try")
    wait_until(lambda: [one["state"] for one in events(agent, "chore")][-2:] == ["postponed", "notified"])
    assert server.of("/notify/503-200")[0]["task_id"] == task
    agent.cli("submit", "--notify", f"{url}/never/302", "true")
    wait_until(lambda: events(agent, "chore")[-1]["state"] == "abandoned")
    assert len(server.of("/never/302")) == 1
    assert agent.cli("submit", "--notify", "mail:nobody", "true").returncode == 2


def test_a_hook_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue in this process: its workers are busy with a hook that hangs, and it is full."""
    notes: list[tuple[str, str]] = []
    counters: Counter[str] = Counter()
    monkeypatch.setattr(hooks, "TIME_S_MAX", 0.2)
    monkeypatch.setattr(hooks, "PAUSE_S", 0.001)

    async def main() -> None:
        config = SimpleNamespace(node="n1", socket="/x", hooks=HooksSettings(on_fail=("exec sleep 600",)))
        info: Any = SimpleNamespace(config=config, counters=counters)
        has_failed = asyncio.Event()

        def record_event(_: str, state: str, **facts: str) -> None:
            notes.append((state, facts["reason"]))
            if state == "failed":
                has_failed.set()

        journal: Any = SimpleNamespace(record=record_event)
        store: Any = SimpleNamespace(spec=lambda _: SimpleNamespace(name="", user="u"))
        node_hooks = hooks.NodeHooks(info, store, journal)
        record = SimpleNamespace(
            task="n1/1", state=TaskState.FAILED, node="n1", reason="", started_at=0.0, ended_at=0.0, exit=None
        )
        running = asyncio.get_running_loop().create_task(node_hooks.run())
        for _ in range(300):
            node_hooks.changed(SimpleNamespace(record=record))  # type: ignore[arg-type]
        await has_failed.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert counters['hooks_total{outcome="dropped"}'] == 300 - hooks.WAITING_MAX
    assert [state for state, _ in notes][:2] == ["dropped", "failed"]
    assert "killed" in notes[1][1]


def test_a_command_cancelled_while_it_is_killed_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def main() -> None:
        async def start_noted(*words: str, **more: Any) -> asyncio.subprocess.Process:
            started.append(await start(*words, **more))
            return started[0]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_noted)
        running = asyncio.get_running_loop().create_task(run_command(("/bin/sh", "-c", "exec sleep 600"), 0.0))
        monkeypatch.setattr(os, "killpg", lambda *_: running.cancel())  # closing the transport kills it
        with pytest.raises(asyncio.CancelledError):
            await running
        assert started[0].returncode == -signal.SIGKILL

    asyncio.run(main())


def test_a_dead_node_is_told_of(told: tuple[Agent, Receiver, str]) -> None:
    n1, server, _ = told
    cluster = n1.cluster
    n2 = cluster.add("n2", "--peer", n1.call("info")["listen"]).start()
    wait_until(lambda: "n2" in n1.peers_alive())
    n2.kill()
    wait_until(lambda: server.of("/dead"), what="word of the dead node")
    assert (server.of("/dead")[0]["node"], server.of("/dead")[0]["state"]) == ("n2", "dead")
