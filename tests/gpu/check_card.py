"""Holds every reading of this machine's GPUs against `nvidia-smi`, idle and at work, and runs tasks on them through an agent.

`python -m tests.gpu.check_card --out FILE`: for a machine with a real card. Nothing is set on it. Each task takes memory by
way of torch, where that is installed, else of CUDA's driver. The report is Markdown. Exit code 1 if something differs.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peerload.agent.sensors.nvml import CardReading, Nvml, find_library
from peerload.model.resources import Device, Health
from tests.bench.support import ENVIRONMENT, Agent, agents, wait_until

MIB = 1 << 20
TASKS = 8
TASK_MIB = 2048
TASK_S = 6.0
SEEN_WITHIN_S = 120.0
MEMORY_SLACK_MIB = 64
"""Between two readings somebody may have taken a little more."""
FOREIGN_SLACK_MIB = 256
"""Others may take a little more, too; a task's memory that is taken for theirs is more than this."""
BUSY_SLACK_PERCENT = 30
TEMPERATURE_SLACK_C = 3
FIELDS = (
    "uuid", "index", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "pci.bus_id",
    "compute_cap", "clocks_event_reasons.active", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
TAKE = """
import ctypes, os, sys, time
size, seconds = int(sys.argv[1]) << 20, float(sys.argv[2])
try:
    import torch
    held = torch.zeros(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    how = "torch " + torch.__version__ + ", " + torch.cuda.get_device_name() + ", devices: %d" % torch.cuda.device_count()
except ImportError:
    cuda, count, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    how = "libcuda, devices: %d" % count.value
print(os.environ["CUDA_VISIBLE_DEVICES"], how, flush=True)
time.sleep(seconds)
"""


class Compared(NamedTuple):
    """One value as we read it and as the tool tells it."""

    what: str
    ours: object
    theirs: object
    is_same: bool


def tool(*words: str) -> list[list[str]]:
    """Rows of `nvidia-smi`."""
    command = ["nvidia-smi", *words, "--format=csv,noheader,nounits"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(out)) if row]


def compared(device: Device, reading: CardReading, told: dict[str, str]) -> list[Compared]:
    """Every value that both tell."""

    def near(what: str, ours: float | None, name: str, slack: float) -> Compared:
        theirs = number(told[name])
        same = ours == theirs if ours is None or theirs is None else abs(ours - theirs) <= slack
        return Compared(what, ours, theirs, same)

    used = reading.mem_used_bytes
    health = "sick" if number(told["ecc.errors.uncorrected.volatile.total"]) else "ok or degraded"
    bdf = told["pci.bus_id"].lower().removeprefix("0000")
    return [
        Compared("name", device.model, told["name"], device.model == told["name"]),
        Compared("number", device.index, told["index"], str(device.index) == told["index"]),
        Compared("PCI address", device.bdf, bdf, device.bdf == bdf),
        near("compute capability", device.capability, "compute_cap", 0.001),
        near("memory, MiB", device.mem_bytes / MIB, "memory.total", 1),
        near("memory in use, MiB", None if used is None else used / MIB, "memory.used", MEMORY_SLACK_MIB),
        near("at work, %", None if reading.busy is None else reading.busy * 100, "utilization.gpu", BUSY_SLACK_PERCENT),
        near("temperature, °C", reading.temperature_c, "temperature.gpu", TEMPERATURE_SLACK_C),
        Compared("health", reading.health.name.lower(), health, (health == "sick") == (reading.health is Health.SICK)),
    ]


def number(text: str) -> float | None:
    """None for `[N/A]` and its like."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


def readings(ask: Callable[..., list[list[str]]] = tool) -> tuple[list[str], bool]:
    """The lines of the report on the sensors, and whether all agree."""
    nvml = Nvml(find_library())
    devices = nvml.find()
    began_s = time.perf_counter()
    cards = nvml.read()
    took_s = time.perf_counter() - began_s
    told = {row[0]: dict(zip(FIELDS, row, strict=True)) for row in ask(f"--query-gpu={','.join(FIELDS)}")}
    apps = {(row[0], int(row[1])) for row in ask("--query-compute-apps=gpu_uuid,pid") if row[1].isdecimal()}
    lines, good = [f"{len(devices)} devices, all read in {took_s * 1e3:.1f} ms.", ""], True
    for device, reading in zip(devices, cards, strict=True):
        if device.name not in told:  # a slice
            lines += [
                f"{device.name}: a slice, {device.mem_bytes / MIB:.0f} MiB, capabilities {device.capabilities}",
                "",
            ]
            continue
        values = compared(device, reading, told[device.name])
        seen = {(device.name, process.pid) for process in reading.processes or () if not process.is_graphics}
        theirs = {app for app in apps if app[0] == device.name}
        values.append(Compared("processes", sorted(seen), sorted(theirs), theirs <= seen))
        good = good and all(value.is_same for value in values)
        lines += [f"**{device.name}** can tell: {', '.join(device.capabilities)}", ""]
        lines += ["| | read | nvidia-smi | |", "|---|---|---|---|"]
        lines += [f"| {what} | {a} | {b} | {'same' if same else '**differs**'} |" for what, a, b, same in values]
        lines.append("")
    nvml.close()
    return lines, good


class Seen(NamedTuple):
    """Memory of all GPUs in bytes, at one moment: what tasks have, and what others have."""

    ours: int
    foreign: int


def seen_well(samples: Sequence[Seen], foreign_before: int) -> tuple[Seen, bool]:
    """The most that was seen of the tasks, with the most that was seen of others in that many samples; and whether
    that is all of what they took, and none of it was taken for others'."""
    wanted = TASKS * TASK_MIB * MIB
    most = max((sample.ours for sample in samples), default=0)
    foreign = max((sample.foreign for sample in samples if sample.ours >= min(most, wanted)), default=0)
    return Seen(most, foreign), most >= wanted and abs(foreign - foreign_before) <= FOREIGN_SLACK_MIB * MIB


def seen_now(agent: Agent) -> Seen:
    """What this node tells now."""
    found = gpus(agent)
    return Seen(sum(gpu["mem_ours_bytes"] for gpu in found), sum(gpu["mem_foreign_bytes"] for gpu in found))


def tasks() -> tuple[list[str], bool]:
    """The lines of the report on tasks, with the readings while they ran, and whether all went as it should."""
    compared, read_well = ["They were never all at work at one time."], False
    with agents(1, slots=TASKS) as (agent,):
        wait_until(lambda: all(gpu["health"] != "unknown" for gpu in gpus(agent)) and gpus(agent), SEEN_WITHIN_S)
        before = sum(gpu["mem_used_bytes"] for gpu in gpus(agent))
        foreign_before = seen_now(agent).foreign
        ids = [submitted(agent) for _ in range(TASKS)]
        samples: list[Seen] = []
        while agent.client.call("wait", tasks=ids, timeout_s=0.5)["timed_out"]:
            samples.append(seen_now(agent))
            if not read_well and samples[-1].ours >= TASKS * TASK_MIB * MIB:
                compared, read_well = readings()
        shown = agent.client.call("show", tasks=ids)["tasks"]
        outputs = [output(agent, task) for task in ids]
        wait_until(lambda: not any(gpu["tasks"] for gpu in gpus(agent)), SEEN_WITHIN_S)
        after = sum(gpu["mem_used_bytes"] for gpu in gpus(agent))
    failed = [task["id"] for task in shown if task["exit_code"]]
    wrong = [
        task["id"]
        for task, out in zip(shown, outputs, strict=True)
        if not out or [f"nvidia:{out.split()[0]}"] != task["devices"]
    ]
    waits = [task["started_at"] - task["submitted_at"] for task in shown if task["started_at"]]
    seen, is_all_seen = seen_well(samples, foreign_before)
    lines = [
        f"{TASKS} tasks of {TASK_MIB} MiB, {TASK_S:g} s each: {len(failed)} failed, {len(wrong)} saw another card than granted.",
        f"Seen as ours: at most {seen.ours / MIB:.0f} MiB (they took {TASKS * TASK_MIB}, and a context each).",
        f"Seen as others' then: {seen.foreign / MIB:.0f} MiB; before: {foreign_before / MIB:.0f} MiB.",
        "Nothing is missing or misplaced." if is_all_seen else "**Some is missing, or taken for others'.**",
        f"In use before {before / MIB:.0f} MiB, after {after / MIB:.0f} MiB.",
        f"From submission to start: median {statistics.median(waits):.3f} s." if waits else "None has started.",
        "",
        f"The first says: `{outputs[0]}`",
        "",
        "### Readings while they ran",
        "",
        *compared,
    ]
    return lines, not failed and not wrong and is_all_seen and read_well


def gpus(agent: Agent) -> list[dict[str, Any]]:
    """This node's, as `nodes` tells them."""
    found: list[dict[str, Any]] = agent.client.call("nodes")["nodes"][0]["gpus"]
    return found


def submitted(agent: Agent) -> str:
    """One task that takes memory."""
    argv = [os.fsencode(word) for word in (sys.executable, "-c", TAKE, str(TASK_MIB), str(TASK_S))]
    request = {"gpus": 1, "gpu_mem_bytes": (TASK_MIB + 1024) * MIB, "gpu_share": "time", "cpus": 0.1}
    spec = {"argv": argv, "directory": b"/", "environment": ENVIRONMENT, "request": request}
    return str(agent.client.call("submit", token=os.urandom(16).hex(), spec=spec)["id"])


def output(agent: Agent, task: str) -> str:
    """What it printed."""
    pieces = agent.client.stream("output", task=task, streams=[1])
    return b"".join(piece["data"] for piece in pieces).decode("utf-8", "replace").strip()


def main(words: Sequence[str] | None = None) -> int:
    """Check and report."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--out", type=Path, help="where the report goes, too")
    options = reader.parse_args(words)
    driver = tool("--query-gpu=driver_version")[0][0]
    read, read_well = readings()
    ran, ran_well = tasks()
    verdict = "Everything agrees." if read_well and ran_well else "**Something differs.**"
    text = "\n".join(
        ["# Readings and tasks on a real GPU", "", f"Driver {driver}. {verdict}", "", "## Readings", "", *read,
         "## Tasks", "", *ran, ""]
    )  # fmt: skip
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0 if read_well and ran_well else 1


if __name__ == "__main__":
    sys.exit(main())
