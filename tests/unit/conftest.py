"""Nothing that a unit test opens stays open: Python 3.13 warns of databases that are never closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from peerload.files.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[BlockStore] = []
    make: Any = BlockStore.__init__

    def made(store: BlockStore, *arguments: Any, **named: Any) -> None:
        opened.append(store)
        make(store, *arguments, **named)

    monkeypatch.setattr(BlockStore, "__init__", made)
    yield
    for store in opened:
        if hasattr(store, "_database"):  # else it could not be opened
            store.close()
