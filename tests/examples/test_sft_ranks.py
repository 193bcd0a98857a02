"""sft.py on two and three CPU ranks, DDP and FSDP2: as one process; what one does to others.

`make kills` runs all of it, and `python -m tests.examples.kills`, which kills two ranks at random.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_chat
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.examples.rank_server import RankServer, said
from tests.examples.runs import Results, read_results, scalars_of, wait_for_steps, weights

TINY = "--num-held-out 0 --max-tokens 512 --cpu --threads 1 --batch-size 5 --learning-rate 2e-3"
SHORT = f"{TINY} --num-conversations 25 --epochs 2 --checkpoint-every 2"  # 10 steps
LONG = f"{TINY} --num-conversations 25 --epochs 100 --checkpoint-every 1 --num-workers 1"
FULL_DISK = "raise OSError(28, 'No space left on device')"
DDP_AND_FSDP2 = pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def chats(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 conversations that fit into a row: of grade-school maths where the data is."""
    lines = [json.dumps(record) for record in synthetic_chat.make_corpus(21, seed=0)]
    if data_folder.is_dir():
        lines = (data_folder / "gsm8k_train_2k.jsonl").read_text().splitlines()
        lines = [line for line in lines if len(line) < 700][:21]
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller one than sft.py makes, in a folder."""
    tokenizer = synthetic_chat.train_tokenizer(synthetic_chat.make_corpus(50, seed=0))
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    synthetic_chat.make_model(tokenizer, hidden_size=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def options(chats: Path, model: Path) -> str:
    """Ten steps; every fifth has one conversation, so other ranks have none."""
    ten = f"{TINY} --dataset {chats} --model {model} --epochs 2 --checkpoint-every 3"
    return f"{ten} --max-grad-norm 1000"  # the norm itself has rounding of its own: 2e-5


@pytest.fixture(scope="module")
def short(model: Path) -> str:
    return f"{SHORT} --model {model}"


def finish(server: RankServer, arguments: str, folder: Path, ranks: int, **options: Any) -> Results:
    codes = server.run(arguments, folder, ranks, **options)
    assert codes == [0] * ranks, "\n".join(said(folder, rank) for rank in range(ranks))
    return read_results(folder)


@pytest.fixture(scope="module")
def alone(server: RankServer, options: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "adamw"
    finish(server, options, folder, 1)
    return folder


@DDP_AND_FSDP2
def test_two_ranks_train_as_one(
    server: RankServer, options: str, alone: Path, tmp_path: Path, sharded: bool
) -> None:
    """Killed, all in a step or one alone, and resumed; and resumed again, to the last bit."""
    out, logged = tmp_path / "out", f"{options} --log-with tensorboard --resume"
    pids = server.start(f"{logged} auto", out, 2, sharded=sharded)
    wait_for_steps(out, 4)
    for pid in pids[: 2 if sharded else 1]:
        os.kill(pid, signal.SIGKILL)
    assert server.wait() == [-signal.SIGKILL, -signal.SIGKILL if sharded else 1]
    found, expected = finish(server, logged, out, 2, sharded=sharded), read_results(alone)
    assert [step["step"] for step in found.steps] == list(range(1, 11))
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
    assert [s["tokens"] for s in found.steps] == [s["tokens"] for s in expected.steps]
    balance = [step["cost_balance"] for step in found.steps]
    assert 1 <= min(balance) < max(balance) <= 2
    assert scalars_of(out / "sft")["loss"].keys() == set(range(1, 11))
    assert said(out, 0).count("\n3/10 ") == 1  # where a bar begins
    assert "3/10 " not in said(out, 1)
    whole = weights(out)
    assert (whole - weights(alone)).norm() < 1e-6 * whole.norm()
    shutil.rmtree(out / "checkpoint-00000010")
    shutil.rmtree(out / "model")
    assert finish(server, logged, out, 2, sharded=sharded).losses == found.losses
    assert torch.equal(weights(out), whole)


def test_two_ranks_share_the_rows_of_one(
    server: RankServer, model: Path, chats: Path, tmp_path: Path
) -> None:
    """As one rank that reads them whole, which goes on with the last steps."""
    by_rows = TINY.replace("--batch-size 5", "--batch-rows 2 --rows-multiple-of 2 --align 4")
    options = f"{by_rows} --dataset {chats} --model {model} --epochs 2 --max-grad-norm 1000"
    options = options.replace("--num-held-out 0", "--num-held-out 5 --checkpoint-every 2")
    one, two = tmp_path / "one", tmp_path / "two"
    expected = finish(server, options, one, 1)
    found = finish(server, f"{options} --context-parallel 2", two, 2)
    assert len(expected.losses) > 3
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=2e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert [step["tokens"] for step in found.steps] == [step["tokens"] for step in expected.steps]
    assert found.summary["held_out_loss"] == pytest.approx(
        expected.summary["held_out_loss"], abs=1e-5
    )
    shutil.rmtree(max(two.glob("checkpoint-*")))
    shutil.rmtree(two / "model")
    again = finish(server, f"{options} --resume", two, 1)
    assert again.losses == pytest.approx(expected.losses, rel=0, abs=2e-6)


def test_sigterm_to_one_rank_stops_all(server: RankServer, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pids = server.start(f"{LONG} --model {model}", out, 2)
    wait_for_steps(out, 3)
    os.kill(pids[1], signal.SIGTERM)
    assert server.wait() == [0, 0], said(out, 0)
    num_steps = len(read_results(out).steps)
    assert f"stopped by SIGTERM: step {num_steps} is saved" in said(out, 0)
    assert (out / f"checkpoint-{num_steps:08d}").exists()


WRITER = "torch.distributed.checkpoint.filesystem"
WRITE_DATA = (
    f"import {WRITER} as w\nif rank == 1:\n def full(*_):\n  {FULL_DISK}\n"
    " w.FileSystemWriter.write_data = full"
)


def test_a_full_disk_of_one_rank_ends_all(server: RankServer, short: str, tmp_path: Path) -> None:
    """In a resumed run: the checkpoint before is whole."""
    out, few = tmp_path / "out", f"{short} --max-steps 2 --checkpoint-every 1"
    finish(server, few, out, 2, sharded=True)
    shutil.rmtree(out / "checkpoint-00000002")
    codes = server.run(f"{few} --resume", out, 2, sharded=True, before=WRITE_DATA)
    assert codes == [1, 1]
    expected = (
        "sft.py: checkpoint of step 2 could not be saved by rank 1: [Errno 28] No space left on "
        "device; checkpoint-00000001 is whole, --resume goes on from it"
    )
    for rank in (0, 1):
        assert said(out, rank).splitlines()[-1] == expected
        assert "Traceback" not in said(out, rank)
    assert not (out / "unfinished").exists()


SETTINGS = {  # of Accelerate, that sft.py refuses
    "FSDP_STATE_DICT_TYPE=FULL_STATE_DICT": "SHARDED_STATE_DICT in the configuration",
    "FSDP_CPU_RAM_EFFICIENT_LOADING=true": "loading: false in the configuration",
    "ACCELERATE_USE_FSDP=true": "Accelerate shards on GPUs only",  # on a CPU it would be DDP
    "--rows-multiple-of 3": "--rows-multiple-of 3: must be a multiple of the 2 ranks",
    "--batch-rows 3": "--batch-rows 3: must be a multiple of the 2 ranks",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_two_ranks_refuse(
    server: RankServer, short: str, tmp_path: Path, setting: str
) -> None:
    name, _, value = setting.partition("=")
    before = f"import os; os.environ[{name!r}] = {value!r}" if value else ""
    arguments = short if value else f"{short} {setting}"
    if setting.startswith("--batch-rows"):
        arguments = arguments.replace("--batch-size 5", "")
    sharded = name.startswith("FSDP")
    assert server.run(arguments, tmp_path / "out", 2, sharded=sharded, before=before) == [1, 1]
    # rank 0, which holds the store: the other may find it gone while it joins
    assert SETTINGS[setting] in said(tmp_path / "out", 0)


SEEDS = """
import checkpoints
whole = checkpoints.set_seed
def watch(seed):
    whole(seed)
    open(f"{folder}.seed.{rank}", "w").write(str(seed))
checkpoints.set_seed = watch
"""


@DDP_AND_FSDP2
def test_a_run_goes_on_with_another_number_of_ranks(
    server: RankServer, short: str, tmp_path: Path, sharded: bool
) -> None:
    """Two ranks, then three (uneven parts) and one; a new rank has a random state of its own."""
    out, options = tmp_path / "out", f"{short} --max-grad-norm 1000 --keep-checkpoints 9"
    expected = finish(server, options, out, 2, sharded=sharded).losses
    for ranks, step in ((3, 4), (2 if sharded else 1, 8)):
        for folder in out.glob("checkpoint-*"):
            if int(folder.name.partition("-")[2]) > step:
                shutil.rmtree(folder)
        (out / "summary.json").unlink()
        found = finish(server, f"{options} --resume", out, ranks, sharded=sharded, before=SEEDS)
        assert found.losses[:4] == expected[:4]
        assert found.losses == pytest.approx(expected, rel=0, abs=2e-6)
    seeds = {path.name: path.read_text() for path in tmp_path.glob("out.seed.*")}
    expected_seed = np.random.SeedSequence((0, 4, 2)).generate_state(1)[0]  # run, step, rank
    assert seeds == {"out.seed.2": str(expected_seed)}


WATCH = """
import synthetic_chat, torch
whole = synthetic_chat.exact_match
def watch(model, *others):
    sharded = {type(part).__name__ for part in model.modules() if hasattr(part, "unshard")}
    assert sharded == {"FSDPQwen3DecoderLayer"}, sharded
    with torch.no_grad():
        torch.save(model(torch.arange(20)[None]).logits, f"{folder}.logits.{rank}")
    return whole(model, *others)
synthetic_chat.exact_match = watch
"""


def test_sharded_weights_generate_and_are_saved_whole(
    server: RankServer, short: str, tmp_path: Path
) -> None:
    """Ranks ask about different conversations, and write answers of different lengths."""
    evaluated = f"{short} --num-held-out 15"
    two = finish(server, evaluated, tmp_path / "out", 2, sharded=True, before=WATCH)
    one = finish(server, evaluated, tmp_path / "one", 1)
    found, expected = (
        {key: value for key, value in results.summary.items() if "match" in key or "held" in key}
        for results in (two, one)
    )
    assert len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-4)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    with torch.no_grad():
        logits = saved(torch.arange(20)[None]).logits
    for rank in (0, 1):
        generating = torch.load(f"{tmp_path / 'out'}.logits.{rank}")
        torch.testing.assert_close(generating, logits, rtol=1e-4, atol=1e-4)
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("out", "one")]
    assert files[0].stat().st_size == files[1].stat().st_size  # a tied head is saved once


BF16 = """
import accelerate
whole = accelerate.Accelerator.__init__
def in_bf16(self, *args, mixed_precision, **options):
    whole(self, *args, mixed_precision="bf16", **options)
accelerate.Accelerator.__init__ = in_bf16
"""
FROZEN_BF16 = """
import trained_model, torch
trained_model.weight_dtype = lambda args: torch.bfloat16
"""


def test_adapters_in_parts(server: RankServer, short: str, tmp_path: Path) -> None:
    """In fp32 beside frozen weights, which on a GPU are in bf16, are sharded too, and not saved."""
    pytest.importorskip("peft", MIN_PEFT_VERSION)
    few, before = f"{short} --max-steps 3 --max-grad-norm 1000 --lora 4", BF16 + FROZEN_BF16
    one = finish(server, few, tmp_path / "one", 1, before=before)
    whole = finish(server, few, tmp_path / "whole", 2, before=before)
    two = finish(server, few, tmp_path / "two", 2, sharded=True, before=before)
    for found in (whole, two):
        assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-3)
    name = "model/adapter_model.safetensors"
    expected, found = (load_file(tmp_path / folder / name) for folder in ("one", "two"))
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert set(found) == set(expected)
    saved = [
        sum(path.stat().st_size for path in tmp_path.glob(f"two/checkpoint-*/{part}_0/__*"))
        for part in ("pytorch_model_fsdp", "optimizer")
    ]
    assert saved[0] < saved[1]  # two moments of the adapters
