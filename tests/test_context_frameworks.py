"""Shards are what frameworks cut, by their code or formula, and joined they are the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.context_ranks import process_groups
from tests.ranks import on_two_ranks
from tests.test_context_shards import FIELDS, LAYOUTS, SIZES, with_fields
from torch_collate_kit import Batch, PackedCollator, PackingOptions, ParallelLayout
from torch_collate_kit.attention import context_join


def random_pack(seed: int) -> tuple[Batch, int]:
    """Rows of random examples with all fields, and a number of context ranks that divides them."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice(SIZES))
    parallel = ParallelLayout(dp=int(rng.integers(1, 3)), tp=int(rng.integers(1, 3)), cp=size)
    examples = []
    for n in rng.integers(1, 40, rng.integers(1, 6)):
        weights = rng.random(n) * (rng.random(n) < 0.7)
        ids = rng.integers(0, 150_000, n).tolist()
        examples.append({"input_ids": ids, "loss_mask": weights.tolist(), "num_actions": int(n)})
    room = parallel.align * int(rng.integers(1, 4)) + 40 // parallel.align * parallel.align
    collate = PackedCollator(7, max_tokens=room, parallel=parallel, fields=FIELDS)
    return collate(with_fields(examples)), size


def check_join(batch: Batch, size: int, layout: Any) -> list[Batch]:
    """Fields of cells, of predicted tokens, and of trained tokens alone, joined."""
    shards = [batch.context_shard(rank, size, layout=layout) for rank in range(size)]
    for name in ("input_ids", "position_ids", "attention_mask"):
        assert torch.equal(context_join([of[name] for of in shards], shards), batch[name]), name
    for name in ("loss_mask", "kind", "top_ids", "ref_logps"):
        joined = context_join([of[name] for of in shards], shards)[:, :-1]
        expected, pad = batch[name][:, -joined.shape[1] :], getattr(FIELDS.get(name), "pad", 0)
        expected = torch.where(first_tokens(batch, expected.ndim), pad, expected)
        assert torch.equal(joined, expected.to(joined.dtype)), name
    targets = context_join([of["targets"] for of in shards], shards)[:, :-1]
    assert torch.equal(targets, batch["labels"][:, 1:])
    trained = [of["targets"][of["loss_mask"] != 0] for of in shards]
    assert torch.equal(
        context_join(trained, shards), batch["input_ids"][:, 1:][batch["loss_mask"] != 0]
    )
    for shard in shards:
        assert shard["year"] == batch["year"]
        assert shard.metadata["num_loss_tokens"] == batch.metadata["num_loss_tokens"]
    return shards


def first_tokens(batch: Batch, ndim: int) -> torch.Tensor:
    """Which of the predicted tokens begin a segment, so that nothing predicts them."""
    is_first = (batch["position_ids"] == 0)[:, 1:]
    return is_first[..., None] if ndim == 3 else is_first


def transformer_engine(cu: np.ndarray, rank: int, size: int) -> list[int]:
    """The cells of ``thd_get_partitioned_indices``, by the formula of its kernel."""
    local = cu // size
    cells = []
    for s in range(len(cu) - 1):
        length = int(local[s + 1] - local[s])
        for i in range(length):
            chunk = rank if i < length // 2 else 2 * (size - 1) - rank
            cells.append(i + int(local[s]) * size + length // 2 * chunk)
    return cells


def head_tail(width: int, rank: int, size: int) -> list[int]:
    """The columns of torch's own balancer."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    balancer = _load_balancer._HeadTailLoadBalancer(width, size, "cpu")
    order = balancer._generate_indices()[0]
    return order.chunk(size)[rank].tolist()


def check_frameworks(batch: Batch, size: int, shards: list[Batch], layout: str) -> None:
    width = batch["input_ids"].shape[1]
    for rank, shard in enumerate(shards):
        cu = np.asarray(shard.metadata["cu_seq_lens"])
        if layout == "zigzag":
            assert shard.cells.tolist() == transformer_engine(cu, rank, size)
            assert torch.equal(shard.metadata["cu_seq_lens_local"], torch.from_numpy(cu // size))
            inputs = batch.model_inputs()
            assert torch.equal(shard.metadata["cu_seq_lens"], inputs["cu_seq_lens_q"])
        elif layout == "head_tail":
            columns = shard.cells.view(len(batch), -1) % width
            assert columns.tolist() == [head_tail(width, rank, size)] * len(batch)


def check(seed: int) -> None:
    batch, size = random_pack(seed)
    for layout in LAYOUTS:
        shards = check_join(batch, size, layout)
        if size > 1:  # one rank has all, also where they would refuse odd lengths
            check_frameworks(batch, size, shards, layout)


def test_joined_shards_are_the_batch_and_cut_as_frameworks_do() -> None:
    for seed in range(30):
        check(seed)


@pytest.mark.release
def test_ten_thousand_packs() -> None:
    for seed in range(100, 10_100):
        check(seed)


# --- two ranks run the code of torch ---------------------------------------------


def one_example_rows() -> Batch:
    """Two rows of one example each, the second shorter."""
    examples = [{"input_ids": [*range(10 * i + 1, 10 * i + 1 + n)]} for i, n in enumerate((8, 5))]
    packing = PackingOptions(8, parallel=ParallelLayout(cp=2), max_sequences_per_row=1)
    return PackedCollator(0, packing=packing)(examples)


def whole_rows(batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of the recipe, and the keywords of ``context_parallel``."""
    inputs = {name: batch[name].clone() for name in ("input_ids", "position_ids")}
    inputs["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    buffers = list(inputs.values())
    return inputs, {
        "buffers": buffers,
        "buffer_seq_dims": [1] * len(buffers),
        "no_restore_buffers": set(buffers),
    }


def cut_by_torch() -> tuple[list[Any], list[Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    with process_groups(2):
        batch = one_example_rows()
        shard = batch.context_shard(dist.get_rank(), 2, layout="head_tail")
        inputs, keywords = whole_rows(batch)
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, **keywords):
            names = ("input_ids", "position_ids", "shift_labels")
            found = [inputs[name].tolist() for name in names]
        expected = [shard[name].tolist() for name in ("input_ids", "position_ids", "targets")]
        assert batch["input_ids"].shape == (2, 8), "the batch itself was cut"
    return found, expected


def test_torch_cuts_our_inputs_to_our_shard() -> None:
    for found, expected in on_two_ranks(cut_by_torch):
        assert found == expected
