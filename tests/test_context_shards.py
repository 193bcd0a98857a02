"""Shards of context ranks: the oracle's cells and those of frameworks, and joined the batch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.batch_checks import assert_same_batch
from tests.context_ranks import process_groups
from tests.ranks import on_two_ranks
from tests.rollout_strategies import rollouts
from tests.strategies import FUZZ, batches
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
)
from torch_collate_kit.attention import context_join

LAYOUTS = ("zigzag", "contiguous", "head_tail")
SIZES = (1, 2, 3, 4, 8, 16)
DEPTHS = st.sampled_from((1, 2, 3, 6))
FIELDS = {
    "kind": PerToken(torch.int16, pad=-1),
    "top_ids": PerToken(torch.int32, pad=-7, shape=(2,)),
    "ref_logps": PerResponseToken(torch.float32, pad=0.5),
    "year": PerExample(torch.int64),
}
PADS = {"kind": -1, "top_ids": -7, "ref_logps": 0.5}


def with_fields(examples: list[dict[str, Any]], number: int = 100) -> list[dict[str, Any]]:
    """The examples with a value of every declared field, each its own."""
    found = []
    for i, example in enumerate(examples):
        tokens = range(i * number, i * number + len(example["input_ids"]))
        responses = example.get("num_actions", 0)
        more = {
            "kind": list(tokens),
            "top_ids": [[t, -t] for t in tokens],
            "ref_logps": [-0.5 * t for t in tokens][len(tokens) - responses :],
            "year": i,
        }
        found.append(example | more)
    return found


def fields_for(form: str) -> dict[str, Any]:
    """Response tokens are known where examples say how many they have."""
    return {name: of for name, of in FIELDS.items() if name != "ref_logps" or form == "num_actions"}


def as_oracle(batch: Batch) -> dict[str, Any]:
    """The batch in the form of the oracle, which the fuzz of collators compares it with."""
    return {k: v if isinstance(v, torch.Tensor) else v.tolist() for k, v in batch.items()}


def assert_shards(
    batch: Batch, size: int, layout: Any, pads: dict[str, float], depth: int = 1
) -> list[Batch]:
    expected_of = as_oracle(batch)
    shards = [batch.context_shard(rank, size, layout=layout, depth=depth) for rank in range(size)]
    for rank, shard in enumerate(shards):
        expected = oracle.context_shard(expected_of, rank, size, layout, pads, depth)
        assert shard.cells.tolist() == expected.pop("cells")
        for name, values in expected.items():
            assert shard[name].dtype == values.dtype, name
            assert torch.equal(shard[name], values), (name, shard[name], values)
        others = {"year", "rollout_expert_indices"} | ({"cu_seq_lens"} if size == 1 else set())
        assert {*shard} - others == {*expected}
        if "year" in batch:
            assert shard["year"] == batch["year"]
        number = batch.metadata["num_loss_tokens"] if depth == 1 else None
        assert shard.metadata.get("num_loss_tokens") == number
        assert shard.num_cells == batch.num_cells // size
    cells = torch.cat([shard.cells for shard in shards])
    assert cells.sort().values.tolist() == list(range(batch.num_cells)), "not a partition"
    assert sum(shard.num_tokens for shard in shards) == batch.num_tokens
    return shards


def check_join(batch: Batch, shards: list[Batch], pads: dict[str, float]) -> None:
    """Fields of cells, of predicted tokens, and of trained tokens alone, joined."""
    for name in ("input_ids", "position_ids", "attention_mask"):
        assert torch.equal(context_join([of[name] for of in shards], shards), batch[name]), name
    for name in ("loss_mask", *(name for name in pads if name in batch)):
        joined = context_join([of[name] for of in shards], shards)[:, :-1]
        expected = batch[name][:, -joined.shape[1] :]
        is_first = (batch["position_ids"] == 0)[:, 1:]  # nothing predicts these
        is_first = is_first[..., None] if expected.ndim == 3 else is_first
        expected = torch.where(is_first, pads.get(name, 0), expected)
        assert torch.equal(joined, expected.to(joined.dtype)), name
    targets = context_join([of["targets"] for of in shards], shards)[:, :-1]
    assert torch.equal(targets, batch["labels"][:, 1:])
    trained = [of["targets"][of["loss_mask"] != 0] for of in shards]
    expected = batch["labels"][:, 1:][batch["loss_mask"] != 0]
    assert torch.equal(context_join(trained, shards), expected)


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


def check_frameworks(batch: Batch, shards: list[Batch], layout: str) -> None:
    size, width = len(shards), batch["input_ids"].shape[1]
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


@FUZZ
@given(data=st.data())
def test_packed_rows_are_those_of_the_oracle(data: st.DataObject) -> None:
    drawn = data.draw(batches(max_examples=6, columns=False))
    form = drawn.form
    size, cut = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from((1, 1, 2)))
    parallel = ParallelLayout(dp=data.draw(st.sampled_from((1, 2))), cp=size * cut)
    align = parallel.align
    room = -(-max(drawn.lengths) // align) * align * data.draw(st.integers(1, 4))
    collate = PackedCollator(
        9, max_tokens=room, parallel=parallel, fields=fields_for(form), train_all=form == "none"
    )
    batch = collate(with_fields(drawn.plain))
    for layout in LAYOUTS:
        shards = assert_shards(batch, size, layout, PADS)
        check_join(batch, shards, PADS)
        assert_shards(batch, size, layout, PADS, data.draw(DEPTHS))
        if size > 1:  # one rank has all, also where they would refuse odd lengths
            check_frameworks(batch, shards, layout)


@FUZZ
@given(data=st.data())
def test_padded_rows_are_those_of_the_oracle(data: st.DataObject) -> None:
    drawn = data.draw(batches(max_examples=4, columns=False))
    size, side = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(("left", "right")))
    options = {
        "padding_side": side,
        "pad_to_multiple_of": 2 * size,
        "fields": fields_for(drawn.form),
    }
    batch = PaddedCollator(9, train_all=drawn.form == "none", **options)(with_fields(drawn.plain))
    for layout in LAYOUTS[size > 1 :]:
        assert_shards(batch, size, layout, PADS, data.draw(DEPTHS))


@FUZZ
@given(data=st.data())
def test_rollouts_are_those_of_the_oracle(data: st.DataObject) -> None:
    drawn = data.draw(
        rollouts(images=False, max_examples=4, max_length=8, rollout_expert_indices=True)
    )
    size = data.draw(st.sampled_from(SIZES))
    padded = RolloutCollator(9, pad_to_multiple_of=2 * size)(drawn.given)
    packed = PackedCollator(9, max_tokens=96, parallel=ParallelLayout(cp=size))(drawn.given)
    for batch in (padded, packed):
        for layout in LAYOUTS[batch is padded and size > 1 :]:
            for shard in assert_shards(batch, size, layout, {}, data.draw(DEPTHS)):
                routes = batch["rollout_expert_indices"].flatten(0, 1)[shard.cells]
                assert torch.equal(shard["rollout_expert_indices"].flatten(0, 1), routes)


def small(size: int = 2, **options: Any) -> Batch:
    examples = [
        {"input_ids": list(range(10 * i + 1, 10 * i + 1 + n))} for i, n in enumerate((6, 3))
    ]
    return PackedCollator(0, max_tokens=16, parallel=ParallelLayout(cp=size), **options)(examples)


def test_a_shard_survives_pickling_and_copies() -> None:
    shard = small().context_shard(1, 2)
    again = pickle.loads(pickle.dumps(shard))
    assert again == shard
    assert_same_batch(again, shard)
    assert again.cells.tolist() == shard.cells.tolist() == [2, 3, 4, 5, 9, 10]


def test_fields_changed_before_are_cut_as_they_are() -> None:
    batch = small()
    batch["labels"][0, 2] = 55
    batch["position_ids"][0, 1] = 77
    batch["loss_mask"][0, 0] = 0.5
    batch = batch.with_fields(
        values=torch.arange(12.0).view(1, 12), pairs=torch.arange(22).view(1, 11, 2)
    )
    shard = batch.context_shard(0, 2)
    assert shard.cells.tolist() == [0, 1, 6, 7, 8, 11]
    assert shard["targets"].tolist() == [[2, 55, -100, -100, 12, -100]]
    assert shard["position_ids"].tolist() == [[0, 77, 6, 7, 0, 3]]
    assert shard["loss_mask"][0, 0] == 0.5
    assert torch.equal(shard["loss_mask"][0, 1:] != 0, torch.tensor([1, 0, 0, 1, 0]) == 1)
    assert shard["values"].tolist() == [[1, 2, 0, 0, 9, 0]]
    assert shard["pairs"].tolist() == [[[0, 1], [2, 3], [0, 0], [0, 0], [16, 17], [0, 0]]]
    assert "labels" not in shard


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
