"""Questions about tasks that others wait for: those of a submission that names some, before it is accepted, and those of other
homes.

A submission that names a task of which nobody knows is refused; one of another home is asked after first, for at most
await_answer_s. Since a task can only wait for what there is already, nobody ever waits in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.core.tasks.dependencies import Dependents, names_of
from peerload.model import timers
from peerload.model.actions import Answer, FindTasks
from peerload.model.errors import BadRequest, NoSuchTask, SlowDown
from peerload.model.messages import AwaitedTask, TasksTold
from peerload.model.task import TaskState, task_home

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.dependencies import Dependencies
    from peerload.core.tasks.home import Home
    from peerload.model.events import TasksFound, TaskSubmitted
    from peerload.model.messages import AwaitTasks
    from peerload.model.task import TaskRecord

WATCHED_MAX = 10_000
"""Tasks of this home of whose end other homes are told as soon as it comes; of more they hear when they ask again."""
WATCHERS_MAX = 100
"""Other homes that are told of the end of one task."""


ENDING = "ending"
"""State of a task that has ended, while its end is not durable yet."""


class RemoteStatusQuery(Dependents):
    """A submission that names tasks, until it is known that there are such. left: those of which nobody has said so yet;
    has_timer: whether it is refused after a while."""

    __slots__ = ("event", "has_timer", "left")

    def __init__(self, number: int, event: TaskSubmitted) -> None:
        super().__init__(number, event.terms)
        self.event = event
        self.has_timer = False
        self.left = dict.fromkeys(names_of(event.terms))


class RemoteStatusQueries:
    """One per node; its timer is ``inquiry``."""

    def __init__(self, state: CoreState, home: Home, membership: Membership, dependencies: Dependencies) -> None:
        self._state = state
        self._home = home
        self._membership = membership
        self._dependencies = dependencies
        self._inquiries: dict[int, RemoteStatusQuery] = {}
        self._last = 0
        self._watched: dict[str, dict[str, None]] = {}
        self._failure_told: dict[str, None] = {}
        """Arrays among them of which a member has failed: only their end is news now."""
        self._asked: dict[str, dict[str, None]] = {}
        """Names that are looked up on disk, and the homes that have asked for that."""

    # -- submissions ---------------------------------------------------------------------------------------------------

    def begin(self, event: TaskSubmitted, counter: int) -> None:
        """Find out whether there are the tasks that it names; then it is submitted, or refused. counter: the last number
        given here."""
        try:
            self._check(event, counter)
        except BadRequest as error:
            self._state.actions.append(Answer(event.request, error=error))
            return
        self._last += 1
        inquiry = self._inquiries[-self._last] = RemoteStatusQuery(-self._last, event)
        dependencies = self._dependencies
        dependencies.await_all(inquiry)
        unknown: list[str] = []
        homes: dict[str, None] = {}
        for name in list(inquiry.left):
            awaited = dependencies.get(name)
            assert awaited is not None
            is_mine = task_home(name) == self._state.node
            is_single = bool(awaited.left) and self._home.by_id.get(name) is not None
            if (awaited.is_known and not is_mine) or awaited.fate.is_over or is_single:
                del inquiry.left[name]
            elif is_mine:
                unknown.append(name)
            else:
                homes[task_home(name)] = None
        if unknown:
            self._state.actions.append(FindTasks(tuple(unknown)))
        for home in homes:
            dependencies.ask(home)
        if inquiry.left:
            inquiry.has_timer = True
            self._state.set_timer_in(self._state.config.await_answer_s, timers.RemoteStatus.of(inquiry.number))
        else:
            self._submit(inquiry)

    def _check(self, event: TaskSubmitted, counter: int) -> None:
        """Raises BadRequest for what need not be asked after."""
        state = self._state
        if len(self._inquiries) >= state.config.inquiries_max:
            raise SlowDown("too many submissions wait for word on other tasks", retry_after_s=1.0)
        for name in names_of(event.terms):
            home, _, rest = name.partition("/")
            number = int(rest.partition(".")[0])
            if home == state.node and self._home.is_being_made(name):
                raise NoSuchTask(
                    f"no such task: {name}",
                    why=f"{home}/{number} is only just being submitted",
                    hint="submit this one again once that has answered:  peerload ls",
                )
            if home == state.node and number == counter + 1:
                raise BadRequest(
                    f"a task cannot wait for itself: {name} is the next id here, that of this one",
                    why=f"the circle would be {name} → {name}",
                    hint="peerload ls",
                )
            if home == state.node and number > counter:
                why = (
                    f"the last one submitted on {home} is {home}/{counter}"
                    if counter
                    else f"{home} has had no task yet"
                )
                raise NoSuchTask(
                    f"no such task: {name}", why=why, hint="a task can only wait for one there is:  peerload ls"
                )
            peer = self._membership.get(home)
            if home != state.node and peer is None:
                raise NoSuchTask(f"no such task: {name}", why=f"no node {home} is known here", hint="peerload nodes")
            awaited = self._dependencies.get(name)
            is_known = awaited is not None and awaited.is_known
            if peer is not None and peer.state is not PeerState.ALIVE and not is_known:
                raise _silent(name, home, f"it is {peer.state}")

    def status_received(self, name: str) -> None:
        """Something was heard of a task that is awaited."""
        """Something was heard of a task: perhaps of one that a submission names."""
        awaited = self._dependencies.get(name)
        if awaited is None:
            return
        for inquiry in [one for one in awaited.dependents.values() if isinstance(one, RemoteStatusQuery)]:
            if name not in inquiry.left:
                continue
            if not awaited.is_known or awaited.fate.lost:
                home = task_home(name)
                where = "here" if home == self._state.node else f"on {home}, its home"
                self._refuse(
                    inquiry, NoSuchTask(f"no such task: {name}", why=f"there is none {where}", hint="peerload ls")
                )
                continue
            del inquiry.left[name]
            if not inquiry.left:
                self._submit(inquiry)

    def _closes(self, inquiry: RemoteStatusQuery) -> None:
        if inquiry.has_timer:
            self._state.clear_timer(timers.RemoteStatus.of(inquiry.number))
        del self._inquiries[inquiry.number]

    def _submit(self, inquiry: RemoteStatusQuery) -> None:
        self._closes(inquiry)
        self._home.mediator.submission_checked(inquiry.event)
        self._dependencies.await_no_more(inquiry)

    def _refuse(self, inquiry: RemoteStatusQuery, error: BadRequest) -> None:
        self._closes(inquiry)
        self._dependencies.await_no_more(inquiry)
        self._state.actions.append(Answer(inquiry.event.request, error=error))

    def timed_out(self, number: int) -> None:
        """Nobody has answered in time."""
        inquiry = self._inquiries.get(number)
        if inquiry is not None:
            inquiry.has_timer = False
            name = next(iter(inquiry.left))
            why = f"it has not answered for {self._state.config.await_answer_s:g} s"
            self._refuse(inquiry, _silent(name, task_home(name), why))

    def gone(self, client: int) -> None:
        """This connection is closed: what its client waits to see accepted is dropped, as nobody would be there for it."""
        for inquiry in [one for one in self._inquiries.values() if one.event.client == client]:
            self._refuse(inquiry, BadRequest("nothing was submitted: its client is gone"))

    # -- other homes ---------------------------------------------------------------------------------------------------

    def asked(self, src: str, message: AwaitTasks) -> None:
        """Another home asks after tasks of this one; it is told what is known now, and of their end when it comes."""
        told, unknown = [], []
        for name in message.tasks:
            if task_home(name) != self._state.node:
                told.append(AwaitedTask(name, is_known=False))
                continue
            task = self._home.by_id.get(name)
            if task is not None and not task.record.state.is_final and not self._home.is_being_made(name):
                told.append(AwaitedTask(name, says=self._dependencies.stands_here(name)[:128]))
            elif name in self._asked or len(self._asked) < WATCHED_MAX:  # else it will ask again
                self._asked.setdefault(name, {})[src] = None
                unknown.append(name)
            if name in self._watched or len(self._watched) < WATCHED_MAX:
                watchers = self._watched.setdefault(name, {})
                if len(watchers) < WATCHERS_MAX:
                    watchers[src] = None
        if told:
            self._state.send(src, TasksTold(tuple(told)))
        if unknown:
            self._state.actions.append(FindTasks(tuple(unknown)))

    def is_watched(self, task: str) -> bool:
        """True if another home has asked after this task of this home, or after its array, and was not told yet that it is over."""
        return task in self._watched or task.rpartition(".")[0] in self._watched

    def is_any_watched(self, array: str) -> bool:
        """True if another home has asked after this array, or after one of its members."""
        return any(name.rpartition(".")[0] == array or name == array for name in self._watched)

    def found(self, event: TasksFound) -> None:
        """Status of tasks as it is on disk: it is sent to the nodes that wait for them.

        That all of it has ended is told only as the disk has it, together with what has failed. If more has ended since then,
        that is looked up as well: until its end was told, the watch is kept."""
        answers: dict[str, list[AwaitedTask]] = {}
        for found in event.found:
            name = found.task
            self._dependencies.found(name, is_known=found.is_known, failed=found.failed)
            says = "over" if found.is_over else self._dependencies.stands_here(name)
            is_unfinished = says != "over"
            if not found.is_over and not is_unfinished:
                says = ENDING
            is_known = found.is_known or is_unfinished
            told = AwaitedTask(name, is_known, found.is_over, found.failed, says[:128] if is_known else "")
            listeners = self._asked.pop(name, {})
            if found.is_over or not is_known:
                listeners |= self._watched.pop(name, {})
                self._failure_told.pop(name, None)
            for src in listeners:
                answers.setdefault(src, []).append(told)
        for src, words in answers.items():
            self._state.send(src, TasksTold(tuple(words)))

    def ended(self, record: TaskRecord) -> None:
        """A task of this home has ended: whoever has asked after it, or after its array, is told what is on disk then."""
        if not self._watched:
            return
        array = record.task.rpartition(".")[0]
        names = [name for name in (record.task, array) if name and name in self._watched]
        if array in names and self._has_unfinished(array):  # its first failure and its end are news
            if record.state is TaskState.DONE or array in self._failure_told:
                names.remove(array)
            else:
                self._failure_told[array] = None
        for name in names:
            self._asked.setdefault(name, {}).update(self._watched[name])
        if names:
            self._state.actions.append(FindTasks(tuple(names)))

    def _has_unfinished(self, array: str) -> bool:
        members = self._home.arrays.get(array, {}).values()
        return array in self._home.untouched or any(
            not task.record.state.is_final for task in reversed(members)
        )  # mostly the last ones are


def _silent(name: str, home: str, why: str) -> BadRequest:
    return BadRequest(
        f"nothing was submitted: whether there is a task {name} only {home} can tell",
        why=why,
        hint=f"peerload nodes        once {home} answers, submit it again",
    )
