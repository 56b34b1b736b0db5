"""The verbs of `peerload`, as `--help` lists them, and how each is loaded."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERBS = {
    "up": "start an agent for me on this machine",
    "down": "stop it (--all: its running tasks too)",
    "agent": "be the agent, in the foreground",
    "run": "run a command where there is room, as if it ran here",
    "sh": "a shell on another node",
    "submit": "queue a command, print its id",
    "map": "run a command once for each input, as GNU parallel does",
    "ls": "my tasks: unfinished ones and those of the last 24 hours",
    "history": "ended tasks: when, how long, where, what they used",
    "show": "everything about a task",
    "why": "why a task waits: a reason for every node; or why it went where it went",
    "events": "what happened: every change with its reason and time",
    "logs": "the output of a task",
    "attach": "join a running task: its output, its input, its end",
    "exec": "run a command inside a running task",
    "wait": "block until tasks have ended",
    "cancel": "stop tasks",
    "signal": "send a signal to running tasks",
    "hold": "keep waiting tasks back",
    "release": "let held tasks go on",
    "prio": "change the priority of waiting tasks",
    "group": "groups of tasks: how many of each at a time, pause, resume",
    "retry": "queue what a task was to run once more",
    "clean": "drop ended tasks and their outputs",
    "drain": "have this node take no more tasks",
    "undrain": "have it take tasks again",
    "nodes": "every node: state, load, cpu, memory, tasks",
    "invite": "have another machine join: prints the line to type there",
    "join": "make this machine a member of another's cluster",
    "leave": "take this node out of its cluster",
    "forget": "say that a node is gone for good",
    "revoke": "shut a node out of the cluster",
    "cluster": "make a cluster for several machines; show which one is used here",
    "policy": "the policies there are; what each is and what its knobs do; check a preset",
    "sim": "what a policy does to response times, by simulation",
    "replay": "decide a recording of an agent again, and compare",
    "doctor": "what usually goes wrong here, and what mends it",
    "config": "the settings in force and where each comes from; check a configuration file",
    "service": "the service for all users of this machine: install, upgrade, uninstall",
    "completions": "what has a shell complete verbs, flags, ids and names",
    "top": "the cluster at a glance",
    "demo": "three agents and a broker on this machine, at work",
}
"""Each verb with what it does."""
HIDDEN = ("launcher",)
"""Verbs that services run, and nobody else."""


def load(verb: str) -> Callable[[list[str]], int]:
    """The function that runs this verb with its words."""
    module = __import__(f"peerload.cli.verbs.{verb}", fromlist=["main"])
    run: Callable[[list[str]], int] = module.main
    return run
