"""`peerload demo`: three agents and a broker on this machine, which share real commands; `peerload demo gpu`."""

from __future__ import annotations

import os
import signal

from peerload.cli.common.messages import INTERRUPTED
from peerload.cli.common.options import Options, whole
from peerload.cli.demo.demo import TASKS_MAX, SharingDemo, interrupt, run_and_clean, temporary_directory, told
from peerload.text.format import print_result

TASKS = 60


def main(words: list[str]) -> int:
    """Run the verb → 0 if the demo succeeded and left nothing behind, 1 if not."""
    if words[:1] == ["gpu"]:
        from peerload.cli.demo import gpu

        return gpu.main(words[1:])
    reader = Options(
        "demo",
        "Start three agents and an MQTT broker on this machine, submit real commands of different length to one of"
        " the agents, show where they run, print a summary, and remove everything. `peerload demo gpu` shows how tasks"
        " share GPUs, on simulated GPUs.",
    )
    reader.flag("--tasks N", help="number of commands (default: %(default)s)", type=whole(1, TASKS_MAX), default=TASKS)
    reader.flag("--policy NAME|FILE", help="the preset of policies (%(default)s)", default="adaptive")
    reader.flag(
        "--broker", help="which broker (default: Mosquitto where it is installed)", choices=("mosquitto", "amqtt")
    )
    flags = reader.read(words)
    policy = os.path.abspath(flags.policy) if flags.policy.endswith(".toml") else flags.policy  # noqa: PTH100 -- no links followed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    demo = SharingDemo(temporary_directory(), policy)
    account, left = run_and_clean(demo, lambda: demo.run(flags.tasks, flags.broker))
    if account is None:
        return INTERRUPTED
    account |= {"policy": flags.policy, "broker": demo.broker, "processes_left": len(left)}
    print_result(account, ["", *told(account)], as_json=flags.json)
    good = not left and not account["failed"] and account["outputs_right"] == account["tasks"]
    return 0 if good else 1
