"""The verbs of `peerload`: by what a user wants to do, as `--help` lists them; what else people type for them; and how each is loaded.

Small verbs of one kind share a file. Only the file of the verb in question is imported.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS = {
    "Run commands": {
        "run": "run a command where there is room, as if it ran here",
        "submit": "queue a command and print its id",
        "assign": "assign the tasks of a program to nodes at the least cost",
        "map": "run a command once for each input, like GNU parallel",
        "sh": "open a shell on another node",
        "attach": "follow a running task as run does",
        "exec": "run a command inside a running task",
        "wait": "wait until tasks have ended",
    },
    "Look at tasks": {
        "ls": "list my tasks: unfinished ones and those of the last 24 hours",
        "show": "show everything about tasks",
        "why": "explain why a task waits, or why it went where it went",
        "trace": "show where the time of a task went, on all nodes that had it",
        "logs": "print the output of tasks",
        "history": "list ended tasks: when, how long, where, what they used",
        "events": "list what happened: every change with its reason and time",
        "top": "watch nodes and tasks live",
        "web": "show the cluster in a browser; metrics for Prometheus",
    },
    "Change tasks": {
        "cancel": "stop tasks",
        "signal": "send a signal to running tasks",
        "hold": "keep waiting tasks from starting",
        "release": "let held tasks start",
        "prio": "change the priority of waiting tasks",
        "group": "limit how many tasks of a group run at a time; pause and resume groups",
        "retry": "queue ended tasks again",
        "clean": "delete ended tasks and their outputs",
        "files": "show the files of tasks that are kept here, and remove them",
    },
    "Nodes": {
        "up": "start an agent for me on this machine",
        "down": "stop my agent (--all: its running tasks too)",
        "nodes": "list the nodes: state, cores, memory, GPUs, tasks",
        "power": "show what this node draws, and how that is known",
        "energy": "print the joules of nodes, tasks and users",
        "drain": "have a node take no more tasks",
        "undrain": "have a node take tasks again",
        "doctor": "find the usual problems and the commands that fix them",
        "config": "show the settings and where each comes from; check a configuration file",
        "service": "install, upgrade or uninstall the service for all users of this machine",
        "agent": "run the agent in the foreground",
    },
    "Cluster": {
        "invite": "let another machine join: prints the command to type there",
        "join": "make this machine a member of another machine's cluster",
        "leave": "take this node out of its cluster",
        "forget": "drop a node that is gone for good",
        "revoke": "shut a node out of the cluster",
        "cluster": "make a cluster; show which one is used here",
    },
    "Policies": {
        "policy": "list and explain policies and presets; check a preset",
        "sim": "simulate what a policy does to response times",
        "replay": "decide the recording of an agent again, and compare",
    },
    "More": {
        "demo": "start three agents and a broker on this machine, and give them work",
        "completions": "print a script that completes verbs, flags, ids and names in a shell",
    },
}
"""Each verb with one line about it, by purpose."""
VERBS = {verb: says for group in GROUPS.values() for verb, says in group.items()}
HIDDEN = ("launcher",)
"""Verbs that only services run."""
FILES = {
    "agent": ("up", "down", "agent", "launcher"),
    "change": ("cancel", "signal", "hold", "release", "prio", "group", "retry", "clean", "files"),
    "cluster": ("cluster", "leave", "forget", "revoke"),
    "energy": ("power", "energy"),
    "join": ("invite", "join"),
    "ls": ("ls", "why", "logs", "history", "events"),
    "nodes": ("nodes", "top", "drain", "undrain"),
    "run": ("run", "sh", "attach", "exec"),
    "show": ("show", "trace"),
}
"""The files with their verbs, which are functions of that name; any other verb is `main` in a file of its own."""
ALIASES = {"kill": "cancel", "list": "ls", "log": "logs", "ps": "ls"}
"""Words that people type for a verb; `version` stands for --version."""
_TASKS_OR_AGENT = "a task:  peerload {}        the agent:  peerload {}"
SUGGESTIONS = {
    "add": "queue a command:  peerload submit CMD        let another machine join:  peerload invite",
    "delete": "stop tasks:  peerload cancel        delete ended ones:  peerload clean        drop a node:  peerload forget",
    "info": "a task:  peerload show ID        the nodes:  peerload nodes        the settings:  peerload config",
    "pause": "a task:  peerload hold        a group:  peerload group pause G        a node:  peerload drain",
    "queue": "list the queue:  peerload ls        queue a command:  peerload submit CMD",
    "restart": _TASKS_OR_AGENT.format("retry", "down ; peerload up"),
    "resume": "a task:  peerload release        a group:  peerload group resume G        a node:  peerload undrain",
    "rm": "stop tasks:  peerload cancel        delete ended ones:  peerload clean        drop a node:  peerload forget",
    "sbatch": "peerload submit CMD",
    "scancel": "peerload cancel",
    "sinfo": "peerload nodes",
    "squeue": "peerload ls",
    "srun": "peerload run CMD",
    "start": _TASKS_OR_AGENT.format("run CMD", "up"),
    "status": "tasks:  peerload ls        nodes:  peerload nodes        both:  peerload top --once        problems:  peerload doctor",
    "stop": _TASKS_OR_AGENT.format("cancel", "down"),
}
"""Hints for words that people type."""


def load(verb: str) -> Callable[[list[str]], int]:
    """The function that runs this verb with its words."""
    file, function = next(((file, verb) for file, verbs in FILES.items() if verb in verbs), (verb, "main"))
    run: Callable[[list[str]], int] = getattr(__import__(f"peerload.cli.verbs.{file}", fromlist=[function]), function)
    return run


def listed() -> str:
    groups = (
        f"{title}\n" + "".join(f"  {verb:12}{says}\n" for verb, says in verbs.items())
        for title, verbs in GROUPS.items()
    )
    return "\n".join(groups)


def suggested(word: str) -> str:
    """A hint for a word that is not a verb; "" if there is none."""
    if word in SUGGESTIONS:
        return SUGGESTIONS[word]
    from difflib import get_close_matches

    near = get_close_matches(word, VERBS, n=1)
    return f"did you mean  peerload {near[0]} ?" if near else ""
