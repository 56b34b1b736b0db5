"""Every verb against everybody who could ask for it, in both modes: what is carried out, and what is refused, in which words."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest

from peerload.agent.accounts import Account, Accounts
from peerload.agent.control import connection
from peerload.agent.control.authorization import NOBODY, RIGHTS, Authorization, Quotas, Right, display_user
from peerload.agent.runtime import AgentInfo
from peerload.agent.systemd import LIVE
from peerload.model.config import AgentConfig
from peerload.model.errors import BadRequest, ConfigError, NoSuchTask, NotAllowed, PeerloadError, SlowDown
from peerload.model.messages import Forward
from peerload.model.task import NO_TERMS, SubmitOptions, TaskSpec, owner_key
from peerload.wire import control
from tests.each import each

VERBS: tuple[Any, ...] = get_args(control.Request)
SPEC = TaskSpec((b"true",), b"/", user="root")
OWNED = {1: "20001", 2: "20002", 3: "n2:alice"}
ACCOUNTS = {
    0: Account(0, "root", frozenset({0})),
    900: Account(900, "service", frozenset({900, 1})),
    20001: Account(20001, "alice", frozenset({20001, 1})),
    20002: Account(20002, "bob", frozenset({20002, 1})),
    20003: Account(20003, "carol", frozenset({20003, 2})),
    20004: Account(20004, "olga", frozenset({20004})),
}


class Told(list[tuple[str, str, str]]):
    def report(self, rule: str, who: str, what: str) -> None:
        self.append((rule, who, what))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    groups = {"peerload": 1, "peerload-admin": 2}
    monkeypatch.setattr("peerload.agent.control.authorization.group_number", groups.get)

    def make(mode: str = "system", **settings: Any) -> Authorization:
        config = AgentConfig(node="n1", state="/s", socket="/k", mode=mode, **settings)  # type: ignore[arg-type]
        store = SimpleNamespace(
            owners_of=lambda counters: {counter: OWNED[counter] for counter in counters if counter in OWNED},
            last_counter_of=lambda who: max((n for n, owner in OWNED.items() if owner == who), default=None),
            last_counter=lambda: 3,
            was_removed=lambda _counter: False,
            unfinished_of=lambda _who: 0,
            output_bytes_of_owner=lambda _who: 0,
        )
        executor = SimpleNamespace(remote_tasks={})
        info = SimpleNamespace(config=config)
        access = Authorization(cast("Any", info), cast("Any", store), cast("Any", executor), cast("Any", Told()))
        monkeypatch.setattr(access.accounts, "of", lambda uid: ACCOUNTS.get(uid, Account(uid, "", frozenset())))
        by_name = {account.name: account for account in ACCOUNTS.values()}
        monkeypatch.setattr(access.accounts, "named", by_name.get)
        return access

    return make


def request(kind: Any, ref: str) -> Any:
    """One of this kind that names this task, where it names any."""
    fields = {field.name for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    if "tasks" in fields:
        values["tasks"] = (ref,)
    if "task" in fields:
        values["task"] = ref
    more: dict[Any, dict[str, Any]] = {
        control.Submit: {"token": "t" * 16, "spec": SPEC, "terms": SubmitOptions(after=(ref,))},
        control.RetryRequest: {"token": "t" * 16},
        control.Prio: {"priority": 1},
        control.Group: {"name": "g"},
        control.Exec: {"argv": (b"true",)},
        control.SendSignal: {"signal": 1},
        control.Resize: {"rows": 1, "columns": 1},
        control.Forget: {"node": "n9"},
        control.RevokeRequest: {"node": "n9"},
        control.CancelRemote: {"guests": ("n9/1",)},
    }
    return kind(**values, **more.get(kind, {}))


def names_tasks(kind: Any) -> bool:
    return kind is control.Submit or bool({"task", "tasks"} & set(kind.__struct_fields__))


def test_the_table_has_every_verb_and_no_other() -> None:
    assert set(RIGHTS) == set(VERBS)
    assert all(RIGHTS[kind] in (Right.OWN, Right.SUBMIT) for kind in VERBS if names_tasks(kind))


@pytest.mark.rule("L1", "L2")
@each("kind", VERBS)
def test_who_may_ask_what_of_a_system_agent(kind: Any, made: Any) -> None:
    access = made()
    right = RIGHTS[kind]
    for uid in (20001, 20002):
        caller = access.local(uid)
        if right in (Right.ADMIN, Right.HERE):
            with pytest.raises(NotAllowed):
                access.authorize(caller, request(kind, "1"))
        else:
            access.authorize(caller, request(kind, "1" if uid == 20001 else "2"))
    carol = access.local(20003)
    assert carol.is_admin
    access.authorize(carol, request(kind, "1"))
    remote = access.forwarded("n2", Forward(b"x", "alice"))
    if right in (Right.ADMIN, Right.HERE):
        with pytest.raises(BadRequest):
            access.authorize(remote, request(kind, "3"))
    else:
        access.authorize(remote, request(kind, "3"))


@pytest.mark.rule("L2")
@each("kind", [kind for kind in VERBS if names_tasks(kind)])
@each("whose", ["1", "n1/1", "1.7", "n1/1.7", "3"])
def test_tasks_of_others_are_as_tasks_that_are_not_there(kind: Any, whose: str, made: Any) -> None:
    access = made()
    bob = access.local(20002)
    with pytest.raises(NoSuchTask) as foreign:
        access.authorize(bob, request(kind, whose))
    with pytest.raises(NoSuchTask) as absent:
        access.authorize(bob, request(kind, whose.replace("1", "9").replace("3", "8").replace("n9", "n1")))
    told = [(error.value.code, error.value.why, error.value.hint) for error in (foreign, absent)]
    assert told[0] == told[1]
    assert foreign.value.what.endswith(f": {whose}")
    assert not access._security, "who mistypes an id has broken no rule"


@pytest.mark.rule("L2")
def test_one_foreign_task_among_own_ones_is_enough(made: Any) -> None:
    access = made()
    alice = access.local(20001)
    for tasks in (("1", "2"), ("2", "1"), ("1", "1.3", "3")):
        with pytest.raises(NoSuchTask):
            access.authorize(alice, control.Cancel(tasks=tasks))


def test_the_last_task_is_that_of_who_asks(made: Any) -> None:
    access = made()
    assert access.authorize(access.local(20001), control.Show(tasks=("@", "@.2"))).tasks == ("n1/1", "n1/1.2")
    assert access.authorize(access.local(20002), control.ExplainTask(task="@")).task == "n1/2"
    waits = control.Submit(token="t" * 16, spec=SPEC, terms=SubmitOptions(after=("@",), after_ok=("1",)))
    assert access.authorize(access.local(20001), waits).terms == SubmitOptions(after=("n1/1",), after_ok=("1",))
    with pytest.raises(NoSuchTask):  # an administrator's own, too
        access.authorize(access.local(20003), control.ExplainTask(task="@"))


@pytest.mark.rule("L1")
def test_who_is_let_in(made: Any) -> None:
    access = made()
    for uid in (20004, 20099):
        with pytest.raises(NotAllowed):
            access.local(uid)
    assert [rule for rule, _, _ in access._security] == ["L1", "L1"]
    assert access.local(0).is_admin
    assert not access.local(20001).is_admin
    own = made("user")
    assert own.local(0).sees_all
    with pytest.raises(NotAllowed):
        own.local(20001)


@pytest.mark.rule("L1")
def test_root_and_services_submit_nothing(made: Any) -> None:
    submit = control.Submit(token="t" * 16, spec=SPEC)
    access = made()
    for uid in (0, 900):
        with pytest.raises(NotAllowed):
            access.authorize(access.local(uid), submit)
    allowed = made(allow_root_tasks=True)
    allowed.authorize(allowed.local(0), submit)


@pytest.mark.rule("L1")
def test_whose_a_task_is_comes_from_the_operating_system(made: Any) -> None:
    access = made()
    claims = SubmitOptions(owner=0)
    assert access.with_owner(access.local(20002), SPEC, claims)[0].user == "bob"
    assert access.with_owner(access.local(20002), SPEC, claims)[1].owner == 20002
    remote = access.forwarded("n2", Forward(b"x", "alice", uid=0))
    spec, terms = access.with_owner(remote, SPEC, claims)
    assert (spec.user, terms.owner, owner_key(terms.owner, spec.user)) == ("n2:alice", -1, "n2:alice")
    assert display_user(spec, "me") == "alice@n2"
    own = made("user")
    assert own.with_owner(own.local(0), SPEC, claims) == (msgspec.structs.replace(SPEC, user=""), NO_TERMS)


def test_a_token_is_good_for_one_user(made: Any) -> None:
    access = made()
    submit = control.Submit(token="t" * 16, spec=SPEC)
    tokens = {access.authorize(access.local(uid), submit).token for uid in (20001, 20002)}
    assert len(tokens) == 2
    assert access.authorize(access.local(20001), submit).token in tokens
    own = made("user")
    assert own.authorize(own.local(0), submit) == submit


# -- what other nodes send on ---------------------------------------------------------------------------------------------


@pytest.mark.rule("P3")
@each("user", ["alice", "carol", "root", "service", "nobody-here"])
@each(
    "users",
    ["guest", "same-name", {"n2:alice": "bob", "n2:root": "root", "n2:carol": "carol", "n2:service": "service"}],
)
@each("allowed", [False, True])
def test_who_is_who_from_another_node(user: str, users: Any, allowed: bool, made: Any) -> None:
    """carol is in peerload-admin: nobody of another node is she, unless that is said."""
    access = made(users=users, map_administrators=allowed)
    caller = access.forwarded("n2", Forward(b"x", user))
    assert not caller.is_admin
    mapped = {"same-name": {"alice": 20001, "carol": 20003}, "guest": {}}
    whom = (mapped[users] if isinstance(users, str) else {"alice": 20002, "carol": 20003}).get(user, -1)
    if user == "carol" and not allowed:
        whom = -1
    assert caller.uid == whom, "never root, and no account of the system"
    assert caller.who == (str(whom) if whom >= 0 else f"n2:{user}")
    for kind in VERBS:
        judged(access, caller, kind)
    assert access._security


def judged(access: Authorization, caller: Any, kind: Any) -> None:
    """What a client of another node, who is no administrator here, may ask, and what not."""
    if RIGHTS[kind] in (Right.ADMIN, Right.HERE):
        with pytest.raises(BadRequest):
            access.authorize(caller, request(kind, "1"))
    elif names_tasks(kind):
        for counter, owner in OWNED.items():
            if owner == caller.who:
                access.authorize(caller, request(kind, str(counter)))
            else:
                with pytest.raises(NoSuchTask):
                    access.authorize(caller, request(kind, str(counter)))
    else:
        access.authorize(caller, request(kind, "1"))


@pytest.mark.rule("P3")
def test_a_request_goes_one_hop_and_names_its_user(made: Any) -> None:
    access = made()
    for message in (Forward(b"x", "alice", hops=2), Forward(b"x", ""), Forward(b"x", "n1:alice")):
        with pytest.raises(BadRequest):
            access.forwarded("n2", message)


@pytest.mark.rule("P3")
@each("kind", VERBS)
def test_in_user_mode_a_member_may_all_but_what_is_done_at_the_machine(kind: Any, made: Any) -> None:
    access = made("user")
    caller = access.forwarded("n2", Forward(b"x", "anybody"))
    if RIGHTS[kind] is Right.HERE:
        with pytest.raises(BadRequest):
            access.authorize(caller, request(kind, "1"))
    else:
        assert access.authorize(caller, request(kind, "1")) == request(kind, "1")
    assert access.authorize(access.local(0), request(kind, "1")) == request(kind, "1")


@pytest.mark.rule("X2")
@each("settings", [{"accept_foreign": False}, {"exec_allow": ("/usr/bin/true",)}])
def test_who_takes_chosen_foreign_tasks_only_is_no_home_for_them_either(settings: Any, made: Any) -> None:
    """An account that a user of another node is here could else submit here what it may not send."""
    submits = (request(control.Submit, "1"), request(control.RetryRequest, "1"))
    access = made(users="same-name", **settings)
    for submit in submits:
        access.authorize(access.local(20001), submit)
        with pytest.raises(NotAllowed, match=r"accept_foreign|exec_allow"):
            access.authorize(access.forwarded("n2", Forward(b"x", "alice")), submit)
    access.authorize(access.forwarded("n2", Forward(b"x", "alice")), control.Show(tasks=("1",)))
    made(users="same-name").authorize(access.forwarded("n2", Forward(b"x", "alice")), submits[0])


def test_a_reload_closes_this_node_to_users_of_others(made: Any) -> None:
    access = made(users="same-name")
    caller = access.forwarded("n2", Forward(b"x", "alice"))
    submit = request(control.Submit, "1")
    access.authorize(caller, submit)
    access._info.config = msgspec.structs.replace(access._info.config, accept_foreign=False)
    assert "accept_foreign" in LIVE
    with pytest.raises(NotAllowed, match="accept_foreign"):
        access.authorize(caller, submit)


@pytest.mark.rule("X1", "P3")
def test_nobody_from_another_node_is_the_agent(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    access = made(users="same-name")
    monkeypatch.setattr(access, "_own_uid", 20001)
    assert access.mapped("n2", "alice") is None
    assert access.mapped("n2", "bob").uid == 20002


@pytest.mark.rule("L4", "P2")
def test_users_that_a_node_makes_up_share_its_quotas(made: Any) -> None:
    access = made(user_tasks_max=5, users={"n2:alice": "alice"})
    quotas = Quotas(access._config, access._store, access._security)
    quotas.check_submission(access.forwarded("n2", Forward(b"x", "one")), 3)
    with pytest.raises(SlowDown):
        quotas.check_submission(access.forwarded("n2", Forward(b"x", "two")), 3)
    quotas.check_submission(access.forwarded("n3", Forward(b"x", "two")), 3)
    quotas.check_submission(access.forwarded("n2", Forward(b"x", "alice")), 3)
    quotas.check_submission(access.local(20002), 3)


def test_nobody_owns_nothing() -> None:
    assert NOBODY.who.startswith("nobody:"), "no uid, and no name of a node is followed by nothing"
    assert not NOBODY.sees_all


# -- the socket -------------------------------------------------------------------------------------------------------------


def listened(path: Path, **settings: Any) -> None:
    connection.listen(AgentConfig(node="n", state="s", socket=str(path), **settings)).close()


@pytest.mark.rule("L1")
def test_where_the_socket_of_a_system_agent_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "group_number", lambda _name: os.getgid())
    good = tmp_path / "run"
    listened(good / "sock", mode="system")
    assert (good.stat().st_mode & 0o777, (good / "sock").stat().st_mode & 0o777) == (0o755, 0o660)
    (tmp_path / "link").symlink_to(good)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "file").write_text("", encoding="ascii")
    for directory in ("link", "open", "file"):
        with pytest.raises(ConfigError):
            listened(tmp_path / directory / "sock", mode="system")
    monkeypatch.setattr(connection, "group_number", lambda _name: None)
    with pytest.raises(ConfigError):
        listened(good / "sock", mode="system")
    listened(tmp_path / "own" / "sock")
    assert (tmp_path / "own" / "sock").stat().st_mode & 0o777 == 0o600


def test_a_reload_changes_how_many_clients_there_may_be(made: Any) -> None:
    access = made("user")
    config = AgentConfig(node="n1", state="/s", socket="/k", clients_max=1)
    info = AgentInfo(config, cast("Any", None))
    quotas, server, launcher = Quotas(config, access._store, access._security), cast("Any", None), cast("Any", None)
    clients = connection.LocalSocket(info, server, access, quotas, access._security, launcher)

    class Client:
        uid, caller = os.getuid(), NOBODY

    def refusal() -> PeerloadError | None:
        return clients.admit(cast("Any", Client()))

    assert refusal() is None
    assert isinstance(refusal(), SlowDown)
    info.config = msgspec.structs.replace(config, clients_max=2)
    assert refusal() is None
    assert isinstance(refusal(), SlowDown)


def test_accounts_are_looked_up_by_number() -> None:
    accounts = Accounts()
    root = pwd.getpwuid(0)
    assert accounts.of(0).name == root.pw_name
    assert accounts.named(root.pw_name) == accounts.of(0)
    assert accounts.of(3_999_999_999) == Account(3_999_999_999, "", frozenset())
    assert [accounts.named(name) for name in ("", "a\0b", "0", "no such account", "x" * 5000)] == [None] * 5


CONNECT = """
import os, socket, sys
uid, gid, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
socket.socket(socket.AF_UNIX).connect(path)
"""


@pytest.mark.rule("L1")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as somebody else")
def test_members_of_either_group_alone_can_connect_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "group_number", {"peerload-admin": 61_002}.get)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listening:
        Path(directory).chmod(0o755)
        path = str(Path(directory) / "agent.sock")
        listening.bind(path)
        os.chown(path, 0, 61_001)
        Path(path).chmod(0o660)
        listening.listen()
        assert connection.allow_group(path, "peerload-admin") == ""
        assert connection.allow_group(path, "nobody") != ""

        def connects(gid: int) -> bool:
            words = [sys.executable, "-I", "-S", "-c", CONNECT, "61009", str(gid), path]
            return subprocess.run(words, capture_output=True, check=False).returncode == 0

        assert [connects(gid) for gid in (61_001, 61_002, 61_003)] == [True, True, False]
