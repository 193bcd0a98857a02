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
from contextlib import nullcontext, suppress
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
    try:
        train_on(loader, data, how, num_workers, loader if in_with else nullcontext())
    finally:
        print(len(active_children()), "workers are left", file=sys.stderr)


def train_on(loader: Any, data: Stuck, how: str, num_workers: int, opened: Any) -> None:
    with opened:
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
        data = DataLoader(
            range(50),
            batch_sampler=PrefetchingSampler(50, batch_size=1),
            collate_fn=collecting,
        )
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


class Child:
    """A case in a forked process, which writes to a pipe when its time begins."""

    def __init__(self, case: str) -> None:
        self.case, self.began, self.seconds = case, 0.0, 0.0
        self.begin, write = os.pipe()
        self.said = os.memfd_create("said")
        self.pid = os.fork()
        if not self.pid:
            os.dup2(write, 3, inheritable=False)
            os.dup2(self.said, 2)
            CASES[case]()  # and out of the loop that forks, by an error or by the exit
            sys.exit(0)
        os.close(write)
        os.set_blocking(self.begin, False)

    def has_ended(self) -> bool:
        if not self.began:
            with suppress(BlockingIOError):
                os.read(self.begin, 3)
                self.began = time.perf_counter()
                if self.case.startswith("ctrl-c"):
                    os.kill(self.pid, signal.SIGINT)
            return False
        has_ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        self.seconds = time.perf_counter() - self.began
        if not has_ended and self.seconds > LIMIT:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return True
        return has_ended

    def result(self) -> dict[str, Any]:
        os.lseek(self.said, 0, os.SEEK_SET)
        return {"seconds": self.seconds, "said": os.read(self.said, 100_000).decode()}


def results(cases: list[str]) -> dict[str, Any]:
    """Two at a time, which mostly wait: more would take each other's time."""
    waiting, running, done = list(cases), list[Child](), list[Child]()
    while waiting or running:
        while waiting and len(running) < 2:
            running.append(Child(waiting.pop(0)))
        done += [child for child in running if child.has_ended()]
        running = [child for child in running if child not in done]
        time.sleep(0.01)
    return {child.case: child.result() for child in done}


if __name__ == "__main__":
    gc.freeze()  # else much of a child's end is the collection of what was imported
    os.dup2(0, 3)  # that no pipe or file of ours has this number
    print(json.dumps(results(list(CASES))))
