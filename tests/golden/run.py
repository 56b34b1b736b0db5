"""`python -m tests.golden.run`: what `make golden` runs. Compares behaviour with a recorded state, so that a change of names and
places can be seen to change nothing else.

Each part is a tree of names with a value or the hash of a text at each leaf; a difference is told by its name. With
``--record`` the state is written anew. Texts that show the name of a class are compared with new names turned back into
the old ones (`RENAMED`). Not part of the gate.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.agent.store.store import Store
from peerload.cli.main import HIDDEN, VERBS
from tests.chaos.campaign import Options, run
from tests.golden import samples, session
from tests.integration.cluster import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
STATE = HERE / "state.json"
RENAMED: dict[str, str] = {
    "AccountPending": "NotKnownYet",
    "AccountResolver": "Lookups",
    "AccountUnanswered": "Unanswered",
    "ActionRefused": "Refused",
    "Admission": "Admitted",
    "AgentCredentials": "AgentAccess",
    "AntiEntropy": "Contacts",
    "ArrayRow": "Row",
    "AttachRequests": "Attending",
    "AttemptFence": "Floor",
    "AttemptFences": "Floors",
    "AuthorisationVerdict": "Verdict",
    "Authorization": "Access",
    "AwaitedReader": "Reader",
    "BacklogEstimate": "Backlog",
    "BatchedRequests": "Turns",
    "Bootstrap": "Seeds",
    "BroadcastQueue": "Rumours",
    "CancelWaits": "Endings",
    "CancelWatch": "Watch",
    "CertificateInfo": "Facts",
    "CgroupLimits": "Shares",
    "CheckedPolicy": "Checked",
    "ChildReports": "Words",
    "CircuitBreaker": "BlackHoles",
    "ClientBinding": "Attendance",
    "ClientNotifier": "Clients",
    "ClientRequests": "Clients",
    "ClusterDirectory": "Cluster",
    "CommandTemplate": "Template",
    "CommitProbe": "Checked",
    "CompletionJob": "Chore",
    "CompletionJobs": "Chores",
    "ConnectionRegistry": "MadeConnections",
    "DateAnchor": "Anchor",
    "DeferredRequests": "Waits",
    "DemoScreen": "Live",
    "DeviceGrant": "Grant",
    "DeviceLocks": "Claims",
    "DeviceQueue": "DeviceLine",
    "DeviceRequest": "Ask",
    "Dialer": "Dialling",
    "DirectoryCache": "SeenDirectories",
    "DirectoryQueries": "AskedNodes",
    "DiskReserve": "Reserve",
    "DiskSpace": "Disk",
    "DoctorInput": "Facts",
    "DueJob": "Owed",
    "DurationEstimates": "History",
    "Eligibility": "Gates",
    "EligibilityVerdict": "Verdict",
    "EndedTask": "Ended",
    "Enrollment": "Joining",
    "EventLog": "Journal",
    "ExecutorHandoff": "Executor",
    "ExecutorLeases": "GuestLeases",
    "ExecutorLink": "Link",
    "ExecutorResults": "GuestResults",
    "ExtraColumns": "More",
    "FenceKind": "FloorKind",
    "FileChanged": "Changed",
    "FileSystemStalled": "Stalled",
    "ForkServer": "Forge",
    "ForwardedRequests": "Forwards",
    "GossipMember": "Member",
    "GpuFaults": "Illnesses",
    "GpuProcess": "Process",
    "DemoGpuTask": "Asked",
    "GpuUsage": "Tenants",
    "GroupCommands": "Gating",
    "Handshakes": "Introductions",
    "Heartbeat": "Pulse",
    "HelperRequest": "Asked",
    "HighWaterFile": "HighWater",
    "HighWaterMark": "Mark",
    "HolePuncher": "Holes",
    "HomeHandoff": "Handoff",
    "HomeLeases": "Leases",
    "Intake": "Arrivals",
    "Invitation": "Invite",
    "InvitationRefused": "Refused",
    "InvitationUse": "Use",
    "Invitations": "Invites",
    "JobFailed": "Failed",
    "JobNotDue": "Postponed",
    "JoinServer": "Door",
    "JoiningNode": "Newcomer",
    "KeyPair": "Pair",
    "LaunchedTask": "Task",
    "LauncherAccount": "Account",
    "LauncherStdin": "StandardInput",
    "LeaseTimers": "Leases",
    "LineList": "Lines",
    "LineReader": "Lines",
    "LintWarning": "Doubt",
    "LiveSampler": "Live",
    "LoadPublished": "LoadTold",
    "LocalNode": "Introduction",
    "LostAttempts": "Losses",
    "MaintenanceRow": "Upkeep",
    "MapBatch": "Batch",
    "MapInputs": "Inputs",
    "MapResult": "Ended",
    "MapTask": "Task",
    "MemberStatus": "Standing",
    "MembershipUpdate": "Rumour",
    "MergedListing": "Listing",
    "MovableTasksView": "Movable",
    "NamesWithout": "Names",
    "NodeDrain": "Drain",
    "NodeIdentityFile": "Joined",
    "NodeModel": "Node",
    "NotificationLost": "NoticeLost",
    "NotifyHooks": "Notices",
    "OfflineCleaner": "Alone",
    "Outbox": "Release",
    "OutputBackpressure": "Pace",
    "OutputSaver": "Saving",
    "OverviewBuilder": "Overview",
    "OverviewCache": "Overviews",
    "OwnCredentials": "OwnAccess",
    "PairProtocol": "Pairing",
    "PastDurations": "PastRuns",
    "PeerBackpressure": "Backlog",
    "PeerEntry": "Peer",
    "PeerEvents": "Meetings",
    "PeerHints": "Memory",
    "PeerInfo": "Peer",
    "PolicyDescription": "Member",
    "PresetLoader": "Reading",
    "PresetPlaces": "Places",
    "Principal": "Caller",
    "ProcScan": "Bare",
    "ProcessOwners": "Owners",
    "PseudoTerminal": "Terminal",
    "PseudoTerminals": "Terminals",
    "Reachability": "Ways",
    "ReadTimeout": "SlowFrames",
    "Reaper": "Endings",
    "ReceivedReport": "Heard",
    "RecordedEvent": "Happened",
    "RecordedSampler": "Played",
    "RemotePhase": "GuestPhase",
    "RemoteStatusQueries": "Inquiries",
    "RemoteStatusQuery": "Inquiry",
    "RemoteTask": "Guest",
    "RemovalCriteria": "Wanted",
    "RemovalSearch": "Removable",
    "RequestRouter": "Routes",
    "ResourceShortage": "Shortage",
    "RetryRate": "Pace",
    "RevisionIndex": "Revisions",
    "RunRequest": "Wanted",
    "RunningTasks": "Runs",
    "RunningTasksView": "Running",
    "SaveProgress": "Progress",
    "SavedOutput": "Saved",
    "SecuredBroker": "Secured",
    "SelectionReader": "Reader",
    "ServedStdin": "Served",
    "ServiceTimes": "Service",
    "SimLauncher": "Launcher",
    "SimNetwork": "Network",
    "SimProcess": "Process",
    "SimStore": "Store",
    "UtilizationMonitor": "Watch",
    "SpawnOrder": "Order",
    "SpawnRefused": "NotAllowed",
    "Spawner": "Births",
    "StateRequests": "Requests",
    "StdinFeed": "Feed",
    "StdinFetch": "Pull",
    "StdinFetches": "InputPulls",
    "StdinForwarding": "Feeding",
    "StdinFull": "InputFull",
    "StdinReader": "StandardInput",
    "StdinServer": "InputServer",
    "StdinStore": "Inputs",
    "StoredStdin": "HomeInput",
    "SubmissionInProgress": "Made",
    "SubmissionLog": "Submissions",
    "SubmissionRows": "Submissions",
    "SubmitOptions": "Terms",
    "Suggestion": "Change",
    "Syscalls": "Kernel",
    "TaskCommands": "Changes",
    "TaskDonor": "Giver",
    "TaskEvacuation": "Leaving",
    "TaskGroup": "Group",
    "TaskGroups": "Groups",
    "TaskIds": "Names",
    "TaskOutcome": "Fate",
    "TaskOutputs": "Output",
    "TaskPage": "Listing",
    "TaskParking": "Parking",
    "TaskSelection": "Meant",
    "TaskSession": "Following",
    "TaskUser": "Whose",
    "TaskWatch": "Watch",
    "TerminalSize": "Terminal",
    "TerminationTracker": "Endings",
    "Thresholds": "Marks",
    "ThrottleDetector": "Clocks",
    "TokenBucket": "Rate",
    "TopModel": "World",
    "TopSample": "Sample",
    "UsagePanel": "Uses",
    "UsageReading": "Reading",
    "UserHelper": "Errand",
    "UserHelpers": "Errands",
    "UserServices": "Users",
    "ViewState": "Look",
    "WaitCharge": "Charge",
    "WaitProgress": "Progress",
    "WaitReasons": "Reasons",
    "WaitRequest": "Waiting",
    "Watchdog": "Guard",
    "WhyRequest": "Why",
    "WritableChecks": "Checks",
}
"""Class, field or enum name of today → its name when the state was recorded. Traces of the simulator show such names."""
SEEDS = 60
MINUTES = 1.5
LINES_A_PART = 1000
"""The trace of a seed is hashed in parts of so many lines, so that it can be said where it differs."""
HASH_DIGITS = 12
SHOWN_MAX = 40


def digest(text: str | bytes) -> str:
    """A short hash."""
    raw = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(raw).hexdigest()[:HASH_DIGITS]


_words = re.compile(rf"\b({'|'.join(map(re.escape, RENAMED))})\b") if RENAMED else None


def old_names(line: str) -> str:
    """A line of a trace with the names that were recorded."""
    return _words.sub(lambda found: RENAMED[found[0]], line) if _words else line


def chaos_seed(seed: int) -> tuple[str, list[str]]:
    """A seed → what it came to, and the hashes of its trace in parts."""
    parts: list[str] = []
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(old_names(line))
        if len(lines) == LINES_A_PART:
            parts.append(digest("\n".join(lines)))
            lines.clear()

    outcome = run(seed, Options(minutes=MINUTES), write)
    parts.append(digest("\n".join(lines)))
    return f"seed {seed}", [
        f"{outcome.tasks} tasks, {outcome.steps} steps, broken: {outcome.broken or 'nothing'}",
        *parts,
    ]


def chaos(jobs: int) -> dict[str, list[str]]:
    """Every seed."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return dict(pool.imap(chaos_seed, range(1, SEEDS + 1)))


def replays() -> dict[str, Any]:
    """Each recording → what `peerload replay --json` says of it, and its exit code."""
    found: dict[str, Any] = {}
    for file in sorted(HERE.glob("*.recording.gz")):
        with tempfile.NamedTemporaryFile() as plain:
            plain.write(gzip.decompress(file.read_bytes()))
            plain.flush()
            done = peerload("replay", "--json", plain.name)
        told = [json.loads(line) for line in done.stdout.splitlines()]
        for start in told:
            start.pop("version", None)
        found[file.name] = {"exit code": done.returncode, "starts": told}
    return found


def peerload(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the program, as wide as any terminal, away from the user's own settings."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [*program(), *words], env=environment, capture_output=True, text=True, check=False, cwd="/tmp"
    )


def helps() -> dict[str, str]:
    """Each verb → the hash of its help."""
    found = {"peerload": digest(peerload("--help").stdout)}
    for verb in [*VERBS, *HIDDEN]:
        done = peerload(verb, "--help")
        found[verb] = f"{digest(done.stdout + done.stderr)}, {done.returncode}"
    return found


def sql() -> dict[str, Any]:
    """Each table and index of a new database → its definition."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "peerload.db"
        store = Store(path, "n1")
        store.open()
        store.close()
        with closing(sqlite3.connect(path)) as database:
            rows = database.execute("SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")
            found: dict[str, Any] = {f"{kind} {name}": " ".join(text.split()) for kind, name, text in rows}
            found["user_version"] = database.execute("PRAGMA user_version").fetchone()[0]
            found["application_id"] = database.execute("PRAGMA application_id").fetchone()[0]
    return found


def differences(recorded: Any, now: Any, where: str = "") -> Iterator[str]:
    """Each difference, by its name. null, "nothing" and an empty list leave the type open: timing decides whether there
    is a value."""
    if recorded == now or "nothing" in (recorded, now) or "null" in (recorded, now):
        return
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted(recorded.keys() | now.keys()):
            if key not in now:
                yield f"{where} > {key}: is gone"
            elif key not in recorded:
                yield f"{where} > {key}: is new"
            else:
                yield from differences(recorded[key], now[key], f"{where} > {key}")
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for number, (one, other) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(one, other, f"{where} [{number}]")
    else:
        yield f"{where}: recorded {_short(recorded)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def record_sessions(file_of: Callable[[str], Path] = HERE.joinpath) -> dict[str, Any]:
    """A session of real agents that are recorded; the recordings stay."""
    with tempfile.TemporaryDirectory() as directory:
        shown = session.shown(Path(directory))
        for path in sorted(Path(directory).glob("*.recording")):
            file_of(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    return shown


PARTS = ("wires", "sql", "help", "replay", "session", "chaos")


def main() -> int:
    reader = argparse.ArgumentParser(prog="python -m tests.golden.run", description=__doc__)
    reader.add_argument("--record", action="store_true", help="write the state anew")
    reader.add_argument("--jobs", type=int, default=2)
    reader.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    flags = reader.parse_args()
    parts = flags.only or list(PARTS)
    recorded: dict[str, Any] = json.loads(STATE.read_text(encoding="utf-8")) if STATE.exists() else {}
    now: dict[str, Any] = {}
    if "session" in parts:
        now["session"] = record_sessions() if flags.record else session.shown()
    makers: dict[str, Callable[[], Any]] = {
        "wires": samples.every_wire,
        "sql": sql,
        "help": helps,
        "replay": replays,
        "chaos": lambda: chaos(flags.jobs),
    }
    now |= {part: makers[part]() for part in parts if part in makers}
    if flags.record:
        text = json.dumps(recorded | now, indent=1, sort_keys=True, ensure_ascii=False)
        STATE.write_text(f"{text}\n", encoding="utf-8")
        sys.stdout.write(f"recorded: {', '.join(parts)}\n")
        return 0
    found = [line for part in parts for line in differences(recorded.get(part), now[part], part)]
    for line in found[:SHOWN_MAX]:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{len(found)} differences in {', '.join(parts)}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
