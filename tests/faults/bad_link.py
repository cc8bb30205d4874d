"""A link between two network namespaces that delays packets and loses some: two TUN devices, and a relay between them.

Needs root and /dev/net/tun, and nothing of the kernel's traffic control, which is often built without delay and loss.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST_PACKET = 65536


class BadLink:
    """Carries IP packets between two TUN devices of one name, each to be moved to a namespace of its own.

    A packet arrives ``delay`` seconds after it was sent, or, with the probability ``loss``, never.
    """

    def __init__(self, device: str, delay: float, loss: float) -> None:
        self.delay, self.loss = delay, loss
        self.carried = self.lost = 0
        """Packets so far."""
        self.names = (f"{device}-0", f"{device}-1")
        self._ends = [_open_tun(name) for name in self.names]
        self._closed = threading.Event()
        self._random = random.Random(0)
        self._thread = threading.Thread(target=self._relay, name="bad-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The devices go with their ends."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for end in self._ends:
            os.close(end)

    def _relay(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._closed.is_set():
            wait = min(0.05, under_way[0][0] - time.monotonic()) if under_way else 0.05
            readable, _, _ = select.select(self._ends, [], [], max(0.0, wait))
            for end in readable:
                with suppress(OSError):  # the device is down
                    packet = os.read(end, _LARGEST_PACKET)
                    if self._random.random() < self.loss:
                        self.lost += 1
                        continue
                    count += 1
                    other = self._ends[1 - self._ends.index(end)]
                    heapq.heappush(under_way, (time.monotonic() + self.delay, count, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(under_way)
                with suppress(OSError):
                    os.write(other, packet)
                    self.carried += 1


def _open_tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end
