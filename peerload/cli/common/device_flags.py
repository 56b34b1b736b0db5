"""The flags of `run` and `submit` by which a task asks for GPUs and other devices."""

from __future__ import annotations

from argparse import ArgumentTypeError

from peerload.cli.common import options
from peerload.model.errors import UsageError
from peerload.text import units

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

GPUS_MAX = 1024
OOM_RETRIES_MAX = 16
"""As peerload.model has them."""


def add(reader: options.Options) -> None:
    """All of them."""
    reader.flag("-G", "--gpus", type=gpus, metavar="N", help="GPUs, all of one node; 0.25: that part of one")
    reader.flag("--gpu-mem", type=units.size, metavar="12G", help="memory of each GPU")
    reader.flag(
        "--gpu-prefer",
        action="append",
        default=[],
        metavar="0,1",
        help="these first: numbers, beginnings of names (GPU-ab12), or patterns of models (A100*)",
    )
    reader.flag(
        "--gpu-wait", choices=("queue", "schedule"), help="if those have no room: wait for them, or take others"
    )
    reader.flag("--gpu-wait-max", type=units.duration, metavar="10m", help="after this, queue becomes schedule")
    reader.flag("--gpu-share", choices=("auto", "exclusive", "time"), help="with whom it shares its GPUs")
    reader.flag(
        "--gpu-oom-retries",
        type=options.whole(0, OOM_RETRIES_MAX),
        metavar="N",
        help="out of GPU memory: tried again so often with more (default 2, 0: never)",
    )
    reader.flag(
        "-l", "--device", action="append", default=[], type=kind, metavar="KIND=N", help="other devices (repeatable)"
    )


def gpus(text: str) -> float:
    """A whole number of GPUs, or a part of one."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= GPUS_MAX:
        raise ArgumentTypeError(f"{text!r} is no number of GPUs; such as 1, 4, or 0.25 for a part of one")
    if number > 1 and number != int(number):
        raise ArgumentTypeError(f"{text!r} is neither whole GPUs nor a part of one; such as 2, or 0.5")
    return number


def kind(text: str) -> tuple[str, int]:
    """``fpga=2``; ``fpga`` alone is one."""
    name, equals, number = text.partition("=")
    count = number if equals else "1"
    if not name or not count.isdecimal() or not 1 <= int(count) <= GPUS_MAX:
        raise ArgumentTypeError(f"{text!r} is no kind of device and number; such as fpga=1")
    if name == "gpu":
        raise ArgumentTypeError("GPUs are asked for with -G")
    return name, int(count)


def request(flags: Namespace, verb: str) -> dict[str, object]:
    """The part of a request that is about devices. Raises UsageError for what makes no sense together."""
    about_gpus = ("gpu_mem", "gpu_prefer", "gpu_wait", "gpu_wait_max", "gpu_share")
    given = [name for name in about_gpus if getattr(flags, name)]
    given += ["gpu_oom_retries"] if flags.gpu_oom_retries is not None else []
    if given and not flags.gpus:
        raise UsageError(
            f"{verb}: --{given[0].replace('_', '-')} is about GPUs, and none is asked for", hint="add  -G 1"
        )
    if len({name for name, _ in flags.device}) < len(flags.device):
        raise UsageError(f"{verb}: one kind of device is asked for twice", hint="such as:  -l fpga=2")
    found: dict[str, object] = {"devices": flags.device or None}
    if not flags.gpus:
        return found
    is_part = flags.gpus < 1
    if is_part and flags.gpu_share == "exclusive":
        raise UsageError(f"{verb}: a part of a GPU is shared with others, and --gpu-share exclusive was given")
    if flags.gpu_wait_max and flags.gpu_wait != "queue":
        raise UsageError(f"{verb}: --gpu-wait-max is when waiting ends", hint="add  --gpu-wait queue")
    return found | {
        "gpus": 1 if is_part else int(flags.gpus),
        "gpu_fraction": flags.gpus if is_part else None,
        "gpu_mem_bytes": flags.gpu_mem,
        "gpu_prefer": [name for value in flags.gpu_prefer for name in value.split(",") if name] or None,
        "gpu_wait": flags.gpu_wait,
        "gpu_wait_s_max": flags.gpu_wait_max,
        "gpu_share": flags.gpu_share,
        "gpu_oom_retries": flags.gpu_oom_retries,
    }
