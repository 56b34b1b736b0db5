"""Who may say what of a task: every message of ownership by everybody who could send it, in one table.

``src`` is proven by the peer link; all else in a message is a claim. What changes a task, an attempt here, a lease or a
floor comes from the task's home (at the node that runs it) or from the node that the attempt was granted to (at the home);
the same said by anybody else, or under another task's id, is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from peerload.core.work import HomeTask
from peerload.model import events, messages
from peerload.model.actions import Action, PutFloor
from peerload.model.config import CoreConfig
from peerload.model.messages import Identity
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import Exit, FenceKind, Guarantee, TaskState
from tests.core.given import ACCEPTS, UID, Given, offer, spec
from tests.each import each

EXIT = Exit(0, started_at=5.0, ended_at=6.0)
KEY = f"{UID.hex()}-1"

# -- x runs attempt 1 of h/1: who is heard about it --------------------------------------------------------------------

HOME, OTHER, OTHER_AS_ITS_OWN, HOME_AS_ANOTHERS = ("h", "h/1"), ("z", "h/1"), ("z", "z/1"), ("h", "z/1")
SAYERS = {
    "its home": HOME,
    "another member": OTHER,
    "another, as a task of its own": OTHER_AS_ITS_OWN,
    "its home, as another's task": HOME_AS_ANOTHERS,
}
ONLY_HOME = ("its home",)
FIRST = ("its home", "another, as a task of its own")
"""Whose the uid is, nobody here knows yet."""
HOME_BY_UID = ("its home", "its home, as another's task")
"""It speaks of an attempt of its own, which the uid names; the id is for people."""

TO_EXECUTOR: dict[tuple[str, str], tuple[str, ...]] = {
    ("nothing", "Offer"): FIRST,
    ("nothing", "Commit"): FIRST,  # refused: a floor
    ("nothing", "Query"): FIRST,  # refused: a floor
    ("ended once", "Commit"): ONLY_HOME,  # told that it is over
    ("ended once", "Query"): ONLY_HOME,
    ("ended once", "ResultAck"): ONLY_HOME,  # that it died is noted
    ("refused", "Offer"): ONLY_HOME,
    ("refused", "Query"): ONLY_HOME,
    ("reserved", "Offer"): ONLY_HOME,
    ("reserved", "Commit"): ONLY_HOME,
    ("reserved", "Query"): ONLY_HOME,  # the ACCEPT, again
    ("reserved", "Revoke"): HOME_BY_UID,
    ("running", "Offer"): ONLY_HOME,  # told what is here
    ("running", "Commit"): ONLY_HOME,  # told what is here
    ("running", "Query"): ONLY_HOME,
    ("running", "RenewOk"): HOME_BY_UID,  # names no task
    ("running", "Park"): HOME_BY_UID,
    ("running", "Revoke"): HOME_BY_UID,
    ("running", "Signal"): HOME_BY_UID,
    ("ended", "Query"): ONLY_HOME,
    ("ended", "Commit"): ONLY_HOME,
    ("ended", "ResultAck"): HOME_BY_UID,
}


def executor(phase: str) -> tuple[Given, messages.Accept | None]:
    kinds = {"ended once": FenceKind.STARTED_ONCE, "refused": FenceKind.REFUSED}
    floors = ((UID, 1, kinds[phase], "h"),) if phase in kinds else ()
    x = Given(slots=4, peers=("h", "z"), started=events.AgentStarted(floors=floors))
    if phase == "nothing" or phase in kinds:
        return x, None
    x.hear("h", offer())
    accept = x.sent(messages.Accept)
    if phase != "reserved":
        x.hear("h", messages.Commit("h/1", UID, 1, accept.nonce, accept.ts, 60.0))
        x.when(events.TaskStarted(KEY, 7.0))
    if phase == "ended":
        x.end(KEY)
    return x.after(5), accept


def to_executor(kind: str, task: str, accept: messages.Accept | None) -> messages.Message:
    nonce, ts = (accept.nonce, accept.ts) if accept is not None else (7, 5.0)
    newer = ts + 4.0
    made: dict[str, Callable[[], messages.Message]] = {
        "Offer": lambda: messages.Offer(task, UID, 1, spec(), 60.0),
        "Commit": lambda: messages.Commit(task, UID, 1, nonce, ts, 60.0),
        "Query": lambda: messages.Query(task, UID, 1),
        "RenewOk": lambda: messages.RenewOk((messages.LeaseExtension(UID, 1, newer, 60.0),)),
        "Park": lambda: messages.Park((messages.Parking(task, UID, 1, newer),)),
        "Revoke": lambda: messages.Revoke(task, UID, 1),
        "Signal": lambda: messages.Signal(task, UID, 1, 10),
        "ResultAck": lambda: messages.ResultAck(task, UID, 1),
    }
    return made[kind]()


# -- x is the home of x/2, which y has, or was offered, or had: who is heard about it ------------------------------------

HAS, HAD, NEVER, HAS_AS_ANOTHERS, HAS_ANOTHER_ATTEMPT = "who has it", "who had it", "another", "as z/1", "attempt 0"
LAST_WORD = (HAS, HAS_AS_ANOTHERS)

TO_HOME: dict[tuple[str, str], tuple[str, ...]] = {
    ("offered", "Accept"): LAST_WORD,
    ("offered", "Staging"): LAST_WORD,
    ("offered", "Decline"): LAST_WORD,
    ("offered", "Result"): (HAD,),
    ("away", "Accept"): LAST_WORD,  # COMMIT, again
    ("away", "Staging"): (),
    ("away", "Decline"): (),
    ("away", "Renew"): LAST_WORD,
    ("away", "NotStarted"): LAST_WORD,
    ("away", "Return"): LAST_WORD,
    ("away", "Died"): LAST_WORD,
    ("away", "Result"): (*LAST_WORD, HAD),  # R9
    ("unknown", "Renew"): LAST_WORD,
    ("unknown", "NotStarted"): LAST_WORD,
    ("unknown", "Return"): LAST_WORD,
    ("unknown", "Died"): LAST_WORD,
    ("unknown", "Result"): LAST_WORD,
    ("given up", "Renew"): LAST_WORD,  # R11
    ("given up", "NotStarted"): (),
    ("given up", "Died"): (),
    ("given up", "Result"): LAST_WORD,
    ("held", "Result"): LAST_WORD,
    ("waiting", "Accept"): (),
    ("waiting", "Renew"): (),
    ("waiting", "Result"): (),
}


def accepted(x: Given, task: HomeTask, node: str) -> None:
    x.node.handoff.offer(task, node, voluntary=False)
    x.hear(
        node,
        messages.Accept(task.task, task.uid, task.record.attempt + 1, 7, 50.0, f"{node}-machine-1", f"{node}-store"),
    )


def lease_ends(x: Given, task: HomeTask) -> None:
    x.after(66).timer("lease", task.uid.hex())


def home(phase: str) -> tuple[Given, HomeTask]:
    """y has the attempt; where that can be, w had an earlier one."""
    x = Given(slots=1, peers=("w", "y", "z"), config=CoreConfig(poison_nodes=9))
    guarantee = Guarantee.ONCE if phase == "unknown" else Guarantee.AT_LEAST_ONCE
    x.submit()  # takes the only slot
    x.submit(spec(guarantee=guarantee))
    task = x.task(2)
    if phase == "waiting":
        return x, task
    if phase in ("away", "offered"):
        accepted(x, task, "w")
        lease_ends(x, task)
        x.timer("rest", task.uid.hex())
    if phase == "offered":
        x.node.handoff.offer(task, "y", voluntary=False)
        return x, task
    accepted(x, task, "y")
    if phase != "away":
        lease_ends(x, task)
    if phase == "held":
        x.when(events.HoldRequested(9, (task.task,)))
    states = {"away": TaskState.LEASED, "unknown": TaskState.UNKNOWN, "held": TaskState.HELD}
    assert task.record.state is states.get(phase, TaskState.QUEUED)
    return x, task


def to_home(kind: str, phase: str, task: HomeTask, who: str) -> tuple[str, messages.Message]:
    current = task.record.attempt + (phase == "offered" and kind in ("Accept", "Staging", "Decline"))
    attempt = {HAD: 1, HAS_ANOTHER_ATTEMPT: 0}.get(who, max(current, 0))
    src = {HAD: "w", NEVER: "z"}.get(who, "y")
    name, uid = "z/1" if who == HAS_AS_ANOTHERS else task.task, task.uid
    made: dict[str, Callable[[], messages.Message]] = {
        "Accept": lambda: messages.Accept(name, uid, attempt, 7, 50.0, "y-machine-1", "y-store"),
        "Staging": lambda: messages.Staging(name, uid, attempt, 5, 9),
        "Decline": lambda: messages.Decline(name, uid, attempt, "room", "", LoadReport()),
        "Renew": lambda: messages.Renew((messages.Renewal(name, uid, attempt, 90.0, 6.0),)),
        "NotStarted": lambda: messages.NotStarted(name, uid, attempt, "", f"{src}-store"),
        "Return": lambda: messages.Return(name, uid, attempt, "", "", f"{src}-store"),
        "Died": lambda: messages.Died(name, uid, attempt, "", f"{src}-store"),
        "Result": lambda: messages.Result(name, uid, attempt, EXIT, inline=True),
    }
    return src, made[kind]()


# -- the tables, held against the core -----------------------------------------------------------------------------------


def seen(x: Given) -> Any:
    """All that a message of ownership may change."""
    node = x.node

    def of(work: Any) -> dict[str, object]:
        slots = [name for kind in type(work).__mro__ for name in getattr(kind, "__slots__", ()) if name != "__dict__"]
        return {name: repr(getattr(work, name)) for name in [*slots, *getattr(work, "__dict__", ())]}

    return (
        {uid: of(task) for uid, task in node.home.tasks.items()},
        {key: of(guest) for key, guest in node.executor.remote_tasks.items()},
        dict(node.executor.fences._fences),
        sorted(node.runs._works),
        (node.ledger.load_tasks, node.ledger.cpus_running),
        node.membership.is_usable("y"),
    )


NOTHING_IN_IT = ("Decline", "Revoke", "ResultAck")
"""Answers that tell a stranger nothing, and change nothing at one that is not asked."""


def drops(x: Given, src: str, did: list[str], before: Any, counted: dict[str, int]) -> None:
    assert seen(x) == before
    assert [action for action in did if action not in [f"{name} to {src}" for name in NOTHING_IN_IT]] == []
    assert x.node.state.counts != counted


@pytest.mark.rule("P3")
@each("phase, kind, who", [(*told, who) for told in TO_EXECUTOR for who in SAYERS])
def test_who_may_tell_the_node_that_runs_it(phase: str, kind: str, who: str) -> None:
    x, accept = executor(phase)
    before, counted = seen(x), dict(x.node.state.counts)
    src, task = SAYERS[who]
    did = x.hear(src, to_executor(kind, task, accept))
    if who in TO_EXECUTOR[phase, kind]:
        assert did
    else:
        drops(x, src, did, before, counted)


@pytest.mark.rule("P3")
@each(
    "phase, kind, who",
    [(*told, who) for told in TO_HOME for who in (HAS, HAD, NEVER, HAS_AS_ANOTHERS, HAS_ANOTHER_ATTEMPT)],
)
def test_who_may_tell_its_home(phase: str, kind: str, who: str) -> None:
    x, task = home(phase)
    before, counted = seen(x), dict(x.node.state.counts)
    src, message = to_home(kind, phase, task, who)
    did = x.hear(src, message)
    if who in TO_HOME[phase, kind]:
        assert seen(x) != before
    else:
        drops(x, src, did, before, counted)


@pytest.mark.rule("P3")
def test_the_tables_have_every_message_of_ownership() -> None:
    kinds = {kind for _, kind in (*TO_EXECUTOR, *TO_HOME)}
    between_homes = {"AwaitTasks", "TasksTold"}  # tests/core/test_gates.py
    assert kinds | between_homes == {kind.__name__ for kind in get_args(messages.Ownership)}


ADVICE: list[Any] = [
    messages.Ping(1),
    messages.Pong(1, ACCEPTS),
    messages.Sync(),
    messages.ProfileRequest(("y",)),
    messages.ProfileTold(()),
    messages.Leaving(),
    messages.Wake("z"),
    messages.DirectoryTold(b"/data", code="directory"),
    messages.State(Identity("y", "b", "another", "s", 9, "y:1"), Profile("y", 9, 9.0), ACCEPTS),
    messages.State(Identity("z", "b", "m", "z-store", 9, "z:1"), Profile("y", 9, 9.0), ACCEPTS),
    messages.StateRequest(1, ACCEPTS, messages.Need()),
    messages.Enough(1),
    messages.StateAnswer(1, ACCEPTS),
    messages.ProbeRequest(1, messages.Need(), ACCEPTS),
    messages.ProbeReply(1, accepts=True, report=ACCEPTS),
    messages.GiveRequest(1, ACCEPTS, Profile("z", 9, 9.0)),
    messages.GiveReply(1, ACCEPTS),
    messages.Footprint(has_room=True),
    messages.PairRequest(1, ACCEPTS),
    messages.PairReply(1, accepts=True, report=ACCEPTS),
    messages.Unpair(1),
]


def test_all_else_that_goes_between_nodes_is_here() -> None:
    said = {type(message) for message in ADVICE}
    of_the_link = {
        messages.Hello,
        messages.WrongBoot,
        messages.NameTaken,
        messages.DialBack,
        messages.NotDialled,
    }  # tests/integration/test_peer_tls.py
    of_the_agent = {  # test_joining.py, test_agent_peers.py
        messages.Trust,
        messages.CertificateRequest,
        messages.CertificateTold,
        messages.DirectoryRequest,
    }
    elsewhere = of_the_link | of_the_agent
    assert said == {*get_args(messages.Advice), *get_args(messages.Membership)} - elsewhere


@pytest.mark.rule("M2", "P4")
@each("number", range(len(ADVICE)))
def test_advice_moves_nothing_that_somebody_has(number: int) -> None:
    for x in (home("away")[0], home("unknown")[0], executor("running")[0], executor("reserved")[0]):
        before = seen(x)
        x.hear("z", ADVICE[number])
        assert seen(x) == before


# -- one uid, two homes --------------------------------------------------------------------------------------------------


def durable(done: list[Action]) -> list[PutFloor]:
    return [row for action in done for row in getattr(action, "rows", ()) if isinstance(row, PutFloor)]


@pytest.mark.parametrize("state", ["waiting", "running here"])
def test_the_uid_of_an_own_task_is_nobody_elses(state: str) -> None:
    x = Given(slots=1, peers=("y",))
    x.submit()
    x.submit()
    task = x.task(1 if state == "running here" else 2)
    before = seen(x)
    for attempt in (task.record.attempt, task.record.attempt + 8):
        assert x.hear("y", messages.Offer("y/1", task.uid, attempt, spec(), 60.0, only=True)) == ["Decline to y"]
        assert x.hear("y", messages.Commit("y/1", task.uid, attempt, 7, 5.0, 60.0)) == []
        assert x.hear("y", messages.Query("y/1", task.uid, attempt)) == []
    assert seen(x) == before
    first = x.task(1)
    assert "persist done" in x.end(first.key)


def test_a_floor_is_its_homes_after_a_restart_too() -> None:
    floors = ((UID, 1, FenceKind.STARTED_ONCE, "h"),)
    x = Given(slots=2, peers=("h", "z"), started=events.AgentStarted(floors=floors))
    assert x.hear("z", messages.Query("z/1", UID, 1 << 31)) == []
    assert x.hear("z", messages.ResultAck("z/1", UID, 1)) == []
    assert x.hear("z", messages.Offer("z/1", UID, 2, spec(), 60.0)) == ["Decline to z"]
    assert x.after(4000).timer("floors")[0].startswith("timer floors"), "kept until its home has taken note"
    assert x.hear("h", messages.Query("h/1", UID, 1)) == ["Died to h"]


def test_nobody_else_raises_the_floor_of_a_task() -> None:
    x = Given(slots=2, peers=("h", "z"))
    for said in (messages.Query("h/1", UID, 1 << 31), messages.Commit("h/1", UID, 1 << 31, 7, 5.0, 60.0)):
        assert x.hear("z", said) == []
        assert durable(x.last) == []
    assert x.hear("h", offer())[1] == "Accept to h"
