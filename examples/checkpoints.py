"""The output folder of a run: locked, with checkpoints that a kill leaves whole."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.distributed.checkpoint import CheckpointException


def fail(message: str) -> NoReturn:
    """End the script, whose name precedes the message."""
    raise SystemExit(f"{argparse.ArgumentParser().prog}: {message}")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """End all ranks with the message of one that fails in here; else they would wait for it."""
    message = None
    try:
        yield
    except SystemExit as failure:  # of fail()
        message = failure.code
    if messages := [other for other in gather_object([message]) if other]:
        raise SystemExit(messages[0])


def claim(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Make and lock the output folder, for all ranks; refuse one of another run."""
    folder = args.output_dir
    with together():
        if accelerator.is_main_process:
            lock(folder)
            if args.resume == "always" and not checkpoints(args):
                fail(f"--resume: no checkpoint in {folder}; was --checkpoint-every given?")
            if checkpoints(args) and not args.resume:
                fail(f"{folder} has checkpoints of an earlier run; --resume it, or go elsewhere")
            if (folder / "metrics.jsonl").exists() and not checkpoints(args):
                print(f"{folder}: the results of an earlier run are replaced")
    if not checkpoints(args):
        args.resume = None  # of "auto"


def lock(folder: Path) -> None:
    """Make the folder, and keep other runs out of it until this process ends or is killed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)  # never closed
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers that outlive us do not hold it
    except BlockingIOError:
        fail(f"--output-dir {folder}: another run is using it; choose another folder")
    except OSError as error:
        fail(f"--output-dir {folder}: cannot be made and locked: {error.strerror}")


def finish_the_step(_: int) -> None:
    """`worker_init_fn`: a SIGTERM to the whole process group leaves DataLoader workers alive."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def noting_sigterm() -> Iterator[list[int]]:
    """Collect SIGTERMs, which Slurm and Kubernetes send before they kill: a step is finished."""
    received: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, handler)


def checkpoints(args: argparse.Namespace) -> list[Path]:
    """Return the folders of the checkpoints that are whole, the oldest first."""
    return sorted(path.parent for path in args.output_dir.glob("checkpoint-*/run.json"))


def save_checkpoint(accelerator: Accelerator, loader: Any, step: int, args: Any) -> None:
    """Write to `unfinished`, then rename it: a kill leaves the checkpoint before it whole."""
    unfinished, metrics = args.output_dir / "unfinished", args.output_dir / "metrics.jsonl"

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while saving
        unfinished.mkdir()

    def save_part() -> None:
        accelerator.save_state(str(unfinished))
        wait_for_disk(*unfinished.glob(f"random_states_{args.rank}.pkl"))  # maybe not of this host

    def finish() -> None:
        state = {"version": 6, "step": step, "loader": loader.state_dict(), "run": args.run}
        (unfinished / "run.json").write_text(json.dumps(state, indent=2))
        wait_for_disk(metrics, *unfinished.rglob("*"), unfinished)
        unfinished.rename(args.output_dir / f"checkpoint-{step:08d}")
        wait_for_disk(args.output_dir)
        for old in checkpoints(args)[: -args.keep_checkpoints]:
            shutil.rmtree(old.rename(unfinished))  # a kill leaves no half of a checkpoint

    main, everybody = [0], range(args.num_ranks)
    try:
        for work, ranks in ((begin, main), (save_part, everybody), (finish, main)):
            with together():
                try:
                    if args.rank in ranks:
                        work()
                except (OSError, RuntimeError, CheckpointException) as error:
                    fail(not_saved(error, step, args))
    except SystemExit:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def not_saved(error: BaseException, step: int, args: argparse.Namespace) -> str:
    """Return why a checkpoint was not saved; torch calls a full disk a RuntimeError."""
    rank = args.rank
    if isinstance(error, CheckpointException):  # every rank has the errors of all
        rank, (error, _) = next(iter(error.failures.items()))
    where = f" by rank {rank}" if args.num_ranks > 1 else ""
    whole = [path.name for path in checkpoints(args)[-1:]]
    there = f"{whole[0]} is whole, --resume goes on from it" if whole else "there is no other"
    return f"checkpoint of step {step} could not be saved{where}: {error}; {there}"


def wait_for_disk(*paths: Path) -> None:
    """Flush files, and the names in folders, so that a power failure cannot lose them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def resume(accelerator: Accelerator, loader: Any, args: argparse.Namespace) -> int:
    """Load the latest checkpoint, if it is of this very run; return the number of its step."""
    latest = checkpoints(args)[-1]
    state = json.loads((latest / "run.json").read_text())
    was, now = {"version": state["version"], **state["run"]}, {"version": 6, **args.run}
    if other := [f"{name} {value}" for name, value in was.items() if now.get(name) != value]:
        fail(f"--resume: {latest} is of another run, which had {', '.join(other)}")
    accelerator.load_state(str(latest))
    if not (latest / f"random_states_{args.rank}.pkl").exists():  # there were fewer ranks
        seeds = np.random.SeedSequence((args.seed, state["step"], args.rank))
        set_seed(int(seeds.generate_state(1)[0]))
    loader.load_state_dict(state["loader"])  # plain JSON: Accelerate would load it as a pickle
    if accelerator.is_main_process:  # forget the steps that came after it
        metrics, shorter = args.output_dir / "metrics.jsonl", args.output_dir / "metrics.new"
        shorter.write_text("".join(metrics.read_text().splitlines(True)[: state["step"]]))
        wait_for_disk(shorter)
        shorter.replace(metrics)
    return state["step"]
