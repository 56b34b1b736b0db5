"""The handoff of one task as a small machine: what may happen next, in every state. Rules are named as in docs/wire.md.

A home and two executors (home itself, too, if ``local``). The network loses, delays, reorders and repeats whatever it
likes (`wire.py`); crashes have a budget. Leases and time stamps are relative to now and counted in ticks, so that time has no bound and
yet the states are finite. ``without`` names rules that are left out; `rows.py` says what becomes of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model import deliveries
from tests.model.state import HERE, NOBODY, UNBOUNDED, UNWATCHED, At, Executor, History, Home, Kept, State, Step
from tests.model.wire import (
    ACCEPT,
    COMMIT,
    DIED,
    NOT_STARTED,
    OFFER,
    PARK,
    QUERY,
    RENEW,
    RENEW_OK,
    RESULT,
    RESULT_ACK,
    RETURN,
    REVOKE,
    Wire,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.model.state import Budget

    Emit = Callable[[Step, State], None]


class Handoff:
    """The protocol with these bounds. attempts: how many there may be; lease, grace: ticks; waits: a committed task may
    wait in the executor's queue; returns: and may be returned from it; reinstates: a
    lease given up may be taken up again (R11); loose: what only real nodes do:
    reservations run out, a COMMIT never leaves home, START is decided in time and on disk too late to fork, a
    launcher forks for an agent that is gone, a frozen process is killed or never made, an OFFER overtakes the row that puts its
    task into the queue again; prunes: messages without a future are dropped."""

    def __init__(
        self,
        budget: Budget,
        *,
        at_most_once: bool = False,
        attempts: int = 2,
        lease: int = 1,
        grace: int = 0,
        local: bool = False,
        waits: bool = True,
        returns: bool = True,
        nonces: bool = True,
        reinstates: bool = False,
        loose: bool = False,
        nodes: int = 2,
        without: tuple[str, ...] = (),
        prunes: bool = True,
    ) -> None:
        self.budget = budget
        self.at_most_once = at_most_once
        self.attempts = attempts
        self.lease = lease
        self.grace = grace
        self.local = local
        self.waits = waits
        self.returns = returns
        self.nonces = nonces
        self.reinstates = reinstates
        self.loose = loose
        self.nodes = nodes
        self.without = frozenset(without)
        self.wire = Wire(attempts, nodes, lease, budget.parks, keeps_renewals=loose and reinstates)
        self._prunes = prunes and not self.without & {"return-not-durable", "n-not-burnt", "same-n-two-commits"}

    # -- the search's questions ----------------------------------------------------------------------------------------

    def initial(self) -> State:
        """Nothing was submitted yet."""
        history = History(starts=(0,) * (self.attempts + 1))
        return State(home=Home(), executors=(Executor(),) * self.nodes, messages=0, history=history, budget=self.budget)

    def is_end(self, state: State) -> bool:
        """A result is recorded, or nobody can know, and this is shown."""
        return state.home.state is At.OVER or (self.at_most_once and state.home.state is At.UNKNOWN)

    def is_bound(self, state: State) -> bool:
        """The model has no more attempts; the protocol would have."""
        return state.home.attempt >= self.attempts and state.home.state is At.QUEUED

    def era(self, state: State) -> int:
        """PARKs so far."""
        return self.budget.parks - state.budget.parks

    def steps(self, state: State) -> list[tuple[Step, State]]:
        """Everything that may happen next."""
        found: list[tuple[Step, State]] = []

        def emit(step: Step, after: State) -> None:
            found.append((step, self._settled(after)))

        self._home(state, emit)
        self._home_crashes(state, emit)
        self._tick(state, emit)
        for node in range(self.nodes):
            self._executor(state, node, emit)
            self._executor_crashes(state, node, emit)
        for message in self.wire.in_it(state.messages):
            deliveries.deliver(self, state, message, emit)
        return found

    # -- home on its own -----------------------------------------------------------------------------------------------

    def _home(self, state: State, emit: Emit) -> None:  # noqa: C901 PLR0912 -- one list
        home = state.home
        if home.state is At.NEW and not state.history.acknowledged:
            history = state.history._replace(acknowledged=True)
            emit(Step("submitted"), state._replace(home=home._replace(state=At.QUEUED), history=history))
        if home.unsynced:
            emit(Step("home syncs"), state._replace(home=home._replace(unsynced=False)))
        if self._may_offer(home) and home.attempt < self.attempts:
            if home.offered == NOBODY:
                for node in range(self.nodes):
                    emit(Step("offer", home.attempt + 1, node), self.offered(state, node))
                if self.local and home.state is At.QUEUED:
                    emit(Step("starts at home", home.attempt + 1), self._starts_at_home(state))
            else:
                emit(Step("offer times out"), state._replace(home=home._replace(offered=NOBODY)))
        if home.runs:
            emit(Step("ends at home", home.runs), self._ends_at_home(state))
        is_away = home.state is At.LEASED and home.holder != HERE and not home.away
        if is_away and not home.parked and home.deadline == 0:
            if self.at_most_once:
                emit(Step("lease over", home.attempt), state._replace(home=home._replace(state=At.UNKNOWN)))
            else:
                emit(Step("lease over", home.attempt), self.requeued(state))
        if is_away and state.budget.parks and not home.unsynced:
            park = self.wire.bit(PARK, home.attempt, home.holder, self.era(state) + 1)
            parked = home._replace(parked=True, away=True, deadline=0, unsynced="park-not-durable" in self.without)
            budget = state.budget._replace(parks=state.budget.parks - 1)
            emit(Step("park", home.attempt), state._replace(home=parked, messages=state.messages | park, budget=budget))
        if is_away and self.loose and not home.parked and 0 <= home.holder < self.nodes:
            self._takes_back(state, emit)
        if home.away:
            emit(Step("home is back"), state._replace(home=home._replace(away=False)))

    def _may_offer(self, home: Home) -> bool:
        """OFFER waits for no row: that the task was submitted, or is in the queue again, may still be on its way to the disk."""
        return home.state in (At.NEW, At.QUEUED) or (self.loose and home.state is At.LEASED and home.holder != HERE)

    def _takes_back(self, state: State, emit: Emit) -> None:
        """The only COMMIT never left home: nobody can have read it."""
        attempt, node = state.home.attempt, state.home.holder
        x = state.executors[node]
        if attempt != x.has and attempt > x.floor:
            unsent = state._replace(messages=state.messages & ~self.wire.some(attempt, node, COMMIT))
            emit(Step("requeued", attempt, node, "COMMIT never left"), self.requeued(unsent))

    def offered(self, state: State, node: int) -> State:
        """An offer of the next attempt goes out."""
        offer = self.wire.bit(OFFER, state.home.attempt + 1, node)
        return state._replace(home=state.home._replace(offered=node), messages=state.messages | offer)

    def requeued(self, state: State) -> State:
        """Back in the queue at home; the number stays used."""
        burnt = 1 if "n-not-burnt" in self.without and not self.at_most_once else 0
        home = state.home
        home = home._replace(state=At.QUEUED, attempt=home.attempt - burnt, holder=NOBODY, deadline=0)
        return state._replace(home=home._replace(parked=False, away=False))

    def started(self, history: History, attempt: int) -> History:
        """An attempt's process exists."""
        starts = history.starts
        return history._replace(starts=(*starts[:attempt], min(2, starts[attempt] + 1), *starts[attempt + 1 :]))

    def _starts_at_home(self, state: State) -> State:
        attempt = state.home.attempt + 1
        home = state.home._replace(state=At.LEASED, attempt=attempt, holder=HERE, runs=attempt)
        return state._replace(home=home, history=self.started(state.history, attempt))

    def _ends_at_home(self, state: State) -> State:
        home, history = state.home, state.history
        history = history._replace(finished=history.finished | 1 << home.runs)
        if home.state is not At.OVER:
            history = history._replace(recorded=min(2, history.recorded + 1))
            home = home._replace(result=home.runs)
        home = home._replace(state=At.OVER, runs=0, offered=NOBODY, deadline=0)
        return state._replace(home=home, history=history)

    def _home_crashes(self, state: State, emit: Emit) -> None:
        home, budget = state.home, state.budget
        again = self.lease + self.grace if home.state is At.LEASED and home.holder != HERE else 0  # R4
        if budget.home_machine:
            spent = state._replace(budget=budget._replace(home_machine=budget.home_machine - 1))
            if home.unsynced:
                back = home._replace(parked=False, away=False, unsynced=False, deadline=self.lease + self.grace)
                emit(Step("home machine crashes", note="PARKED was not on disk"), spent._replace(home=back))
            elif home.state is At.LEASED and home.holder == HERE:
                lost = home._replace(
                    state=At.UNKNOWN if self.at_most_once else At.QUEUED, holder=NOBODY, runs=0, offered=NOBODY
                )
                emit(Step("home machine crashes", note="and the run there"), spent._replace(home=lost))
            elif not home.away:
                back = home._replace(offered=NOBODY, deadline=0 if home.parked else again, runs=0)
                emit(Step("home machine crashes"), spent._replace(home=back))
        remembers = home.offered != NOBODY or home.state is At.LEASED
        if budget.home_agent and remembers and not home.unsynced and not home.away:
            spent = state._replace(budget=budget._replace(home_agent=budget.home_agent - 1))
            back = home._replace(offered=NOBODY, deadline=0 if home.parked else again)
            emit(Step("home agent crashes"), spent._replace(home=back))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self, state: State, emit: Emit) -> None:
        executors = tuple(
            executor._replace(left=executor.left - 1) if 0 < executor.left < UNBOUNDED else executor
            for executor in state.executors
        )
        home = state.home._replace(deadline=max(0, state.home.deadline - 1))
        after = state._replace(home=home, executors=executors, messages=self.wire.older(state.messages))
        if after != state:
            emit(Step("tick"), after)

    # -- an executor on its own ----------------------------------------------------------------------------------------

    def replaced(self, state: State, node: int, executor: Executor, add: int = 0) -> State:
        """The same with this executor, and with these messages sent, too."""
        executors = (*state.executors[:node], executor, *state.executors[node + 1 :])
        return state._replace(executors=executors, messages=state.messages | add)

    def _executor(self, state: State, node: int, emit: Emit) -> None:
        x = state.executors[node]
        waiting = x.waiting
        if waiting and (x.left != 0 or self.loose) and waiting > x.floor:
            begun = x._replace(floor=waiting, kept=Kept.START, kept_attempt=waiting)  # D3
            emit(Step("START", waiting, node), self.replaced(state, node, begun))
        if x.has_begun:
            self._begun(state, node, emit)
        if waiting and not x.has_begun and self.returns and waiting > x.floor:
            self._returns(state, node, emit)
        if x.reserved and self.loose:
            emit(Step("reservation ends", x.reserved, node), self.replaced(state, node, x._replace(reserved=0)))
        if x.runs and x.left != UNWATCHED and (x.left or self.loose):
            ended = x._replace(kept=Kept.EXIT, kept_attempt=x.runs, runs=0, left=0, applied=0, waiting=0)
            history = state.history._replace(finished=state.history.finished | 1 << x.runs)
            if x.left:
                emit(Step("process ends", x.runs, node), self.replaced(state, node, ended)._replace(history=history))
            if self.loose and x.left:
                short = history._replace(short=history.short | 1 << x.runs)
                emit(Step("runs short", x.runs, node), self.replaced(state, node, ended)._replace(history=short))
            if self.loose:
                history = history._replace(killed=history.killed | 1 << x.runs)
                emit(Step("is killed", x.runs, node), self.replaced(state, node, ended)._replace(history=history))
        if x.kept is Kept.EXIT:
            result = self.wire.bit(RESULT, x.kept_attempt, node)  # D4
            after = self.replaced(state, node, x._replace(kept=Kept.RESULT), result)
            history = state.history._replace(rows=state.history.rows | 1 << x.kept_attempt)
            emit(Step("RESULT", x.kept_attempt, node), after._replace(history=history))

    def _begun(self, state: State, node: int, emit: Emit) -> None:
        x = state.executors[node]
        if x.left != 0:
            forked = self.replaced(state, node, x._replace(waiting=0, runs=x.waiting))
            emit(Step("forks", x.waiting, node), forked._replace(history=self.started(state.history, x.waiting)))
        if self.loose:  # D6: the launcher confirms that it made no process
            refused = x._replace(waiting=0, left=0, applied=0, kept=Kept.REFUSED)
            said = self.wire.bit(NOT_STARTED, x.waiting, node)
            emit(Step("NOT_STARTED", x.waiting, node, "no process"), self.replaced(state, node, refused, said))

    def _returns(self, state: State, node: int, emit: Emit) -> None:
        x = state.executors[node]
        said = self.wire.bit(RETURN, x.waiting, node)
        gone = x._replace(waiting=0, left=0, applied=0)
        if "return-queued" in self.without:
            if not state.messages & said:
                emit(Step("RETURN", x.waiting, node, "still queued"), self.replaced(state, node, x, said))
        elif "return-not-durable" in self.without:
            emit(Step("RETURN", x.waiting, node, "on no disk"), self.replaced(state, node, gone, said))
        else:
            refused = gone._replace(floor=x.waiting, kept=Kept.REFUSED, kept_attempt=x.waiting)  # D6
            emit(Step("RETURN", x.waiting, node), self.replaced(state, node, refused, said))

    def _executor_crashes(self, state: State, node: int, emit: Emit) -> None:
        x, budget = state.executors[node], state.budget
        if x.runs and x.left == UNWATCHED:
            died = self.wire.bit(DIED, x.runs, node)
            emit(Step("left-over ends", x.runs, node), self.replaced(state, node, x._replace(runs=0, left=0), died))
        if budget.executor_launcher and (x.runs or x.has_begun) and x.left != UNWATCHED:
            spent = state._replace(budget=budget._replace(executor_launcher=budget.executor_launcher - 1))
            emit(Step("launcher crashes", x.has, node), self._without_launcher(spent, node))
        if budget.executor_agent and (x.has or x.reserved):
            spent = state._replace(budget=budget._replace(executor_agent=budget.executor_agent - 1))
            applied = x.applied if x.runs else 0
            if "park-ts-volatile" in self.without:
                applied %= 2
            back = x._replace(reserved=0, waiting=0, left=x.left if x.runs else 0, applied=applied)
            emit(Step("agent crashes", 0, node), self.replaced(spent, node, back))
            if x.has_begun and self.loose:
                asked = x._replace(reserved=0, applied=applied)
                emit(
                    Step("agent crashes", 0, node, "the launcher was asked to fork"), self.replaced(spent, node, asked)
                )
        if budget.executor_machine:
            spent = state._replace(budget=budget._replace(executor_machine=budget.executor_machine - 1))
            self._machine_crashes(spent, node, emit)

    def _without_launcher(self, state: State, node: int) -> State:
        x = state.executors[node]
        attempt = x.has
        gone = x._replace(waiting=0, runs=0, left=0, applied=0)
        died = self.wire.bit(DIED, attempt, node)
        if "launcher-bound" in self.without and x.runs:
            return self.replaced(state, node, x._replace(waiting=0, left=UNWATCHED if x.left else 0))
        if "launcher-lost-died" in self.without:
            refused = gone._replace(kept=Kept.REFUSED, kept_attempt=attempt)
            return self.replaced(state, node, refused, self.wire.bit(NOT_STARTED, attempt, node))
        if "died-never-forked" in self.without and x.has_begun:
            return self.replaced(state, node, x, died)  # the agent keeps its fork request
        return self.replaced(state, node, gone, died)

    def _machine_crashes(self, state: State, node: int, emit: Emit) -> None:
        x = state.executors[node]
        messages = 0
        if x.kept in (Kept.START, Kept.EXIT, Kept.RESULT):
            messages |= self.wire.bit(DIED, x.kept_attempt, node)  # R6: home sees another machine boot id by itself
        if "boot-id-any" in self.without or "boot-id-of-accept" in self.without:
            for attempt in (x.reserved, x.waiting):
                messages |= self.wire.bit(DIED, attempt, node) if attempt else 0
        back = x._replace(reserved=0, waiting=0, runs=0, left=0, applied=0)
        after = back._replace(kept=Kept.START) if x.kept is Kept.EXIT else back
        if "exit-torn" in self.without and x.kept is Kept.START and x.runs:
            after = back._replace(kept=Kept.EXIT)  # an empty exit record is read as exit 0
        if x.kept is Kept.EXIT:
            emit(
                Step("machine crashes", 0, node, "the exit record survives"), self.replaced(state, node, back, messages)
            )
        if after != x:
            emit(Step("machine crashes", 0, node), self.replaced(state, node, after, messages))

    # -- what makes the states few -------------------------------------------------------------------------------------

    def _settled(self, state: State) -> State:
        """With what its sender repeats for ever in the network, and without what can have no effect any more."""
        home, messages = state.home, state.messages
        era = self.era(state)
        if home.state is not At.LEASED and (home.parked or home.away):
            home = home._replace(parked=False, away=False)
        if home.state in (At.LEASED, At.UNKNOWN) and 0 <= home.holder < self.nodes:
            messages |= self.wire.bit(QUERY, home.attempt, home.holder)
        for node, x in enumerate(state.executors):
            if x.has:
                messages |= self.wire.bit(RENEW, x.has, node, era, holds=x.applied == 2 * era)
            if x.reserved:
                messages |= self.wire.bit(ACCEPT, x.reserved, node, era)
        state = state._replace(home=home, messages=messages)
        return self._pruned(state, era) if self._prunes else state

    def _pruned(self, state: State, era: int) -> State:
        home, messages, executors = state.home, state.messages, state.executors
        if self.budget.parks:
            messages &= ~self.wire.renewals_before(era)  # R12: such a RENEW gets no answer
            if not home.parked:
                messages &= ~self.wire.renewals_too_old
        for node, executor in enumerate(state.executors):
            x = executor
            for attempt in range(1, self.attempts + 1):
                if messages & self.wire.about(attempt, node):
                    messages, x = self._pruned_of(home, messages, x, attempt, node)
            if x is not executor:
                executors = (*executors[:node], x, *executors[node + 1 :])
        return state._replace(messages=messages, executors=executors)

    def _pruned_of(self, home: Home, messages: int, x: Executor, attempt: int, node: int) -> tuple[int, Executor]:  # noqa: C901 -- one list
        wire = self.wire
        is_over = home.state is At.OVER
        is_elsewhere = attempt == home.attempt and home.holder != node and not self.reinstates
        is_past = attempt < home.attempt or is_over or is_elsewhere
        if attempt <= x.floor:
            messages &= ~wire.some(attempt, node, OFFER, COMMIT)
            if attempt not in (x.runs, x.waiting):
                messages &= ~wire.some(attempt, node, RENEW_OK, REVOKE, PARK)
                if x.reserved != attempt and (attempt < home.attempt or is_over):
                    messages &= ~wire.some(attempt, node, RENEW)
                if x.kept is not Kept.RESULT or x.kept_attempt != attempt:
                    messages &= ~wire.some(attempt, node, RESULT_ACK)
                    if is_over:
                        messages &= ~wire.some(attempt, node, RESULT)
                if x.kept_attempt != attempt or x.kept not in (Kept.START, Kept.REFUSED):
                    messages &= ~wire.some(attempt, node, QUERY)
            elif x.runs == attempt and not self.without & {"park-late", "park-ts-volatile"}:
                messages &= ~wire.orders_before(attempt, node, x.applied)
            if is_past:
                messages &= ~wire.some(attempt, node, ACCEPT)
        if is_past:
            messages &= ~wire.some(attempt, node, NOT_STARTED, DIED, RETURN)
            if attempt not in (x.runs, x.waiting) and not messages & wire.some(attempt, node, COMMIT):
                messages &= ~wire.some(attempt, node, OFFER, ACCEPT)  # home will never COMMIT it to this one any more
                if x.reserved == attempt:
                    x = x._replace(reserved=0)
        return messages, x
