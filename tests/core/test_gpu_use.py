"""What an attempt has used of its GPUs, and whose fault it is that it had too little."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.core.resources.devices import DeviceLedger, DeviceRequest, with_gpu_use
from peerload.model.config import GpuConfig
from peerload.model.resources import Device, DeviceReading, Health, Profile, ResourceRequest
from peerload.model.task import Exit
from tests.wording import Says

GIB = 1 << 30
SAYS_SO = Exit(1, out_of="gpu memory")


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"nvidia:GPU-{number}" for number in numbers)


class Cards:
    """A node with cards of 24 GiB, and the attempt "a" on some of them."""

    def __init__(self, request: ResourceRequest, *on: int) -> None:
        self.request, self.on = request, names(*on)
        devices = tuple(
            Device(name, index=number, model="A10", mem_bytes=24 * GIB, is_read=True)
            for number, name in enumerate(names(0, 1, 2))
        )
        self.devices = DeviceLedger(Profile("x", 8, 8.0, gpus=3, devices=devices), GpuConfig())
        self.devices.grant("a", self.on, DeviceRequest(request, GpuConfig()), 0.0)

    def read(self, number: int, gib: float, others: float = 0.0, **more: Any) -> None:
        used = int(gib * GIB)
        reading = DeviceReading(names(number)[0], mem_used_bytes=used + int(others * GIB), ours=(("a", used),), **more)
        self.devices.read([reading], 1.0)

    def ended(self, exit_: Exit) -> Exit:
        return with_gpu_use(self.devices, "a", self.on, self.request, exit_)


def asked(gib: float = 0.0, **more: Any) -> ResourceRequest:
    return ResourceRequest(gpus=more.pop("gpus", 1), gpu_mem_bytes=int(gib * GIB), **more)


def test_the_most_that_was_seen_on_any_one_card_goes_with_the_end() -> None:
    cards = Cards(asked(12, gpus=2), 0, 2)
    cards.read(0, 3.0)
    cards.read(2, 8.0)
    cards.read(2, 5.0)
    exit_ = cards.ended(Exit(0))
    assert (exit_.usage.gpu_memory_bytes_max, exit_.usage.gpu_model, exit_.out_of) == (8 * GIB, "A10", "")


def test_it_is_told_which_card_what_it_had_and_what_it_took() -> None:
    cards = Cards(asked(gpus=2), 1, 2)
    cards.read(1, 3.0)
    cards.read(2, 24.0)
    exit_ = cards.ended(SAYS_SO)
    assert (exit_.reason, exit_.out_of) == (Says.OUT_OF_GPU_MEMORY("gpu2", 24.0, 24.0), "gpu memory")
    assert exit_.had_bytes == 24 * GIB


def test_a_plain_failure_is_none_of_memory_however_much_was_used() -> None:
    cards = Cards(asked(4), 1)
    for used in (3.95, 4.0, 5.0):
        cards.read(1, used)
        exit_ = cards.ended(Exit(1))
        assert (exit_.out_of, exit_.reason, exit_.had_bytes) == ("", "", 0)
        assert exit_.usage.gpu_memory_bytes_max == int(used * GIB)


@pytest.mark.parametrize(
    ("exit_", "used"),
    [
        (Exit(0), 12.0),
        (Exit(1), 11.0),
        (Exit(143, 15), 12.0),
        (Exit(137, 9, out_of="gpu memory"), 12.0),
        (Exit(139, 11), 12.0),
        (Exit(124, 15, reason="time limit"), 12.0),
        (Exit(124, reason="time limit"), 12.0),
    ],
)
def test_other_ends_are_others(exit_: Exit, used: float) -> None:
    cards = Cards(asked(12), 0)
    cards.read(0, used)
    found = cards.ended(exit_)
    assert (found.out_of, found.reason, found.had_bytes) == ("", exit_.reason, 0)


@pytest.mark.parametrize("exit_", [Exit(1), Exit(134, 6), SAYS_SO, Exit(1, reason="its last words")])
def test_who_fails_on_a_card_that_is_sick_by_then_failed_because_of_it(exit_: Exit) -> None:
    cards = Cards(asked(4, gpus=2), 0, 2)
    cards.read(0, 1.0)
    cards.read(2, 2.0, health=Health.SICK, why="XID 79")
    found = cards.ended(exit_)
    assert (found.failed_device, found.out_of, found.exit_code) == ("GPU 2 (A10)", "", exit_.exit_code)
    assert "XID 79" in found.reason


@pytest.mark.parametrize("exit_", [Exit(0), Exit(137, 9), Exit(143, 15), Exit(124, reason="time limit")])
def test_a_sick_card_is_not_blamed_for_other_ends(exit_: Exit) -> None:
    cards = Cards(asked(4), 0)
    cards.read(0, 1.0, health=Health.SICK, why="XID 79")
    assert cards.ended(exit_).failed_device == ""


def test_one_that_ends_itself_by_a_signal_and_says_so_ran_out_of_memory() -> None:
    cards = Cards(asked(12), 0)
    cards.read(0, 5.0)
    assert cards.ended(Exit(134, 6, out_of="gpu memory")).out_of == "gpu memory"


def test_who_had_no_gpu_did_not_run_out_of_its_memory_whatever_it_says() -> None:
    cards = Cards(asked(12), 0)
    assert with_gpu_use(cards.devices, "b", (), ResourceRequest(), SAYS_SO).out_of == ""
    assert cards.ended(Exit(137, 9, out_of="memory")).out_of == "memory"


def test_what_others_took_of_its_promise_is_not_its_fault() -> None:
    cards = Cards(asked(12), 0)
    cards.read(0, 6.0, others=16.0)
    assert cards.ended(SAYS_SO).had_bytes == 0
    alone = Cards(asked(), 0)
    alone.read(0, 6.0, others=16.0)
    assert alone.ended(SAYS_SO).had_bytes == 0


def test_what_was_not_seen_is_not_made_up() -> None:
    cards = Cards(asked(12), 0)
    exit_ = cards.ended(SAYS_SO)
    assert exit_.reason == Says.OUT_OF_GPU_MEMORY("gpu0", 12.0, "not seen")
    assert exit_.had_bytes == 12 * GIB
    cards.devices.take_back("a")  # an agent that came back after its end knows what it asked for
    assert cards.ended(SAYS_SO).had_bytes == 12 * GIB
