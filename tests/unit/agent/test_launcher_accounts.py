"""As whom a task runs: the policy, the accounts, and the files it is read from."""

from __future__ import annotations

import json
import os
import pwd
from typing import TYPE_CHECKING, Any

import pytest

from peerload.config.loader import converted_value, mistakes_in
from peerload.launcher.process import SpawnRefused
from peerload.launcher.system.accounts import (
    Entry,
    GuestIds,
    PolicyError,
    PolicyFiles,
    UsersPolicy,
    account_named,
    check_root_owned,
    check_uid,
    policy_of,
)
from peerload.launcher.system.sandbox import guest_filter
from peerload.model.config import AgentConfig
from peerload.model.errors import ConfigError
from tests.each import each
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root's files are told from those of others")


@pytest.mark.rule("X1")
@each(
    ("users", "home", "user", "uid", "name"),
    [
        ("guest", "ws1", "alice", 1000, "alice"),  # the node's own
        ("guest", "ws2", "alice", -1, ""),
        ("same-name", "ws2", "alice", -1, "alice"),
        ({"ws2:alice": "bob"}, "ws2", "alice", -1, "bob"),
        ({"ws2:alice": "bob"}, "ws1", "ws2:alice", -1, "bob"),  # submitted here by one of ws2
        ("guest", "ws1", "ws2:alice", -1, ""),
        ("same-name", "ws1", "ws2:alice", -1, "alice"),
    ],
)
def test_who_runs_as_whom(users: Any, home: str, user: str, uid: int, name: str) -> None:
    assert UsersPolicy(users).name_for("ws1", home, user, uid) == name


@pytest.mark.rule("X1")
@each(
    ("policy", "home", "user"),
    [
        (UsersPolicy({"ws2:alice": "bob"}), "ws2", "carol"),
        (UsersPolicy({"ws2:alice": "bob"}), "ws3", "alice"),
        (UsersPolicy({"ws2:alice": "bob"}), "ws20", "alice"),
        (UsersPolicy({"ws2:alice": "bob"}), "ws3", "ws2:alice"),  # what ws3 says of ws2's users counts for nothing
        (UsersPolicy("same-name"), "ws2", ""),
        (UsersPolicy(accept_foreign=False), "ws2", "alice"),
        (UsersPolicy(accept_foreign=False), "ws1", "ws2:alice"),
        (UsersPolicy(), "ws1", ""),
    ],
)
def test_who_runs_nothing(policy: UsersPolicy, home: str, user: str) -> None:
    with pytest.raises(SpawnRefused):
        policy.name_for("ws1", home, user, -1)


@pytest.mark.rule("X1")
@each("uid", [0, 1, 999, 61_184, 62_000, 65_519, 65_534, 65_535, (1 << 32) - 1])
def test_accounts_that_no_task_has(uid: int) -> None:
    with pytest.raises(SpawnRefused):
        check_uid(uid, UsersPolicy(), is_own=True)
    with pytest.raises(SpawnRefused):
        check_uid(0, UsersPolicy(allow_root_tasks=True), is_own=False)
    check_uid(0, UsersPolicy(allow_root_tasks=True), is_own=True)
    check_uid(1000, UsersPolicy(), is_own=False)


@pytest.mark.rule("X1", "X6")
@each(
    ("users", "groups", "own", "foreign"),
    [
        ("guest", ("staff",), True, True),
        ("guest", (), False, True),
        ("guest", ("wheel",), True, False),
        ("same-name", (), True, True),
        ("same-name", ("staff", "wheel"), True, False),
        ({"ws2:bob": "alice"}, (), True, True),
        ({"ws2:alice": "bob"}, (), False, True),
        ({"ws2:bob": "alice"}, ("wheel",), True, False),
    ],
)
def test_neither_the_agent_nor_another_node_is_believed_about_everybody(
    users: Any, groups: tuple[str, ...], own: bool, foreign: bool
) -> None:
    """own: whether a task of the node's own runs as that account; foreign: one of another node's user."""
    policy = UsersPolicy(users, group="staff", admin_group="wheel")

    def look(name: str, group: str, admin_group: str) -> Entry:
        assert (group, admin_group) == ("staff", "wheel")
        return name, 20001, 20001, (20001,), "/", "/bin/sh", group in groups, admin_group in groups

    for is_own, uid, may in ((True, 20001, own), (True, -1, own), (False, -1, foreign)):
        if may:
            assert account_named("alice", policy, uid=uid, is_own=is_own, look=look).uid == 20001
        else:
            with pytest.raises(SpawnRefused):
                account_named("alice", policy, uid=uid, is_own=is_own, look=look)


@each("name", ["", "nobody-is-called-this", "root\0", "0", "daemon", "root"])
def test_names_that_are_no_users(name: str) -> None:
    with pytest.raises(SpawnRefused):
        account_named(name, UsersPolicy())


def test_no_user_of_another_node_becomes_an_administrator_unless_that_is_said() -> None:
    def look(name: str, group: str, admin_group: str) -> Entry:
        assert (group, admin_group) == ("peerload", "wheel")
        return name, 20_001, 20_001, (20_001, 27), "/", "/bin/sh", False, True

    strict, lax = (UsersPolicy(admin_group="wheel", map_administrators=allowed) for allowed in (False, True))
    with pytest.raises(SpawnRefused, match="wheel"):
        account_named("carol", strict, look=look)
    assert account_named("carol", lax, look=look).uid == 20_001
    assert account_named("carol", strict, uid=20_001, is_own=True, look=look).uid == 20_001, "her own tasks are hers"


def test_a_guest_has_a_limit_of_memory() -> None:
    """What it whose for, what the policy says, or its share of the machine."""
    policy = UsersPolicy(guest_memory_bytes_max=1 << 30)
    assert (policy.memory_bytes_max(7, 1.0), policy.memory_bytes_max(0, 4.0)) == (7, 1 << 30)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shares = [UsersPolicy().memory_bytes_max(0, cpus) for cpus in (0.1, 1.0, float(os.cpu_count() or 1), 1e6)]
    assert shares[0] == shares[1] == max(whole // (os.cpu_count() or 1), 64 << 20)
    assert shares[2] == shares[3] == whole


def test_an_account_that_has_another_number_by_now_is_refused() -> None:
    entry = pwd.getpwuid(0)
    policy = UsersPolicy(allow_root_tasks=True)
    assert account_named(entry.pw_name, policy, uid=0, is_own=True).uid == 0
    with pytest.raises(SpawnRefused, match="another account"):
        account_named(entry.pw_name, policy, uid=1234, is_own=True)


def test_uids_of_guests_are_one_attempts_until_it_is_gone() -> None:
    ids, bounds = GuestIds(), (61_200, 61_202)
    uids = {ids.take(key, bounds).uid for key in ("a", "b", "c")}
    assert uids == {61_200, 61_201, 61_202}
    with pytest.raises(SpawnRefused):
        ids.take("d", bounds)
    ids.give_back("b")
    assert ids.take("d", bounds).uid in uids


def test_what_is_given_back_is_given_away_last() -> None:
    ids, bounds = GuestIds(), (61_200, 61_209)
    first = ids.take("a", bounds).uid
    ids.give_back("a")
    seen = []
    for _ in range(9):
        seen.append(ids.take("b", bounds).uid)
        ids.give_back("b")
    assert first not in seen


@each(
    "settings",
    [
        {"users": "everybody"},
        {"users": {"ws1:alice": 0}},
        {"users": {"ws3:ws2:alice": "bob"}},
        {"users": {"alice": "bob"}},
        {"users": {"ws1:alice": "bob\0"}},
        {"users": 7},
        {"allow_root_tasks": "yes"},
        {"exec_allow": ["bin/true"]},
        {"exec_allow": "/bin/true"},
        {"guest_uids": [0, 10]},
        {"guest_uids": [2000, 1500]},
        {"guest_uids": [2000]},
        {"task_processes_max": 0},
        {"guest_bytes_max": True},
        {"guest_memory_bytes_max": -1},
        {"guest_network": "no"},
        {"map_administrators": 1},
        {"admin_group": "a b"},
        {"group": 7},
        {"admin_group": ""},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], tmp_path: Path) -> None:
    """The launcher, the agent and `config check` say why in the same words."""
    with pytest.raises(ValueError, match=next(iter(settings))) as caught:
        policy_of(settings)
    ((key, value),) = settings.items()
    why = str(caught.value).removeprefix(f"{key}: ")
    with pytest.raises(ConfigError) as told:
        converted_value(key, value, "here")
    assert told.value.why == why
    file = tmp_path / "peerload.toml"
    shown = json.dumps(value)
    if isinstance(value, dict):
        shown = "{" + ", ".join(f'"{user}" = {json.dumps(account)}' for user, account in value.items()) + "}"
    file.write_text(f"{key} = {shown}\n")
    assert [(mistake.key, mistake.why) for mistake in mistakes_in(file)] == [(key, why)]


def test_its_settings_and_defaults_are_the_agents() -> None:
    config, policy = AgentConfig(node="n", state="s", socket="s"), policy_of({"node": "n", "slots": 3})
    for name in UsersPolicy.__slots__:
        assert getattr(config, name) == getattr(policy, name), name


@needs_root
@pytest.mark.rule("X1")
def test_a_file_that_others_could_write_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "peerload.toml"
    file.write_text('users = "same-name"\n')
    file.chmod(0o644)
    files = PolicyFiles(str(file), str(tmp_path / "conf.d"))
    assert files.read().users == "same-name"
    file.chmod(0o664)
    with pytest.raises(PolicyError, match=Says.NOT_ROOTS()):
        files.read()
    file.chmod(0o644)
    os.chown(file, 1000, 1000)
    with pytest.raises(PolicyError):
        check_root_owned(str(file))


@needs_root
def test_a_change_that_cannot_be_used_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.launcher.system.accounts.CHECK_EVERY_S", 0.0)
    file = tmp_path / "peerload.toml"
    file.write_text("accept_foreign = false\n")
    files = PolicyFiles(str(file), str(tmp_path / "conf.d"))
    assert not files.read().accept_foreign
    file.write_text("accept_foreign = 17 18\n")
    assert not files.current().accept_foreign
    file.write_text("accept_foreign = true\n")
    assert files.current().accept_foreign


@needs_root
@pytest.mark.rule("X2")
def test_a_file_that_is_away_for_a_moment_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some editors take a file away before they put it back."""
    monkeypatch.setattr("peerload.launcher.system.accounts.CHECK_EVERY_S", 0.0)
    file = tmp_path / "peerload.toml"
    file.write_text("accept_foreign = false\n")
    files = PolicyFiles(str(file), str(tmp_path / "conf.d"))
    assert not files.read().accept_foreign
    file.rename(tmp_path / "peerload.toml~")
    assert not files.current().accept_foreign, "not yet"
    (tmp_path / "peerload.toml~").rename(file)
    assert not files.current().accept_foreign
    file.unlink()
    assert not files.current().accept_foreign
    assert files.current().accept_foreign, "it is gone for good"


def test_the_filter_is_whole_on_each_machine_it_is_known_for() -> None:
    for machine in ("x86_64", "aarch64"):
        program = guest_filter(machine)
        assert len(program) % 8 == 0
        count = len(program) // 8
        for at in range(count):
            code, true, false = program[8 * at], program[8 * at + 2], program[8 * at + 3]
            if code & 0x07 == 0x05:  # a jump stays inside, and ahead
                assert at + 1 + max(true, false) < count
    assert guest_filter("sparc") == b""
