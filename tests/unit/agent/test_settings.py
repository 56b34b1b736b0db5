"""The settings: which place wins, and what a bad value says."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from peerload.config import loader
from peerload.config.loader import default_node_name, load, mistakes_in
from peerload.model.config import AgentConfig
from peerload.model.errors import ConfigError
from tests.each import each
from tests.wording import Says

DEFAULTS = {"state": "/var/s", "socket": "/run/s"}


class Places:
    """The files of one machine and one user, and the user's variables."""

    def __init__(self, root: Path) -> None:
        self.system = root / "etc/peerload.toml"
        self.directory = root / "etc/conf.d"
        self.user = root / "home/.config/peerload/config.toml"
        self.directory.mkdir(parents=True)
        self.user.parent.mkdir(parents=True)
        self.environment = {"HOME": str(root / "home")}

    def load(self, **flags: Any) -> AgentConfig:
        return load(flags, DEFAULTS, self.environment)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    made = Places(tmp_path)
    monkeypatch.setattr(loader, "SYSTEM_FILE", made.system)
    monkeypatch.setattr(loader, "SYSTEM_DIRECTORY", made.directory)
    return made


def test_nothing_given(places: Places) -> None:
    config = places.load()
    assert (config.node, config.state, config.socket) == (default_node_name(), "/var/s", "/run/s")
    assert (config.slots, config.peer, config.policy) == (None, (), "adaptive")


def test_the_nearer_place_wins(places: Places) -> None:
    def node() -> str:
        return places.load().node

    assert node() == default_node_name()
    places.system.write_text('node = "system"\nslots = 3\n')
    assert node() == "system"
    (places.directory / "20-b.toml").write_text('node = "later"\n')
    (places.directory / "10-a.toml").write_text('node = "earlier"\n')
    (places.directory / "30.ignored").write_text('node = "ignored"\n')
    assert node() == "later"
    places.user.write_text('node = "user"\n')
    assert node() == "user"
    places.environment["PEERLOAD_NODE"] = "variable"
    assert node() == "variable"
    assert places.load(node="flag").node == "flag"
    assert places.load(node="flag").slots == 3, "a key is decided by itself, not with its file"


def test_a_named_file_takes_the_place_of_the_users(places: Places, tmp_path: Path) -> None:
    places.user.write_text('node = "user"\n')
    places.system.write_text("slots = 3\n")
    named = tmp_path / "named.toml"
    named.write_text('advertise = "hall:7"\n')
    config = places.load(config=str(named))
    assert (config.node, config.advertise, config.slots) == (default_node_name(), "hall:7", 3)
    with pytest.raises(ConfigError, match="no such file"):
        places.load(config=str(tmp_path / "missing"))


def test_the_users_file_is_where_xdg_says(places: Places, tmp_path: Path) -> None:
    (tmp_path / "xdg/peerload").mkdir(parents=True)
    (tmp_path / "xdg/peerload/config.toml").write_text("slots = 7\n")
    places.environment["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert places.load().slots == 7


def test_variables_are_text_whatever_the_setting(places: Places) -> None:
    places.environment |= {
        "PEERLOAD_NODE": "17",
        "PEERLOAD_SLOTS": "4",
        "PEERLOAD_LEASE_S": "2.5",
        "PEERLOAD_OUTPUT_BYTES_MAX": "65536",
        "PEERLOAD_PEER": "a:1, b:2,,",
        "PEERLOAD_LABEL": "gpu",
        "PEERLOAD_MQTT": "",
        "PEERLOAD_UNKNOWN": "x",
    }
    config = places.load()
    assert (config.node, config.slots, config.lease_s, config.output_bytes_max) == ("17", 4, 2.5, 65536)
    assert (config.peer, config.label, config.mqtt) == (("a:1", "b:2"), ("gpu",), ())


def test_foreign_load_is_set_in_a_table_or_by_a_variable(places: Places) -> None:
    assert places.load().load.foreign == "count"
    places.user.write_text("[load]\nforeign = 'ignore'\n")
    assert places.load().load.foreign == "ignore"
    places.environment["PEERLOAD_LOAD_FOREIGN"] = "count"
    assert places.load().load.foreign == "count"
    places.environment["PEERLOAD_LOAD_FOREIGN"] = "some"
    with pytest.raises(ConfigError) as caught:
        places.load()
    assert caught.value.key == "load.foreign"


def test_inside_a_task_variables_mean_something_else(places: Places) -> None:
    places.environment |= {"PEERLOAD_TASK_ID": "n/1", "PEERLOAD_NODE": "other", "PEERLOAD_SLOTS": "x"}
    assert places.load().node == default_node_name()


def test_an_unknown_key_is_named_with_its_neighbour(places: Places) -> None:
    places.user.write_text("slot = 3\n")
    with pytest.raises(ConfigError) as caught:
        places.load()
    assert caught.value.key == "slot"
    assert str(places.user) in str(caught.value)
    assert "'slots'" in caught.value.hint


@each(
    ("text", "key"),
    [
        ("slots = -1", "slots"),
        ('slots = "4"', "slots"),
        ("slots = true", "slots"),
        ("lease_s = nan", "lease_s"),
        ("lease_s = 0.5", "lease_s"),
        ('node = "Not A Name"', "node"),
        ('peer = "a:1"', "peer"),
        ("label = [1]", "label"),
        ("state = 34", "state"),
        ("state = []", "state"),
        ('state = "\\u0000"', "state"),
    ],
)
def test_a_bad_value_names_the_key_and_the_file(places: Places, text: str, key: str) -> None:
    places.user.write_text(text + "\n")
    with pytest.raises(ConfigError, match=Says.CANNOT_BE_USED()) as caught:
        places.load()
    assert caught.value.key == key
    assert str(places.user) in str(caught.value)
    assert caught.value.why


@each(
    ("text", "says"),
    [
        ('gossip = "fast"', "gossip: 'fast' cannot be used (FILE): it may be lan or local or wan"),
        ('node = "A"', "node: 'A' cannot be used (FILE): a name of a-z, 0-9 and -, at most 40 characters, is wanted"),
        ("[gpu]\nmax_tasks = 0", "gpu.max_tasks: this cannot be used (FILE): a whole number of at least 1 is wanted"),
        ("[gpu]\nmax_task = 1", "gpu: this cannot be used (FILE): max_task is unknown"),
        (
            '[gpu]\nstarve_after = "15"',
            (
                "gpu.starve_after: '15' cannot be used (FILE): '15' has no unit: 15m is 15 minutes, 15s is 15 seconds;"
                " which is meant?"
            ),
        ),
        (
            '[gpu]\nreserve = "2000000TiB"',
            "gpu.reserve: '2000000TiB' cannot be used (FILE): '2000000TiB' is not between 0 B and 2^60",
        ),
        (
            '[[device]]\nkind = "FPGA"\nids = ["a"]',
            (
                "device[0].kind: this cannot be used (FILE): a word of a-z, 0-9 and -, a letter first, at most 31"
                " characters, is wanted"
            ),
        ),
        ('[[device]]\nkind = "fpga"', "device[0]: this cannot be used (FILE): ids is missing"),
        (
            '[[device]]\nkind = "gpu"\nids = ["0"]',
            "device: gpu 0 cannot be used (FILE): GPUs are detected automatically",
        ),
    ],
)
def test_a_bad_value_says_what_it_may_be(places: Places, text: str, says: str) -> None:
    places.user.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        places.load()
    assert str(caught.value) == says.replace("FILE", str(places.user))


@each("text", ["0s", "9" * 400 + "s", "x", "", "1e3s", "-1s"])
def test_no_time_to_starve_is_refused(places: Places, text: str) -> None:
    places.user.write_text(f'[gpu]\nstarve_after = "{text}"\n')
    with pytest.raises(ConfigError, match="cannot be"):
        places.load()


@each(
    ("text", "key"),
    [
        ('[files]\ncache = "lots"', "files.cache"),
        ('[files]\ncache = "10"', "files.cache"),
        ('[web]\nlisten = "nonsense"', "web.listen"),
        ('[web]\nlisten = "127.0.0.1:70000"', "web.listen"),
        ('[web]\nlisten = "0.0.0.0:7118"', "web.listen"),
        ('mqtt = ["mqtt://broker..lab"]', "mqtt"),
        (f'mqtt = ["mqtt://{"x" * 64}.lab"]', "mqtt"),
        ('listen = "nonsense"', "listen"),
        ('peer = ["a.lab:99999"]', "peer"),
        ('policy = "nonsense"', "policy"),
        ('state = "here"', "state"),
        ('socket = "run/agent.sock"', "socket"),
    ],
)
def test_what_an_agent_could_not_use_is_found_by_the_check(places: Places, text: str, key: str) -> None:
    places.user.write_text(f"{text}\n")
    assert [mistake.key for mistake in mistakes_in(places.user)] == [key]
    with pytest.raises(ConfigError) as caught:
        places.load()
    assert (caught.value.key, str(places.user) in caught.value.says) == (key, True)


@each(
    "text",
    [
        '[files]\ncache = "5GiB"',
        '[web]\nlisten = "/run/peerload/web.sock"',
        '[web]\nlisten = "[::1]:7118"',
        '[web]\nlisten = "0.0.0.0:7118"\ntls_cert = "/c.pem"\ntls_key = "/k.pem"',
        'mqtt = ["mqtt://broker.lab.:1883", "mqtts://[fd00::5]"]',
    ],
)
def test_the_check_takes_what_an_agent_can_use(places: Places, text: str) -> None:
    places.user.write_text(f"{text}\n")
    assert mistakes_in(places.user) == []
    places.load()


def test_a_bad_variable_and_a_bad_flag_name_their_place(places: Places) -> None:
    places.environment["PEERLOAD_SLOTS"] = "many"
    with pytest.raises(ConfigError, match=r"slots: .*\(environment\)"):
        places.load()
    with pytest.raises(ConfigError, match=r"node: .*\(flag\)"):
        places.load(node="A", slots=1)


def test_a_file_that_is_no_toml_is_named(places: Places) -> None:
    places.system.write_text("slots = \n")
    with pytest.raises(ConfigError, match="is not TOML"):
        places.load()
    places.system.write_bytes(b'policy = "\xff"\n')
    with pytest.raises(ConfigError, match="is not TOML"):
        places.load()


def test_the_hosts_name_makes_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "WS1.Example_Lab." + "x" * 80)
    assert default_node_name() == ("ws1-example-lab-" + "x" * 80)[:40]
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    assert default_node_name() == "node"


def test_the_state_directory_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({"state": "here"}, DEFAULTS, {}).state == str(tmp_path / "here")


def test_a_state_directory_in_a_file_may_begin_with_the_home(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    places.user.write_text('state = "~/tasks"\n')
    assert places.load().state == "/home/me/tasks"
    assert mistakes_in(places.user) == []


@pytest.mark.parametrize("named", [{}, {"config": "/" + "x" * 300}], ids=["the user's", "named"])
def test_a_place_that_cannot_be_looked_at_is_said(places: Places, named: dict[str, str]) -> None:
    """As the home of another account, which is what HOME may be after setpriv."""
    places.environment["HOME"] = "/" + "x" * 300  # what root, too, cannot look at
    with pytest.raises(ConfigError, match=r"config: /x+"):
        places.load(**named)
