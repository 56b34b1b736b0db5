"""The core of a node as one state machine: `handle` takes the current time and an event, and returns actions.

    node = Node(config, policies, identity, profile, random.Random(seed))
    actions = node.handle(now, event)

`Node` routes; the machines behind it decide: queue and ledger (which tasks may start here), runs (attempts that run
here), sharing (the policies), home (its own tasks), handoff and executor (the two sides of moving a task), membership
(the other nodes). None of them reads a clock, uses a random source other than the given one, or does I/O. Waiting is an
action (`SetTimer`), expiry an event.

Messages between nodes are authorised first: `TABLE` has a verdict for each kind of message and each role of a sender
(rule P3). The sender's identity is proven before a message gets here: on the peer link by its certificate, in gossip
and on the broker by the seal. All other content is a claim. A message that a role may not send is dropped, reported as
a security event, and changes nothing. Messages of streams, gossip and the broker have rows here, too.
"""

from __future__ import annotations

import enum
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, assert_never, get_args

import msgspec

from peerload.core.coordination.clients import ClientBinding, ClientRequests
from peerload.core.coordination.evacuation import NodeDrain, TaskEvacuation
from peerload.core.coordination.intake import Intake, SubmissionLog, TaskDispatch, submission_order
from peerload.core.coordination.runs import ResourceShortage, RunningTasks
from peerload.core.handoff.executor import ExecutorHandoff
from peerload.core.handoff.home import HomeHandoff
from peerload.core.membership.membership import Membership, OwnProfile
from peerload.core.resources.admission import Ledger
from peerload.core.sharing.sharing import Sharing
from peerload.core.state import BatchedRequests, CoreState
from peerload.core.tasks.eligibility import Eligibility
from peerload.core.tasks.home import Home
from peerload.core.tasks.queue import WaitingQueue
from peerload.core.work import HomePhase, HomeTask, RemotePhase, UntouchedMembers
from peerload.model import events, gossip, messages, metrics, rules, timers
from peerload.model.task import TaskState, submission_of, task_home

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from peerload.core.work import Offering, RemoteTask, Work
    from peerload.model.actions import Action, Row
    from peerload.model.config import CoreConfig
    from peerload.model.events import Instant
    from peerload.model.messages import Identity
    from peerload.model.resources import LoadReport, Profile
    from peerload.model.task import TaskRecord
    from peerload.policy.preset import PolicySet


TO_HOME = (
    messages.Accept,
    messages.Staging,
    messages.Decline,
    messages.Renew,
    messages.Result,
    messages.NotStarted,
    messages.Return,
    messages.Died,
)
"""Messages to the home of a task."""


class Node:
    """Core of one node. `handle` changes it; views for people may read the machines behind it."""

    def __init__(
        self, config: CoreConfig, policies: PolicySet, identity: Identity, profile: Profile, rng: random.Random
    ) -> None:
        """profile: with all details of its devices, of which only a part is advertised to other nodes."""
        mediator = _Mediator(self)
        if profile.power is not None:
            profile = msgspec.structs.replace(profile, power=config.limited(profile.power))
        self.ledger = Ledger(profile, config.gpu)
        if profile.devices:
            profile = self.ledger.profile = msgspec.structs.replace(profile, devices=self.ledger.devices.advertised())
        self.state = CoreState(config, policies, identity, profile, rng)
        self.own_profile = OwnProfile(self.state, self.ledger)
        self.queue = WaitingQueue(self.state, self.ledger)
        self.membership = Membership(self.state, mediator)
        self.home = Home(self.state, self.queue, mediator)
        self.handoff = HomeHandoff(self.state, self.queue, self.membership, self.home)
        self.executor = ExecutorHandoff(self.state, self.queue, self.ledger, mediator)
        self.authorisation = Authorisation(identity.node, self.home, self.executor)
        self.sharing = Sharing(
            self.state, self.queue, self.membership, self.home, self.handoff, self.executor, mediator
        )
        self.submissions = SubmissionLog(self.state, self.membership)
        self.batches = batches = BatchedRequests(self.state)
        self.eligibility = Eligibility(self.state, self.home, self.membership, batches)
        self.client_binding = ClientBinding(self.state, self.home, batches)
        self.dispatch = TaskDispatch(self.state, self.queue, self.membership, self.home, self.sharing, self.eligibility)
        self.intake = Intake(
            self.state, self.home, self.submissions, batches, self.eligibility, self.client_binding, self.dispatch
        )
        self.evacuation = TaskEvacuation(self.state, self.queue, self.membership, self.home, self.sharing.sender)
        self.shortage = ResourceShortage(
            self.state, self.own_profile, self.executor, self.sharing.information, self.evacuation
        )
        self.runs = RunningTasks(
            self.state, self.queue, self.membership, self.home, self.handoff, self.executor, self.shortage
        )
        self.drain = NodeDrain(
            self.state, self.ledger, self.executor, self.own_profile, self.sharing.information, self.evacuation
        )
        self.clients = ClientRequests(
            self.state, self.home, self.handoff.leases, self.membership, self.drain, batches, self.eligibility
        )

    def handle(self, now: Instant, event: events.Event) -> list[Action]:
        """Decide about one event → the actions, in order. Raises InvariantBroken only for a bug of ours.

        Order: the event goes to its machine. Then the machines settle in turn, from eligibility to sharing, because a
        change in one may affect the next. Each has an attribute that tells whether it needs to settle: most do not, and
        a node handles many events.
        """
        state, sharing, shortage = self.state, self.sharing, self.shortage
        state.now = now
        self.ledger.now_s = now.boot_s
        state.actions = []
        if isinstance(event, events.MessageReceived):  # the most frequent
            self._message(event)
        else:
            self._route(event)
        if self.eligibility.is_needed:
            self.eligibility.settle()
        self.runs.fill()
        if self.runs.has_freed:
            self._slot_freed()
        if self.runs.frozen.is_needed:
            self.runs.frozen.settle()
        if shortage.reason:
            shortage.settle()
        if state.profile.drained:
            self.drain.settle()
            self.evacuation.settle(f"{state.node} is drained")
        elif shortage.reason and (because := shortage.leaves_because):
            self.evacuation.settle(because)
        if sharing.sender.waiting:
            sharing.sender.take_turns()
        for machine in sharing.paced:
            machine.settle()
        sharing.information.settle()
        return state.actions

    def _slot_freed(self) -> None:
        """Ask other nodes for tasks after an attempt has ended and the next tasks here have started."""
        self.runs.has_freed = False
        self.sharing.completed()

    def shrink(self) -> None:
        """Rebuild the tables of tasks at their present size: a dictionary never shrinks by itself."""
        self.submissions.shrink()
        for table in self.home.tables():
            kept = list(table.items())
            table.clear()
            table.update(kept)

    def knows(self, key: str) -> bool:
        """True for the current attempt of an unfinished task of this home, and for a remote attempt here."""
        try:
            task = self.home.tasks.get(bytes.fromhex(key.partition("-")[0]))
        except ValueError:  # a foreign file in the spool
            return False
        return key in self.executor.remote_tasks or (task is not None and task.key == key)

    @property
    def has_work(self) -> bool:
        """True if a task of this home has not ended, a task of another home is here, or other programs keep slots busy:
        the machine must not sleep."""
        has_tasks = self.home.number or self.executor.remote_tasks or self.ledger.inbound
        return bool(has_tasks or self.ledger.foreign_slots)

    def holds(self, key: str) -> bool:
        """True if this attempt is to run here."""
        return self.runs.holds(key)

    def _route(self, event: events.Event) -> None:  # noqa: PLR0912 PLR0915 C901 -- one line an event
        match event:  # the frequent ones first
            case events.TaskEnded():
                if event.with_start:
                    self.runs.started(event.key, event.exit.started_at, is_over=True)
                self.runs.ended(event.key, event.exit)
            case events.Together():
                for one in event.events:
                    self._route(one)
            case events.MessageReceived():
                self._message(event)
            case events.TaskStarted():
                self.runs.started(event.key, event.started_at)
            case events.TimerExpired():
                self._timer(event.timer)
            case events.TaskSubmitted():
                self.intake.submitted(event)
            case events.GossipReceived() | events.LoopLagged():
                self.membership.gossip.handle(event)
                self._gossiped()
            case events.OutputArrived():
                self.handoff.output_arrived(event)
            case events.OutputWaits():
                self.runs.output_waits(event.key, event.why)
            case events.OutputComing():
                self.handoff.output_coming(event)
            case events.FilesStaged():
                self.executor.files_staged(event.key, event.code, event.why)
            case events.TaskLost():
                self.runs.lost(event.key, event.reason, never_started=event.never_started, shortage=event.shortage)
            case events.LoadSampled():
                if self.sharing.information.sampled(event):
                    self.sharing.completed()  # a slot is free, as after the end of a task
            case events.DirectoryFound():
                self.dispatch.directory_found(event.directory)
            case events.DevicesSampled():
                for key, device in self.ledger.devices.read(event.readings, event.at_s):
                    self.runs.strayed(key, device)
            case events.MpsReported():
                self.ledger.devices.mps_reported(event.device, event.why, is_fault=event.is_fault)
                self.runs.fill()
            case events.DevicesFound():
                self.own_profile.set_devices(event.devices)
                self.sharing.information.announce()
                self.dispatch.reevaluate_waiting()
                self.executor.give_unrunnable_back()
            case events.PeerMet():
                self._met(event, told_by_itself=not event.retained)
                self.eligibility.dependencies.ask(event.identity.node)
            case events.PeerUnreachable():
                self.membership.unreachable(event.node)
            case events.SendFailed():
                self._send_failed(event)
            case (
                events.CancelRequested()
                | events.HoldRequested()
                | events.ReleaseRequested()
                | events.PriorityRequested()
            ):
                self.clients.carry_out(event)
            case events.AttendRequested():
                self.client_binding.attend(event)
            case events.DetachRequested():
                self.client_binding.detach(event)
            case events.ClientGone():
                self.eligibility.remote_status.gone(event.client)
                self.client_binding.gone(event.client)
            case events.InputCut():
                self.client_binding.cut(event.uid)
            case events.InputCame():
                self.client_binding.input_came(event.uid)
            case events.EndAsked():
                self.runs.terminations.asked(event)
            case events.SignalRequested():
                self.clients.signal(event)
            case events.AgentStarted():
                self._restart(event)
            case events.TaskFrozen():
                self.runs.froze(event.key, frozen=event.frozen)
            case events.LauncherLost():
                self.own_profile.trouble("launcher", "")
                self.runs.launcher_lost(event.reason)
            case events.LauncherSilent():
                self.own_profile.trouble("launcher", "launcher does not answer" if event.is_silent else "")
                self.runs.launcher_silent(is_silent=event.is_silent)
            case events.LauncherReady():
                self.runs.launcher_ready(event.running, dict(event.ended), event.frozen)
            case events.SpeedMeasured():
                self.own_profile.change(speed=event.speed)
                self.sharing.information.announce()
            case events.PowerMeasured():
                self.own_profile.change(power=event.curve.limited_as(self.state.profile.power))
                self.sharing.information.announce()
            case events.BusChanged():
                self.membership.has_bus = event.connected
                if event.connected:
                    self.sharing.information.announce()
            case events.LoadPublished():
                self.sharing.information.report_sent(event.report)
            case events.GroupRequested():
                self.eligibility.groups.asked(event)
            case events.TasksFound():
                self.eligibility.remote_status.found(event)
            case events.DrainRequested():
                self.clients.drain(event)
            case events.EmptyAwaited():
                self.drain.await_empty(event.request)
            case events.EmptyAwaitedNoMore():
                self.drain.await_no_more(event.request)
            case events.UndrainRequested():
                self.clients.undrain(event)
            case events.ForgetRequested():
                self.clients.forget(event, self.executor)
            case events.NodeRevoked():
                self.membership.shut_out(event.node)
                self.executor.home_revoked(event.node)
            case events.RemoteCancelRequested():
                self.executor.cancel(event)
            case events.CoresEnforced():
                self.own_profile.change(enforces_cores=True)
                self.ledger.recount(self.queue.as_it_is())
            case events.PricesRead():
                self.dispatch.prices_changed(event.prices)
            case events.DiskRoomChanged():
                self.state.has_disk_room = event.has_room
                self.own_profile.trouble("disk", event.trouble)
                if event.has_room:
                    self.shortage.try_again()
                self.sharing.information.announce()
            case events.MachineSleeping():
                if event.is_suspended and self.has_work:
                    return
                self.state.is_asleep = True
                self.handoff.parking.go_away("this machine goes to sleep")
                if event.is_suspended:
                    self.membership.gossip.sleep()
            case events.MachineWoke():
                self.state.is_asleep = False
                self.membership.gossip.wake()
                self.handoff.parking.resume()
                self.handoff.leases.ask_all()
            case events.AgentStopping():
                self.handoff.parking.go_away("this agent stops")
                self.membership.leave()
            case _:
                assert_never(event)

    # -- restart -------------------------------------------------------------------------------------------------------

    def _restart(self, event: events.AgentStarted) -> None:
        """Restore every unfinished task of this home and every attempt of another home."""
        self.submissions.restore(event.counter)
        self.state.prices = event.prices
        self.executor.fences.restore(event.floors)
        self.state.attempts_from, self.state.attempts_up_to = event.attempts_from, event.attempts_up_to
        if event.drained is not None:
            self.drain.restore(event.drained)
        for run in event.past:
            self.state.history.learn(run.spec, run.exit)
        self.eligibility.restore(event.fates, event.groups)
        apart = [members for members in event.members if _is_doubtful(members, event)]
        together = [members for members in event.members if not _is_doubtful(members, event)]
        rows = chain(event.tasks, *(members.rows() for members in apart))
        queued = [task for row in rows if (task := self._restored(row)).record.state is TaskState.QUEUED]
        for record in event.executions:
            remote = self.executor.adopt(record)
            if remote.phase is not RemotePhase.ENDED:
                self.runs.restore(remote)
        works: list[HomeTask | UntouchedMembers] = [*queued, *map(self.intake.restored_members, together)]
        self.eligibility.dependencies.restored()  # counts the awaited tasks before any of them ends
        if event.commits_lost:
            self.handoff.leases.commits_lost(queued)
        self.runs.reconcile(event.running, dict(event.ended), event.frozen)
        for home, at in event.revoked:  # a new node of that name has started its tasks later
            self.executor.home_revoked(home, at)
        for work in sorted(works, key=submission_order) if together else works:
            self._restored_arrives(work)
        self.client_binding.restored()
        self.membership.waking.took_s.update(event.wake_s)
        self.membership.start(event.known, event.seeds, event.asleep, event.gone)
        self.state.set_timer_in(self.state.config.floor_kept_s, timers.Fences())

    def _restored_arrives(self, work: HomeTask | UntouchedMembers) -> None:
        if isinstance(work, UntouchedMembers):
            for _ in self.dispatch.arrive_together(work):
                pass
        elif work.phase in (HomePhase.HELD, HomePhase.OVER):
            return
        elif not self.handoff.lost_attempts.rest_after_restart(work):
            self.dispatch.arrives(work)

    def _restored(self, row: events.TaskRow) -> HomeTask:
        task = self.intake.restored(row)
        if task.phase is HomePhase.HERE:
            self.runs.restore(task)
        elif task.phase in (HomePhase.AWAY, HomePhase.UNKNOWN):
            self.handoff.leases.restored(task)
        return task

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _met(self, event: events.PeerMet, *, told_by_itself: bool) -> None:
        """Handle the introduction or return of a peer. ``told_by_itself``: over its own link, just now; a message
        through a broker does not prove that the peer is alive."""
        node = event.identity.node
        known = self.membership.gossip.anti_entropy.known.get(node)
        if event.retained and known is not None and known.boot == event.identity.boot:
            return  # a broker also keeps messages of dead nodes; this run is known, and gossip probes it
        is_new = self.membership.meet(
            event.identity,
            event.profile,
            event.report if not event.retained else None,  # of unknown age
            refutation=event.refutation,
            in_person=told_by_itself,
        )
        peer = self.membership.get(node)
        if told_by_itself and peer is not None and peer.identity == event.identity:  # not a late message
            self.handoff.leases.machine_changed(event.identity)
        if is_new:
            self._is_back(node)
        for identity in event.known:
            self.membership.gossip.anti_entropy.learn(identity)
        newest = self.membership.last_report(node)
        if newest is not None and newest.report is event.report:
            self.sharing.report_met(node, event.report)

    def _gossiped(self) -> None:
        for node in self.membership.back():
            self._is_back(node)

    def _is_back(self, node: str) -> None:
        """Settle open matters with a peer that has returned or restarted."""
        self.handoff.leases.peer_is_back(node)
        self.executor.home_is_back(node)
        self.sharing.sender.peer_met()

    def _send_failed(self, event: events.SendFailed) -> None:
        message = event.message
        self.membership.gossip.cut_off(event.dst)
        if isinstance(message, messages.Offer):
            self.handoff.offer_failed(event.dst, message.uid)
        elif isinstance(message, messages.Commit):
            task = self.home.tasks.get(message.uid)
            if task is not None:
                self.handoff.commit_never_left(task, message.attempt)

    def _message(self, event: events.MessageReceived) -> None:
        src = event.src
        message: Any = event.message
        if self.home.untouched:
            self._touch_named(message)
        if self.authorisation.verdict(src, message) is DROPPED:
            task = getattr(message, "task", "no task")
            self.state.count(
                metrics.labelled(metrics.MESSAGES_UNAUTHORIZED, type=str(type(message).__struct_config__.tag))
            )
            self.state.broken(
                rules.ROLES_CHECKED, src, f"{type(message).__struct_config__.tag} of {task} may not come from it"
            )
            return
        self.membership.heard_from(src)
        if self.handoff.parking.is_away and isinstance(message, TO_HOME):
            return  # for a home that has stopped; the sender repeats it
        route = self._ROUTES.get(type(message))
        if route is None:
            self.state.count(metrics.MESSAGES_UNKNOWN)
        else:
            route(self, event)

    def _terminated(self, event: events.MessageReceived) -> Any:  # noqa: ANN401 -- one of `TerminationMessage`
        """Notify clients that wait for the end of an attempt. → the message that proves it."""
        message: Any = event.message
        self.runs.terminations.message_received(event.src, message)
        return message

    def _not_started(self, event: events.MessageReceived) -> None:
        message = self._terminated(event)
        to = self.handoff.not_started_received(event.src, message)
        if to is not None:
            self.dispatch.returned(message, to)

    def _pong_received(self, src: str, pong: messages.Pong) -> None:
        self.membership.gossip.detector.acked(src, pong.sequence, over_link=True)
        self.sharing.report_received(src, pong.report)

    def _synced(self, src: str, sync: messages.Sync) -> None:
        self.membership.gossip.synced(src, sync)
        self._gossiped()

    def _profile_told(self, src: str, told: messages.ProfileTold) -> None:
        if self.membership.profiles.received(src, told):
            self.sharing.sender.peer_met()

    def _state_told(self, src: str, message: messages.State) -> None:
        if message.identity.node == message.profile.node == src:
            met = events.PeerMet(message.identity, message.profile, message.report)
            self._met(met, told_by_itself=False)
        else:
            self.state.count(metrics.STATES_FORGED)
            self.state.broken(rules.ROLES_CHECKED, src, "a state report in another node's name")

    _ROUTES: ClassVar[Mapping[type[Any], Callable[[Node, Any], object]]] = {
        # advice
        messages.ProbeRequest: lambda self, event: self.sharing.admission.probe_received(event.src, event.message),
        messages.ProbeReply: lambda self, event: self.sharing.sender.reply_received(event.src, event.message),
        messages.GiveRequest: lambda self, event: self.sharing.receiver.give_requested(event.src, event.message),
        messages.GiveReply: lambda self, event: self.sharing.receiver.give_replied(event.src, event.message),
        messages.Footprint: lambda self, event: self.sharing.footprint_received(event.src, event.message),
        messages.StateRequest: lambda self, event: self.sharing.requests.request_received(event.src, event.message),
        messages.StateAnswer: lambda self, event: self.sharing.answer_received(event.src, event.message),
        messages.Enough: lambda self, event: self.sharing.requests.enough_received(event.src, event.message),
        messages.PairRequest: lambda self, event: self.sharing.pairing.request_received(event.src, event.message),
        messages.PairReply: lambda self, event: self.sharing.pairing.reply_received(event.src, event.message),
        messages.Unpair: lambda self, event: self.sharing.pairing.unpair_received(event.src, event.message),
        messages.State: lambda self, event: self._state_told(event.src, event.message),
        # home → executor
        messages.Offer: lambda self, event: self.executor.offer_received(
            event.src,
            event.message,
            directory_here=event.directory_here,
            refused=event.refused,
            stalled=event.stalled,
        ),
        messages.Commit: lambda self, event: self.executor.commit_received(event.src, event.message),
        messages.RenewOk: lambda self, event: self.executor.renewed(event.src, event.message),
        messages.Park: lambda self, event: self.executor.park_received(event.src, event.message),
        messages.Revoke: lambda self, event: self.executor.revoke_received(event.src, event.message),
        messages.Signal: lambda self, event: self.executor.signal_received(event.src, event.message),
        messages.Query: lambda self, event: self.executor.query_received(event.src, event.message),
        messages.ResultAck: lambda self, event: self.executor.ack_received(event.src, event.message),
        # executor → home
        messages.Accept: lambda self, event: self.handoff.accept_received(event.src, event.message),
        messages.Staging: lambda self, event: self.handoff.staging_received(event.src, event.message),
        messages.Decline: lambda self, event: self._declined(event.src, event.message),
        messages.Renew: lambda self, event: self.handoff.leases.renew_received(event.src, event.message),
        messages.Result: lambda self, event: self.handoff.result_received(event.src, self._terminated(event)),
        messages.Died: lambda self, event: self.handoff.died_received(event.src, self._terminated(event)),
        messages.NotStarted: lambda self, event: self._not_started(event),
        messages.Return: lambda self, event: self._not_started(event),
        # home → home
        messages.AwaitTasks: lambda self, event: self.eligibility.remote_status.asked(event.src, event.message),
        messages.TasksTold: lambda self, event: self.eligibility.remote_status.status_received(
            event.src, event.message
        ),
        # membership
        messages.Ping: lambda self, event: self.membership.pinged(event.src, event.message, self.sharing.report()),
        messages.Pong: lambda self, event: self._pong_received(event.src, event.message),
        messages.Sync: lambda self, event: self._synced(event.src, event.message),
        messages.ProfileRequest: lambda self, event: self.membership.profiles.requested(event.src, event.message),
        messages.ProfileTold: lambda self, event: self._profile_told(event.src, event.message),
        messages.DirectoryTold: lambda self, event: self.membership.directory_answered(event.src, event.message),
        messages.Wake: lambda self, event: self.membership.waking.wake_requested(event.message.node),
        messages.Leaving: lambda self, event: self.membership.left(event.src),
    }
    """Each kind of message with its machine; the agent handles all others. A table, because a simulated node receives
    thousands a second, and forty `case` clauses in turn take as long as the handling."""

    def _touch_named(self, message: Any) -> None:  # noqa: ANN401 -- any message may name tasks
        """Make the tasks of this home that a message names tasks of their own. After a restore of the database from a
        copy, an untouched task may have an attempt elsewhere."""
        for named in (message, *getattr(message, "renewals", ())):
            task = getattr(named, "task", "")
            if isinstance(task, str) and "." in task and task_home(task) == self.state.node:
                self.home.member(task)

    def _declined(self, src: str, message: messages.Decline) -> None:
        if message.code in messages.DECLINES_LASTING:
            task = self.home.tasks.get(message.uid)
            if task is not None:
                self.membership.remember_decline(src, message.code, messages.decline_subject(message.code, task.spec))
        self.membership.report_received(src, message.report)
        self.handoff.decline_received(src, message)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _timer(self, timer: timers.Timer) -> None:  # noqa: PLR0912 PLR0915 C901 -- one line a timer
        match timer:  # the frequent ones first
            case timers.ProbeTimeout():
                self.sharing.probe_timed_out(timer.number)
            case timers.RenewalDue():
                self.executor.renew_leases()
            case timers.StartsTold():
                self.executor.leases.tell_starts()
            case timers.GossipDue():
                self.membership.timer(timer.kind, timer.subject)
                self._gossiped()
            case timers.WakeTimeout():
                self.membership.waking.overdue(timer.node)
            case timers.RegionSettled():
                self.sharing.information.region_held()
            case timers.Period():
                self.sharing.information.period_passed()
            case timers.Announcement():
                self.sharing.information.announce_again()
            case timers.AnswerDue():
                self.sharing.requests.answer(timer.key)
            case timers.Pair():
                self.sharing.pairing.ask()
            case timers.Paired():
                self.sharing.pairing.timed_out()
            case timers.RetryDue():
                self.sharing.receiver.retry()
            case timers.Stranded():
                self.sharing.sender.ask_again(timer.uid)
            case timers.Inbound():
                self.sharing.donor.inbound_timed_out(timer.uid)
            case timers.ReservationTimeout():
                self.executor.not_committed(timer.key)
            case timers.Fences():
                self.executor.fences.expire()
            case timers.ResultTimeout():
                self.executor.results.repeat(timer.key)
            case timers.OfferTimeout() | timers.QueryDue() | timers.Lease() | timers.Rest() | timers.ClientTimeout():
                task = self.home.tasks.get(timer.uid)
                if task is not None:
                    self._home_timer(timer, task)
            case timers.Batch():
                self.batches.go_on(timer.number)
            case timers.TimeLimit():
                self.runs.stop(timer.key)
            case timers.Kill():
                self.runs.kill(timer.key)
            case timers.AwaitedQueryDue():
                self.eligibility.dependencies.ask(timer.home)
            case timers.RemoteStatus():
                self.eligibility.remote_status.timed_out(timer.number)
            case timers.Devices():
                self.runs.devices_due()
            case timers.Shortage():
                self.shortage.try_again()
            case timers.EligibilityDue() | timers.FrozenTimeout():
                pass  # the machines settle after each event, so nothing else is needed
            case _:
                assert_never(timer)

    def _home_timer(
        self,
        timer: timers.OfferTimeout | timers.QueryDue | timers.Lease | timers.Rest | timers.ClientTimeout,
        task: HomeTask,
    ) -> None:
        match timer:
            case timers.OfferTimeout():
                self.handoff.offer_failed(task.offered_to, task.uid)
            case timers.QueryDue():
                self.handoff.leases.ask(task)
            case timers.Lease():
                self.handoff.leases.ran_out(task)
            case timers.Rest():
                self.home.rested(task)
            case timers.ClientTimeout():
                self.client_binding.timed_out(task)
            case _:
                assert_never(timer)


def _is_doubtful(members: events.MembersRow, event: events.AgentStarted) -> bool:
    """True if each member needs a check: another node may have it, or this one cannot run it."""
    is_older = submission_of(members.record.task) <= event.attempts_up_to
    return event.commits_lost or is_older or not members.directory_here


class _Mediator:
    """Passes the calls of `Mediator` to the machines of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def task_arrives(self, task: HomeTask) -> None:
        self._node.dispatch.arrives(task)

    def task_placed(self, task: HomeTask, node: str) -> None:
        self._node.sharing.sender.placed(task, node)

    def task_kept_back(self, task: HomeTask) -> None:
        self._node.eligibility.groups.release(task)

    def task_left_gate(self, task: HomeTask) -> None:
        self._node.eligibility.groups.waits_no_more(task)

    def rows_at_end(self, record: TaskRecord) -> Sequence[Row]:
        return self._node.eligibility.dependencies.ending(record)

    def task_ended(self, record: TaskRecord) -> None:
        self._node.eligibility.remote_status.ended(record)

    def is_awaited(self, array: str) -> bool:
        return self._node.eligibility.is_awaited(array)

    def task_left(self, task: HomeTask) -> None:
        node, sender = self._node, self._node.sharing.sender
        node.eligibility.left(task)
        node.client_binding.left(task)
        if task.record.node != node.state.node:
            sender.room_freed(task.record.node)
        if sender.places_all:
            sender.place_next()

    def submission_checked(self, event: events.TaskSubmitted) -> None:
        self._node.intake.accepted(event)

    def offer_declined(self, task: HomeTask, offering: Offering, reason: str) -> None:
        self._node.sharing.sender.offer_declined(task, offering, reason)

    def may_regain_lease(self, task: HomeTask) -> bool:
        return self._node.eligibility.groups.regains(task)

    def is_own_task(self, uid: bytes) -> bool:
        return uid in self._node.home.tasks

    def is_ending(self, key: str) -> bool:
        return self._node.runs.is_ending(key)

    def accepts_offer(self, offer: messages.Offer) -> bool:
        return self._node.sharing.admission.accepts_offer(offer)

    def remote_arrived(self, remote: RemoteTask) -> None:
        self._node.sharing.arrived(remote)
        if node := self._node.sharing.sender.next_node(remote):
            self._node.executor.give_back(remote, f"{self._node.state.node} passes it on", to=node)

    def running_tasks(self) -> Iterable[Work]:
        return self._node.runs.works()

    def own_report(self) -> LoadReport:
        return self._node.sharing.report()

    def ask_for_states(self, report: LoadReport) -> None:
        self._node.sharing.requests.ask(report)

    def report_met(self, node: str, report: LoadReport) -> None:
        self._node.sharing.report_met(node, report)

    def peer_died(self, node: str) -> None:
        self._node.handoff.leases.peer_died(node)

    def peer_came_back_older(self, node: str) -> None:
        self._node.handoff.peer_is_older(node)


class Role(enum.StrEnum):
    """Role of a sender towards the task or attempt of its message; towards this node if the message names none."""

    HOME = "its home"
    HOLDER = "the node it is leased, or offered, to"
    FORMER = "a node that had it before, or may have had"
    MEMBER = "any other member"
    SELF = "this node itself"
    REVOKED = "a member that was shut out"
    STRANGER = "anybody else"


class AuthorisationVerdict(enum.StrEnum):
    """Verdict on a message."""

    TAKEN = "taken"
    PASSED_OVER = "passed over"
    DROPPED = "dropped"


TAKEN, PASSED_OVER, DROPPED = AuthorisationVerdict.TAKEN, AuthorisationVerdict.PASSED_OVER, AuthorisationVerdict.DROPPED
"""TAKEN: its content is evaluated. PASSED_OVER: it is ignored, perhaps because it is late, which is no fault; the
sender may get the current state. DROPPED: a correct node never sends it; a security event."""

VerdictsByRole = dict[Role, AuthorisationVerdict]
_NOBODY: VerdictsByRole = dict.fromkeys(Role, DROPPED)
ANY_MEMBER: VerdictsByRole = _NOBODY | {Role.HOME: TAKEN, Role.HOLDER: TAKEN, Role.FORMER: TAKEN, Role.MEMBER: TAKEN}
"""Advice and membership: these messages move no task."""
ITS_HOME: VerdictsByRole = _NOBODY | {Role.HOME: TAKEN}
ITS_HOLDER: VerdictsByRole = _NOBODY | {Role.HOLDER: TAKEN, Role.FORMER: PASSED_OVER, Role.MEMBER: PASSED_OVER}
"""Nodes that gave an attempt back are not remembered, so their late messages look like those of any member."""
MAY_BE_BACK: VerdictsByRole = ITS_HOLDER | {Role.FORMER: TAKEN}
"""A node that was lost, and still has a task that no other node was given since (R11)."""
HAD_IT: VerdictsByRole = _NOBODY | {Role.HOLDER: TAKEN, Role.FORMER: TAKEN}
"""The first result of any attempt that was granted counts (R9)."""
WHO_WAS_ASKED: VerdictsByRole = ANY_MEMBER
"""Over a stream that this node has opened to that member; over any other stream the message closes the stream."""

TABLE: Mapping[type[Any], VerdictsByRole] = {
    # Membership and advice. The CA signs its statements, WAKE wakes a sleeping member at most once a second, and
    # DIAL_BACK makes a connection to the sender, who could have made it.
    **dict.fromkeys(get_args(messages.Membership | messages.Advice | gossip.GossipMessage), ANY_MEMBER),
    # home → executor, except messages between homes about tasks of one of them
    **dict.fromkeys(get_args(messages.Ownership), ITS_HOME),
    messages.AwaitTasks: ANY_MEMBER,
    messages.TasksTold: ANY_MEMBER,
    # executor → home
    **dict.fromkeys(TO_HOME, ITS_HOLDER),
    messages.Renew: MAY_BE_BACK,
    messages.Result: HAD_IT,
    # streams
    **dict.fromkeys(get_args(messages.Output | messages.Input | messages.Files | messages.Forwarding), WHO_WAS_ASKED),
    messages.OutputRequest: ITS_HOME,
    messages.InputRequest: ITS_HOLDER,
    messages.BlocksRequest: ANY_MEMBER,  # a sender that knows a block's digest has its manifest
    messages.Forward: ANY_MEMBER,  # agent/control/authorization.py authorizes its user
    messages.ForwardStop: ANY_MEMBER,
}


class Authorisation:
    """Authorisation of messages by table. ``executor`` knows the tasks of other homes here, ``home`` the tasks of this
    home elsewhere."""

    def __init__(self, node: str, home: Home, executor: ExecutorHandoff) -> None:
        self._node = node
        self._home = home
        self._executor = executor

    def verdict(self, src: str, message: Any) -> AuthorisationVerdict:  # noqa: ANN401 -- any of the table
        """The verdict on this message of this member. For a message about several attempts it is the best of their
        verdicts, because the handler checks each of them."""
        row = TABLE[type(message)]
        if src == self._node:
            return row[Role.SELF]
        if row is ANY_MEMBER:
            return row[Role.MEMBER]
        return row[self._as_home(src, message) if row is ITS_HOME else self._as_holder(src, message)]

    def _as_home(self, src: str, message: Any) -> Role:  # noqa: ANN401 -- as above
        """The role of src towards an attempt that is here or will come here. Its home is the node that committed it;
        for an unknown attempt, the node in its id."""
        if isinstance(message, messages.RenewOk | messages.Park):
            items = message.extensions if isinstance(message, messages.RenewOk) else message.parkings
            known = [remote for item in items if (remote := self._executor.by_uid.get(item.uid)) is not None]
            return Role.MEMBER if known and all(remote.home != src for remote in known) else Role.HOME
        remote = self._executor.by_uid.get(message.uid)
        home = remote.home if remote is not None else task_home(message.task)
        return Role.HOME if home == src else Role.MEMBER

    def _as_holder(self, src: str, message: Any) -> Role:  # noqa: ANN401 -- as above
        """The role of src towards a task of this home. Any node may have had a task that has ended or is unknown."""
        if isinstance(message, messages.Renew):
            return Role.FORMER  # each renewal is for a different task
        task = self._home.tasks.get(message.uid)
        if task is None or task.phase is HomePhase.OVER or message.attempt > self._home.next_attempt(task):
            return Role.FORMER
        record = task.record
        if src in (record.node, task.offered_to):
            return Role.HOLDER
        is_former = (
            src == record.last_node or src in record.lost_on or any(grant.node == src for grant in record.grants)
        )
        is_former = is_former or message.attempt > record.attempt or self._home.may_be_lost(task, message.attempt)
        return Role.FORMER if is_former else Role.MEMBER
