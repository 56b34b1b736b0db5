"""Whose the memory of a card is, and who else is on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.agent.sensors.nvml import (
    CONTEXT_BYTES,
    FOREIGN_PEAK_S,
    CardReading,
    GpuAverages,
    GpuProcess,
    GpuUsage,
    memory_by_owner,
)
from peerload.model.resources import Device, DeviceReading
from tests.each import each

MIB, GIB = 1 << 20, 1 << 30
CARD = Device("nvidia:GPU-0", mem_bytes=24 * GIB, is_read=True)


def share(
    used: int | None,
    processes: Sequence[GpuProcess] | None,
    owners: dict[int, str | None],
    held: Sequence[str] = (),
    is_contained: bool = False,
) -> GpuUsage:
    return memory_by_owner(used, processes, owners, held, is_contained=is_contained)


def test_each_attempt_has_what_its_processes_have() -> None:
    processes = [GpuProcess(1, GIB), GpuProcess(2, 2 * GIB), GpuProcess(3, 3 * GIB)]
    found = share(6 * GIB + 9 * MIB, processes, {1: "a", 2: "a", 3: "b"}, ("a", "b"))
    assert found == GpuUsage({"a": 3 * GIB, "b": 3 * GIB})


def test_others_have_what_theirs_have() -> None:
    found = share(3 * GIB, [GpuProcess(1, GIB), GpuProcess(2, 2 * GIB)], {1: "a", 2: ""})
    assert found == GpuUsage({"a": GIB}, 2 * GIB, 1, strangers={2: 2 * GIB})


@each("processes", [[], [GpuProcess(9, None)]])
def test_what_no_process_of_ours_explains_is_foreign(processes: list[GpuProcess]) -> None:
    found = share(5 * GIB, processes, {9: None})
    assert (found.ours, found.foreign_bytes) == ({}, 5 * GIB)
    found = share(5 * GIB, [GpuProcess(1, GIB), *processes], {1: "a", 9: None})
    assert (found.ours, found.foreign_bytes) == ({"a": GIB}, 4 * GIB - CONTEXT_BYTES)


def test_ours_whose_memory_is_not_told_have_what_nobody_else_has() -> None:
    processes = [GpuProcess(1, None), GpuProcess(2, None), GpuProcess(3, GIB)]
    found = share(6 * GIB, processes, {1: "a", 2: "b", 3: ""})
    assert found == GpuUsage({"a": 5 * GIB // 2, "b": 5 * GIB // 2}, GIB, 1, strangers={3: GIB})


def test_without_a_list_those_that_hold_the_card_are_on_it() -> None:
    assert share(4 * GIB, None, {}, ("a", "b")) == GpuUsage({"a": 2 * GIB, "b": 2 * GIB})
    assert share(4 * GIB, None, {}) == GpuUsage({}, 4 * GIB)


def test_in_a_container_pids_that_say_nothing_may_be_ours() -> None:
    processes = [GpuProcess(4001, 3 * GIB)]
    assert share(3 * GIB, processes, {4001: None}, ("a",), is_contained=True) == GpuUsage({"a": 3 * GIB})
    assert share(3 * GIB, processes, {4001: None}, ("a",)).ours == {}
    assert share(3 * GIB, processes, {4001: None}, (), is_contained=True) == GpuUsage(
        {}, 3 * GIB, 1, strangers={4001: 3 * GIB}
    )
    found = share(4 * GIB, [*processes, GpuProcess(7, GIB)], {4001: None, 7: "a"}, ("a",), is_contained=True)
    assert found == GpuUsage({"a": GIB}, 3 * GIB, 1, strangers={4001: 3 * GIB})


def read(averaged: GpuAverages, tenants: GpuUsage, busy: float | None = 0.0, held: Sequence[str] = ()) -> DeviceReading:
    return averaged.reading(CardReading(CARD.id, busy=busy), tenants, held, 1.0)


@each(("foreign_bytes", "others", "told"), [(49 * MIB, 1, 0), (51 * MIB, 0, 1), (GIB, 1, 1), (GIB, 3, 3)])
def test_a_tenant_has_more_than_a_little_memory(foreign_bytes: int, others: int, told: int) -> None:
    reading = read(GpuAverages(CARD), GpuUsage({}, foreign_bytes, others))
    assert (reading.foreign, reading.mem_foreign_bytes) == (told, foreign_bytes)


def test_of_a_large_card_a_little_is_more() -> None:
    large = GpuAverages(Device(CARD.id, mem_bytes=200 * GIB))
    assert read(large, GpuUsage({}, 100 * MIB, 1)).foreign == 0
    assert read(large, GpuUsage({}, 300 * MIB, 1)).foreign == 1


def test_a_desktop_takes_memory_and_is_no_tenant_while_it_is_quiet() -> None:
    averaged = GpuAverages(CARD)
    desktop = GpuUsage({}, 700 * MIB, 0, 700 * MIB)
    for _ in range(5):
        reading = read(averaged, desktop, busy=0.05)
        assert (reading.foreign, reading.mem_foreign_bytes) == (0, 700 * MIB)
    assert [read(averaged, desktop, busy=0.9).foreign for _ in range(3)] == [0, 0, 1]


def test_work_that_nobody_of_ours_does_is_a_tenant_s_after_three_readings() -> None:
    averaged = GpuAverages(CARD)
    assert [read(averaged, GpuUsage(), busy=0.5).foreign for _ in range(3)] == [0, 0, 1]
    assert read(averaged, GpuUsage(), busy=0.0).foreign == 0
    assert [read(averaged, GpuUsage({"a": MIB}), busy=0.5).foreign for _ in range(4)] == [0] * 4
    assert [read(averaged, GpuUsage(), busy=0.5, held=("a",)).foreign for _ in range(4)] == [0] * 4


def test_how_busy_it_is_is_averaged_over_five_seconds() -> None:
    averaged = GpuAverages(CARD)
    assert read(averaged, GpuUsage(), 1.0).busy == 1.0
    readings = [read(averaged, GpuUsage(), 0.0) for _ in range(5)]
    assert readings[-1].busy == pytest.approx(0.368, abs=0.001)
    assert read(averaged, GpuUsage(), None).busy == 0.0


def test_the_peak_of_a_foreign_process_counts_while_it_is_there_and_for_a_while() -> None:
    averaged = GpuAverages(CARD)

    def peak_gib(processes: dict[int, int], gap_s: float = 1.0, unexplained: int = 0) -> int:
        """``processes``: GiB by pid; ``unexplained``: GiB that no process has."""
        strangers = {pid: used * GIB for pid, used in processes.items()}
        tenants = GpuUsage({}, sum(strangers.values()) + unexplained * GIB, len(strangers), strangers=strangers)
        return averaged.reading(CardReading(CARD.id), tenants, (), gap_s).mem_foreign_peak_bytes // GIB

    assert peak_gib({1: 20, 2: 1}) == 21
    assert peak_gib({1: 3, 2: 1}) == 21
    assert peak_gib({2: 1}) == 1, "one of them has left"
    assert peak_gib({1: 2, 2: 1}) == 3, "it came back, or another has its number"
    assert peak_gib({1: 1, 2: 1}, unexplained=4) == 7
    assert peak_gib({1: 1, 2: 1}, FOREIGN_PEAK_S) == 3
    assert peak_gib({1: 1, 2: 1}, FOREIGN_PEAK_S) == 2, "what was longer ago does not count"
    assert peak_gib({}) == 0


SIZES = st.none() | st.integers(0, 1 << 40)
LISTED = st.lists(
    st.builds(GpuProcess, st.integers(1, 6), SIZES, st.booleans()), max_size=6, unique_by=lambda one: one.pid
)


@given(
    SIZES,
    st.none() | LISTED,
    st.dictionaries(st.integers(1, 6), st.sampled_from([None, "", "a", "b"])),
    st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    st.booleans(),
)
def test_nothing_that_is_in_use_goes_unseen(
    used: int | None,
    processes: list[GpuProcess] | None,
    owners: dict[int, str | None],
    held: list[str],
    is_contained: bool,
) -> None:
    found = share(used, processes, owners, held, is_contained)
    assert all(size >= 0 for size in found.ours.values())
    assert found.foreign_bytes >= found.drawn_bytes >= 0
    total = sum(found.ours.values()) + found.foreign_bytes
    assert total >= (used or 0) - CONTEXT_BYTES * len(found.ours)
