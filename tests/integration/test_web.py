"""`peerload web` over TLS, with real agents behind it."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import os
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.integration.cluster import Agent, Cluster, ended, is_alive, program
from tests.support import kept_port, wait_until


def serve(agent: Agent, *words: str) -> tuple[subprocess.Popen[bytes], str]:
    """A web server for this agent, and the URL of one visit."""
    environment = {**os.environ, **agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket}
    words = (*program(), "web", "--listen", "127.0.0.1:0", "--json", *words)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=agent.cluster.directory)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def certificate(directory: Path, name: str) -> tuple[str, str]:
    """A certificate for a name, signed by its own key, and this key: paths of PEM files."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "web.pem", directory / "web.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *kind))
    return str(paths[0]), str(paths[1])


def test_tls_serves_its_names_and_tells_of_a_node_that_died() -> None:
    with Cluster() as cluster:
        n1, n2 = cluster.linked(2)
        pem, key = certificate(cluster.directory, "localhost")
        process, url = serve(n1, "--tls-cert", pem, "--tls-key", key, "--host", "cluster.example")
        with ended(process):
            visit = urlsplit(url)
            trust = ssl.create_default_context(cafile=pem)

            def get(path: str, *, name: str = "localhost", cookie: str = "") -> tuple[int, dict[str, str], bytes]:
                link = http.client.HTTPSConnection("localhost", visit.port, timeout=60, context=trust)
                link.request("GET", path, headers={"Host": name, "Cookie": cookie})
                answer = link.getresponse()
                found = answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
                link.close()
                return found

            assert visit.scheme == "https"
            assert get("/api/v1/cluster")[0] == 401
            assert get("/", name="cluster.example")[0] == 200
            assert get("/", name="evil.example")[0] == 421
            plain = http.client.HTTPConnection("localhost", visit.port, timeout=60)
            plain.request("GET", "/")
            with pytest.raises((OSError, http.client.HTTPException)):
                plain.getresponse()
            plain.close()

            status, headers, _ = get(f"/login?code={visit.query.partition('=')[2]}")
            cookie, *flags = headers["set-cookie"].split("; ")
            assert (status, "Secure" in flags) == (303, True)

            def states() -> dict[str, Any]:
                told = json.loads(get("/api/v1/cluster", cookie=cookie)[2])
                return {node["node"]: node["state"] for node in told["nodes"]}

            wait_until(lambda: states() == {"n1": "alive", "n2": "alive"}, what="both to be seen alive")
            os.kill(n2.pid, signal.SIGKILL)
            wait_until(lambda: states()["n2"] != "alive", what="n2 to be told as gone")
            assert states()["n1"] == "alive"


def test_the_agent_runs_a_web_server_which_comes_back_and_ends_with_it() -> None:
    with Cluster() as cluster, kept_port() as port:
        config = cluster.directory / "web.toml"
        config.write_text(f'[web]\nlisten = "127.0.0.1:{port}"\n')
        agent = cluster.agent("n1", "--config", str(config))

        def answer(path: str, **headers: str) -> bytes:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                try:
                    connection.request("GET", path, headers=headers)
                    return connection.getresponse().read()
                except OSError:
                    return b""

        def pids() -> list[int]:
            found = []
            for child in psutil.Process(agent.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    found += [child.pid] if "web" in child.cmdline() else []
            return found

        wait_until(lambda: answer("/"), what="the server")
        token = (agent.state / "web" / "view.token").read_text().strip()
        assert b"peerload_agent_info" in answer("/metrics", Authorization=f"Bearer {token}")
        assert "login?code" not in agent.log_end()
        (first,) = pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pids() not in ([], [first]), what="another server")
        events = agent.call("events", what=["web"])["events"]
        assert [event["state"] for event in events if event["what"] == "web"] == ["ended"]
        wait_until(lambda: answer("/"), what="the other server")
        (second,) = pids()
        agent.kill()
        wait_until(lambda: not is_alive(second), what="the server to end with its agent")
