"""Dependencies of tasks of this home: other tasks and arrays, of this home or another, that must have ended or
succeeded.

The outcome of an awaited task is made durable together with its end (or when its home reports it), and forgotten with
the last task that waits for it, so that old tasks need no lookup. Another home is queried every await_s, and also
reports an end unasked; a home that cannot be reached is waited for.

A submission that names an unknown task is refused. For a task of another home, that home is queried first, for at most
await_answer_s. A task can only wait for existing tasks, so there are no cycles.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from peerload.core.membership.peers import PeerState
from peerload.model import metrics, timers
from peerload.model.actions import Answer, DropFates, FindTasks, PutFate
from peerload.model.errors import BadRequest, NoSuchTask, SlowDown
from peerload.model.messages import AWAITED_MAX, AwaitedTask, AwaitTasks, TasksTold
from peerload.model.task import TaskOutcome, TaskState, failure_text, submission_of, task_home

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model.actions import Row
    from peerload.model.events import TasksFound, TaskSubmitted
    from peerload.model.task import SubmitOptions, TaskRecord


NAMED_MAX = 2
"""Number of dependencies that a reason names."""
WAITS, OPEN, DOOMED, LOST = "waits", "open", "doomed", "lost"


class Dependents:
    """The unfinished tasks of one submission, which share their dependencies; none for one that is not accepted yet."""

    __slots__ = ("number", "tasks", "terms")

    def __init__(self, number: int, terms: SubmitOptions) -> None:
        self.number = number
        self.terms = terms
        self.tasks: dict[bytes, HomeTask] = {}


class Awaited:
    """A task or an array that others wait for. left: number of its unfinished tasks, if of this home; is_known: it is
    known to exist; says: its state as reported by its home; is_kept: its outcome is durable."""

    __slots__ = ("dependents", "fate", "is_kept", "is_known", "left", "says")

    def __init__(self, name: str) -> None:
        self.fate = TaskOutcome(name)
        self.dependents: dict[int, Dependents] = {}
        self.left = 0
        self.is_known = False
        self.is_kept = False
        self.says = ""


class Dependencies:
    """Dependencies of tasks, one object per node; its timer is ``await``. ``news``: tasks whose dependencies have
    changed state."""

    def __init__(self, state: CoreState, home: Home, membership: Membership) -> None:
        self._state = state
        self._home = home
        self._membership = membership
        self._awaited: dict[str, Awaited] = {}
        self._dependents: dict[int, Dependents] = {}
        self._elsewhere: dict[str, dict[str, None]] = {}
        """Names whose outcome another home has to report, by that home."""
        self._restored: dict[str, TaskOutcome] = {}
        self.news: deque[Dependents] = deque()

    # -- tasks and their dependencies ----------------------------------------------------------------------------------

    def restore(self, fates: Iterable[TaskOutcome]) -> None:
        """Restore the durable dependencies after a restart, before the tasks are adopted."""
        self._restored = {fate.task: fate for fate in fates}

    def restored(self) -> None:
        """Finish the restart: ask for unknown outcomes, and forget those that no task waits for."""
        unneeded = tuple(name for name in self._restored if name not in self._awaited)
        if unneeded:
            self._state.persist(DropFates(unneeded))
        self._restored = {}
        lost = [name for name, one in self._awaited.items() if self._is_mine(name) and self._count(name, one)]
        if lost:
            self._state.actions.append(FindTasks(tuple(lost)))

    def adopt(self, task: HomeTask) -> None:
        """Add a task of this home that waits for others."""
        number = submission_of(task.task)
        dependents = self._dependents.get(number)
        if dependents is None:
            dependents = self._dependents[number] = Dependents(number, task.terms)
            self.await_all(dependents)
        dependents.tasks[task.uid] = task

    def left(self, task: HomeTask) -> None:
        """Forget a task that waited for others and is over."""
        dependents = self._dependents.get(submission_of(task.task))
        if dependents is not None and dependents.tasks.pop(task.uid, None) is not None and not dependents.tasks:
            del self._dependents[dependents.number]
            self.await_no_more(dependents)

    def await_all(self, dependents: Dependents) -> None:
        """Record that a submission waits for each of its dependencies."""
        for name in names_of(dependents.terms):
            awaited = self._awaited.get(name)
            if awaited is None:
                awaited = self._awaited[name] = self._new(name)
            awaited.dependents[dependents.number] = dependents

    def await_no_more(self, dependents: Dependents) -> None:
        """Forget dependencies that no submission waits for."""
        unneeded = []
        for name in names_of(dependents.terms):
            awaited = self._awaited[name]
            awaited.dependents.pop(dependents.number, None)
            if not awaited.dependents:
                del self._awaited[name]
                self._elsewhere.get(task_home(name), {}).pop(name, None)
                if awaited.is_kept:
                    unneeded.append(name)
        if unneeded:
            self._state.persist(DropFates(tuple(unneeded)))

    def _new(self, name: str) -> Awaited:
        awaited = Awaited(name)
        known = self._restored.get(name)
        if known is not None:
            awaited.fate, awaited.is_kept, awaited.is_known = known, True, True
        if self._is_mine(name):
            self._count(name, awaited)
        elif not awaited.fate.is_over:
            self._elsewhere.setdefault(task_home(name), {})[name] = None
            self._state.set_timer_in(self._state.config.await_s, timers.AwaitedQueryDue(task_home(name)))
        return awaited

    def _is_mine(self, name: str) -> bool:
        return task_home(name) == self._state.node

    def _count(self, name: str, awaited: Awaited) -> bool:
        """Count its unfinished tasks here; → True if its outcome must be read from the disk."""
        awaited.left = self._home.unfinished_in(name)
        awaited.is_known = awaited.is_known or awaited.left > 0
        return not awaited.left and not awaited.fate.is_over

    def rows(self, terms: SubmitOptions) -> list[Row]:
        """Rows to store with tasks that are submitted on these terms: the states of their dependencies."""
        rows: list[Row] = []
        for name in names_of(terms):
            awaited = self._awaited.get(name)
            if awaited is not None and awaited.fate.is_news and not awaited.is_kept:
                awaited.is_kept = True
                rows.append(PutFate(awaited.fate))
        return rows

    def get(self, name: str) -> Awaited | None:
        return self._awaited.get(name)

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def verdict(self, terms: SubmitOptions) -> tuple[str, str]:
        """(OPEN, "") if all dependencies are met; (DOOMED, why) if one has failed that had to succeed; (LOST, why) if
        an outcome cannot be known; else (WAITS, "")."""
        lost = ""
        is_open = True
        for name in terms.after_ok:
            fate = self._fate(name)
            if fate.failed:
                return DOOMED, fate.failed
            lost = lost or fate.lost
            is_open = is_open and fate.is_over
        for name in terms.after:
            fate = self._fate(name)
            lost = lost or fate.lost
            is_open = is_open and fate.is_over
        if lost:
            return LOST, lost
        return (OPEN, "") if is_open else (WAITS, "")

    def _fate(self, name: str) -> TaskOutcome:
        awaited = self._awaited.get(name)
        return awaited.fate if awaited is not None else TaskOutcome(name)

    def waits_for(self, terms: SubmitOptions) -> list[str]:
        """The unmet dependencies, each with its state: ``ws1/3 (running on ws2)``."""
        return [f"{name} ({self._stands(name)})" for name in names_of(terms) if not self._fate(name).is_over]

    def reason(self, terms: SubmitOptions) -> str:
        left = self.waits_for(terms)
        more = f" and {len(left) - NAMED_MAX} more" if len(left) > NAMED_MAX else ""
        return f"waits for {', '.join(left[:NAMED_MAX])}{more}" if left else ""

    def _stands(self, name: str) -> str:
        if self._is_mine(name):
            return self.state_text(name)
        home = task_home(name)
        peer = self._membership.get(home)
        if peer is None or peer.state is not PeerState.ALIVE:
            return f"its home {home} is {'not known' if peer is None else peer.state}"
        awaited = self._awaited.get(name)
        return (awaited.says if awaited is not None else "") or f"{home} has not answered yet"

    def state_text(self, name: str) -> str:
        """The state of a task, or an array, of this home in a few words."""
        awaited = self._awaited.get(name)
        unfinished = self._home.unfinished_in(name) if awaited is None else awaited.left
        if not unfinished:
            return "over"
        task = self._home.by_id.get(name)
        return unfinished_text(task) if task is not None else f"{unfinished} of it unfinished"

    def is_awaited(self, array: str) -> bool:
        """True if tasks here wait for this array, or for one of its members."""
        return any(name.rpartition(".")[0] == array or name == array for name in self._awaited)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def ending(self, record: TaskRecord) -> list[Row]:
        """Handle the end of a task of this home → the rows to store together with it."""
        rows: list[Row] = []
        if not self._awaited:
            return rows
        for name in (record.task, record.task.rpartition(".")[0]):
            awaited = self._awaited.get(name) if name else None
            if awaited is None or awaited.fate.is_over:
                continue
            awaited.left = max(awaited.left - 1, 0)
            failed = awaited.fate.failed
            if not failed and record.state is not TaskState.DONE:
                is_cancelled = record.state is TaskState.CANCELLED
                failed = failure_text(record.task, is_cancelled=is_cancelled, reason=record.reason)
            fate = TaskOutcome(name, is_over=not awaited.left, failed=failed)
            if fate != awaited.fate:
                rows += self._becomes(awaited, fate)
        return rows

    def _becomes(self, awaited: Awaited, fate: TaskOutcome) -> list[Row]:
        awaited.fate = fate
        awaited.is_kept = True
        self.news.extend(awaited.dependents.values())
        return [PutFate(fate)]

    def found(self, name: str, *, is_known: bool, failed: str) -> None:
        """Handle the answer of the store about a task of this home."""
        awaited = self._awaited.get(name)
        if awaited is None:
            return
        awaited.is_known = awaited.is_known or is_known
        if is_known:  # it may have ended since it was looked up
            fate = TaskOutcome(
                name, is_over=awaited.fate.is_over or not awaited.left, failed=awaited.fate.failed or failed
            )
            self._outcome_received(awaited, fate)
        elif not awaited.left and not awaited.fate.is_over:
            self._loses(awaited, f"{self._state.node} does not know {name} any more")

    def status_received(self, src: str, told: AwaitedTask) -> bool:
        """Record the state of a task as told by its home → whether the task is awaited; other senders are ignored."""
        awaited = self._awaited.get(told.task)
        if task_home(told.task) != src or awaited is None or awaited.fate.is_over or awaited.fate.lost:
            self._state.count(metrics.UNAWAITED_TASK_STATUS)
            return False
        awaited.says = told.says
        awaited.is_known = awaited.is_known or told.is_known
        if told.is_known:
            self._outcome_received(awaited, TaskOutcome(told.task, is_over=told.is_over, failed=told.failed))
        else:
            self._loses(awaited, f"{src} does not know {told.task} any more")
        return True

    def _outcome_received(self, awaited: Awaited, fate: TaskOutcome) -> None:
        if fate != awaited.fate:
            if awaited.is_kept or any(number >= 0 for number in awaited.dependents):
                self._state.persist(*self._becomes(awaited, fate))
            else:  # only submissions that are not accepted yet wait for it
                awaited.fate = fate
        if fate.is_over:
            self._elsewhere.get(task_home(fate.task), {}).pop(fate.task, None)

    def _loses(self, awaited: Awaited, why: str) -> None:
        name = awaited.fate.task
        if awaited.is_known or any(number >= 0 for number in awaited.dependents):
            self._outcome_received(awaited, msgspec.structs.replace(awaited.fate, lost=why))
            self._elsewhere.get(task_home(name), {}).pop(name, None)

    def forgotten(self, node: str) -> int:
        """Handle `forget` of a home: the outcomes of its tasks stay unknown. → the number of tasks that waited for
        them."""
        names = list(self._elsewhere.get(node, ()))
        for name in names:
            self._loses(self._awaited[name], f"{node}, the home of {name}, was forgotten")
        return sum(
            len(one.tasks) for one in self._dependents.values() if not set(names).isdisjoint(names_of(one.terms))
        )

    # -- queries -------------------------------------------------------------------------------------------------------

    def ask(self, home: str) -> None:
        """Query another home about all its awaited tasks, and again after a pause."""
        names = self._elsewhere.get(home)
        if not names:
            self._elsewhere.pop(home, None)
            return
        asked = list(names)
        for start in range(0, len(asked), AWAITED_MAX):
            self._state.send(home, AwaitTasks(tuple(asked[start : start + AWAITED_MAX])))
        self._state.set_timer_in(self._state.config.await_s, timers.AwaitedQueryDue(home))

    def waits_on(self, node: str) -> bool:
        """True if a task here waits for one of that home."""
        return bool(self._elsewhere.get(node))


def names_of(terms: SubmitOptions) -> Iterator[str]:
    return iter(dict.fromkeys((*terms.after, *terms.after_ok)))


def unfinished_text(task: HomeTask) -> str:
    """The state of an unfinished task in a few words."""
    record = task.record
    if record.state is TaskState.LEASED:
        return f"running on {record.node}" if task.running_at else f"waits on {record.node}"
    return str(record.state)


WATCHED_MAX = 10_000
"""Tasks of this home whose end is reported to other homes immediately; for more, the other homes query again."""
WATCHERS_MAX = 100
"""Other homes that are notified of the end of one task."""


ENDING = "ending"
"""State of a task that has ended, while its end is not durable yet."""


class RemoteStatusQuery(Dependents):
    """Submission whose awaited tasks are being checked for existence. left: names not confirmed yet; has_timer: it is
    refused after a timeout."""

    __slots__ = ("event", "has_timer", "left")

    def __init__(self, number: int, event: TaskSubmitted) -> None:
        super().__init__(number, event.terms)
        self.event = event
        self.has_timer = False
        self.left = dict.fromkeys(names_of(event.terms))


class RemoteStatusQueries:
    """Status queries to other homes, one object per node; its timer is ``inquiry``."""

    def __init__(self, state: CoreState, home: Home, membership: Membership, dependencies: Dependencies) -> None:
        self._state = state
        self._home = home
        self._membership = membership
        self._dependencies = dependencies
        self._inquiries: dict[int, RemoteStatusQuery] = {}
        self._last = 0
        self._watched: dict[str, dict[str, None]] = {}
        self._failure_told: dict[str, None] = {}
        """Arrays in `_watched` of which a member has failed: only their end is still to report."""
        self._asked: dict[str, dict[str, None]] = {}
        """Names that are being looked up on disk, and the homes that asked for them."""

    # -- submissions ---------------------------------------------------------------------------------------------------

    def begin(self, event: TaskSubmitted, counter: int) -> None:
        """Check that the awaited tasks exist, then submit or refuse. counter: the last number given here."""
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
            self._state.set_timer_in(self._state.config.await_answer_s, timers.RemoteStatus(str(inquiry.number)))
        else:
            self._submit(inquiry)

    def _check(self, event: TaskSubmitted, counter: int) -> None:
        """Raises BadRequest for names that can be refused without a query."""
        state = self._state
        if len(self._inquiries) >= state.config.inquiries_max:
            raise SlowDown("too many submissions wait for answers about other tasks", retry_after_s=1.0)
        for name in names_of(event.terms):
            home, _, rest = name.partition("/")
            number = int(rest.partition(".")[0])
            if home == state.node and self._home.is_being_made(name):
                raise NoSuchTask(
                    f"no such task: {name}",
                    why=f"{home}/{number} is still being submitted",
                    hint="submit this one again once that one is listed:  peerload ls",
                )
            if home == state.node and number == counter + 1:
                raise BadRequest(
                    f"a task cannot wait for itself: {name} would be its own id",
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

    def status_received(self, src: str, message: TasksTold) -> None:
        for told in message.tasks:
            if self._dependencies.status_received(src, told):
                self._outcome_known(told.task)

    def _outcome_known(self, name: str) -> None:
        """Handle an update about an awaited task, which a pending submission may name."""
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
            self._state.clear_timer(timers.RemoteStatus(str(inquiry.number)))
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
        """Refuse the submission: a home has not answered in time."""
        inquiry = self._inquiries.get(number)
        if inquiry is not None:
            inquiry.has_timer = False
            name = next(iter(inquiry.left))
            why = f"it has not answered for {self._state.config.await_answer_s:g} s"
            self._refuse(inquiry, _silent(name, task_home(name), why))

    def gone(self, client: int) -> None:
        """Drop the unaccepted submissions of a closed connection."""
        for inquiry in [one for one in self._inquiries.values() if one.event.client == client]:
            self._refuse(inquiry, BadRequest("nothing was submitted: its client has disconnected"))

    # -- other homes ---------------------------------------------------------------------------------------------------

    def asked(self, src: str, message: AwaitTasks) -> None:
        """Answer another home's query about tasks of this home: their current states now, and their ends later."""
        told, unknown = [], []
        for name in message.tasks:
            if task_home(name) != self._state.node:
                told.append(AwaitedTask(name, is_known=False))
                continue
            task = self._home.by_id.get(name)
            if task is not None and not task.record.state.is_final and not self._home.is_being_made(name):
                told.append(AwaitedTask(name, says=self._dependencies.state_text(name)[:128]))
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
        """True if another home waits for the outcome of this task or of its array."""
        return task in self._watched or task.rpartition(".")[0] in self._watched

    def is_any_watched(self, array: str) -> bool:
        """True if another home has asked after this array, or after one of its members."""
        return any(name.rpartition(".")[0] == array or name == array for name in self._watched)

    def found(self, event: TasksFound) -> None:
        """Send the status of tasks, as read from the disk, to the nodes that wait for them.

        The end of a whole task or array is reported only from the disk, together with its failures. If more has ended
        meanwhile, it is looked up again; the watch is kept until the end was reported."""
        answers: dict[str, list[AwaitedTask]] = {}
        for found in event.found:
            name = found.task
            self._dependencies.found(name, is_known=found.is_known, failed=found.failed)
            self._outcome_known(name)
            says = "over" if found.is_over else self._dependencies.state_text(name)
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
        """Handle the end of a task of this home: look up its state, and its array's, for the homes that asked for
        them."""
        if not self._watched:
            return
        array = record.task.rpartition(".")[0]
        names = [name for name in (record.task, array) if name and name in self._watched]
        if array in names and self._has_unfinished(array):  # only its first failure and its end are reported
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
        )  # mostly the last ones are unfinished


def _silent(name: str, home: str, why: str) -> BadRequest:
    return BadRequest(
        f"nothing was submitted: only {home} knows whether there is a task {name}",
        why=why,
        hint=f"peerload nodes        once {home} answers, submit it again",
    )
