"""Tasks as JSON objects for clients (keys: docs/json.md); nodes are in `views/node.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.accounts import output_path
from peerload.agent.launcher.client import TRACEPARENT, TRACEPARENT_PARTS, child_traceparent
from peerload.agent.runtime import now
from peerload.agent.store.maintenance import jobs_of
from peerload.core.estimates import ANY_MODEL, RUNS_KNOWN_MIN
from peerload.core.explain import uncollected_reason
from peerload.core.membership.peers import PeerState
from peerload.core.work import HomePhase, RemotePhase
from peerload.model.resources import GPU
from peerload.model.task import Staged, TaskRecord, TaskState, execution_key, order_of, variables_of
from peerload.text.tasks import instant_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.control.authorization import Authorization, Principal
    from peerload.agent.output.spool import Spool
    from peerload.agent.store.reader import ArrayRow, StoreReader
    from peerload.agent.store.schema import Damage, RecordedEvent
    from peerload.core.estimates import DurationEstimates
    from peerload.core.node import Node
    from peerload.core.work import HomeTask, RemoteTask
    from peerload.model.events import Instant
    from peerload.model.resources import Device, ResourceRequest
    from peerload.model.task import Exit, SubmitOptions, TaskSpec


ERROR_TAIL_BYTES = 1024
"""Size of the tail of stderr in which its last line is searched."""
ERROR_LINE_CHARS_MAX = 200
_STATES = {state: state.value for state in TaskState}
"""Values of the states; `.value` of an enum is slow in long lists."""


def text(raw: bytes) -> str:
    """Decode bytes for messages and JSON; invalid UTF-8 is escaped."""
    return raw.decode("utf-8", "backslashreplace")


def task_object(
    record: TaskRecord, spec: TaskSpec, user: str, *, running_at: float = 0.0, devices: Sequence[str] = ()
) -> dict[str, object]:
    """Task object as `ls` lists it. ``running_at``: first seen running at this time (Unix s), 0 = not; devices: names of
    its devices."""
    exit_ = record.exit
    is_running = record.state is TaskState.LEASED and running_at
    state = "running" if is_running else _STATES[record.state]
    started_at = record.started_at or running_at
    request = spec.request
    return {
        "id": record.task,
        "name": spec.name or text(spec.argv[0]).rpartition("/")[2],
        "user": user,
        "state": state,
        "node": record.node or None,
        "home": record.task.partition("/")[0],
        "argv": [text(word) for word in spec.argv],
        "cpus": request.cpus,
        "mem_bytes": request.mem_bytes,
        "gpus": gpus_asked(request),
        "attempt": record.attempt,
        "migrations": record.migrations,
        "submitted_at": record.submitted_at,
        "started_at": started_at or None,
        "ended_at": record.ended_at or None,
        "exit_code": exit_.exit_code if exit_ is not None else None,
        "signal": exit_.signal if exit_ is not None and exit_.signal else None,
        "reason": ": ".join([f"started on {record.node}", *([", ".join(devices)] if devices else [])])
        if is_running
        else record.reason,
        "device_names": list(devices),
        "retry_of": record.retry_of or None,
        "unreachable_since": None,
    }


def gpus_asked(request: ResourceRequest) -> float:
    """The number of GPUs that a task requests, or the fraction of one."""
    return request.gpus * request.gpu_fraction if request.gpu_fraction < 1 else request.gpus


def task_here(node: Node, record: TaskRecord, spec: TaskSpec, user: str) -> dict[str, object]:
    """A task of this home, as `ls` lists it, with its live state: whether it runs, and on which devices."""
    task = node.home.tasks.get(record.uid)
    names = device_names(node, record.node, devices_of(node, record))
    fields = task_object(record, spec, user, running_at=running_since(task, record), devices=names)
    waits = uncollected_reason(task) or deferral_text(node, task) or _environment_text(task) if task is not None else ""
    return fields | {"reason": waits} if waits else fields


def _environment_text(task: HomeTask) -> str:
    """Reason why a task that has room here does not run yet: its environment comes first; "" for other tasks."""
    if task.phase is not HomePhase.HERE or task.spec.lock is None or task.running_at:
        return ""
    return f"waits for its environment: {task.spec.lock.name}"


def deferral_text(node: Node, task: HomeTask) -> str:
    """Reason and end of a deferral for cheaper energy, in words; "" for a task that is not deferred."""
    found = node.dispatch.deferral(task)
    if found is None:
        return ""
    start_s, price, price_now = found
    now = "the price now is unknown" if price_now is None else f"it is {price_now:g} now"
    return f"put off until {instant_text(start_s)}, when energy costs {price:g} a kWh; {now}"


def unreachable_since(node: Node, record: TaskRecord, now: Instant) -> float | None:
    """Time of the last message from the node of a leased task (Unix s), if it is suspected or dead; else None."""
    peer = node.membership.get(record.node)
    if peer is None or not is_unreachable(node, record):
        return None
    return now.wall_s - max(now.boot_s - peer.heard_s, 0.0)


def is_unreachable(node: Node, record: TaskRecord) -> bool:
    """True if the task is leased to another node that is suspected or dead."""
    if record.state is not TaskState.LEASED or record.node == node.state.node:
        return False
    peer = node.membership.get(record.node)
    return peer is not None and peer.state in (PeerState.SUSPECT, PeerState.DEAD)


def array_row(first: dict[str, object], row: ArrayRow) -> dict[str, object]:
    """The fields of a row for several members of an array that differ from those of its first member."""
    is_over = first["state"] in (TaskState.DONE, TaskState.CANCELLED, TaskState.FAILED)
    is_same = first["state"] == TaskState.DONE or (first["state"] == TaskState.FAILED and row.has_reason)
    line = {"error_line": f"{first['id']}: {first['error_line']}"} if first.get("error_line") else {}
    return line | {
        "members": {"spans": row.spans, "count": row.count, "nodes": row.nodes},
        "node": first["node"] if row.has_node else None,
        "started_at": row.started_at or None,
        "ended_at": row.ended_at or None,
        "exit_code": first["exit_code"] if is_same else None,
        "signal": first["signal"] if is_same else None,
        "reason": first["reason"] if row.has_reason or not is_over else "",
    }


def running_since(task: HomeTask | None, record: TaskRecord) -> float:
    """Time at which the current attempt was first seen running (Unix s), 0 = not running. ``task``: the unfinished task,
    if any."""
    return task.running_at if task is not None and task.record.attempt == record.attempt else 0.0


def submit_options_object(terms: SubmitOptions, record: TaskRecord) -> dict[str, object]:
    """The submit options of a task, for `show`, with its failures so far."""
    return {
        "group": terms.group or None,
        "tags": dict(tag.split("=", 1) for tag in terms.tags),
        "after": list(terms.after),
        "after_ok": list(terms.after_ok),
        "retries": terms.retries,
        "failures": record.failures,
        "start_by": terms.start_by or None,
    }


def why_waiting(node: Node, task: HomeTask | None, record: TaskRecord) -> str:
    """Short reason why a queued task waits; `why` has more details."""
    if task is None:
        return record.reason
    if task.phase is HomePhase.GATED:
        return node.eligibility.reason(task) or record.reason
    if task.phase is HomePhase.RESTING:
        return deferral_text(node, task) or record.reason
    if task.stranded_because:
        return f"waits for another node: {task.stranded_because}"
    if task.phase is HomePhase.OFFERED:
        staging = task.offering.staging if task.offering is not None else None
        if staging is None:
            return f"offered to {task.offered_to}"
        if staging.builds:
            return f"offered to {task.offered_to}: its environment is being built"
        percent = 100 * staging.done_bytes // max(staging.size_bytes, 1)
        return f"offered to {task.offered_to}: its files are on their way, {percent} %"
    return "waits for room"


def ended_object(record: TaskRecord) -> dict[str, object]:
    """The end of a task, in the form of `wait` and `output`."""
    exit_ = record.exit
    return {
        "id": record.task,
        "state": record.state.value,
        "exit_code": exit_.exit_code if exit_ is not None else None,
        "signal": exit_.signal if exit_ is not None and exit_.signal else None,
        "node": record.node or None,
        "reason": record.reason,
        "out_of": (exit_.out_of or None) if exit_ is not None else None,
        "missing_bytes": exit_.missing_bytes if exit_ is not None else 0,
        "kept_beside": exit_.staged.conflicts if exit_ is not None and exit_.staged is not None else 0,
    }


def error_line(spool: Spool, record: TaskRecord) -> dict[str, object]:
    """The last line of stderr of a failed task, if any; nothing for other tasks."""
    if record.state is not TaskState.FAILED or record.exit is None or not record.exit.stderr_bytes:
        return {}
    tail = spool.read_tail(execution_key(record.uid, record.attempt), 2, ERROR_TAIL_BYTES)
    lines = text(tail).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"error_line": last[:ERROR_LINE_CHARS_MAX]} if last else {}


def devices_of(node: Node, record: TaskRecord) -> tuple[str, ...]:
    """The ids of the devices of a task, or those that it had at its end."""
    task = node.home.tasks.get(record.uid)
    if record.devices or task is None or task.record.attempt != record.attempt:
        return record.devices
    return task.devices if record.node else ()


def device_names(node: Node, where: str, ids: Sequence[str]) -> list[str]:
    """Names of devices of a node, such as ``GPU 1 (RTX 4090)``; their ids if the node is not known."""
    if not ids:
        return []
    peer = node.membership.get(where)
    known = {device.id: device for device in peer.profile.devices} if peer is not None else {}
    if where == node.state.node:
        known = {state.id: state.device for state in node.ledger.devices.states.values()}
    return [_device_name(known[name]) if name in known else name for name in ids]


def _device_name(device: Device) -> str:
    if device.kind != GPU:
        return f"{device.kind} {device.name}"
    return f"GPU {device.index}" + (f" ({device.model})" if device.model else "")


def detail_object(spec: TaskSpec, record: TaskRecord, devices: Sequence[str] = ()) -> dict[str, object]:
    """The fields that `show` adds. devices: the ids of its devices."""
    placement = spec.placement
    exit_ = record.exit
    return {
        "directory": text(spec.directory),
        "takes_input": spec.takes_input,
        "terminal": None if spec.terminal is None else [spec.terminal.rows, spec.terminal.columns],
        "priority": spec.priority,
        "time_limit_s": spec.time_limit_s,
        "est_s": spec.est_s or None,
        "prefer": spec.prefer or None,
        "overcommit": spec.request.overcommit,
        "guarantee": spec.guarantee.value,
        "lease": "auto" if spec.lease_auto else spec.lease_s or None,
        "parked": record.parked_ts > 0,
        "lost": record.losses,
        "lost_on": list(record.lost_on),
        **device_request_object(spec.request),
        "devices": list(devices),
        "placement": {
            "node": placement.node,
            "exclude": list(placement.exclude),
            "labels": list(placement.labels),
            "local": placement.local,
            "migrations_max": placement.migrations_max,
        },
        "memory_retries": record.memory_retries,
        "usage": _usage(record),
        "out_of": (exit_.out_of or None) if exit_ is not None else None,
        "stdout_bytes": exit_.stdout_bytes if exit_ is not None else None,
        "stderr_bytes": exit_.stderr_bytes if exit_ is not None else None,
        **travelling(spec, exit_),
        "trace": _trace(spec, record),
    }


def _trace(spec: TaskSpec, record: TaskRecord) -> dict[str, object] | None:
    """The trace in which a task was submitted, and the span of its attempt; None without a trace."""
    if TRACEPARENT not in spec.environment:
        return None
    given = variables_of(spec.environment).get(TRACEPARENT, b"")
    own = child_traceparent(given, execution_key(record.uid, record.attempt)).split("-")
    if len(own) != TRACEPARENT_PARTS:
        return None
    parent = given.decode("ascii").split("-")[2]
    return {"trace_id": own[1], "parent_id": parent, "span_id": own[2] if record.attempt else None}


def travelling(spec: TaskSpec, exit_: Exit | None) -> dict[str, object]:
    """The files of a task: its staged files; after its end, the fetched files and the outputs that came home; and the lock
    of its environment."""
    lock = spec.lock.name if spec.lock is not None else None
    if spec.files is None:
        return {"files": None, "lock": lock}
    staged = exit_.staged if exit_ is not None and exit_.staged is not None else Staged()
    files = {
        "snapshot": spec.files.manifest.hex(),
        "bytes": spec.files.size_bytes,
        "count": spec.files.count,
        "fetched_bytes": staged.in_bytes,
        "staging_s": staged.in_s,
        "returned_bytes": staged.out_bytes,
        "returned": staged.out_count,
        "kept_beside": staged.conflicts,
    }
    return {"files": files, "lock": lock}


def output_gone_object(store: StoreReader, record: TaskRecord) -> dict[str, object]:
    """Time and reason of the removal of an ended task's output."""
    gone = store.output_gone(record.task) if record.ended_at else None
    at, why = gone or (None, None)
    return {"output_gone_at": at, "output_gone_why": why}


def gpu_wishes(spec: TaskSpec) -> dict[str, object]:
    """The GPUs that a task prefers, and the mode of waiting for them."""
    return {"gpu_prefer": list(spec.request.gpu_prefer), "gpu_wait": spec.request.gpu_wait.value}


def device_request_object(request: ResourceRequest) -> dict[str, object]:
    """The device request of a task, besides the number of GPUs."""
    return {
        "gpu_mem_bytes": request.gpu_mem_bytes,
        "gpu_prefer": list(request.gpu_prefer),
        "gpu_wait": request.gpu_wait.value,
        "gpu_wait_s_max": request.gpu_wait_s_max,
        "gpu_share": request.gpu_share.value,
        "gpu_pct": request.gpu_pct or None,
        "gpu_oom_retries": request.gpu_oom_retries,
        "other_devices": dict(request.devices),
    }


def learned_gpu_memory(history: DurationEstimates, spec: TaskSpec) -> dict[str, object]:
    """GPU memory that earlier runs of this command needed, in bytes a GPU, and their number; null and 0 if unknown."""
    runs = history.gpu.past(history.keys(spec), ANY_MODEL, RUNS_KNOWN_MIN) if spec.request.gpus else None
    return {
        "gpu_mem_learned_bytes": runs.need_bytes if runs else None,
        "gpu_runs_learned": len(runs) if runs else 0,
    }


def usage_object(record: TaskRecord) -> dict[str, object]:
    """The fields that `history` adds. duration_s: run time of its process, None if it never ran; waited_s: from
    submission to start, or to end."""
    ran = record.ended_at > record.started_at > 0
    until = record.started_at if ran else record.ended_at
    return {
        "duration_s": record.ended_at - record.started_at if ran else None,
        "waited_s": max(until - record.submitted_at, 0.0),
        "usage": _usage(record),
    }


def history_step(event: RecordedEvent) -> dict[str, object]:
    return {
        "at": event.at,
        "state": event.state,
        "reason": event.reason,
        "attempt": event.attempt,
        "node": event.node or None,
    }


def event_object(event: RecordedEvent, record: TaskRecord | None = None) -> dict[str, object]:
    """Event object as `events` lists it. record: of the task whose end it is."""
    return {
        "number": event.number,
        "at": event.at,
        "what": event.what,
        "state": event.state,
        "task": event.task or None,
        "attempt": event.attempt or None,
        "node": event.node or None,
        "reason": event.reason,
        "usage": None if record is None else _usage(record),
    }


def damaged_objects(rows: Sequence[Damage]) -> list[dict[str, object]]:
    return [{"id": row.task, "why": row.why} for row in rows]


def _usage(record: TaskRecord) -> dict[str, object]:
    """Usage of the last attempt. None, not 0, while its processes run, or if it never ran."""
    used = record.exit.usage if record.exit is not None else record.usage
    return {
        "user_s": used and used.user_s,
        "system_s": used and used.system_s,
        "memory_bytes_max": used and used.memory_bytes_max,
        "gpu_memory_bytes_max": used and used.gpu_memory_bytes_max,
        "gpu_model": used and (used.gpu_model or None),
        "joules": used and used.joules,
        "energy_quality": used and used.energy_quality,
        "energy_scope": used and (used.energy_scope or None),
    }


def completion_object(
    store: StoreReader, record: TaskRecord, spec: TaskSpec, terms: SubmitOptions
) -> dict[str, object]:
    """Output files, notification command, and pending jobs. The file names are final when the task has
    ended."""
    counter, member = order_of(record.task)
    node = record.node or record.last_node
    files = [
        text(output_path(pattern, counter, member, spec.name, node) if pattern and record.ended_at else pattern) or None
        for pattern in (terms.output_file, terms.error_file)
    ]
    owed = jobs_of(store, counter, member) if record.ended_at and terms.completion_jobs() else []
    return {
        "output_file": files[0],
        "error_file": files[1],
        "notify": text(terms.notify) or None,
        "owed": [
            {"what": one.kind.value, "tries": one.tries, "why": one.why, "due_at": one.due_at or None} for one in owed
        ],
    }


# -- tasks of other homes, as their executor shows them, even while the homes are away --------------------------------


def find_remote(node: Node, name: str) -> RemoteTask | None:
    """The newest attempt here of the task with this whole id; None if there is none."""
    found = [
        remote
        for remote in node.executor.remote_tasks.values()
        if remote.task == name and remote.phase is not RemotePhase.RESERVED
    ]
    return max(found, key=lambda remote: remote.attempt, default=None)


def remote_tasks_seen_by(node: Node, access: Authorization, caller: Principal) -> list[RemoteTask]:
    remotes = node.executor.remote_tasks.values()
    return [g for g in remotes if g.phase is not RemotePhase.RESERVED and access.sees_remote(caller, g)]


def remote_listed(node: Node, remote: RemoteTask, user: str) -> dict[str, object]:
    """The task as `ls` lists tasks; submitted_at: when it came to this node."""
    record, moment = remote_record(node, remote), now()
    names = device_names(node, record.node, remote.devices)
    task = task_object(record, remote.spec, user, running_at=remote.running_at, devices=names)
    arrived_at = moment.wall_s - (moment.boot_s - remote.arrived_s)
    return task | {"submitted_at": arrived_at, "reason": remote_reason(node, remote)}


def remote_reason(node: Node, remote: RemoteTask) -> str:
    """Reason for the state of a task of another home; "" while it simply runs."""
    if remote.phase is RemotePhase.ENDED:
        return f"{remote.home} has not taken its result yet"
    if remote.output_waits_because:
        return f"it has ended, and its output files wait: {remote.output_waits_because}"
    if remote.killed_because:
        return remote.killed_because
    if remote.key in node.runs.frozen:
        return f"frozen: {remote.home} is silent"
    if remote.is_parked:
        return f"{remote.home} is away, and lets it run on"
    return "waits for room here" if remote.phase is RemotePhase.WAITING else ""


def remote_shown(node: Node, remote: RemoteTask, user: str) -> dict[str, object]:
    """The task as `show` shows tasks, without the fields that only its home knows."""
    record = remote_record(node, remote)
    names = device_names(node, record.node, remote.devices)
    task = task_object(record, remote.spec, user, running_at=remote.running_at, devices=names)
    task["reason"] = f"reported by {record.node}, which has it: its home {remote.home} knows more"
    return task | detail_object(remote.spec, record, remote.devices) | {"history": [], "decision": None}


def remote_record(node: Node, remote: RemoteTask) -> TaskRecord:
    """The record that its home would have, as far as known here."""
    state = TaskState.LEASED
    exit_ = remote.exit
    if exit_ is not None:
        state = TaskState.DONE if exit_.exit_code == 0 and not exit_.signal else TaskState.FAILED
    return TaskRecord(
        remote.task,
        remote.uid,
        state,
        0.0,
        attempt=remote.attempt,
        node=node.state.node,
        migrations=remote.migrations,
        started_at=exit_.started_at if exit_ is not None else remote.running_at,
        ended_at=exit_.ended_at if exit_ is not None else 0.0,
        exit=exit_,
    )
