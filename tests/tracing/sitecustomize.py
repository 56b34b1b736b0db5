"""Call trace of a real peerload process, for `python -m tests.walk` alone, which puts this directory on PYTHONPATH.

While the first byte of the file PEERLOAD_WALK_SWITCH is "1", each call of a Python function of peerload appends one line to
PEERLOAD_WALK_TRACE: time, process, callback, file, line, function. callback: the number of one callback of the event loop. Code that runs because a module is imported does not count.
"""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

PRODUCT = ("/peerload/", "/peerload_policies/", "/policies/")
EVENT_LOOP = "asyncio/runners.py"
SWITCH = os.environ["PEERLOAD_WALK_SWITCH"]
_trace = os.open(os.environ["PEERLOAD_WALK_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
_switch = mmap.mmap(os.open(SWITCH, os.O_RDONLY | os.O_CLOEXEC), 1, prot=mmap.PROT_READ)
_names: dict[CodeType, str] = {}
_imports: dict[int, int] = {}
"""Thread → how many modules of peerload it is importing now, one inside the other."""
_callback: dict[int, int] = {}
_callbacks = itertools.count(1)


def _name(code: CodeType) -> str:
    """The file and function, or "" for code that is not of peerload."""
    path = code.co_filename
    root = next((root for root in PRODUCT if root in path), None)
    if root is None:
        return ""
    file = f"{root.strip('/').removeprefix('peerload_')}/{path.rpartition(root)[2]}"
    return "" if file == "peerload/__main__.py" else f"{file} {code.co_firstlineno} {code.co_name}"


def _called(frame: FrameType, event: str, _argument: object) -> None:
    if event not in {"call", "return"}:
        return
    thread = threading.get_ident()
    caller = frame.f_back
    if event == "call" and (caller is None or caller.f_code.co_filename.endswith(EVENT_LOOP)):
        _callback[thread] = next(_callbacks)
    code = frame.f_code
    name = _names.get(code)
    if name is None:
        name = _names[code] = _name(code)
    if not name:
        return
    if name.endswith(" <module>"):
        _imports[thread] = _imports.get(thread, 0) + (1 if event == "call" else -1)
    elif event == "call" and _switch[0] == 49 and not _imports.get(thread):
        os.write(_trace, f"{time.monotonic_ns()} {os.getpid()} {_callback.get(thread, 0)} {name}\n".encode())


class _Popen(subprocess.Popen):
    """The launcher runs isolated from PYTHONPATH: it is told to load this file first."""

    def __init__(self, argv: object, *more: object, **options: object) -> None:
        if isinstance(argv, list) and "-c" in argv and "peerload.launcher" in argv[argv.index("-c") + 1]:
            code = argv.index("-c") + 1
            own = f"exec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'), {{'__file__': {__file__!r}}}); "
            argv = [*argv[:code], own + argv[code], *argv[code + 1 :]]
        super().__init__(argv, *more, **options)  # type: ignore[call-overload]


if Path("/proc/self/cmdline").read_bytes().split(b"\0")[3:4] == [b"agent"]:
    subprocess.Popen = _Popen  # type: ignore[assignment,misc]
threading.setprofile(_called)
sys.setprofile(_called)
