"""Starts ranks of sft.py in a moment: it has imported everything, and forks.

A torchrun would do, and takes ten seconds for every run. Reads one request per line, answers with
the process ids at once, and with the exit codes when all ranks have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 900  # seconds for a run; then its ranks are killed, and the code says so


def parse_launch(config: Path) -> argparse.Namespace:
    """What `accelerate launch --config_file CONFIG examples/sft.py` makes of the file."""
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(config), "examples/sft.py"])
    return _validate_launch_command(args)[0]


def launch_environment(config: Path) -> dict[str, str]:
    """The environment variables that it gives to every rank."""
    args = parse_launch(config)
    args.main_process_ip, args.main_process_port = "127.0.0.1", 0
    environment = prepare_multi_gpu_env(args)
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


@functools.cache
def fsdp2() -> dict[str, str]:
    """As in the configuration for eight GPUs, which here are CPU ranks, in fp32."""
    environment = launch_environment(EXAMPLES / "configs" / "eight_gpus_fsdp2.yaml")
    return environment | {"ACCELERATE_MIXED_PRECISION": "no"}


def free_port() -> int:
    """One that the system gives to nobody by itself: a rank takes seconds to take it."""
    while True:
        port = random.SystemRandom().randint(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def become_rank(request: dict[str, Any], rank: int, port: int) -> None:
    """In the forked process: sft.py as torchrun starts it."""
    os.environ |= request["environment"]
    if request["ranks"] > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(request["ranks"]), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(request["ranks"])}
    log = os.open(f"{request['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [str(EXAMPLES / "sft.py"), *request["arguments"]]
    if "ACCELERATE_USE_FSDP" in request["environment"]:
        from tests.examples.fsdp_on_cpu import shard_on_cpu

        shard_on_cpu()
    if request["before"]:
        exec(
            request["before"], {"rank": rank, "folder": request["arguments"][-1]}
        )  # what the test breaks
    runpy.run_path(sys.argv[0], run_name="__main__")


def start_rank(request: dict[str, Any], rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        become_rank(request, rank, port)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: list[int]) -> list[int]:
    """Exit codes, -9 for a kill; 124 for a rank that hangs."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = 124
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def serve() -> None:
    for name in ("sft", "torch.distributed.checkpoint.state_dict"):  # once, for all ranks
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        port = free_port()
        pids = [start_rank(request, rank, port) for rank in range(request["ranks"])]
        print(json.dumps(pids), flush=True)
        print(json.dumps(wait_for(pids)), flush=True)


class RankServer:
    """The server, seen from a test: `start` gives process ids, `wait` gives exit codes."""

    def __init__(self) -> None:
        root = EXAMPLES.parent
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        environment |= {"PYTHONPATH": f"{root}:{EXAMPLES}", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.examples.rank_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=root,
            text=True,
        )

    def start(
        self, arguments: str, folder: Path, ranks: int, *, sharded: bool = False, before: str = ""
    ) -> list[int]:
        """Start sft.py with these arguments; what they print goes to FOLDER.log.RANK."""
        request = {
            "arguments": [*arguments.split(), "--output-dir", str(folder)],
            "ranks": ranks,
            "environment": fsdp2() if sharded else {},
            "log": f"{folder}.log",
            "before": before,
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait(self) -> list[int]:
        return json.loads(self.process.stdout.readline())

    def run(self, arguments: str, folder: Path, ranks: int, **options: Any) -> list[int]:
        self.start(arguments, folder, ranks, **options)
        return self.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=600)


def said(folder: Path, rank: int) -> str:
    """What a rank of the last run in this folder printed."""
    return Path(f"{folder}.log.{rank}").read_text()


if __name__ == "__main__":
    serve()
