"""Bounded dictionary: what is remembered of peers, users or tasks never grows without limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dictionary of at most ``size_max`` entries. To set an entry makes it the newest; beyond the bound the oldest goes."""

    def __init__(self, size_max: int) -> None:
        super().__init__()
        self._size_max = size_max

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._size_max:
            self.popitem(last=False)
