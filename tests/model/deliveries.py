"""What a message does when it arrives, at an executor and at home: the second half of the model in `handoff.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model import wire as w
from tests.model.state import NOBODY, UNBOUNDED, UNWATCHED, At, Executor, Kept, Step

if TYPE_CHECKING:
    from tests.model.handoff import Emit, Handoff
    from tests.model.state import State
    from tests.model.wire import Message

TO_HOME = (w.ACCEPT, w.RENEW, w.RESULT, w.NOT_STARTED, w.DIED, w.RETURN)


def deliver(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    """Everything that may follow from this message's arrival now."""
    if message.kind not in TO_HOME:
        AT_EXECUTOR[message.kind](model, state, message, emit)
    elif not state.home.away:
        AT_HOME[message.kind](model, state, message, emit)


# -- at an executor ----------------------------------------------------------------------------------------------------


def _offer(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    x = state.executors[node]
    if attempt <= x.floor or x.has or x.kept in (Kept.RESULT, Kept.EXIT) or x.reserved >= attempt:
        return  # R7, R10
    messages = state.messages
    if model.nonces:  # a COMMIT of an earlier reservation is as good as too late, its ACCEPT leads to nothing else
        messages &= ~model.wire.some(attempt, node, w.ACCEPT)
        messages = model.wire.too_late(messages, attempt, node)
    if "boot-id-of-accept" in model.without:
        messages &= ~model.wire.bit(w.DIED, attempt, node)  # this ACCEPT carries the new machine boot id
    messages |= model.wire.bit(w.ACCEPT, attempt, node, model.era(state))
    reserved = x._replace(reserved=attempt, waiting=0, runs=0, left=0, applied=0)
    emit(Step("accept", attempt, node), model.replaced(state._replace(messages=messages), node, reserved))


def _commit(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    _, attempt, node, era, age, _ = message
    x = state.executors[node]
    if attempt <= x.floor or x.has:
        return
    if x.reserved == attempt and age < model.lease:
        left = model.lease - age  # R1
        if model.waits:
            committed = x._replace(reserved=0, waiting=attempt, left=left, applied=2 * era)
            emit(Step("commit taken", attempt, node), model.replaced(state, node, committed))
        else:
            begun = x._replace(floor=attempt, kept=Kept.START, kept_attempt=attempt, reserved=0)
            begun = begun._replace(runs=attempt, left=left, applied=2 * era)
            history = model.started(state.history, attempt)
            emit(Step("forks", attempt, node), model.replaced(state, node, begun)._replace(history=history))
    elif x.kept not in (Kept.RESULT, Kept.EXIT):
        refused = Executor(floor=attempt, kept=Kept.REFUSED, kept_attempt=attempt)  # D6
        said = model.wire.bit(w.NOT_STARTED, attempt, node)
        emit(Step("NOT_STARTED", attempt, node, "no such reservation"), model.replaced(state, node, refused, said))


def _renew_ok(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    _, attempt, node, era, age, _ = message
    x = state.executors[node]
    if attempt != x.has or x.left == UNWATCHED:
        return
    left = model.lease - age
    if x.left == UNBOUNDED:
        if 2 * era > x.applied:  # R12: newer than its PARK
            bounded = x._replace(left=left, applied=2 * era)
            emit(Step("renewed", attempt, node, "a deadline again"), model.replaced(state, node, bounded))
    elif left > x.left or 2 * era > x.applied:
        renewed = x._replace(left=max(x.left, left), applied=max(x.applied, 2 * era))
        emit(Step("renewed", attempt, node), model.replaced(state, node, renewed))


def _park(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    order = 2 * message.era - 1
    x = state.executors[node]
    if attempt != x.has or x.left == UNWATCHED:
        return
    if "park-equal" in model.without and x.applied == order - 1 and state.home.away:
        history = state.history._replace(error="U1 the PARK of an absent home is ignored")
        emit(Step("PARK ignored", attempt, node), state._replace(history=history))
    elif order > x.applied or ("park-late" in model.without and x.left != UNBOUNDED):
        emit(Step("parked", attempt, node), model.replaced(state, node, x._replace(left=UNBOUNDED, applied=order)))


def _revoke(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    x = state.executors[node]
    if attempt == x.has:
        gone = x._replace(waiting=0, runs=0, left=0, applied=0)  # START stays: a QUERY is answered DIED
        if x.kept_attempt == attempt and "revoke-keeps-start" in model.without:
            gone = gone._replace(kept=Kept.NOTHING, kept_attempt=0)
        emit(Step("revoked", attempt, node), model.replaced(state, node, gone))
    elif x.reserved == attempt:
        emit(Step("revoked", attempt, node), model.replaced(state, node, x._replace(reserved=0)))


def _result_ack(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    x = state.executors[message.node]
    if x.kept is Kept.RESULT and x.kept_attempt == message.attempt:
        gone = x._replace(kept=Kept.NOTHING, kept_attempt=0)
        emit(Step("acknowledged", message.attempt, message.node), model.replaced(state, message.node, gone))


def _query(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    x = state.executors[node]
    is_newest = x.kept_attempt == attempt
    if attempt == x.has or (is_newest and x.kept in (Kept.RESULT, Kept.EXIT)):
        return  # its RENEW, or its RESULT, speaks for it
    died = model.wire.bit(w.DIED, attempt, node)
    not_started = model.wire.bit(w.NOT_STARTED, attempt, node)
    if is_newest and x.kept is Kept.START:
        if not state.messages & died:
            emit(Step("DIED", attempt, node), model.replaced(state, node, x, died))
    elif attempt > x.floor or (is_newest and x.kept is Kept.REFUSED):
        if is_newest and x.kept is Kept.REFUSED and state.messages & not_started:
            return
        if x.kept in (Kept.RESULT, Kept.EXIT):
            refused = x._replace(floor=attempt, reserved=0)  # R10: never let go of a result
        elif x.has:
            return
        else:
            refused = Executor(floor=attempt, kept=Kept.REFUSED, kept_attempt=attempt)
        emit(Step("NOT_STARTED", attempt, node), model.replaced(state, node, refused, not_started))


AT_EXECUTOR = {
    w.OFFER: _offer,
    w.COMMIT: _commit,
    w.RENEW_OK: _renew_ok,
    w.PARK: _park,
    w.REVOKE: _revoke,
    w.RESULT_ACK: _result_ack,
    w.QUERY: _query,
}


# -- at home -----------------------------------------------------------------------------------------------------------


def _accept(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    _, attempt, node, era, age, _ = message
    home = state.home
    commit = model.wire.bit(w.COMMIT, attempt, node, era, age)
    revoke = model.wire.bit(w.REVOKE, attempt, node)
    deadline = model.lease + model.grace  # R2
    if home.state is At.QUEUED and home.offered == node and attempt == home.attempt + 1:
        leased = home._replace(state=At.LEASED, attempt=attempt, holder=node, offered=NOBODY, deadline=deadline)  # D2
        emit(Step("LEASED", attempt, node), state._replace(home=leased, messages=state.messages | commit))
    elif home.state is At.LEASED and home.holder == node and home.attempt == attempt:
        again = home._replace(deadline=0 if home.parked else deadline)
        after = state._replace(home=again, messages=state.messages | commit)
        if after != state:
            emit(Step("COMMIT again", attempt, node), after)
    elif "same-n-two-commits" in model.without and home.state is At.LEASED and home.attempt == attempt:
        if not state.messages & commit:
            emit(Step("COMMIT", attempt, node, "to another, too"), state._replace(messages=state.messages | commit))
    elif home.state is not At.NEW and attempt <= home.attempt and not state.messages & revoke:
        emit(Step("REVOKE", attempt, node), state._replace(messages=state.messages | revoke))


def _renew(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    _, attempt, node, era, age, holds = message
    home = state.home
    answered = state._replace(messages=state.messages | model.wire.bit(w.RENEW_OK, attempt, node, era, age))
    deadline = model.lease + model.grace
    revoke = model.wire.bit(w.REVOKE, attempt, node)
    if home.state is At.LEASED and home.attempt == attempt and home.holder == node:
        if not home.parked:
            after = answered._replace(home=home._replace(deadline=deadline))
        elif era < model.era(state):
            return  # R12: from before the PARK
        elif holds or "park-confirmed" in model.without:
            after = answered._replace(home=home._replace(parked=False, deadline=deadline))
        else:
            after = answered
        if after != state:
            emit(Step("RENEW_OK", attempt, node), after)
    elif home.state is At.UNKNOWN and home.attempt == attempt and home.holder == node:
        after = answered._replace(home=home._replace(state=At.LEASED, deadline=deadline))
        emit(Step("leased again", attempt, node), after)
    elif home.state is At.OVER or attempt < home.attempt or home.state is At.QUEUED:
        if home.state is At.QUEUED and attempt == home.attempt and model.reinstates:
            again = home._replace(state=At.LEASED, holder=node, offered=NOBODY, deadline=deadline)  # R11
            emit(Step("leased again", attempt, node), answered._replace(home=again))
        elif not state.messages & revoke:
            emit(Step("REVOKE", attempt, node), state._replace(messages=state.messages | revoke))


def _result(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    home = state.home
    acknowledged = state._replace(messages=state.messages | model.wire.bit(w.RESULT_ACK, attempt, node))
    if home.state is At.OVER:
        if acknowledged != state:
            emit(Step("RESULT_ACK", attempt, node), acknowledged)
        return
    is_short = state.history.short >> attempt & 1 and not model.at_most_once
    is_its = home.state is At.LEASED and attempt == home.attempt
    noted = acknowledged._replace(history=state.history._replace(rows=state.history.rows & ~(1 << attempt)))
    if (
        model.loose and home.state is At.QUEUED and attempt == home.attempt
    ):  # its output is fetched before it is recorded
        fetching = home._replace(state=At.LEASED, holder=node, offered=NOBODY, deadline=model.lease + model.grace)
        emit(Step("leased again", attempt, node), state._replace(home=fetching))
    if is_short and is_its:  # no result, but the task again with more; or its result, when that was tried often enough
        emit(Step("requeued", attempt, node, "out of memory"), model.requeued(noted))
    if (attempt < home.attempt and state.history.killed >> attempt & 1) or (is_short and not is_its):
        emit(Step("dropped", attempt, node), noted)  # R9: it was revoked, or is tried again by now: that is no result
    elif home.state is not At.NEW and attempt <= home.attempt:  # R9: the first result of any attempt granted
        over = home._replace(state=At.OVER, result=attempt, offered=NOBODY, deadline=0)
        history = state.history._replace(recorded=min(2, state.history.recorded + 1))
        emit(Step("recorded", attempt, node), acknowledged._replace(home=over, history=history))


def _comes_back(model: Handoff, state: State, message: Message, emit: Emit) -> None:
    attempt, node = message.attempt, message.node
    home = state.home
    if home.state not in (At.LEASED, At.UNKNOWN) or home.attempt != attempt or home.holder != node:
        return
    if message.kind == w.DIED and model.at_most_once:
        if home.state is At.LEASED:
            emit(Step("unknown", attempt, node), state._replace(home=home._replace(state=At.UNKNOWN, deadline=0)))
        return
    back = model.requeued(state)
    if message.kind == w.RETURN and back.home.attempt < model.attempts:
        for other in range(model.nodes):
            if other != node:
                emit(Step("requeued", attempt, node, f"and offered to X{other}"), model.offered(back, other))
    emit(Step("requeued", attempt, node), back)


AT_HOME = {
    w.ACCEPT: _accept,
    w.RENEW: _renew,
    w.RESULT: _result,
    w.NOT_STARTED: _comes_back,
    w.DIED: _comes_back,
    w.RETURN: _comes_back,
}
