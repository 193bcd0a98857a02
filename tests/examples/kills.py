"""Kill two-rank runs of sft.py at random moments, resume each, and compare to a run let alone.

    python -m tests.examples.kills --kills 20 --seed 0

Every second kill waits until a checkpoint is being written. A kill hits all processes, the launcher
included, or one rank only, which must end the other. DDP and FSDP2 take turns, and so do packed
rows with and without a DataLoader worker. A killed run is resumed, killed again, and so on, until
the kills of its kind are used up; then it must finish with the losses and the weights, to the last
bit, of the run let alone. tests/examples/test_sft_ranks.py has a short version.
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
from pathlib import Path
from typing import Any

from tests.examples.rank_server import EXAMPLES, fsdp2

OPTIONS = (
    "--num-conversations 200 --num-held-out 0 --batch-size 5 --max-tokens 256 --cpu --threads 1 "
    "--epochs 1 --checkpoint-every 1 --resume auto"
)  # 40 steps, each of them saved
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


def wait_for_moment(run: Any, folder: Path, in_save: bool, rng: random.Random) -> int | None:
    """Wait for a random step, and for a random moment in it, or in its save; the step."""
    first = num_lines(folder)
    target = first + rng.randint(1, 6)
    deadline = time.monotonic() + 120
    while num_lines(folder) < target or num_lines(folder) > target + 30:
        if run.poll() is not None:
            return None
        assert time.monotonic() < deadline, f"{folder}: no step {target}"
        time.sleep(0.002)
    while in_save and not (folder / "unfinished").exists():
        if run.poll() is not None:
            return None
    time.sleep(rng.uniform(0, 0.03 if in_save else 0.5))
    return target


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def kill(run: Any, rank: int | None) -> None:
    """All processes, or a rank: then the launcher and the other rank must end by themselves."""
    ranks = ranks_of(run.pid)
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
) -> dict[str, int]:
    """Kill the run that often, resume it after each, and let it finish."""
    counts = {"kills": 0, "while saving": 0, "of one rank": 0, "left a part behind": 0}
    while counts["kills"] < num_kills:
        run = launch(folder, sharded, options)
        in_save = counts["kills"] % 2 == 1
        rank = rng.choice([None, 0, 1])
        step = wait_for_moment(run, folder, in_save, rng)
        if step is None:
            raise AssertionError(f"{folder}: ended before it was killed: see {folder}.log")
        kill(run, rank)
        has_part = (folder / "unfinished").exists()
        counts["kills"] += 1
        counts["while saving"] += in_save
        counts["of one rank"] += rank is not None
        counts["left a part behind"] += has_part
        whole = sorted(path.name for path in folder.glob("checkpoint-*"))
        print(
            f"{folder.name}: killed {'all' if rank is None else f'rank {rank}'} at step {step}, "
            f"{'saving' if has_part else 'not saving'}; whole: {', '.join(whole)}",
            flush=True,
        )
    run = launch(folder, sharded, options)
    assert run.wait(timeout=300) == 0, f"{folder}: see {folder}.log"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks")
    args = parser.parse_args()
    kinds = [("ddp", False, ""), ("ddp_workers", False, "--num-workers 1"), ("fsdp2", True, "")]
    folder, totals = Path(tempfile.mkdtemp()), {}
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
        totals = {key: totals.get(key, 0) + value for key, value in counts.items()}
    print(", ".join(f"{key}: {value}" for key, value in totals.items()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
