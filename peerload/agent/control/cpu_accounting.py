"""How much of the agent's one loop a piece of work takes: measured while it runs, not while it waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator


class MeteredCoroutine:
    """Work whose every stretch between two waits is told to ``spent``, in seconds. To be awaited once."""

    def __init__(self, work: Coroutine[Any, Any, None], spent: Callable[[float], None]) -> None:
        self._work = work
        self._spent = spent

    def __await__(self) -> Generator[Any, Any, None]:
        """Drive it. Raises what it raises."""
        work, given, thrown = self._work, None, None
        while True:
            began_s = time.perf_counter()
            try:
                waits_for = work.send(given) if thrown is None else work.throw(thrown)
            except StopIteration:
                return
            finally:
                self._spent(time.perf_counter() - began_s)
            given, thrown = None, None
            try:
                given = yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001 -- a cancellation, too, is the work's own to see
                thrown = error
