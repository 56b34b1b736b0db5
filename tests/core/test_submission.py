"""What a client is told when it submits: the id, a refusal, or why its task has to wait."""

from __future__ import annotations

from typing import Any

import msgspec

from peerload.core.explain import WaitReasons
from peerload.core.membership.peers import NOT_MET
from peerload.core.state import TASKS_AT_A_TIME
from peerload.model import events, messages
from peerload.model.actions import Answer
from peerload.model.config import CoreConfig
from peerload.model.errors import NeverRunnable, SlowDown
from peerload.model.gossip import MemberStatus
from peerload.model.resources import LoadReport, Placement, ResourceRequest
from peerload.model.task import SubmitOptions, TaskSpec
from tests.core.given import ACCEPTS, Given, identity, spec
from tests.wording import Says


def test_a_repeated_token_gives_the_same_id_and_another_command_is_refused() -> None:
    x = Given(peers=())
    x.submit(token="same")
    assert x.submit(token="same") == ["answer"]
    assert x.done(Answer).reply["id"] == "x/1"
    assert x.submit(token="same", digest=b"other") == ["refuse BadRequest"]


def test_tokens_are_known_after_their_table_was_made_anew() -> None:
    x = Given(peers=())
    x.submit(token="one")
    x.submit(token="many", indices=(1, 2), held=True)
    x.node.shrink()
    assert x.submit(token="many") == ["answer"]
    assert (x.done(Answer).reply["id"], x.done(Answer).reply["members"]) == ("x/2", 2)
    assert x.submit(token="one", digest=b"other") == ["refuse BadRequest"]


def test_a_token_that_only_the_store_remembers_gives_the_same_id() -> None:
    x = Given(peers=())
    assert x.submit(token="old", before=(b"digest", "x/7", 3)) == ["answer"]
    assert (x.done(Answer).reply["id"], x.done(Answer).reply["members"]) == ("x/7", 3)
    assert x.submit(token="old", digest=b"other", before=(b"digest", "x/7", 3)) == ["refuse BadRequest"]


def test_a_repeated_token_gives_the_same_id_though_the_task_that_it_waits_for_is_gone() -> None:
    x, terms = Given(peers=()), SubmitOptions(after=("z/7",))
    assert x.submit(terms=terms) == ["refuse NoSuchTask"]
    assert x.submit(token="old", before=(b"digest", "x/7", 0), terms=terms) == ["answer"]
    assert x.done(Answer).reply["id"] == "x/7"


def test_a_large_array_is_kept_in_parts_and_told_of_when_all_of_it_is_kept() -> None:
    x = Given(peers=(), config=CoreConfig(members_at_a_time=2))
    assert x.submit(indices=(1, 2, 3, 4, 5), held=True) == [
        "persist making held held",
        "persist held held",
        "persist submission held",
        "answer",
    ]
    assert x.submit(indices=(1, 2), held=True) == ["persist submission held held", "answer"]


def test_a_full_queue_is_a_typed_refusal() -> None:
    x = Given(peers=(), config=CoreConfig(tasks_queued_max=1))
    x.submit()
    assert x.submit() == ["refuse SlowDown"]
    assert isinstance(x.done(Answer).error, SlowDown)


def test_what_nobody_could_ever_run_is_refused_with_the_reasons() -> None:
    x = Given()
    assert x.submit(spec(request=ResourceRequest(gpus=1))) == ["refuse NeverRunnable"]
    error = x.done(Answer).error
    assert isinstance(error, NeverRunnable)
    assert error.why == Says.NEAREST("1 GPU", "x: no GPU; y: no GPU")


def test_another_directory_is_suggested_only_if_it_would_help() -> None:
    x = Given()
    x.node.membership.remember_decline("y", "directory", messages.decline_subject("directory", spec(directory=b"/d")))
    x.submit(spec(directory=b"/d", request=ResourceRequest(cpus=5.0)))
    assert "--wait-for-node" in x.done(Answer).error.hint
    x.submit(spec(directory=b"/d"), directory_here=False)
    assert "-d DIR" in x.done(Answer).error.hint


def test_a_node_that_was_shut_out_runs_nothing_ever_until_it_is_let_in_anew() -> None:
    x, pinned = Given(), spec(placement=Placement(node="y"))
    x.when(events.NodeRevoked("y"))
    assert x.submit(pinned) == ["refuse NeverRunnable"]
    assert x.done(Answer).error.why == "x: the task is for y; y: shut out"
    x.meet("y", start=2)
    assert x.submit(pinned)[0] == "persist submission queued"


def test_a_member_of_an_earlier_start_that_was_not_met_yet_may_run_a_task() -> None:
    x = Given(peers=(), started=events.AgentStarted(known=(identity("y"), identity("z"))))
    for placement, nodes in ((Placement(node="y"), "y"), (Placement(exclude=("x", "y")), "z")):
        assert x.submit(spec(placement=placement))[:2] == ["persist submission queued", "answer"]
        waits = x.task(int(x.done(Answer).reply["id"].partition("/")[2]))
        said = {one.node: one.can_ever for one in WaitReasons(x.node, waits, x.at_s).verdicts()}
        assert said == {"x": False, nodes: None}
        assert NOT_MET in x.done(Answer).reply["placeable"]
    assert x.submit(spec(placement=Placement(node="v"))) == ["refuse NeverRunnable"]
    x.when(events.NodeRevoked("y"))
    assert x.submit(spec(placement=Placement(node="y"))) == ["refuse NeverRunnable"]
    x.meet("z")
    assert x.submit(spec(request=ResourceRequest(gpus=1))) == ["refuse NeverRunnable"]


def test_the_answer_says_why_nobody_can_run_it_now() -> None:
    def told(x: Given, task: TaskSpec, **event: Any) -> object:
        assert x.submit(task, **event)[:2] == ["persist submission queued", "answer"]
        reply = x.done(Answer).reply
        assert set(reply) == {"id", "members", "directory_here", "placeable"}
        return reply["placeable"]

    x = Given(peers=("y", "z"))
    assert told(x, spec()) is None
    assert told(x, spec()) is None  # it waits for its turn only
    pinned = spec(placement=Placement(node="y"))
    assert told(x, pinned) == f"{Says.PINNED('y')}; {Says.NO_ROOM_NOW('y')}"
    assert told(x, spec(directory=b"/data"), directory_here=False) == "; ".join(
        (Says.NO_DIRECTORY_HERE("/data"), Says.NO_ROOM_NOW("y"), Says.NO_ROOM_NOW("z"))
    )
    x.hear("y", messages.Pong(1, LoadReport(slots=1, load_tasks=1, slots_foreign=1, incarnation=1, sequence=1)))
    assert told(x, pinned) == f"{Says.PINNED('y')}; {Says.NO_ROOM_BESIDE_OTHERS('y', 1, 1)}"
    x.hear("y", messages.Pong(2, msgspec.structs.replace(ACCEPTS, sequence=2)))
    assert told(x, pinned) is None
    x.rumour("y", MemberStatus.SUSPECT)
    assert told(x, pinned) == f"{Says.PINNED('y')}; y: suspect"
    x.rumour("y", MemberStatus.ALIVE, refutation=1)
    x.meet("y", drained=True)
    assert told(x, pinned) == f"{Says.PINNED('y')}; y: drained"
    for peer in ("a", "b"):
        x.meet(peer)
    assert told(x, spec(directory=b"/data"), directory_here=False) == "; ".join(
        (Says.NO_DIRECTORY_HERE("/data"), "y: drained", Says.NO_ROOM_NOW("z"), Says.NO_ROOM_NOW("a"), "and 1 more")
    )


def test_a_refusal_for_want_of_the_directory_names_the_flag_that_takes_it_along() -> None:
    x = Given()
    pinned = spec(directory=b"/data", placement=Placement(node="x"))
    assert x.submit(pinned, directory_here=False) == ["refuse NeverRunnable"]
    error = x.done(Answer).error
    assert isinstance(error, NeverRunnable)
    assert "--snapshot" in error.hint


def test_members_of_an_array_may_run_a_command_each() -> None:
    x = Given(peers=())
    each = ((b"first",), (b"second", b"2"), (b"third",))
    x.submit(spec(), indices=(1, 2, 3), each=each)
    assert [task.spec.argv for task in x.node.home.tasks.values()] == list(each)
    assert [task.task for task in x.node.home.tasks.values()] == ["x/1.1", "x/1.2", "x/1.3"]


def test_a_repeat_of_some_members_keeps_their_commands() -> None:
    x = Given(peers=())
    each = ((b"first",), (b"second",), (b"third",))
    x.submit(spec(), indices=(1, 3), each=each, retry_of="x/9")
    assert [task.spec.argv for task in x.node.home.tasks.values()] == [(b"first",), (b"third",)]


def told_of_directory(x: Given, node: str, code: str, directory: bytes = b"/data") -> list[str]:
    return x.hear(node, messages.DirectoryTold(directory, code=code))


def test_the_answer_names_the_nodes_that_lack_the_directory() -> None:
    x = Given(peers=("y", "z"))
    assert told_of_directory(x, "y", "directory") == []
    assert told_of_directory(x, "z", "") == []
    x.submit(spec(directory=b"/data"))
    assert x.done(Answer).reply["declining"] == {"y": Says.NO_DIRECTORY_THERE("/data")}
    assert "declining_told" not in x.done(Answer).reply
    x.submit(spec(directory=b"/other"))
    assert "declining" not in x.done(Answer).reply
    x.submit(spec(directory=b"/data", placement=Placement(exclude=("y",))))
    assert "declining" not in x.done(Answer).reply  # it could not run there anyway
    told_of_directory(x, "y", "")  # somebody has made it meanwhile
    x.submit(spec(directory=b"/data"))
    assert "declining" not in x.done(Answer).reply


def test_it_tells_whether_this_was_said_of_the_directory_lately() -> None:
    x = Given(peers=("y", "z"))

    def is_told() -> bool:
        x.submit(spec(directory=b"/data"))
        assert x.done(Answer).reply["declining"]
        return "declining_told" in x.done(Answer).reply

    told_of_directory(x, "y", "directory")
    assert [is_told(), is_told()] == [False, True]
    told_of_directory(x, "z", "directory")
    assert [is_told(), is_told()] == [False, True]
    x.after(3601.0)
    told_of_directory(x, "y", "directory")
    told_of_directory(x, "z", "directory")
    assert not is_told()


def test_a_directory_that_no_node_has_is_refused() -> None:
    x = Given(peers=("y",))
    nowhere = spec(directory=b"/nowhere")
    assert x.submit(nowhere, directory_here=False)[-1] != "refuse NeverRunnable"  # y has not been asked
    told_of_directory(x, "y", "directory", b"/nowhere")
    assert x.submit(nowhere, directory_here=False) == ["refuse NeverRunnable"]
    error = x.done(Answer).error
    assert isinstance(error, NeverRunnable)
    assert error.why == f"x: {Says.NO_DIRECTORY_HERE('/nowhere')}; y: {Says.NO_DIRECTORY_THERE('/nowhere')}"
    assert "-d DIR" in error.hint
    assert x.submit(nowhere, directory_here=False, waits_for_node=True)[-1] != "refuse NeverRunnable"
    assert x.submit(spec(directory=b"/nowhere", placement=Placement(node="y"))) == ["refuse NeverRunnable"]
    assert "-d DIR" in x.done(Answer).error.hint


def test_a_file_system_that_does_not_answer_may_answer_later() -> None:
    x = Given(peers=("y",))
    told_of_directory(x, "y", "stalled")
    assert x.submit(spec(directory=b"/data"), directory_here=False)[-1] != "refuse NeverRunnable"
    assert x.done(Answer).reply["declining"] == {"y": Says.NO_FILE_SYSTEM("/data")}


def test_a_task_runs_at_home_once_the_file_system_of_its_directory_answers() -> None:
    x = Given(peers=("y", "z"))
    x.submit(spec(directory=b"/data"), directory_here=False)
    x.submit(spec(directory=b"/other"), directory_here=False)
    did = x.when(events.DirectoryFound(b"/data"))
    assert "spawn 1" in did
    assert "spawn 2" not in did
    assert x.task(2).uid in x.node.home.stranded
    assert not x.task(1).cannot_here


def test_unfinished_tasks_are_counted_by_state_and_an_array_when_all_its_members_are_made() -> None:
    x = Given(peers=())
    x.submit()
    x.submit(held=True)
    x.submit(indices=tuple(range(TASKS_AT_A_TIME + 1)))
    assert x.node.home.unfinished() == {"leased": 1, "held": 1}
    x.finish(3)
    assert x.node.home.unfinished() == {"leased": 1, "held": 1, "queued": TASKS_AT_A_TIME + 1}
    x.when(events.CancelRequested(9, ("x/1",)))
    assert "leased" not in x.node.home.unfinished()
