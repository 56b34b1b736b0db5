"""Agents whose GPUs are played: the real `pynvml` finds cards that are not there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerload.agent.sensors.gpus import PLACES
from peerload.model.resources import Device
from tests.gpu.cards import Cards
from tests.integration.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cards(cluster: Cluster) -> Iterator[Cards]:
    """Agents claim them in the cluster's directory: nothing of them is left in the machine's."""
    cards = Cards(cluster.directory)
    cluster.environment |= cards.environment
    yield cards
    marks = {f"peerload-device-{Device(cards.id(number)).mark:08x}" for number in range(len(cards.cards))}
    left = [place / mark for place in (*PLACES, Path(tempfile.gettempdir())) for mark in marks]
    assert not [path for path in left if path.exists()]
