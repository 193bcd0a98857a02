"""sft.py on two and four CPU ranks, DDP and FSDP2: as one process; what one does to others.

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
from typing import Any

import checkpoints
import numpy as np
import pytest
import synthetic_chat
import torch
import transformers
from safetensors.torch import load_file

from tests.examples.rank_server import RankServer, said

TINY = "--num-held-out 0 --max-tokens 512 --cpu --threads 1 --batch-size 5 --learning-rate 2e-3"
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
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **ends)
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def options(chats: Path, model: Path) -> str:
    """Twenty steps; every fifth has one conversation, so other ranks have none."""
    twenty = f"{TINY} --dataset {chats} --model {model} --epochs 4 --checkpoint-every 10"
    return f"{twenty} --max-grad-norm 1000"  # the norm itself has rounding of its own: 2e-5


@pytest.fixture(scope="module")
def short(model: Path) -> str:
    return f"{SHORT} --model {model}"


def finish(server: RankServer, arguments: str, folder: Path, ranks: int, **options: Any) -> None:
    codes = server.run(arguments, folder, ranks, **options)
    assert codes == [0] * ranks, "\n".join(said(folder, rank) for rank in range(ranks))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def weights(folder: Path) -> torch.Tensor:
    """All of them, in one vector."""
    tensors = load_file(folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.fixture(scope="module")
def alone(server: RankServer, options: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, with AdamW and with SGD."""
    folder = tmp_path_factory.mktemp("alone")
    finish(server, options, folder / "adamw", 1)
    finish(server, options, folder / "sgd", 1, before=SGD)
    return folder


@pytest.mark.release
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_four_ranks_train_as_one(
    server: RankServer, options: str, alone: Path, tmp_path: Path, sharded: bool
) -> None:
    finish(server, options, tmp_path / "out", 4, sharded=sharded, before=SGD)
    expected, found = losses(alone / "sgd"), losses(tmp_path / "out")
    assert len(expected) == 20
    assert found == pytest.approx(expected, rel=1e-6)  # float32: the sums are in another order
    expected, found = weights(alone / "sgd"), weights(tmp_path / "out")
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_train_as_one_and_resume_exactly(
    server: RankServer, options: str, alone: Path, tmp_path: Path, sharded: bool
) -> None:
    out = tmp_path / "out"
    finish(server, options, out, 2, sharded=sharded)
    expected, found = losses(alone / "adamw"), losses(out)
    assert found == pytest.approx(expected, rel=0, abs=1e-6)
    whole = weights(out)
    difference = whole - weights(alone / "adamw")
    assert difference.norm() < 1e-6 * whole.norm()
    shutil.rmtree(out / "checkpoint-00000020")
    shutil.rmtree(out / "model")
    finish(server, f"{options} --resume", out, 2, sharded=sharded)
    assert losses(out) == found
    assert torch.equal(weights(out), whole)


def test_every_rank_saves_its_part(server: RankServer, short: str, tmp_path: Path) -> None:
    """And a checkpoint of parts is not one of whole weights."""
    out = tmp_path / "out"
    finish(server, f"{short} --max-steps 2", out, 2, sharded=True)
    latest = out / "checkpoint-00000002"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        sizes = {path.name: path.stat().st_size for path in (latest / part).iterdir()}
        assert set(sizes) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        assert sizes["__0_0.distcp"] == pytest.approx(sizes["__1_0.distcp"], rel=0.1)
    assert server.run(f"{short} --max-steps 2 --resume", out, 2) == [1, 1]
    assert "is of another run, which had weights: in parts" in said(out, 0)


SEEDS = """
import checkpoints
whole = checkpoints.set_seed
def watch(seed):
    whole(seed)
    open(f"{folder}.seed.{rank}", "w").write(str(seed))
checkpoints.set_seed = watch
"""


@pytest.mark.release
def test_parts_go_to_another_number_of_ranks(
    server: RankServer, short: str, tmp_path: Path
) -> None:
    """Two ranks, then three: uneven parts; the new rank has a random state of its own."""
    out, options = tmp_path / "out", f"{short} --max-grad-norm 1000"
    finish(server, options, out, 2, sharded=True)
    expected = losses(out)
    shutil.rmtree(out / "checkpoint-00000010")
    (out / "summary.json").unlink()
    finish(server, f"{options} --resume", out, 3, sharded=True, before=SEEDS)
    assert losses(out)[:8] == expected[:8]
    assert losses(out)[8:] == pytest.approx(expected[8:], rel=0, abs=2e-6)
    seeds = {path.name: path.read_text() for path in tmp_path.glob("out.seed.*")}
    expected_seed = np.random.SeedSequence((0, 8, 2)).generate_state(1)[0]  # run, step, rank
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


@pytest.mark.release
def test_sharded_weights_generate_and_are_saved_whole(
    server: RankServer, short: str, tmp_path: Path
) -> None:
    """Ranks ask about different conversations, and write answers of different lengths."""
    folders, evaluated = (tmp_path / "out", tmp_path / "one"), f"{short} --num-held-out 15"
    finish(server, evaluated, folders[0], 2, sharded=True, before=WATCH)
    finish(server, evaluated, folders[1], 1)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    found, expected = (
        {key: value for key, value in summary.items() if "match" in key or "held" in key}
        for summary in summaries
    )
    assert len(expected) == 8
    assert found == pytest.approx(expected, rel=1e-4)
    saved = transformers.AutoModelForCausalLM.from_pretrained(folders[0] / "model")
    with torch.no_grad():
        logits = saved(torch.arange(20)[None]).logits
    for rank in (0, 1):
        generating = torch.load(f"{folders[0]}.logits.{rank}")
        torch.testing.assert_close(generating, logits, rtol=1e-4, atol=1e-4)
    sizes = [(folder / "model" / "model.safetensors").stat().st_size for folder in folders]
    assert sizes[0] == sizes[1]  # a tied head is saved once


@pytest.mark.release
def test_less_memory_changes_nothing(server: RankServer, short: str, tmp_path: Path) -> None:
    """Activations made again, as the option of sft.py or as that of the configuration does it."""
    few = f"{short} --max-steps 3"
    configured = "import os; os.environ['FSDP_ACTIVATION_CHECKPOINTING'] = 'true'"
    finish(server, few, tmp_path / "0", 2, sharded=True)
    finish(server, f"{few} --gradient-checkpointing", tmp_path / "1", 2, sharded=True)
    finish(server, few, tmp_path / "2", 2, sharded=True, before=configured)
    for name in "12":
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "0"), rel=0, abs=1e-6)
        assert torch.allclose(weights(tmp_path / name), weights(tmp_path / "0"), atol=1e-6)


FROZEN_BF16 = """
import trained_model, torch
trained_model.weight_dtype = lambda args: torch.bfloat16
"""


@pytest.mark.release
def test_adapters_in_parts(server: RankServer, short: str, tmp_path: Path) -> None:
    """In fp32 beside frozen weights, which on a GPU are in bf16, are sharded too, and not saved."""
    pytest.importorskip("peft")
    few = f"{short} --max-steps 3 --max-grad-norm 1000 --lora 4"
    finish(server, few, tmp_path / "one", 1, before=BF16 + FROZEN_BF16)
    finish(server, few, tmp_path / "two", 2, sharded=True, before=BF16 + FROZEN_BF16)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0, abs=1e-3)
    name = "model/adapter_model.safetensors"
    expected, found = (load_file(tmp_path / folder / name) for folder in ("one", "two"))
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert set(found) == set(expected)
    saved = [
        sum(path.stat().st_size for path in tmp_path.glob(f"two/checkpoint-*/{part}_0/__*"))
        for part in ("pytorch_model_fsdp", "optimizer")
    ]
    assert saved[0] < saved[1]  # two moments of the adapters


BF16 = """
import accelerate
whole = accelerate.Accelerator.__init__
def in_bf16(self, *args, mixed_precision, **options):
    whole(self, *args, mixed_precision="bf16", **options)
accelerate.Accelerator.__init__ = in_bf16
"""


@pytest.mark.release
def test_bf16_is_of_the_products_alone(server: RankServer, short: str, tmp_path: Path) -> None:
    """Weights are saved in fp32, and the loss is not one of the few numbers of bf16."""
    few = f"{short} --max-steps 3"
    finish(server, few, tmp_path / "fp32", 2, sharded=True)
    finish(server, few, tmp_path / "bf16", 2, sharded=True, before=BF16)
    expected, found = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert found == pytest.approx(expected, rel=1e-2)
    assert found != expected
    assert all(torch.tensor(loss).bfloat16().item() != loss for loss in found)
    assert weights(tmp_path / "bf16").dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_all(
    server: RankServer, model: Path, tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "out"
    pids = server.start(f"{LONG} --model {model}", out, 2)
    wait_for_steps(out, 3)
    os.kill(pids[rank], signal.SIGTERM)
    assert server.wait() == [0, 0], said(out, 0)
    num_steps = len(losses(out))
    assert f"told to stop: step {num_steps} is saved" in said(out, 0)
    assert (out / f"checkpoint-{num_steps:08d}").exists()


def wait_for_steps(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 6000
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
    server: RankServer, short: str, tmp_path: Path, sharded: bool, before: str
) -> None:
    """In a resumed run: the checkpoint before is whole."""
    out = tmp_path / "out"
    finish(server, short, out, 2, sharded=sharded)
    shutil.rmtree(out / "checkpoint-00000010")
    codes = server.run(f"{short} --resume", out, 2, sharded=sharded, before=before)
    assert codes == [1, 1]
    expected = (
        "sft.py: checkpoint of step 10 could not be saved by rank 1: [Errno 28] No space left on "
        "device; checkpoint-00000008 is whole, --resume goes on from it"
    )
    for rank in (0, 1):
        assert said(out, rank).splitlines()[-1] == expected
        assert "Traceback" not in said(out, rank)
    assert not (out / "unfinished").exists()


def test_a_folder_in_use_is_refused_by_all_ranks(
    server: RankServer, short: str, tmp_path: Path
) -> None:
    checkpoints.lock(tmp_path / "out")  # by this process, until it ends
    assert server.run(short, tmp_path / "out", 2) == [1, 1]
    for rank in (0, 1):
        assert said(tmp_path / "out", rank).endswith(
            "another run is using it; choose another folder\n"
        )


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("os.environ['FSDP_STATE_DICT_TYPE'] = 'FULL_STATE_DICT'", "SHARDED_STATE_DICT"),
        ("os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'] = 'true'", "loading: false"),
    ],
)
def test_other_settings_of_fsdp_are_refused(
    server: RankServer, short: str, tmp_path: Path, before: str, expected: str
) -> None:
    codes = server.run(short, tmp_path / "out", 2, sharded=True, before=f"import os; {before}")
    assert codes == [1, 1]
    assert said(tmp_path / "out", 0).splitlines()[-1].endswith(f"{expected} in the configuration")


def test_fsdp_on_a_cpu_is_not_ddp_in_silence(
    server: RankServer, short: str, tmp_path: Path
) -> None:
    before = "import os; os.environ['ACCELERATE_USE_FSDP'] = 'true'"
    assert server.run(short, tmp_path / "out", 2, before=before) == [1, 1]
    # rank 0, which holds the store: the other may find it gone while it joins
    assert "Accelerate shards on GPUs only" in said(tmp_path / "out", 0)


@pytest.mark.release
def test_killed_three_times_and_resumed(server: RankServer, short: str, tmp_path: Path) -> None:
    """All ranks in a save, or one rank in a step; DDP and FSDP2: the bits of a run let alone."""
    rng = random.Random(0)
    options = f"{short} --checkpoint-every 1 --resume auto"
    for sharded, kills in ((False, ["saving", "one"]), (True, ["saving"])):
        quiet, out = tmp_path / f"quiet{sharded}", tmp_path / f"out{sharded}"
        finish(server, options, quiet, 2, sharded=sharded)
        for number, kind in enumerate(kills):
            pids = server.start(options, out, 2, sharded=sharded)
            wait_for_steps(out, 3 * number + rng.randint(1, 3))
            deadline = time.monotonic() + 600
            while kind == "saving" and not (out / "unfinished").exists():
                assert time.monotonic() < deadline, said(out, 0)
                time.sleep(0.001)
            for pid in pids[: 1 if kind == "one" else 2]:
                os.kill(pid, signal.SIGKILL)
            codes = server.wait()
            assert codes[0] == -signal.SIGKILL
            assert codes[1] == (1 if kind == "one" else -signal.SIGKILL)
        finish(server, options, out, 2, sharded=sharded)
        assert losses(out) == losses(quiet)
        assert torch.equal(weights(out), weights(quiet))
