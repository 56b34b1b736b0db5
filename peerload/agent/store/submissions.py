"""What tasks run, as their submissions have it in a node's database: read for many together. Nothing here writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.store.rows import Each, decoded_each, decoded_spec, spec_of_member
from peerload.model.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.model.task import TaskSpec

SUBMISSIONS_AT_A_TIME = 500
"""Submissions asked for in one query."""


class SubmissionRows:
    """The submissions of a list of tasks, read together; what many have in common is decoded, and in memory, once."""

    def __init__(self, query: Callable[[str, tuple[object, ...]], list[Any]], counters: set[object]) -> None:
        """query: what an SQL statement with these values finds; counters: which submissions."""
        self._query = query
        self._rows: dict[object, tuple[Any, ...]] = {}
        self._specs: dict[tuple[object, object], TaskSpec] = {}
        self._each: dict[object, Each] = {}
        self._environments: dict[object, bytes] = {}
        wanted = list(counters)
        for first in range(0, len(wanted), SUBMISSIONS_AT_A_TIME):
            some = wanted[first : first + SUBMISSIONS_AT_A_TIME]
            sql = f"SELECT counter, spec, environment, commands FROM submissions WHERE counter IN ({marks(some)})"  # noqa: S608 -- constants
            self._rows.update((row[0], row[1:]) for row in query(sql, tuple(some)))

    def spec_of(self, counter: object, member: object, node: str) -> TaskSpec:
        """What one task runs. Raises StoreError."""
        spec = self.shared_spec(counter)
        commands = self._rows[counter][2]
        if commands is None:
            return spec
        if counter not in self._each:
            self._each[counter] = decoded_each(commands, counter)
        return spec_of_member(spec, self._each[counter], member, f"{node}/{counter}.{member}")

    def shared_spec(self, counter: object) -> TaskSpec:
        """What all tasks of a submission have in common. Raises StoreError."""
        found = self._rows.get(counter)
        if found is None:
            raise StoreError(f"submission {counter} is missing from the database")
        packed, digest, _ = found
        spec = self._specs.get((packed, digest))
        if spec is None:
            spec = msgspec.structs.replace(
                decoded_spec(packed, counter), environment=self._environment(digest, counter)
            )
            self._specs[packed, digest] = spec
        return spec

    def _environment(self, digest: object, counter: object) -> bytes:
        if digest not in self._environments:
            found = self._query("SELECT environment FROM environments WHERE digest = ?", (digest,))
            if not found:
                raise StoreError(f"the environment of submission {counter} is missing from the database")
            if not isinstance(found[0][0], bytes):
                raise StoreError(f"the environment of submission {counter} cannot be read from the database")
            self._environments[digest] = found[0][0]
        return self._environments[digest]


def marks(values: Sequence[object]) -> str:
    """A place in a statement for each value."""
    return ", ".join("?" * len(values))
