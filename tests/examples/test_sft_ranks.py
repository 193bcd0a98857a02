"""sft.py on two and four CPU ranks, DDP and FSDP2: as one process; and what one rank does to others.

`python -m tests.examples.kills` is the long version of the last test.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest
import synthetic_chat
import torch
from safetensors.torch import load_file

from tests.examples.rank_server import RankServer, said

TINY = "--num-held-out 0 --max-tokens 512 --cpu --threads 1 --batch-size 5"
SHORT = f"{TINY} --num-conversations 25 --epochs 2 --checkpoint-every 2"  # 10 steps
LONG = f"{TINY} --num-conversations 25 --epochs 100 --checkpoint-every 1 --num-workers 1"
FULL_DISK = "raise OSError(28, 'No space left on device')"
# AdamW divides by the size of a gradient that may be rounding alone; SGD shows the sums.
SGD = "import torch; torch.optim.AdamW = lambda p, **_: torch.optim.SGD(p, lr=0.1)"


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def chats(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 conversations: of grade-school maths where the data is, else made up."""
    lines = [json.dumps(record) for record in synthetic_chat.make_corpus(21, seed=0)]
    if data_folder.is_dir():
        lines = (data_folder / "gsm8k_train_2k.jsonl").read_text().splitlines()[:21]
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def options_of(chats: Path) -> str:
    """Twenty steps; every fifth has one conversation, so other ranks have none."""
    return f"{TINY} --dataset {chats} --epochs 4 --max-grad-norm 1000 --checkpoint-every 10"


def finish(server: RankServer, arguments: str, folder: Path, ranks: int, **options: object) -> None:
    codes = server.run(arguments, folder, ranks, **options)
    assert codes == [0] * ranks, "\n".join(said(folder, rank) for rank in range(ranks))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def weights(folder: Path) -> torch.Tensor:
    """All of them, in one vector."""
    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.fixture(scope="module")
def alone(server: RankServer, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, with AdamW and with SGD."""
    folder = tmp_path_factory.mktemp("alone")
    finish(server, options_of(chats), folder / "adamw", 1)
    finish(server, options_of(chats), folder / "sgd", 1, before=SGD)
    return folder


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_four_ranks_train_as_one(
    server: RankServer, chats: Path, alone: Path, tmp_path: Path, sharded: bool
) -> None:
    finish(server, options_of(chats), tmp_path / "out", 4, sharded=sharded, before=SGD)
    expected, found = losses(alone / "sgd"), losses(tmp_path / "out")
    assert len(expected) == 20
    assert found == pytest.approx(expected, rel=0, abs=2e-6)
    expected, found = weights(alone / "sgd"), weights(tmp_path / "out")
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_train_as_one_and_resume_exactly(
    server: RankServer, chats: Path, alone: Path, tmp_path: Path, sharded: bool
) -> None:
    out = tmp_path / "out"
    finish(server, options_of(chats), out, 2, sharded=sharded)
    expected, found = losses(alone / "adamw"), losses(out)
    assert found == pytest.approx(expected, rel=0, abs=1e-6)
    whole = weights(out)
    difference = whole - weights(alone / "adamw")
    assert difference.norm() < 1e-6 * whole.norm()
    assert difference.abs().max() < 1e-5 * whole.abs().max()  # AdamW: see SGD
    shutil.rmtree(out / "checkpoint-00000020")
    shutil.rmtree(out / "model")
    finish(server, f"{options_of(chats)} --resume", out, 2, sharded=sharded)
    assert losses(out) == found
    assert torch.equal(weights(out), whole)


def test_every_rank_saves_its_part(server: RankServer, tmp_path: Path) -> None:
    """And a checkpoint of whole weights is not one of parts."""
    out = tmp_path / "out"
    finish(server, f"{SHORT} --max-steps 2", out, 2, sharded=True)
    latest = out / "checkpoint-00000002"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        names = {path.name for path in (latest / part).iterdir()}
        assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    sizes = [path.stat().st_size for path in sorted(latest.glob("*_0/__*"))]
    assert max(sizes) < 1.1 * sum(sizes) / 3 * 1.5  # two of weights, two of the optimizer
    assert server.run(f"{SHORT} --max-steps 2 --resume", out, 2) == [1, 1]
    assert "is of another run, which had weights: in parts" in said(out, 0)


def test_parts_go_to_another_number_of_ranks(server: RankServer, tmp_path: Path) -> None:
    """Padded, since the order of packed rows depends on the ranks; a new rank is seeded."""
    out, padded = tmp_path / "out", f"{SHORT} --no-packing --max-grad-norm 1000"
    finish(server, padded, out, 2, sharded=True)
    expected = losses(out)
    shutil.rmtree(out / "checkpoint-00000010")
    state = out / "checkpoint-00000008" / "run.json"
    run = json.loads(state.read_text())
    for ranks in (4, 1):
        again = tmp_path / str(ranks)
        shutil.copytree(out, again)
        run["run"]["ranks:"] = str(ranks)
        (again / state.relative_to(out)).write_text(json.dumps(run))
        finish(server, f"{padded} --resume", again, ranks, sharded=True)
        assert losses(again)[:8] == expected[:8]
        assert losses(again)[8:] == pytest.approx(expected[8:], rel=0, abs=2e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_all(server: RankServer, tmp_path: Path, rank: int) -> None:
    out = tmp_path / "out"
    pids = server.start(LONG, out, 2)
    wait_for_steps(out, 3)
    os.kill(pids[rank], signal.SIGTERM)
    assert server.wait() == [0, 0], said(out, 0)
    num_steps = len(losses(out))
    assert f"told to stop: step {num_steps} is saved" in said(out, 0)
    assert (out / f"checkpoint-{num_steps:08d}").exists()


def wait_for_steps(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 90
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, said(folder, 0)
        time.sleep(0.005)


WRITER = "torch.distributed.checkpoint.filesystem"


@pytest.mark.parametrize(
    ("sharded", "before"),
    [
        (False, f"import torch\nif rank == 1:\n def full(*_):\n  {FULL_DISK}\n torch.save = full"),
        (
            True,
            f"import {WRITER} as w\nif rank == 1:\n def full(*_):\n  {FULL_DISK}\n"
            " w.FileSystemWriter.write_data = full",
        ),
    ],
    ids=["ddp", "fsdp2"],
)
def test_a_full_disk_of_one_rank_ends_all(
    server: RankServer, tmp_path: Path, sharded: bool, before: str
) -> None:
    """In a resumed run: the checkpoint before is whole."""
    out = tmp_path / "out"
    finish(server, f"{SHORT}", out, 2, sharded=sharded)
    shutil.rmtree(out / "checkpoint-00000010")
    codes = server.run(f"{SHORT} --resume", out, 2, sharded=sharded, before=before)
    assert codes == [1, 1]
    expected = (
        "sft.py: checkpoint of step 10 could not be saved by rank 1: [Errno 28] No space left on "
        "device; checkpoint-00000008 is whole, --resume goes on from it"
    )
    for rank in (0, 1):
        assert said(out, rank).splitlines()[-1] == expected
        assert "Traceback" not in said(out, rank)
    assert not (out / "unfinished").exists()
    finish(server, f"{SHORT} --resume", out, 2, sharded=sharded)
    assert len(losses(out)) == 10


def test_a_folder_in_use_is_refused_by_all_ranks(server: RankServer, tmp_path: Path) -> None:
    checkpoints.lock(tmp_path / "out")  # by this process, until it ends
    assert server.run(SHORT, tmp_path / "out", 2) == [1, 1]
    for rank in (0, 1):
        assert said(tmp_path / "out", rank).endswith("another run is using it; choose another folder\n")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("os.environ['FSDP_STATE_DICT_TYPE'] = 'FULL_STATE_DICT'", "SHARDED_STATE_DICT"),
        ("os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'] = 'true'", "loading: false"),
    ],
)
def test_other_settings_of_fsdp_are_refused(
    server: RankServer, tmp_path: Path, before: str, expected: str
) -> None:
    codes = server.run(SHORT, tmp_path / "out", 2, sharded=True, before=f"import os; {before}")
    assert codes == [1, 1]
    assert said(tmp_path / "out", 0).splitlines()[-1].endswith(f"{expected} in the configuration")


def test_fsdp_on_a_cpu_is_not_ddp_in_silence(server: RankServer, tmp_path: Path) -> None:
    before = "import os; os.environ['ACCELERATE_USE_FSDP'] = 'true'"
    assert server.run(SHORT, tmp_path / "out", 2, before=before) == [1, 1]
    assert "Accelerate shards on GPUs only" in said(tmp_path / "out", 1)


def test_killed_three_times_and_resumed(server: RankServer, tmp_path: Path) -> None:
    """All ranks, one rank, all while saving; DDP and FSDP2 in turn: the bits of a run let alone."""
    rng = random.Random(0)
    options = f"{SHORT} --checkpoint-every 1"
    for sharded, kills in ((False, ["all", "saving"]), (True, ["one", "saving"])):
        quiet, out = tmp_path / f"quiet{sharded}", tmp_path / f"out{sharded}"
        finish(server, options, quiet, 2, sharded=sharded)
        for number, kind in enumerate(kills):
            resume = " --resume" if number else ""
            pids = server.start(options + resume, out, 2, sharded=sharded)
            wait_for_steps(out, 3 * number + rng.randint(1, 3))
            while kind == "saving" and not (out / "unfinished").exists():
                time.sleep(0.001)
            for pid in pids[: 1 if kind == "one" else 2]:
                os.kill(pid, signal.SIGKILL)
            codes = server.wait()
            assert codes[0] == -signal.SIGKILL
            assert codes[1] == (1 if kind == "one" else -signal.SIGKILL)
        finish(server, f"{options} --resume", out, 2, sharded=sharded)
        assert losses(out) == losses(quiet)
        assert torch.equal(weights(out), weights(quiet))
