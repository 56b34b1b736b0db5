# ruff: noqa: PTH109, PTH118, PTH119, PTH123
# os.path, since directories and commands are bytes.
"""The request that the arguments of `submit` make."""

from __future__ import annotations

import argparse
import os
import secrets
from typing import TYPE_CHECKING, Any, TypedDict

from peerload.client.environment import captured, packed
from peerload.model.errors import BadRequest
from peerload.text.units import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Word = str | bytes
GPU_WAITS = ("schedule", "queue")
GPU_SHARES = ("auto", "exclusive", "time", "mps")
"""The values of peerload.model."""


class RunRequest(TypedDict, total=False):
    """The options of a task, as the flags of `peerload submit`: cpus (1), mem (bytes, or ``"8G"``), gpus, gpu_mem (of each GPU),
    gpu_prefer (numbers, names or patterns of models to take first), gpu_wait (``"schedule"`` or ``"queue"``), gpu_share (``"auto"``,
    ``"exclusive"``, ``"time"`` or ``"mps"``), gpu_pct (of the multiprocessors, under MPS), time_limit_s, name, node (only this one), exclude (not these nodes), labels (only nodes that have
    all of these), directory (default: the current one; ``"-"``: a fresh one), environment (default: the variables that `submit`
    sends), priority, local (do not move it), migrations_max, once, fast, lease_s, wait_for_node, held, group, after, after_ok (ids),
    retries, tags (a mapping, to select tasks by:  peerload ls --tag K=V), in_, out (paths and globs of files that travel), snapshot
    (the directory as it is now; without it: as the settings say), est_s (how long it will take), prefer (``"time"``,
    ``"balanced"`` or ``"energy"``), defer_until (Unix time by which it starts, when energy is cheapest); env
    (a lock file: the environment that it finds in PATH), overcommit (0.8 of its cores are enough).
    """

    cpus: float
    mem: int | str
    gpus: float
    gpu_mem: int | str
    gpu_prefer: str | Sequence[str]
    gpu_wait: str
    gpu_share: str
    gpu_pct: int
    time_limit_s: float
    name: str
    node: str
    exclude: Sequence[str]
    labels: Sequence[str]
    directory: str | os.PathLike[str]
    environment: Mapping[str, str]
    priority: int
    local: bool
    migrations_max: int
    once: bool
    fast: bool
    lease_s: float
    wait_for_node: bool
    held: bool
    group: str
    after: Sequence[str]
    after_ok: Sequence[str]
    retries: int
    tags: Mapping[str, str]
    est_s: float
    prefer: str
    defer_until: float
    overcommit: bool
    in_: Sequence[str]
    out: Sequence[str]
    snapshot: bool
    env: str | os.PathLike[str]


def command(words: Sequence[Word] | str, *, shell: bool) -> list[bytes]:
    """The argv. Raises TypeError for a line without ``shell``, BadRequest for an empty command."""
    if shell:
        if not isinstance(words, (str, bytes)):
            raise TypeError("with shell=True the command is one line")
        return [b"/bin/sh", b"-c", os.fsencode(words)]
    if isinstance(words, (str, bytes)):
        raise TypeError("a command is a list of words; a line for the shell needs shell=True")
    argv = [os.fsencode(word) for word in words]
    if not argv or not argv[0]:
        raise BadRequest("there is no command", hint='such as  client.submit(["hostname"])')
    return argv


def submission(argv: Sequence[bytes], wanted: RunRequest) -> dict[str, Any]:
    """The fields of a `submit` request, with a new token. Raises BadRequest."""
    terms = _given(wanted, "group", "after", "after_ok", "retries")
    if wanted.get("defer_until"):
        terms["start_by"] = wanted["defer_until"]
    if wanted.get("tags"):
        terms["tags"] = [f"{key}={value}" for key, value in wanted["tags"].items()]
    fields = {"token": secrets.token_hex(16), "spec": spec(argv, wanted)}
    fields |= _given(wanted, "held", "wait_for_node")
    return fields | ({"terms": terms} if terms else {})


def spec(argv: Sequence[bytes], wanted: RunRequest) -> dict[str, Any]:
    """The task's spec. Raises BadRequest for options that contradict each other, TypeError for unknown ones."""
    unknown = set(wanted) - set(RunRequest.__annotations__)
    if unknown:
        raise TypeError(f"no such argument: {', '.join(sorted(unknown))}")
    if wanted.get("once") and wanted.get("fast"):
        raise BadRequest("once and fast contradict each other")
    directory = wanted.get("directory")
    here = os.fsencode(directory) if directory is not None else os.getcwdb()
    request: dict[str, Any] = {"cpus": wanted.get("cpus", 1.0), **_devices(wanted)}
    for name, field in (("mem", "mem_bytes"), ("gpu_mem", "gpu_mem_bytes")):
        if wanted.get(name):
            request[field] = _size(wanted[name])  # type: ignore[literal-required]
    request |= _given(wanted, "overcommit")
    placement = _given(wanted, "node", "exclude", "labels", "local", "migrations_max")
    made = {
        "argv": list(argv),
        "directory": here if here == b"-" else os.path.normpath(os.path.join(os.getcwdb(), here)),
        "environment": packed_environment(wanted.get("environment"), moved=directory is not None),
        "umask": _umask(),
        "name": wanted.get("name") or os.path.basename(argv[0]).decode("utf-8", "replace")[:128],
        "request": request,
        "placement": placement,
        "followed": True,  # `Task.output` gives all of it
    }
    made |= _given(wanted, "time_limit_s", "priority", "lease_s", "est_s", "prefer")
    return made | ({"guarantee": "once"} if wanted.get("once") else {"guarantee": "fast"} if wanted.get("fast") else {})


def packed_environment(environment: Mapping[str, str] | None, *, moved: bool = False) -> bytes:
    """These variables, or those of this process that travel, packed. Raises BadRequest if they are too large."""
    if environment is None:
        kept, _ = captured(os.environb, [], [], moved=moved)
    else:
        kept = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    return packed(kept)


def array(indices: Iterable[int]) -> list[tuple[int, int, int]]:
    """The ranges that contain these numbers."""
    if isinstance(indices, range) and indices.step > 0 and indices:
        return [(indices[0], indices[-1], indices.step)]
    ranges: list[tuple[int, int, int]] = []
    for number in sorted(set(indices)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number, 1)
        else:
            ranges.append((number, number, 1))
    return ranges


def _umask() -> int:
    """The umask of this process. It is read from /proc, since setting it for a moment would affect other threads."""
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _devices(wanted: RunRequest) -> dict[str, Any]:
    gpus, terms = wanted.get("gpus", 0), _given(wanted, "gpu_prefer", "gpu_wait", "gpu_share", "gpu_pct")
    if not gpus:
        if terms:
            raise BadRequest(f"{min(terms)} is about GPUs, and no GPU is requested", hint="add  gpus=1")
        return {}
    for name, known in (("gpu_wait", GPU_WAITS), ("gpu_share", GPU_SHARES)):
        if terms.get(name, known[0]) not in known:
            raise BadRequest(f"{name} is {terms[name]!r}", hint="one of  " + "  ".join(known))
    if isinstance(terms.get("gpu_prefer"), str):
        terms["gpu_prefer"] = [name for name in terms["gpu_prefer"].split(",") if name]
    is_part = 0 < gpus < 1
    if is_part and terms.get("gpu_share") == "exclusive":
        raise BadRequest("a part of a GPU is shared with others, and gpu_share is 'exclusive'")
    return ({"gpus": 1, "gpu_fraction": gpus} if is_part else {"gpus": int(gpus)}) | terms


def _size(given: int | str) -> int:
    if isinstance(given, int):
        return given
    try:
        return size(given)
    except argparse.ArgumentTypeError as error:
        raise BadRequest(str(error)) from None


def _given(wanted: RunRequest, *names: str) -> dict[str, Any]:
    return {name: _plain(wanted[name]) for name in names if wanted.get(name) not in (None, "", (), [], False)}  # type: ignore[literal-required]


def _plain(value: Any) -> Any:  # noqa: ANN401 -- whatever was given
    return list(value) if isinstance(value, (tuple, list, set, frozenset)) else value
