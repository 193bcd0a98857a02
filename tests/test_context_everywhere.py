"""All that takes a Batch, of a context shard: the same as of the batch, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batch_samples import VISION, functions_of_a_batch, image_examples, members_of_a_batch
from tests.devices import NoWaiting
from tests.test_trees_everywhere import EXAMPLES, FIELDS
from tests.test_trees_everywhere import FUNCTIONS as TAKING_A_BATCH
from tests.test_trees_everywhere import MEMBERS as MEMBERS_TAKEN
from tests.tiny_models import tiny_model
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    RolloutCollator,
    check_isolation,
    global_num_loss_tokens,
    token_logps,
    token_loss,
)
from torch_collate_kit.attention import context_join
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.losses import sums_by, trained_values
from torch_collate_kit.testing import batch_digest

LAYOUTS = ("zigzag", "contiguous", "head_tail")


def whole(**options: Any) -> Batch:
    parallel = ParallelLayout(dp=2, cp=2)
    return PackedCollator(0, max_tokens=24, parallel=parallel, fields=FIELDS, **options)(EXAMPLES)


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


def test_padded_rollouts_have_losses_of_shards() -> None:
    rollouts = [
        {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "rewards": 1.0, "loss_mask": [1, 0, 1]},
        {"prompt_ids": [6], "response_ids": [7, 8], "rewards": 0.0, "loss_mask": [1, 1]},
    ]
    batch = RolloutCollator(0, pad_to_multiple_of=8)(rollouts)
    values, shards = outputs(batch), shards_of(batch, "head_tail")
    parts = [token_loss(cells_of(values, of), of, num_loss_tokens=4) for of in shards]
    expected = token_loss(values, batch, num_loss_tokens=4)
    torch.testing.assert_close(torch.stack(parts).sum(), expected, rtol=1e-14, atol=0)


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


def test_digests_tell_shards_apart() -> None:
    digests = [batch_digest(of) for _ in range(2) for of in shards_of(whole())]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


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


def raises(match: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=match)


def test_rows_that_do_not_divide_are_refused() -> None:
    batch = PackedCollator(0, max_tokens=9)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}])
    with raises(r"segment 0 has 4 cells, which zigzag does not divide into 8 equal parts for 4"):
        batch.context_shard(0, 4)
    with raises(r"rows have 7 cells, which contiguous does not divide into 2 equal parts for 2"):
        batch.context_shard(0, 2, layout="contiguous")
    with raises(r"collate with parallel=ParallelLayout\(cp=2\), or padded rows with pad_to_mul"):
        batch.context_shard(0, 2, layout="head_tail")


def test_wrong_arguments_are_refused() -> None:
    batch: Any = whole()
    with raises("cp_rank must be 0 to 1, got 2; layout.place"):
        batch.context_shard(2, 2)
    with raises("cp_size must be at least 1"):
        batch.context_shard(0, 0)
    with raises("layout must be one of"):
        batch.context_shard(0, 2, layout="ring")
    with raises("built from tensors"):
        Batch({"input_ids": batch["input_ids"]}).context_shard(0, 2)
    with raises('layout="zigzag" cuts the segments of packed rows, and these are padded'):
        PaddedCollator(0)([{"input_ids": [1, 2, 3, 4]}]).context_shard(0, 2)
    with raises("share_prefixes"):
        PackedCollator(0, max_tokens=24, share_prefixes=True)(EXAMPLES).context_shard(0, 1)
    with raises("context_group is for the shard of a context rank"):
        batch.model_inputs(context_group=object())
    with raises("rank must be 0 to 7, got 8: the layout has"):
        ParallelLayout(dp=2, cp=2, tp=2).place(8)
    assert ParallelLayout(dp=2, cp=2, tp=2).place(5) == (1, 0)


def test_joins_of_other_shards_are_refused() -> None:
    one, other = whole(), whole(strategy="first_fit_decreasing")
    two = PackedCollator(0, max_tokens=24, parallel=ParallelLayout(cp=2))(
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7]}]
    )
    shards = shards_of(one)
    ids = [of["input_ids"] for of in shards]
    not_tensors: Any = [ids[0], [1.0]]
    with raises(r"ranks 0 to 1, in that order, got 2 tensors and shards of the ranks \[1, 0\]"):
        context_join(ids, shards[::-1])
    with raises(r"got 1 tensors and shards of the ranks \[0\]"):
        context_join(ids[0], shards[0])
    with raises("different batches or layouts"):
        context_join(ids, [shards[0], two.context_shard(1, 2)])
    with raises("different batches or layouts"):
        context_join(ids, [shards[0], one.context_shard(1, 2, layout="head_tail")])
    with raises(r"values have shape \[2, 3\], the shard has cells \[2, 1\d\] and \d trained"):
        context_join([ids[0], torch.zeros(2, 3)], shards)
    with raises("values must be tensors, got list", TypeError):
        context_join(not_tensors, shards)
    with raises("got a Batch that is none"):
        context_join(ids, [one, other])


def test_models_that_need_more_than_keys_are_refused() -> None:
    shard = whole().context_shard(0, 2)
    with raises("lfm2.* carry state along a row", IsolationError):
        shard.model_inputs(tiny_model("lfm2", "sdpa"))
    with raises("attention 'sdpa' does not see the keys of other context ranks"):
        shard.model_inputs("sdpa")
    with raises("shards of context ranks have no mask"):
        shard.model_inputs("sdpa", mask="block")
    padded = PaddedCollator(0, pad_to_multiple_of=4)([{"input_ids": [1, 2, 3]}])
    with raises("rows padded on the left need a mask"):
        padded.context_shard(0, 2, layout="head_tail").model_inputs()
    with raises("pass context_group=, got None"):
        shard.model_inputs()


def test_images_stay_whole_and_their_positions_are_cut() -> None:
    collate = PackedCollator(0, max_tokens=32, parallel=ParallelLayout(cp=2), vision=VISION)
    batch = collate(image_examples())
    for layout in LAYOUTS:
        for shard in shards_of(batch, layout):
            positions = batch["mrope_position_ids"].transpose(1, 2).flatten(0, 1)[shard.cells]
            found = shard["mrope_position_ids"].transpose(1, 2).flatten(0, 1)
            assert torch.equal(found, positions)
            assert shard["pixel_values"] == batch["pixel_values"]
    with raises("the placeholders of an image may be on several context ranks"):
        shard.model_inputs()
