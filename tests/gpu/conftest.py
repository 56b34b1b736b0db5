"""Agents whose GPUs are played: the real `pynvml` finds cards that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.cards import Cards
from tests.integration.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cards(cluster: Cluster) -> Cards:
    cards = Cards(cluster.directory)
    cluster.environment |= cards.environment
    return cards
