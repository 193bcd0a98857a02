"""Shards of context ranks: the oracle's cells and those of frameworks, and joined the batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import oracle
from tests.batch_checks import assert_same_batch
from tests.batch_samples import VISION, functions_of_a_batch, image_examples, members_of_a_batch
from tests.devices import NoWaiting
from tests.ranks import on_two_ranks
from tests.rollout_strategies import rollouts
from tests.strategies import FUZZ, batches
from tests.test_context_ranks import process_groups
from tests.test_trees_everywhere import EXAMPLES
from tests.test_trees_everywhere import FIELDS as TREE_FIELDS
from tests.test_trees_everywhere import FUNCTIONS as TAKING_A_BATCH
from tests.test_trees_everywhere import MEMBERS as MEMBERS_TAKEN
from tests.tiny_models import tiny_model
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
    check_isolation,
    global_num_loss_tokens,
    token_logps,
    token_loss,
)
from torch_collate_kit.attention import context_join
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.losses import sums_by, trained_values

LAYOUTS = ("zigzag", "contiguous", "head_tail")
SIZES = (1, 2, 3, 4, 8)
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
        if size > 1:  # one rank has all, also where they would refuse odd lengths
            check_frameworks(batch, shards, layout)


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
        layout = data.draw(st.sampled_from(LAYOUTS[batch is padded and size > 1 :]))
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


def whole(**options: Any) -> Batch:
    parallel = ParallelLayout(dp=2, cp=2)
    return PackedCollator(0, max_tokens=24, parallel=parallel, fields=TREE_FIELDS, **options)(
        EXAMPLES
    )


def shards_of(batch: Batch, layout: Any = "zigzag", size: int = 2) -> list[Batch]:
    return [batch.context_shard(rank, size, layout=layout) for rank in range(size)]


def outputs(batch: Batch, size: int = 40) -> Tensor:
    """Logits [R, W, V] or hidden states, with a value of their own in every cell."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*batch["input_ids"].shape, size, generator=generator).double()


def cells_of(values: Tensor, shard: Batch) -> Tensor:
    picked = values.flatten(0, 1)[shard.cells]
    return picked.view(*shard["input_ids"].shape, *values.shape[2:])


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
def test_losses_of_shards_add_up(layout: str, normalize: bool, with_head: bool) -> None:
    batch = whole(normalize_loss=normalize)
    head = nn.Linear(40, 31, bias=False).double() if with_head else None
    values = outputs(batch).requires_grad_()
    expected = token_loss(values, batch, num_loss_tokens=7, head=head)
    expected.backward()
    gradient, values.grad = values.grad, None
    shards = shards_of(batch, layout)
    parts = [token_loss(cells_of(values, of), of, num_loss_tokens=7, head=head) for of in shards]
    total = torch.stack(parts).sum()
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(values.grad, gradient, rtol=1e-12, atol=1e-15)
    assert sum(int(global_num_loss_tokens(of)) for of in shards) == 14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_of_shards_are_those_of_the_batch(layout: str) -> None:
    batch = whole()
    values = outputs(batch)
    shards = shards_of(batch, layout)
    of_shards = [token_logps(cells_of(values, of), of) for of in shards]
    joined = context_join(of_shards, shards)
    torch.testing.assert_close(joined, token_logps(values, batch), rtol=1e-14, atol=0)
    old = [trained_values(of["old"], of) for of in shards]
    assert torch.equal(context_join(old, shards), trained_values(batch["old"], batch))


def test_weights_changed_by_hand_are_cut() -> None:
    batch = whole()
    batch["loss_mask"][0, 0] = 3.0
    values, shards = outputs(batch), shards_of(batch)
    parts = [token_loss(cells_of(values, of), of, num_loss_tokens=1) for of in shards]
    expected = token_loss(values, batch, num_loss_tokens=1)
    torch.testing.assert_close(torch.stack(parts).sum(), expected, rtol=1e-13, atol=0)
    joined = context_join([token_logps(cells_of(values, of), of) for of in shards], shards)
    torch.testing.assert_close(joined, token_logps(values, batch))


def test_nothing_waits_for_the_device() -> None:
    batch = whole().to("meta")
    with NoWaiting():
        shard = batch.context_shard(1, 2)
        logits = torch.empty(*shard["input_ids"].shape, 9, device="meta")
        token_loss(logits, shard, num_loss_tokens=3)
        assert len(shard.cells) == shard.num_cells
    shard = whole().context_shard(1, 2)
    number = int(shard["loss_mask"].count_nonzero())
    on_device = shard.to("meta")
    with NoWaiting():
        assert token_logps(logits, on_device).shape == (number,)


# --- all that takes a Batch -----------------------------------------------------------------------

SUPPORTED = {
    *("losses.token_logps", "losses.trained_values", "losses.global_num_loss_tokens"),
    *("with_fields", "to", "of_storage", "stored", "pin_memory", "record_stream", "column"),
    *("get", "keys", "items", "values", "num_tokens", "step", "explain", "plot", "cells"),
    *("num_cells", "padding", "nbytes", "placement", "batch_digest"),
}
REFUSED: dict[str, Callable[[Batch], Any]] = {
    name: of for name, of in {**TAKING_A_BATCH, **MEMBERS_TAKEN}.items() if name not in SUPPORTED
} | {
    "losses.global_num_examples": lambda b: TAKING_A_BATCH["losses.global_num_examples"](
        type("", (), {"split": lambda *_: [b]})()
    ),
    "losses.sums_by": lambda b: sums_by(torch.zeros(2), b, "source", per="example"),
    "check_isolation": lambda b: check_isolation(tiny_model("llama"), b),
    "context_shard": lambda b: b.context_shard(0, 2),
    "model_inputs": lambda b: b.model_inputs(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_rows_refuses_a_shard(name: str) -> None:
    shard = whole().context_shard(1, 2)
    before = copy.deepcopy(shard)
    with pytest.raises(ValueError, match=r"shard of context rank 1 of 2|context shard has parts"):
        REFUSED[name](shard)
    assert shard == before


def test_the_table_names_all_that_takes_a_batch() -> None:
    found = functions_of_a_batch() - {"attention.context_join", "pack", "packing_report"}
    found -= {"reporting.packing_report", "rl.mini_batch_boundaries", "packing.pack"}
    found -= {"loading.map_segments"}  # which collates
    short = {name.rpartition(".")[2] for name in (*REFUSED, *SUPPORTED)}
    assert {name for name in found if name.rpartition(".")[2] not in short} == set()
    assert members_of_a_batch() - {*SUPPORTED, *REFUSED} == set()


def test_how_a_shard_looks() -> None:
    shard = whole(strategy="sequential").context_shard(0, 2)
    text = repr(shard)
    assert "Shard of context rank 0 of 2, zigzag: Batch of 2 packed rows, 10 wide" in text
    assert "row 0 |aaBB--cc--|" in text
    shown = shard.explain(0)
    assert shown.columns["id"] == [3, 6, 3, 4, 3, 4]
    assert shown.columns["position"] == [0, 3, 0, 1, 0, 1]
    assert shown.columns["target"] == [-100, -100, 4, 5, -100, -100]
    assert shown.columns["old"] == [0.1, 0, 0.2, 0.2, 0.4, 0.5]
    assert shard.metadata["response_length"] == shard["loss_mask"].shape[1] == 10
    assert shard.num_tokens, shard.num_cells == (9, 20)
    with pytest.raises(KeyError, match=r"labels; the batch has .*targets\"\], shifted already"):
        shard["labels"]
    with pytest.raises(KeyError, match=r'a context shard has .metadata\["cu_seq_lens"\]'):
        shard["cu_seq_lens"]
    assert shard.plot().get_title().startswith("2 rows of 10 cells: 9 tokens")


# --- what cannot be cut, handed over or joined ----------------------------------------------------


ONE = PackedCollator(0, max_tokens=9)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}])
TWO = PackedCollator(0, max_tokens=24, parallel=ParallelLayout(cp=2))(
    [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}]
)
PADDED = PaddedCollator(0, pad_to_multiple_of=4)([{"input_ids": [1, 2, 3]}])
BATCH: Any = whole()
SHARDS = shards_of(BATCH)
IDS = [of["input_ids"] for of in SHARDS]
PLACES = ParallelLayout(dp=2, cp=2, tp=2)


def join(values: Any, shards: Any) -> Callable[[], Any]:
    return lambda: context_join(values, shards)


def cut(batch: Any, *ranks: int, **options: Any) -> Callable[[], Any]:
    return lambda: batch.context_shard(*ranks, **options)


def inputs(shard: Any, *model: Any, **options: Any) -> Callable[[], Any]:
    return lambda: shard.model_inputs(*model, **options)


TREES = PackedCollator(0, max_tokens=24, share_prefixes=True)(EXAMPLES)
HEAD_TAIL: Any = {"layout": "head_tail"}
REFUSED_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (cut(ONE, 0, 4), ValueError, "segment 0 has 4 cells, which zigzag does not divide into 8 equ"),
    (cut(ONE, 0, 2, layout="contiguous"), ValueError, "7 cells, which contiguous does not divide "),
    (cut(ONE, 0, 2, **HEAD_TAIL), ValueError, r"parallel=ParallelLayout\(cp=2\), or padded rows"),
    (cut(BATCH, 2, 2), ValueError, "cp_rank must be 0 to 1, got 2; layout.place"),
    (cut(BATCH, 0, 0), ValueError, "cp_size must be at least 1"),
    (cut(BATCH, 0, 2, layout="ring"), ValueError, "layout must be one of"),
    (cut(Batch({"input_ids": ONE["input_ids"]}), 0, 2), ValueError, "built from tensors"),
    (cut(PADDED, 0, 2), ValueError, 'layout="zigzag" cuts the segments of packed rows, and these'),
    (cut(TREES, 0, 1), ValueError, "share_prefixes"),
    (inputs(BATCH, context_group=object()), ValueError, "context_group is for the shard of a cont"),
    (lambda: PLACES.place(8), ValueError, "rank must be 0 to 7, got 8: the layout has"),
    (join(IDS, SHARDS[::-1]), ValueError, r"0 to 1, in that order, got 2 tensors and .* \[1, 0\]"),
    (join(IDS[0], SHARDS[0]), ValueError, r"got 1 tensors and shards of the ranks \[0\]"),
    (join(IDS, [SHARDS[0], TWO.context_shard(1, 2)]), ValueError, "different batches or layouts"),
    (join(IDS, [SHARDS[0], BATCH.context_shard(1, 2, **HEAD_TAIL)]), ValueError, "or layouts"),
    (join([IDS[0], torch.zeros(2, 3)], SHARDS), ValueError, r"shape \[2, 3\], .* cells \[2, 1\d\]"),
    (join([IDS[0], [1.0]], SHARDS), TypeError, "values must be tensors, got list"),
    (join(IDS, [BATCH, BATCH]), ValueError, "got a whole Batch"),
    (lambda: SHARDS[0].model_inputs(tiny_model("lfm2", "sdpa")), IsolationError, "lfm2.* carry st"),
    (inputs(SHARDS[0], "sdpa"), ValueError, "'sdpa' does not see the keys of other context ranks"),
    (inputs(SHARDS[0], "sdpa", mask="block"), ValueError, "shards of context ranks have no mask"),
    (inputs(PADDED.context_shard(0, 2, **HEAD_TAIL)), ValueError, "on the left need a mask"),
    (inputs(SHARDS[0]), ValueError, "pass context_group=, got None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), REFUSED_CALLS, ids=[words for *_, words in REFUSED_CALLS]
)
def test_what_cannot_be_cut_or_joined_is_refused(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_place_of_a_rank() -> None:
    assert PLACES.place(5) == (1, 0)


def test_images_stay_whole_and_their_positions_are_cut() -> None:
    collate = PackedCollator(0, max_tokens=32, parallel=ParallelLayout(cp=2), vision=VISION)
    batch = collate(image_examples())
    for layout in LAYOUTS:
        for shard in shards_of(batch, layout):
            positions = batch["mrope_position_ids"].transpose(1, 2).flatten(0, 1)[shard.cells]
            found = shard["mrope_position_ids"].transpose(1, 2).flatten(0, 1)
            assert torch.equal(found, positions)
            assert shard["pixel_values"] == batch["pixel_values"]
    with pytest.raises(ValueError, match="placeholders of an image may be on several"):
        shard.model_inputs()
