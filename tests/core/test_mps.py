"""Sharing of GPUs under MPS in the decisions: who may join whom, how many pay off, and what becomes of those it fails under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerload.config.loader import gpu_config
from peerload.core.resources.admission import why_never
from peerload.core.resources.devices import DeviceLedger, DeviceRequest, MpsDegree, with_gpu_use
from peerload.launcher.protocol import MPS_CONTROL
from peerload.model.config import GpuConfig, GpuSettings
from peerload.model.resources import Device, DeviceMode, DeviceReading, GpuShare, Placement, Profile, ResourceRequest
from peerload.model.task import Exit, TaskSpec
from tests.wording import Says

GIB = 1 << 30
CARD = Device("nvidia:GPU-0", model="A10", mem_bytes=24 * GIB, capability=8.0)
CONFIG = GpuConfig(mps="auto")
PROFILE = Profile("x", 8, 8.0, gpus=1, devices=(CARD,))


class Card:
    """One GPU, to which tasks come."""

    def __init__(self, config: GpuConfig = CONFIG, device: Device = CARD) -> None:
        self.ledger = DeviceLedger(Profile("x", 8, 8.0, gpus=1, devices=(device,)), config)
        self.ledger.read([DeviceReading(device.id)], 0.0)
        self.state = self.ledger.states[device.id]

    def ask(self, share: GpuShare = GpuShare.MPS, owner: str | None = "", **more: Any) -> DeviceRequest:
        request = ResourceRequest(gpus=1, gpu_mem_bytes=more.pop("mem", GIB), gpu_share=share, **more)
        return DeviceRequest(request, self.ledger.config, owner=owner)

    def why_not(self, *args: Any, **more: Any) -> str:
        return self.state.why_not(self.ask(*args, **more), 100.0)

    def start(self, key: str, *args: Any, **more: Any) -> DeviceMode:
        ask = self.ask(*args, **more)
        assert not self.state.why_not(ask, 100.0)
        self.ledger.grant(key, (self.state.id,), ask, 100.0)
        return self.state.grants[key].mode


def test_tasks_with_and_without_mps_do_not_share_a_card() -> None:
    card = Card()
    assert card.start("a", GpuShare.TIME) is DeviceMode.TIME
    assert card.why_not() == Says.MPS_FOREIGN()
    assert card.start("b", GpuShare.AUTO) is DeviceMode.TIME  # as those that are there
    card = Card()
    assert card.start("a", GpuShare.AUTO) is DeviceMode.MPS  # nobody else: as it would rather share
    assert card.why_not(GpuShare.TIME) == Says.MPS_HELD()
    assert card.start("b", GpuShare.AUTO) is card.start("c", GpuShare.MPS) is DeviceMode.MPS
    assert card.state.mode is DeviceMode.MPS
    load = card.state.load(100.0)
    assert load.mode is DeviceMode.TIME  # which older nodes know


def test_an_unknown_need_has_a_card_of_its_own_at_first_and_no_daemon() -> None:
    assert Card().start("a", GpuShare.AUTO, mem=0) is DeviceMode.TIME
    assert Card().start("a", GpuShare.EXCLUSIVE) is DeviceMode.EXCLUSIVE


def test_multiprocessors_are_promised_up_to_a_bound() -> None:
    card = Card(GpuConfig(mps="auto", pct_oversubscribe=1.5))
    card.start("a", gpu_pct=90)
    card.start("b", gpu_pct=50)
    assert card.why_not(gpu_pct=20) == Says.MPS_PCT(140, 20, 150)
    card.start("c", gpu_pct=10)


def test_users_do_not_share_a_daemon_and_guests_have_none() -> None:
    card = Card(GpuConfig(mps="auto", mps_by_user=True))
    spec = TaskSpec((b"x",), b"/", request=ResourceRequest(gpus=1, gpu_share=GpuShare.MPS), user="ann")
    assert card.ledger.mps_owner(spec, "") == "ann"
    assert card.ledger.mps_owner(spec, "y") is None
    card.start("a", owner="ann")
    assert card.why_not(owner="bob") == Says.MPS_OTHER_USER()
    assert card.why_not(GpuShare.AUTO, owner="bob") == Says.MPS_OTHER_USER()
    assert card.why_not(GpuShare.AUTO, owner=None) == Says.MPS_HELD()
    assert "guests" in Card().why_not(owner=None)


@pytest.mark.parametrize(
    ("users", "home", "user", "owner"),
    [("guest", "", "y:ann", None), ("same-name", "y", "ann", "ann"), ("same-name", "y", "", None),
     ({"y:ann": "bob"}, "y", "ann", "bob"), ({"y:ann": "bob"}, "", "y:ann", "bob"), ({"y:ann": "bob"}, "z", "ann", None)],
)  # fmt: skip
def test_users_of_other_nodes_have_the_daemon_of_the_account_that_they_run_as(
    users: str | dict[str, str], home: str, user: str, owner: str | None
) -> None:
    card = Card(GpuConfig(mps="auto", mps_by_user=True, mps_users=users))
    assert card.ledger.mps_owner(TaskSpec((b"x",), b"/", user=user), home) == owner


@pytest.mark.parametrize(
    ("config", "device"),
    [(GpuConfig(), CARD), (CONFIG, Device("nvidia:MIG-0", mem_bytes=GIB * 9, capability=9.0)),
     (CONFIG, Device("nvidia:GPU-0", mem_bytes=GIB * 9, capability=6.1)), (CONFIG, Device("amd:0", mem_bytes=GIB * 9))],
)  # fmt: skip
def test_where_there_is_no_mps_tasks_share_in_turns(config: GpuConfig, device: Device) -> None:
    assert Card(config, device).why_not() == Says.MPS_NONE()
    assert Card(config, device).start("a", GpuShare.AUTO) is DeviceMode.TIME


def test_a_node_that_requires_mps_shares_by_nothing_else() -> None:
    card = Card(GpuConfig(mps="require"))
    assert card.why_not(GpuShare.TIME) == Says.MPS_ALONE()
    assert not card.why_not(GpuShare.EXCLUSIVE)
    card.ledger.mps_reported(CARD.id, "refused", is_fault=False)
    assert card.why_not(GpuShare.AUTO) == Says.MPS_ALONE()
    assert card.why_not() == Says.MPS_BROKEN("refused")
    card.ledger.mps_reported(CARD.id, "", is_fault=False)
    assert not card.why_not()


def test_a_daemon_that_does_not_start_leaves_tasks_their_turns() -> None:
    card = Card()
    card.start("a", GpuShare.AUTO)
    card.ledger.mps_reported(CARD.id, "refused", is_fault=False)
    assert card.state.grants["a"].mode is DeviceMode.TIME
    assert card.start("b", GpuShare.AUTO) is DeviceMode.TIME


def test_what_fails_when_its_server_ends_is_not_its_fault_and_breaks_it_twice_at_most() -> None:
    card = Card()
    spec = TaskSpec((b"x",), b"/", request=ResourceRequest(gpus=1, gpu_mem_bytes=GIB))
    for _ in range(2):
        assert card.start("a", GpuShare.AUTO, owner=card.ledger.mps_owner(spec, "")) is DeviceMode.MPS
        card.ledger.mps_reported(CARD.id, "its server has ended", is_fault=True)
        fine = with_gpu_use(card.ledger, "a", (CARD.id,), spec.request, Exit(0))
        assert not fine.failed_device
        exit_ = with_gpu_use(card.ledger, "a", (CARD.id,), spec.request, Exit(1))
        assert exit_.failed_device == "GPU 0 (A10)"
        card.ledger.mps_ended("a", spec.argv, exit_)
        card.ledger.take_back("a")
        card.ledger.mps_reported(CARD.id, "", is_fault=False)
    assert card.start("a", GpuShare.AUTO, owner=card.ledger.mps_owner(spec, "")) is DeviceMode.TIME


def test_the_degree_grows_while_more_pay_off_and_is_halved_when_they_do_not() -> None:
    degree = MpsDegree(10)
    assert degree.limit == 4
    degree.ended((b"x",), 1, 10.0)
    degree.ended((b"x",), 4, 20.0)  # twice as much done as alone
    assert degree.limit == 5
    degree.ended((b"x",), 5, 25.0)  # no more than with four
    assert degree.limit == 5
    degree.ended((b"y",), 4, 20.0)
    degree.ended((b"y",), 5, 40.0)
    assert degree.limit == 2
    for number in range(2, 30):
        degree.ended((b"z",), min(number, degree.limit), 10.0)
    assert degree.limit == 10


def test_the_degree_bounds_who_joins() -> None:
    card = Card(GpuConfig(mps="auto", pct_oversubscribe=48.0))
    for number in range(4):
        card.start(f"{number}")
    assert card.why_not() == Says.MPS_DEGREE(4)


def test_where_it_can_never_run_is_known() -> None:
    request = ResourceRequest(gpus=1, gpu_share=GpuShare.MPS)
    guests = "no MPS for guests, who each run as another user"
    for mps, home, why in (("", "x", "no MPS"), ("home", "y", guests), ("home", "x", ""), ("any", "y", "")):
        profile = msgspec.convert({**msgspec.to_builtins(PROFILE), "mps": mps}, Profile)
        assert why_never(profile, request, Placement(), home) == why
    with pytest.raises(ValueError, match="one GPU"):
        ResourceRequest(gpus=2, gpu_share=GpuShare.MPS)
    with pytest.raises(ValueError, match="gpu_pct"):
        ResourceRequest(gpus=1, gpu_pct=10)


def test_without_the_control_program_there_is_no_mps_unless_the_config_requires_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [gpu_config(GpuSettings(mps=mps)).mps for mps in ("auto", "off", "require")] == ["off", "off", "require"]
    (tmp_path / MPS_CONTROL).touch(mode=0o755)
    assert gpu_config(GpuSettings()).mps == "auto"
