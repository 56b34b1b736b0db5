"""A relay for packets: what is routed into one machine's TUN device comes out of another's, late, twice or out of order.

``relay.py ADDRESS=NAMESPACE …`` says "ready" and then takes lines ``[from, to, delay_s, jitter_s, twice_percent]`` from
stdin, until that is closed. A packet of a link that was never named is passed on as it comes.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES_MAX = 65536
_WAITING_MAX = 100_000
_IP_SOURCE, _IP_DESTINATION = slice(12, 16), slice(16, 20)
_IP_HEADER_BYTES = 20


def _open_device(namespace: str) -> int:
    """The TUN device named ``relay`` of a network namespace (which this process then stays in)."""
    fd = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns", namespace)
    os.close(fd)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"relay", _IFF_TUN | _IFF_NO_PI))
    return device


class Relay:
    """Packets that wait, by the time at which they are due."""

    def __init__(self, ends: dict[bytes, int]) -> None:
        self._ends = ends
        self._links: dict[tuple[bytes, bytes], tuple[float, float, int]] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._chance = random.Random(1)

    def run(self) -> None:
        """Until stdin ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            for device in self._ends.values():
                selector.register(device, selectors.EVENT_READ)
            rest = b""
            while True:
                wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
                for key, _ in selector.select(wait_s):
                    if key.fd:
                        self._take(key.fd)
                        continue
                    raw = os.read(0, 65536)
                    if not raw:
                        return
                    *lines, rest = (rest + raw).split(b"\n")
                    for line in lines:
                        self._told(*json.loads(line))
                self._release()

    def _told(self, sender: str, receiver: str, delay_s: float, jitter_s: float, twice_percent: int) -> None:
        self._links[socket.inet_aton(sender), socket.inet_aton(receiver)] = (delay_s, jitter_s, twice_percent)

    def _take(self, device: int) -> None:
        while True:
            try:
                packet = os.read(device, _PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if len(packet) < _IP_HEADER_BYTES:
                continue
            to = self._ends.get(packet[_IP_DESTINATION])
            if to is None or len(self._waiting) >= _WAITING_MAX:
                continue  # as a network would: it is lost
            delay_s, jitter_s, twice_percent = self._links.get(
                (packet[_IP_SOURCE], packet[_IP_DESTINATION]), (0.0, 0.0, 0)
            )
            copies = 2 if self._chance.random() * 100 < twice_percent else 1
            for _ in range(copies):
                due_at = time.monotonic() + delay_s + self._chance.random() * jitter_s
                self._number += 1
                heapq.heappush(self._waiting, (due_at, self._number, to, packet))

    def _release(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._waiting)
            try:
                os.write(to, packet)
            except OSError:
                continue  # its queue is full, or its machine is gone: the packet is lost


def main() -> None:
    """Open every device, then relay."""
    ends = {}
    for word in sys.argv[1:]:
        address, _, namespace = word.partition("=")
        ends[socket.inet_aton(address)] = _open_device(namespace)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Relay(ends).run()


if __name__ == "__main__":
    main()
