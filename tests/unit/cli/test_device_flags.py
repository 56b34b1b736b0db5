"""The flags by which a task asks for devices."""

from __future__ import annotations

from typing import Any

import pytest

from peerload.cli.common import command
from peerload.model.errors import UsageError
from tests.each import each


def asked(*words: str) -> dict[str, Any]:
    flags, _ = command.command_options("submit", "", usage="").read_command([*words, "true"])
    return {name: value for name, value in command.device_request(flags, "submit").items() if value is not None}


def test_what_is_asked_for() -> None:
    assert asked() == {}
    assert asked("-G2", "--gpu-mem", "12G") == {"gpus": 2, "gpu_mem_bytes": 12 << 30}
    assert asked("-G", "0.25") == {"gpus": 1, "gpu_fraction": 0.25}
    assert asked("-G1", "--gpu-prefer", "0,1", "--gpu-prefer", "A100*")["gpu_prefer"] == ["0", "1", "A100*"]
    assert asked("-G1", "--gpu-wait", "queue", "--gpu-wait-max", "10m") == {
        "gpus": 1,
        "gpu_wait": "queue",
        "gpu_wait_s_max": 600.0,
    }
    assert asked("-G1", "--gpu-share", "exclusive")["gpu_share"] == "exclusive"
    assert asked("-G1", "--gpu-oom-retries", "0") == {"gpus": 1, "gpu_oom_retries": 0}
    assert asked("-l", "fpga=2", "-l", "licence") == {"devices": [("fpga", 2), ("licence", 1)]}


@each(
    ("words", "says"),
    [
        (("-G", "1.5"), "neither a whole number nor below 1"),
        (("-G", "-1"), "not a number of GPUs"),
        (("-G", "many"), "not a number of GPUs"),
        (("-G", "nan"), "not a number of GPUs"),
        (("-G1", "--gpu-mem", "12"), "12G is 12 GiB"),
        (("--gpu-mem", "12G"), "--gpu-mem needs GPUs, and none is requested"),
        (("--gpu-wait", "queue"), "--gpu-wait needs GPUs"),
        (("--gpu-oom-retries", "0"), "--gpu-oom-retries needs GPUs"),
        (("-G1", "--gpu-oom-retries", "17"), "17 is not between 0 and 16"),
        (("-G1", "--gpu-wait-max", "1m"), "--gpu-wait-max is only for"),
        (("-G", "0.5", "--gpu-share", "exclusive"), "a fraction of a GPU cannot be exclusive"),
        (("-l", "fpga=0"), "not KIND=N"),
        (("-l", "gpu=1"), "GPUs are requested with -G"),
        (("-l", "fpga", "-l", "fpga=2"), "given twice"),
    ],
)
def test_what_makes_no_sense_is_said(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        asked(*words)
    assert says in str(raised.value)
