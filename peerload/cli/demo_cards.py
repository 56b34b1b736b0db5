"""Four GPUs that are not there, for `peerload demo gpu`: they speak like `pynvml`, as much of it as an agent uses.

A task of the demo "has memory" of a card when it writes so into a file named by its pid; it is on the card while it lives.
"""

from __future__ import annotations

from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30
CARDS = 4
CARD_BYTES = 24 * GIB
MODEL = "Imagined 24 GB"
TASK = """
import os, sys, time
directory, gib, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
cards = os.environ["CUDA_VISIBLE_DEVICES"]
path = f"{directory}/{os.getpid()}"
with open(path + ".new", "w") as file:
    file.write(f"{cards} {int(gib * 2**30)}")
os.rename(path + ".new", path)
print(cards, flush=True)
time.sleep(seconds)
"""
"""What each task runs: DIRECTORY GIB SECONDS."""


def card_name(directory: Path, number: int) -> str:
    """Its UUID: another one in each demo, so that demos side by side do not take them for the same."""
    return f"GPU-{directory.parent.name.rpartition('-')[2]}-{number}"


class NVMLError(Exception):
    """What cannot be told of an imagined card."""


class _Facts:
    def __init__(self, **facts: object) -> None:
        self.__dict__.update(facts)


class ImaginedCards:
    """``directory``: where the tasks say what they have."""

    NVMLError = NVMLError

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _processes(self, handle: int) -> Iterator[tuple[int, int]]:
        for path in self._directory.iterdir():
            if not path.name.isdecimal() or not Path("/proc", path.name).exists():
                continue
            cards, _, size = path.read_text(encoding="ascii").partition(" ")
            if card_name(self._directory, handle) in cards.split(","):
                yield int(path.name), int(size)

    def nvmlInit(self) -> None:  # noqa: N802 -- the library's own names, here and below
        """They are always there."""

    nvmlShutdown = nvmlInit  # noqa: N815

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802, D102
        return CARDS

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802, D102
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802, D102
        return card_name(self._directory, handle)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: ARG002, N802, D102
        return MODEL

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> _Facts:  # noqa: N802, D102
        return _Facts(total=CARD_BYTES, used=sum(size for _, size in self._processes(handle)))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> _Facts:  # noqa: N802, D102
        return _Facts(gpu=min(33 * len(list(self._processes(handle))), 100), memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[_Facts]:  # noqa: N802, D102
        return [_Facts(pid=pid, usedGpuMemory=size) for pid, size in self._processes(handle)]

    def nvmlEventSetCreate(self) -> None:  # noqa: N802
        """They report no errors."""
        raise NVMLError
