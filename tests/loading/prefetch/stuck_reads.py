"""What becomes of a process while a read is stuck: each case in a process of its own.

    python -m tests.loading.prefetch.stuck_reads

A child is forked for each case, and is left to Python's own end. It says when its error is raised,
or when Ctrl-C may come. Printed as JSON, by case: the seconds from then on, and what it wrote.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import active_children
from typing import Any

from torch.utils.data import DataLoader

from torch_collate_kit.loading import PrefetchingSampler, PrefetchLoader

LIMIT = 20.0  # seconds, after which a case is killed
BLOCKS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(600),
    "socket": lambda: [ends := socket.socketpair(), ends[0].recv(1)],
    "lock": lambda: [lock := threading.Lock(), lock.acquire(), lock.acquire()],
}


class Stuck:
    """Reads two batches of one example, and no third one."""

    def __init__(self, block: str, at: int = 2) -> None:
        self.block, self.at, self.began = block, at, threading.Event()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        if index >= self.at:
            self.began.set()
            BLOCKS[self.block]()
        return index


def loader_of(data: Stuck, num_workers: int) -> PrefetchLoader:
    sampler = PrefetchingSampler(len(data), batch_size=1, shuffle=False)
    return PrefetchLoader(DataLoader(data, batch_sampler=sampler, num_workers=num_workers))


def now() -> None:
    os.write(3, b"now")


def train(how: str, block: str, *, num_workers: int = 0, in_with: bool = True) -> None:
    data = Stuck(block)
    loader = loader_of(data, num_workers)
    with ExitStack() as after:
        after.callback(lambda: print(len(active_children()), "workers are left", file=sys.stderr))
        if in_with:
            after.enter_context(loader)
        for number, _ in enumerate(loader):
            if number == 1:
                time.sleep(0.3) if num_workers else data.began.wait()
                if how == "waiting":
                    threading.Timer(0.3, now).start()
                    continue
                now()
                if how == "error":
                    raise RuntimeError("of the body")
                time.sleep(600)  # Ctrl-C comes


class Trainer:
    def __init__(self, loader: PrefetchLoader) -> None:
        self.batches, self.me = iter(loader), self


def in_a_cycle(loader: PrefetchLoader) -> None:
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])


def in_a_trainer(loader: PrefetchLoader) -> None:
    next(Trainer(loader).batches)


def collecting(examples: list[Any]) -> list[Any]:
    """As in a thread that makes many objects: the collector runs here."""
    gc.collect()
    time.sleep(0.001)
    return examples


def leave_a_hundred(leave: Callable[[PrefetchLoader], None]) -> None:
    gc.freeze()  # what is there already costs most of a collection
    now()
    for _ in range(100):
        sampler = PrefetchingSampler(50, batch_size=1)
        data = DataLoader(range(50), batch_sampler=sampler, collate_fn=collecting)
        leave(PrefetchLoader(data))
        time.sleep(0.002)
    gc.collect()
    assert gc.isenabled()
    print("all were collected", file=sys.stderr)


CASES: dict[str, Callable[[], None]] = {
    "error, socket, with": lambda: train("error", "socket"),
    "error, lock": lambda: train("error", "lock", in_with=False),
    "error, worker, with": lambda: train("error", "sleep", num_workers=1),
    "ctrl-c, body, worker": lambda: train("body", "sleep", num_workers=1, in_with=False),
    "ctrl-c, waiting": lambda: train("waiting", "sleep", in_with=False),
    "ctrl-c, waiting, worker, with": lambda: train("waiting", "sleep", num_workers=1),
    "100 loops in cycles": lambda: leave_a_hundred(in_a_cycle),
    "100 trainers": lambda: leave_a_hundred(in_a_trainer),
}


def result(case: str) -> dict[str, Any]:
    """Run a case in a forked process, which writes to a pipe when its time begins."""
    begin, write = os.pipe()
    said = os.memfd_create("said")
    child = os.fork()
    if not child:
        os.dup2(write, 3, inheritable=False)
        os.dup2(said, 2)
        CASES[case]()  # and out of the loop that forks, by an error or by the exit
        sys.exit(0)
    os.close(write)
    os.read(begin, 3)
    began = time.perf_counter()
    if case.startswith("ctrl-c"):
        os.kill(child, signal.SIGINT)
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.perf_counter() - began > LIMIT:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    os.lseek(said, 0, os.SEEK_SET)
    return {"seconds": seconds, "said": os.read(said, 100_000).decode()}


if __name__ == "__main__":
    gc.freeze()  # else much of a child's end is the collection of what was imported
    os.dup2(0, 3)  # that no pipe or file of ours has this number
    print(json.dumps({case: result(case) for case in sys.argv[1:] or CASES}))
