"""`peerload show` and `trace`: everything about a task; its timeline, on all nodes that had it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError, UsageError
from peerload.model.text import printable, times_text
from peerload.text import tasks
from peerload.text.format import ago_text, counted, duration_text, number_text, print_json, print_result, size_text
from peerload.text.tasks import executors_of, trace_lines, trace_spans

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping


def show(words: list[str]) -> int:
    reader = Options(
        "show",
        "Show everything about tasks: spec, history of states with reasons, usage.",
        json_says="one object a task",
    )
    reader.add_argument("task", nargs="+", metavar="ID")
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        shown = client.call("show", tasks=flags.task, at=flags.at)["tasks"]
    used = usage_of(flags.socket, shown)
    shown = [task | {"live": used.get(task.get("id"))} for task in shown]
    if flags.json:
        for task in shown:
            print_json(task)
    else:
        sys.stdout.write("\n\n".join("\n".join(described(task, time.time())) for task in shown) + "\n")
    return 0


def trace(words: list[str]) -> int:
    reader = Options(
        "trace",
        "Show where the time of a task went: waiting, search, handover, start, run, output home; on its home and on each node\n"
        "that had it. Times of other nodes (~) are by their own clocks.",
    )
    reader.add_argument("task", metavar="ID")
    reader.at()
    flags = reader.read(words)
    events: dict[str, list[dict[str, Any]]] = {}
    missing: list[str] = []
    task = _one_shown(flags)
    with AgentConnection(flags.socket) as client:
        for node in (task["home"], *executors_of(task)):
            try:
                told = client.call("events", tasks=[task["id"]], what=["attempt", "chore"], at=node)
                events[node] = told["events"]
            except PeerloadError:
                missing.append(node)
    now = time.time()
    spans = trace_spans(task, events, now)
    result = {key: task[key] for key in ("id", "name", "state", "home", "trace")} | {"spans": spans, "missing": missing}
    print_result(result, trace_lines(task, spans, missing, now), as_json=flags.json)
    return 0


def _one_shown(flags: Namespace) -> dict[str, Any]:
    """The named task, from a separate connection, since not all members of an array are read. Raises UsageError."""
    with AgentConnection(flags.socket) as client:
        part = next(client.stream("show", tasks=[flags.task], at=flags.at), None)
        shown = (client.last if part is None else part)["tasks"]
    if len(shown) != 1:
        hint = f"name a member:  peerload trace {shown[0]['id']}" if shown else ""
        raise UsageError(f"trace: {flags.task} is an array", hint=hint)
    return dict(shown[0])


def described(task: dict[str, Any], now: float) -> list[str]:
    usage = task.get("usage") or {}
    facts = [
        ("state", _state(task)),
        ("reason", task.get("reason") or ""),
        ("it said", task.get("error_line") or ""),
        ("command", tasks.command_text(task.get("argv"))),
        (
            "directory",
            "a fresh scratch directory" if task.get("directory") in ("-", b"-") else task.get("directory") or "",
        ),
        ("user", task.get("user") or ""),
        ("home", task.get("home") or ""),
        ("node", task.get("node") or ""),
        ("devices", ", ".join(map(str, task.get("device_names") or task.get("devices") or []))),
        ("needs", _needs(task)),
        ("GPUs", _gpu_terms(task)),
        ("learned", _learned(task)),
        ("placement", _placement(task.get("placement"))),
        ("priority", task.get("priority") or ""),
        ("energy", _energy(task)),
        ("time limit", duration_text(task["time_limit_s"]) if task.get("time_limit_s") else ""),
        ("promise", _promise(task)),
        ("group", task.get("group") or ""),
        ("tags", "  ".join(f"{key}={value}" for key, value in (task.get("tags") or {}).items())),
        ("waits for", _awaited(task)),
        ("retries", _retries(task)),
        ("repeats", task.get("retry_of") or ""),
        ("attempt", _attempt(task)),
        ("submitted", _when(task.get("submitted_at"), now)),
        ("started", _when(task.get("started_at"), now)),
        ("ended", _when(task.get("ended_at"), now)),
        ("took", duration_text(tasks.elapsed_s(task, now)) if task.get("started_at") else ""),
        ("uses now", usage_text(task["live"], tasks.elapsed_s(task, now)) if task.get("live") else ""),
        ("GPUs now", gpus_text(task["live"]) if task.get("live") else ""),
        ("used", _usage(usage) if task.get("ended_at") else ""),
        ("output", _output(task)),
        ("files", _files(task.get("files"), ended=bool(task.get("ended_at")))),
        ("env", task.get("lock") or ""),
        ("-o", task.get("output_file") or ""),
        ("-e", task.get("error_file") or ""),
        ("notify", task.get("notify") or ""),
        ("still owed", "; ".join(map(_owed, task.get("owed") or []))),
    ]
    lines = [f"{printable(task.get('id', ''))}  {printable(task.get('name') or '')}".rstrip()]
    lines += [f"  {name:11}{printable(value)}" for name, value in facts if value != ""]
    decision = task.get("decision")
    if isinstance(decision, dict):
        chosen = f"{decision.get('choice', '')} by {decision.get('policy', '')}: {decision.get('reason', '')}"
        lines.append(f"  decided    {printable(chosen)}")
    history = task.get("history") or []
    if history:
        lines.append("  history")
        lines += [f"    {line}" for line in tasks.steps_table(history)]
    return lines


def _output(task: dict[str, Any]) -> str:
    if task.get("stdout_bytes") is None and task.get("stderr_bytes") is None:
        return ""  # the task has not ended
    sizes = f"{size_text(task.get('stdout_bytes'))} stdout, {size_text(task.get('stderr_bytes'))} stderr"
    if not task.get("output_gone_at"):
        return sizes
    return f"{sizes}; removed {tasks.instant_text(task['output_gone_at'])} ({task.get('output_gone_why')})"


def _files(files: object, *, ended: bool) -> str:
    """Text such as ``3 files, 1.2 MiB; 1.2 MiB fetched in 0.4 s; 2 returned, 10 KiB; 1 of them stored under another name``."""
    if not isinstance(files, dict):
        return ""
    parts = [f"{counted(files['count'], 'file')}, {size_text(files['bytes'])}"]
    if ended:
        parts.append(f"{size_text(files['fetched_bytes'])} fetched in {duration_text(files['staging_s'])}")
        back = f"{files['returned']} returned, {size_text(files['returned_bytes'])}"
        parts += [back] if files["returned"] else []
        parts += [f"{files['kept_beside']} of them stored under another name"] if files["kept_beside"] else []
    return "; ".join(parts)


def _owed(owed: dict[str, Any]) -> str:
    what = "its output files" if owed.get("what") == "files" else "the notice"
    tries = int(owed.get("tries") or 0)
    return what + (f" ({counted(tries, 'try').replace('trys', 'tries')}: {owed.get('why')})" if tries else "")


def _when(at: object, now: float) -> str:
    text = tasks.instant_text(at)
    return f"{text} ({ago_text(now - at)})" if isinstance(at, (int, float)) and at else text


def _state(task: dict[str, Any]) -> str:
    ended = tasks.exit_text(task)
    return tasks.state_text(task, time.time()) + (
        "" if ended == "-" else f", exit {ended}".replace("exit signal", "signal")
    )


def _energy(task: dict[str, Any]) -> str:
    est = duration_text(task["est_s"]) if task.get("est_s") else ""
    by = tasks.instant_text(task["start_by"]) if task.get("start_by") else ""
    return _pairs({"prefer": task.get("prefer"), "estimate": est, "start by": by})


def _promise(task: dict[str, Any]) -> str:
    guarantee, lease = task.get("guarantee") or "at-least-once", task.get("lease")
    parts = [] if guarantee == "at-least-once" else [str(guarantee)]
    if lease:
        parts.append(f"lease {lease if lease == 'auto' else duration_text(lease)}")
    if task.get("parked"):
        parts.append("parked: its home was unavailable, and its node has no newer state of it")
    return ", ".join(parts)


def _awaited(task: dict[str, Any]) -> str:
    return _pairs({"end": task.get("after") or [], "success": task.get("after_ok") or []})


def _retries(task: dict[str, Any]) -> str:
    retries = task.get("retries")
    return f"{retries}, {task.get('failures', 0)} of them taken" if retries else ""


def _attempt(task: dict[str, Any]) -> str:
    lost = task.get("lost_on") or []
    said = f", lost {times_text(task['lost'])}" if task.get("lost") else ""
    where = f" (on {', '.join(map(str, lost))})" if said and lost else ""
    tried = task.get("memory_retries")
    more = f", out of GPU memory {times_text(tried)}" if tried else ""
    return f"{task.get('attempt', 0)}, moved {times_text(task.get('migrations', 0))}{said}{where}{more}"


def _needs(task: dict[str, Any]) -> str:
    parts = [f"{number_text(task.get('cpus'))} cpu{'' if task.get('cpus') == 1 else 's'}"]
    if task.get("mem_bytes"):
        parts.append(size_text(task["mem_bytes"]))
    if task.get("gpus"):
        parts.append(_gpus_needed(task["gpus"], task.get("gpu_mem_bytes") or 0))
    others = task.get("other_devices")
    parts += [f"{count} {kind}" for kind, count in others.items()] if isinstance(others, dict) else []
    return ", ".join(parts)


def _gpus_needed(gpus: float, memory_bytes: int) -> str:
    words = f"{gpus:g} of a GPU" if gpus < 1 else counted(int(gpus), "GPU")
    return words + (f" with {size_text(memory_bytes)}{' each' if gpus > 1 else ''}" if memory_bytes else "")


def _gpu_terms(task: dict[str, Any]) -> str:
    wait = task.get("gpu_wait")
    chosen = {
        "prefer": task.get("gpu_prefer") or [],
        "wait": wait if wait != "schedule" else "",
        "wait max": duration_text(task["gpu_wait_s_max"]) if task.get("gpu_wait_s_max") else "",
        "share": task.get("gpu_share") if task.get("gpu_share") != "auto" else "",
        "pct": task.get("gpu_pct") or "",
    }
    return _pairs(chosen)


def _learned(task: dict[str, Any]) -> str:
    need = task.get("gpu_mem_learned_bytes")
    return f"{size_text(need)} of each GPU, from {counted(task.get('gpu_runs_learned') or 0, 'run')}" if need else ""


def _placement(placement: object) -> str:
    return _pairs(placement) if isinstance(placement, dict) else ""


def _pairs(facts: dict[str, Any]) -> str:
    return "  ".join(
        f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in facts.items()
        if value not in (None, "", [], (), False)
    )


def _usage(usage: dict[str, Any]) -> str:
    if usage.get("user_s") is None:
        return ""
    cpu = f"{number_text(usage.get('user_s'))} s user, {number_text(usage.get('system_s'))} s system"
    parts = [f"{cpu}, {size_text(usage.get('memory_bytes_max'))} at most"]
    if usage.get("gpu_memory_bytes_max"):
        model = usage.get("gpu_model") or "model not known"
        parts.append(f"{size_text(usage['gpu_memory_bytes_max'])} of one GPU ({model})")
    if usage.get("joules") is not None:
        scope = f", of {usage['energy_scope']}" if usage.get("energy_scope") else ""
        parts.append(f"{number_text(usage['joules'], 1)} J {usage.get('energy_quality')}{scope}")
    return ", ".join(parts)


TASKS_MAX = 64
"""Maximum number of tasks whose usage is fetched."""
NODE_S_MAX = 1.5
"""Limit for the answer of one node."""
ALL_S_MAX = 3.0
"""Limit for the answers of all nodes."""
AVERAGE_FROM_S = 1.0
"""A shorter run has no meaningful average."""


def usage_of(socket: str | None, tasks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The current usage of the running tasks by id, without nodes that do not answer (`usage` of docs/wire.md)."""
    running = [task for task in tasks if task.get("state") == "running" and task.get("node")][:TASKS_MAX]
    by_node: dict[str, list[str]] = {}
    for task in running:
        by_node.setdefault(str(task["node"]), []).append(str(task["id"]))
    found: dict[str, dict[str, Any]] = {}
    until_s = time.monotonic() + ALL_S_MAX
    for node, names in by_node.items():
        if time.monotonic() > until_s:
            break
        try:
            with AgentConnection(socket, timeout_s=NODE_S_MAX) as client:
                told = client.call("usage", at=node, tasks=names)["tasks"]
        except PeerloadError:  # the node is unavailable: the other facts are shown anyway
            continue
        found |= {str(one.get("id")): one for one in told if isinstance(one, dict)}
    return found


def usage_text(usage: Mapping[str, Any], ran_s: float | None) -> str:
    """Text such as ``1.9 cpus, 812 MiB, 5 processes; 12.3 s of cpu in all``. ran_s: seconds since its start."""
    cpu_s, busy = _number(usage.get("cpu_s")), _number(usage.get("cpus_busy"))
    parts = []
    if busy is not None:
        parts.append(f"{busy:.1f} cpus")
    elif cpu_s is not None and ran_s and ran_s >= AVERAGE_FROM_S:
        parts.append(f"{cpu_s / ran_s:.1f} cpus on average")
    memory_bytes, processes = _number(usage.get("memory_bytes")), _number(usage.get("processes"))
    parts += [size_text(memory_bytes)] if memory_bytes is not None else []
    parts += [counted(int(processes), "process").replace("processs", "processes")] if processes else []
    parts += [f"{number_text(joules, 1)} J so far"] if (joules := _number(usage.get("joules"))) is not None else []
    return ", ".join(parts) + (f"; {cpu_s:.1f} s of cpu in all" if cpu_s is not None else "")


def gpus_text(usage: Mapping[str, Any]) -> str:
    """Text such as ``GPU 0 3.2 GiB of 8 GiB, 63 % busy with 2 tasks`` for each GPU."""
    gpus = usage.get("gpus")
    return "; ".join(_gpu_text(gpu) for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else ""


def _gpu_text(gpu: Mapping[str, Any]) -> str:
    promised, util, tasks = _number(gpu.get("mem_promised_bytes")), _number(gpu.get("util")), gpu.get("tasks")
    text = f"GPU {gpu.get('index')} {size_text(_number(gpu.get('mem_bytes')))}"
    text += f" of {size_text(promised)}" if promised else ""
    text += f", the card {100 * util:.0f} % busy" if util is not None else ""
    text += f" with {tasks} tasks" if isinstance(tasks, int) and tasks > 1 else ""
    text += ", MPS" if gpu.get("mode") == "mps" else ""
    text += " asked, but it runs without" if gpu.get("mps") is False else ""
    return text + ("" if gpu.get("health") in ("ok", None) else f", {gpu['health']}")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < float("inf") else None
