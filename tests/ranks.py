"""CPU ranks of torch.distributed, forked from a process that has imported what they need.

torchrun would do, and starts three processes that each import torch: ten seconds for a test.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["datasets", "accelerate", "transformers.models.qwen3.modeling_qwen3", "torch_collate_kit"]
)


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what the function of a module returns on each of two ranks of gloo."""
    return on_ranks(2, function, *arguments)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what the function of a module returns on each rank of gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(size):
        here, there = FORKS.Pipe(duplex=False)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
        }
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        process = FORKS.Process(
            target=_become_rank, args=(there, environment, function, arguments), daemon=True
        )
        process.start()
        there.close()
        started.append((process, here))
    found = []
    for process, here in started:
        assert here.poll(600), "a rank hangs"
        is_done, result = pickle.loads(here.recv_bytes())
        assert is_done, result
        found.append(result)
        process.join(600)
        assert process.exitcode == 0
    return found


def _become_rank(
    there: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment | {"ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    try:
        found: tuple[bool, Any] = True, function(*arguments)
    except BaseException:
        found = False, traceback.format_exc()
    there.send_bytes(pickle.dumps(found))  # a tensor as its values, not as shared memory
