"""The web server without an agent: access, limits of HTTP, live feed, text of /metrics; dashboard and alerts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.model import metrics
from peerload.model.errors import AgentUnavailable, PeerloadError
from peerload.web import exposition
from peerload.web.access import Access, ViewerRight, secret_of
from peerload.web.http import HttpServer, Request
from peerload.web.live import TIMEOUT_S, AgentLink, LiveFeed
from peerload.web.routes import Routes
from peerload.web.server import _listen_unix
from tests.conftest import require_program
from tests.unit.cli.fake_agent import FakeAgent as AnsweringAgent
from tests.unit.cli.fake_agent import fixture_agent
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("fixture_agent",)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAMES = {value for key, value in vars(metrics).items() if key.isupper()}
HISTOGRAM = {"bounds": [0.1, 1.0], "counts": [1, 2, 3], "sum": 12.5}


class FakeAgent:
    """Answers each verb by a function of the test."""

    def __init__(self, **answers: Callable[[], dict[str, Any]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, object]]] = []

    async def ask(self, verb: str, **fields: object) -> dict[str, Any]:
        self.asked.append((verb, fields))
        return self.answers[verb]()


def request(path: str, method: str = "GET", *, is_local: bool = False, body: bytes = b"", **headers: Any) -> Request:
    given = {"host": "127.0.0.1:7118"} | {name.replace("_", "-"): value for name, value in headers.items()}
    plain, _, query = path.partition("?")
    return Request(method, plain, dict(pair.split("=", 1) for pair in query.split("&") if pair), given, body, is_local)


def access_in(directory: Path) -> Access:
    return Access(directory / "web", ("box",), "peerload_7118", is_secure=False)


def routes(directory: Path, agent: Any) -> Routes:
    return Routes(agent, access_in(directory), LiveFeed(agent), port=7118, scheme="http")


def bearer(directory: Path, right: ViewerRight) -> str:
    return f"Bearer {secret_of(directory / 'web', right)}"


@pytest.mark.parametrize("path", ["/metrics", "/http_sd", "/api/v1/cluster", "/api/v1/tasks/n1/1", "/api/v1/events"])
def test_nothing_is_told_without_a_token(tmp_path: Path, path: str) -> None:
    agent = FakeAgent()
    wrong: tuple[dict[str, Any], ...] = ({}, {"authorization": "Bearer x"}, {"cookie": "peerload_7118=2.9999999999.00"})
    for headers in wrong:
        assert asyncio.run(routes(tmp_path, agent).answer(request(path, **headers))).status == 401
    assert not agent.asked


def test_a_server_without_a_port_lists_no_targets(tmp_path: Path) -> None:
    agent = FakeAgent()
    at_socket = Routes(agent, access_in(tmp_path), LiveFeed(agent), port=0, scheme="http")  # type: ignore[arg-type]
    answer = asyncio.run(at_socket.answer(request("/http_sd", is_local=True)))
    assert answer.status == 404
    assert not agent.asked


def test_another_name_is_refused(tmp_path: Path) -> None:
    served = routes(tmp_path, FakeAgent())
    assert asyncio.run(served.answer(request("/", host="evil.example:7118"))).status == 421
    for name in ("BOX:1", "localhost", "[::1]:7118"):
        assert asyncio.run(served.answer(request("/", host=name))).status == 200


def test_a_code_is_good_once_and_gives_a_cookie(tmp_path: Path) -> None:
    access = access_in(tmp_path)
    code = access.new_code(ViewerRight.LOOK)
    assert (access.take_code(code), access.take_code(code)) == (ViewerRight.LOOK, ViewerRight.NOTHING)
    name, value = access.cookie_for(ViewerRight.LOOK)
    cookie = value.partition(";")[0]
    assert name == "Set-Cookie"
    assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in value.split(";")}
    again = access_in(tmp_path)  # a restarted server
    assert again.right_of(request("/", cookie=f"other=1; {cookie}")) is ViewerRight.LOOK
    assert again.right_of(request("/", cookie=cookie.replace("=1.", "=2."))) is ViewerRight.NOTHING


def test_who_may_look_may_not_act(tmp_path: Path) -> None:
    agent = FakeAgent(cancel=lambda: {"cancelled": ["n1/1"]})
    served = routes(tmp_path, agent)

    def cancel(**headers: Any) -> int:
        return asyncio.run(served.answer(request("/api/v1/tasks/n1/1/cancel", "POST", **headers))).status

    assert cancel(authorization=bearer(tmp_path, ViewerRight.LOOK)) == 403
    act = bearer(tmp_path, ViewerRight.ACT)
    assert cancel(authorization=act, origin="http://evil.example") == 403
    assert cancel(authorization=act, sec_fetch_site="cross-site") == 403
    assert not agent.asked
    assert cancel(authorization=act, origin="http://127.0.0.1:7118") == 200
    assert agent.asked == [("cancel", {"tasks": ["n1/1"]})]


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    access_in(tmp_path)
    (tmp_path / "web" / "token").chmod(0o644)
    with pytest.raises(PeerloadError):
        access_in(tmp_path)


def test_an_agent_that_is_away_is_503(tmp_path: Path) -> None:
    def away() -> dict[str, Any]:
        raise AgentUnavailable("away")

    served = routes(tmp_path, FakeAgent(stats=away))
    assert asyncio.run(served.answer(request("/metrics", is_local=True))).status == 503


def test_the_page_runs_nothing_that_its_policy_does_not_name(tmp_path: Path) -> None:
    answer = asyncio.run(routes(tmp_path, FakeAgent()).answer(request("/")))
    policy = dict(answer.headers)["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    page = answer.body.decode()
    assert len(answer.body) < 80_000
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\bon\w+=|style=|https?://(?!www\.w3\.org)", page
    )


def overview(number: int, *, complete: bool = False, tasks: tuple[str, ...] = ()) -> dict[str, Any]:
    empty: dict[str, Any] = {
        key: [] for key in ("nodes", "nodes_gone", "tasks_gone", "guests", "guests_gone", "events")
    }
    more = {"revision": str(number), "complete": complete, "agent": {}, "counts": {}}
    return empty | more | {"tasks": [{"id": name} for name in tasks]}


def test_a_viewer_that_comes_back_misses_nothing_and_gets_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.web.live.EVERY_S", 0.0)
    answers = [overview(1, complete=True, tasks=("a",)), *(overview(n, tasks=(f"t{n}",)) for n in range(2, 5))]
    agent = FakeAgent(overview=lambda: answers.pop(0), history=lambda: {"tasks": []})

    async def seen(feed: LiveFeed, last: str, count: int) -> list[str]:
        stream = feed.events(last)
        await anext(stream)  # retry:
        found = [(await anext(stream)).decode() for _ in range(count)]
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    async def scenario() -> None:
        feed = LiveFeed(agent)  # type: ignore[arg-type]
        feed._poll = asyncio.current_task()  # the test looks itself
        (first,) = await seen(feed, "", 1)
        assert "event: snapshot" in first
        last = re.search(r"id: (\S+)", first)
        assert last is not None
        for _ in range(2):
            await feed._look()
        updates = await seen(feed, last[1], 3)
        assert [re.findall(r'"id":"(\w+)"', update) for update in updates] == [["t2"], ["t3"], ["t4"]]
        for garbage in ("of-another-server", last[1] + "9" * 5000, "-", last[1].replace("-", "-x")):
            answers.append(overview(5))
            (fresh,) = await seen(feed, garbage, 1)
            assert len(re.findall(r'"id":"(\w+)"', fresh)) == 4

    asyncio.run(scenario())


def test_of_an_array_only_the_first_member_is_read(agent: AnsweringAgent) -> None:
    agent.handlers["show"] = lambda _, reply: reply.more(tasks=[{"id": "n1/16.1"}, {"id": "n1/16.2"}])
    found = asyncio.run(asyncio.wait_for(AgentLink(agent.path).one_task("n1/16"), TIMEOUT_S / 2))
    assert found == {"id": "n1/16.1"}


def test_a_viewer_that_takes_its_snapshot_slowly_misses_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.web.live.EVERY_S", 0.0)
    answers = [overview(1, complete=True, tasks=("a",)), overview(2, tasks=("b",)), overview(3, tasks=("c",))]
    agent = FakeAgent(overview=lambda: answers.pop(0), history=lambda: {"tasks": []})

    async def scenario() -> list[str]:
        feed = LiveFeed(agent)  # type: ignore[arg-type]
        feed._poll = asyncio.current_task()  # the test looks itself
        stream = feed.events("")
        await anext(stream)  # retry:
        told = [(await anext(stream)).decode()]
        for _ in range(2):  # the viewer has not taken the snapshot yet
            await feed._look()
        told += [(await anext(stream)).decode() for _ in range(2)]
        await stream.aclose()  # type: ignore[attr-defined]
        return told

    told = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [re.findall(r'"id":"(\w+)"', event) for event in told] == [["a"], ["b"], ["c"]]


def test_who_looks_later_is_told_how_long_ago_a_node_was_heard() -> None:
    dead = {"node": "n2", "state": "dead", "age_s": 5.0}
    answers = [overview(1, complete=True) | {"nodes": [dead]}, overview(2, tasks=("a",))]
    agent = FakeAgent(overview=lambda: answers.pop(0), history=lambda: {"tasks": []})

    async def scenario() -> None:
        feed = LiveFeed(agent)  # type: ignore[arg-type]
        feed._poll = asyncio.current_task()  # the test looks itself
        assert (await feed.snapshot())["nodes"][0]["age_s"] < 3600.0
        feed._looked_at -= 3600.0
        feed._told_s["n2"] -= 3600.0
        stream = feed.events("")
        await anext(stream)  # retry:
        told = json.loads((await anext(stream)).decode().partition("data: ")[2])
        assert told["nodes"][0]["age_s"] >= 3605.0
        assert [task["id"] for task in told["tasks"]] == ["a"], "not what the last viewer saw"
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_changes_are_told_although_the_list_of_ended_tasks_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.web.live.EVERY_S", 0.0)
    answers = [overview(1, complete=True, tasks=("a",)), *[overview(2) | {"tasks_gone": ["a"]}] * 2]
    histories: list[Any] = [{"tasks": []}, AgentUnavailable("slow"), {"tasks": [{"id": "a", "state": "done"}]}]

    def history() -> dict[str, Any]:
        found = histories.pop(0)
        if isinstance(found, PeerloadError):
            raise found
        return dict(found)

    async def scenario() -> None:
        feed = LiveFeed(FakeAgent(overview=lambda: dict(answers.pop(0)), history=history))  # type: ignore[arg-type]
        for _ in range(3):
            await feed._look()
        *_, (_, last) = feed._updates
        told = json.loads(last.decode().partition("data: ")[2])
        assert (told["tasks_gone"], told["ended"][0]["id"], told["away"]) == (["a"], "a", None)

    asyncio.run(scenario())


def test_viewers_share_one_look_and_an_answer_that_is_a_bug_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = [{}, overview(1, complete=True, tasks=("a",))]
    agent = FakeAgent(overview=lambda: answers.pop(0), history=lambda: {"tasks": []})
    monkeypatch.setattr("peerload.web.live.EVERY_S", 0.0)

    async def scenario() -> None:
        feed = LiveFeed(agent)  # type: ignore[arg-type]

        async def first() -> str:
            stream = feed.events("")
            await anext(stream)  # retry:
            found = (await anext(stream)).decode()
            if not answers:
                answers.append(overview(2))
            await stream.aclose()  # type: ignore[attr-defined]
            return found

        found = await asyncio.gather(first(), first())
        assert ["event: snapshot" in one for one in found] == [True, True]
        await feed.close()
        assert [fields["since"] for verb, fields in agent.asked if verb == "overview"][:2] == ["", ""]

    asyncio.run(scenario())


def test_a_file_where_the_socket_should_be_stays_and_a_server_that_listens_is_not_replaced() -> None:
    async def twice(path: str) -> None:
        gone = asyncio.Event()

        async def away(_: object, writer: asyncio.StreamWriter) -> None:
            writer.close()
            await writer.wait_closed()
            gone.set()

        listener = await _listen_unix(path, away)
        with pytest.raises(OSError, match=Says.SERVER_THERE()):
            await _listen_unix(path, away)
        await gone.wait()
        listener.close()
        (await _listen_unix(path, away)).close()

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl-") as directory:
        path = Path(directory) / "s"
        path.write_text("notes of the user")
        with pytest.raises(OSError, match=re.escape(str(path))):
            asyncio.run(twice(str(path)))
        assert path.read_text() == "notes of the user"
        path.unlink()
        asyncio.run(twice(str(path)))


def test_bad_requests_are_refused_and_a_bug_is_500() -> None:
    async def answer(_request: Request) -> Any:
        raise ValueError("a bug")

    async def sent(path: str, raw: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(raw)
        writer.write_eof()
        found = await reader.read()
        writer.close()
        return found

    async def scenario() -> None:
        server = HttpServer(answer)
        path = str(Path(directory) / "s")
        listener = await asyncio.start_unix_server(server.serve(is_local=True), path)
        assert b" 500 " in (await sent(path, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).splitlines()[0]
        for raw, status in (
            (b"\x16\x03\x01\r\n\r\n", b" 400 "),
            (b"GET / HTTP/1.1\r\n\r\n", b" 400 "),
            (b"GET /" + b"a" * 20_000, b" 431 "),
            (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + b"a" * 99_999, b" 413 "),
        ):
            assert status in (await sent(path, raw)).splitlines()[0]
        listener.close()
        await server.close()

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl-") as directory:  # the path of a socket is short
        asyncio.run(scenario())


def stats() -> dict[str, Any]:
    rules = {metrics.labelled(metrics.SECURITY_EVENTS, rule=f"R{n}"): n for n in range(400)}
    return {
        "counters": {metrics.TASKS_SUBMITTED: 7, **rules},
        "gauges": {metrics.labelled(metrics.TASKS, state="queued"): 3, metrics.AGENT_CPU: 1.5},
        "histograms": {metrics.COMMIT_TIME: HISTOGRAM},
    }


def test_metrics_are_bounded_and_described() -> None:
    told = exposition.text(stats()).decode()
    series = [line for line in told.splitlines() if line and not line.startswith("#")]
    assert len(series) <= exposition.SERIES_MAX
    assert 'peerload_tasks{state="queued"} 3.0' in series
    assert "peerload_tasks_submitted_total 7.0" in series
    assert "peerload_agent_cpu_seconds_total 1.5" in series
    assert 'peerload_hooks_total{outcome="failed"} 0.0' in series, "without the 0 the first failure is no increase"
    assert 'peerload_commit_seconds_bucket{le="+Inf"} 6.0' in series
    assert set(exposition.HELP_TEXTS) == NAMES | {exposition.LEFT_OUT}


def promtool(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = require_program("promtool", "prometheus")
    return subprocess.run([str(program), *words], input=given, capture_output=True, timeout=60, check=False)


@pytest.mark.long
@pytest.mark.sample
def test_promtool_has_no_objection() -> None:
    checked = promtool("check", "metrics", given=exposition.text(stats()))
    assert (checked.returncode, checked.stderr) == (0, b"")
    rules = promtool("check", "rules", str(DEPLOY / "prometheus-alerts.yml"))
    assert rules.returncode == 0, rules.stderr


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    text = json.dumps(dashboard) + (DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8")
    used = {name.removesuffix("_bucket") for name in re.findall(r"peerload_([a-z_]+)", text)}
    assert used <= NAMES
    assert len(dashboard["panels"]) > 15
