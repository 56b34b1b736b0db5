"""When a broker brings what it has brought before."""

from __future__ import annotations

from peerload.agent.mqtt_repeats import FLOOD_MAX, REPEATS_MIN, Repeats


def heard(repeats: Repeats, new: int, old: int) -> None:
    for number in range(new + old):
        repeats.heard()
        repeats.judged(is_new=number < new)


def test_a_circle_is_a_flood_of_what_is_old() -> None:
    repeats = Repeats()
    heard(repeats, 5, FLOOD_MAX)
    assert repeats.is_flood()
    assert not repeats.is_flood(), "nothing has come since"
    heard(repeats, 0, FLOOD_MAX - 1)
    assert not repeats.is_flood(), "that is not much"


def test_states_that_replaced_one_another_unseen_count_as_what_came() -> None:
    repeats = Repeats()
    for _ in range(FLOOD_MAX):
        repeats.heard()
    repeats.judged(is_new=True)
    assert repeats.is_flood()


def test_a_busy_cluster_is_no_flood() -> None:
    repeats = Repeats()
    heard(repeats, 10 * FLOOD_MAX, FLOOD_MAX)
    assert not repeats.is_flood()
    assert not repeats.are_many


def test_two_bridges_between_two_brokers_are_worth_a_word() -> None:
    repeats = Repeats()
    heard(repeats, REPEATS_MIN - 1, REPEATS_MIN - 1)
    assert not repeats.are_many
    heard(repeats, 1, 1)
    assert repeats.are_many
    assert not repeats.is_flood()
