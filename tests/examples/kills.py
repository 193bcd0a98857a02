"""Kill two-rank runs of sft.py at random moments, resume each, and compare to a run let alone.

    python -m tests.examples.kills --kills 20 --seed 0

Every second kill waits until a checkpoint is being written; the others hit a random moment of a
step, of the start or of a resume. A kill hits all processes, the launcher included, or one rank,
which must end the other. Three runs, DDP, DDP with a DataLoader worker and FSDP2, are each killed
and resumed again and again; then they must finish with the losses and the weights, to the last bit,
of a run let alone. tests/examples/test_sft_ranks.py has a short version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.examples.rank_server import EXAMPLES, fsdp2

OPTIONS = (
    "--num-conversations 400 --num-held-out 0 --batch-size 5 --max-tokens 256 --cpu --threads 1 "
    "--epochs 1 --checkpoint-every 1 --resume auto"
)  # 80 steps, each of them saved
SCRIPT = Path(__file__).with_name("fsdp_on_cpu.py")


def launch(folder: Path, sharded: bool, options: str = "") -> subprocess.Popen[bytes]:
    """Two ranks under torchrun, in a process group of their own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= {"PYTHONPATH": f"{EXAMPLES.parent}:{EXAMPLES}"} | (fsdp2() if sharded else {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(SCRIPT), str(EXAMPLES / "sft.py")]
    command += [*OPTIONS.split(), *options.split(), "--output-dir", str(folder)]
    with open(f"{folder}.log", "ab") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun started, which run the script."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def num_lines(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_moment(run: Any, folder: Path, kind: str, rng: random.Random) -> None:
    """Some moment of the start or of a resume, of a random step, or of the save after it."""
    if kind == "starting":
        time.sleep(rng.uniform(2, 10))
        return
    target = num_lines(folder) + rng.randint(1, 5)
    deadline = time.monotonic() + 120
    while num_lines(folder) < target or (kind == "saving" and not (folder / "unfinished").exists()):
        assert run.poll() is None, f"ended before it was killed: see {folder}.log"
        assert time.monotonic() < deadline, f"no step {target}: see {folder}.log"
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02 if kind == "saving" else 0.3))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def kill(run: Any, rank: int | None) -> None:
    """All processes, or a rank: then the launcher and the other rank must end by themselves."""
    while len(ranks := ranks_of(run.pid)) < 2:
        time.sleep(0.01)
    if rank is None:
        for pid in (run.pid, *ranks):  # torchrun starts each rank in a session of its own
            os.kill(pid, signal.SIGKILL)
        run.wait(timeout=30)
        while any(is_running(pid) for pid in ranks):
            time.sleep(0.01)
        return
    os.kill(ranks[rank], signal.SIGKILL)
    assert run.wait(timeout=90) != 0, "a run that lost a rank ended with 0"


def results(folder: Path) -> tuple[list[float], bytes]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    weights = (folder / "model" / "model.safetensors").read_bytes()
    return [json.loads(line)["loss"] for line in lines], weights


def kill_and_resume(
    folder: Path, sharded: bool, options: str, num_kills: int, rng: random.Random
) -> Counter[str]:
    """Kill the run that often, resume it after each, and let it finish."""
    counts: Counter[str] = Counter()
    for number in range(num_kills):
        kind = ("saving", "in a step", "saving", "starting")[number % 4]
        rank = rng.choice([None, 0, 1])
        run = launch(folder, sharded, options)
        wait_for_moment(run, folder, kind, rng)
        kill(run, rank)
        victim = "all ranks" if rank is None else "one rank"
        counts += Counter(["kills", kind, victim])
        counts["left part of a checkpoint behind"] += (folder / "unfinished").exists()
        print(f"{folder.name}: killed {victim} after step {num_lines(folder)}, {kind}", flush=True)
    run = launch(folder, sharded, options)
    assert run.wait(timeout=300) == 0, f"see {folder}.log"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks")
    args = parser.parse_args()
    kinds = [("ddp", False, ""), ("ddp_workers", False, "--num-workers 1"), ("fsdp2", True, "")]
    folder, totals = Path(tempfile.mkdtemp()), Counter()
    for number, (name, sharded, options) in enumerate(kinds):
        num_kills = len(range(number, args.kills, len(kinds)))
        if not num_kills:
            continue
        quiet = launch(folder / f"{name}_quiet", sharded, options)
        assert quiet.wait(timeout=600) == 0, f"see {folder}/{name}_quiet.log"
        expected, weights = results(folder / f"{name}_quiet")
        rng = random.Random(f"{args.seed} {name}")
        counts = kill_and_resume(folder / name, sharded, options, num_kills, rng)
        found, found_weights = results(folder / name)
        assert found == expected, f"{name}: other losses; see {folder}"
        assert found_weights == weights, f"{name}: other weights; see {folder}"
        print(f"{name}: {len(found)} losses and all weights as in the run let alone", flush=True)
        totals += counts
    print(", ".join(f"{key}: {value}" for key, value in totals.items()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
