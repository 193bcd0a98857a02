"""Processes that share rows: losses, gradients and training are those of whole rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.ranks import on_ranks
from tests.tiny_models import VOCAB
from tests.tree_samples import exact_model, pairs
from torch_collate_kit import (
    Batch,
    PackedBatchSampler,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    PrefetchLoader,
    TokenizedDataset,
    segment_sums,
    token_logps,
    token_loss,
)
from torch_collate_kit.attention import context_join
from torch_collate_kit.preference import dpo

LAYOUTS = ("zigzag", "contiguous", "head_tail")

WINDOWED: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1}
WINDOWED["layer_types"] = ["full_attention", "sliding_attention"]


def random_examples(seed: int, count: int = 8) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for n in rng.integers(1, 30, count):
        weights = rng.random(n) * (rng.random(n) < 0.7)
        found.append({"input_ids": rng.integers(3, VOCAB, n), "loss_mask": weights})
    return found


def collated(seed: int, layout: ParallelLayout, max_tokens: int = 64) -> Batch:
    return PackedCollator(0, max_tokens=max_tokens, parallel=layout)(random_examples(seed))


@contextmanager
def process_groups(cp: int) -> Iterator[Any]:
    """Context groups of neighbours, and the one of this rank."""
    dist.init_process_group("gloo")
    group, _ = dist.new_subgroups(cp)
    try:
        yield group
    finally:
        dist.barrier()
        dist.destroy_process_group()


def gradients(model: Any) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def alone(model: Any, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = token_loss(
        model(**batch.model_inputs(model, labels=False)).logits,
        batch,
        num_loss_tokens=batch.metadata["num_loss_tokens"],
    )
    loss.backward()
    return float(loss.detach()), [g.clone() for g in gradients(model)]


def joined_over_ranks(model: Any, total: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients, added up over all ranks."""
    found = [g.clone() for g in gradients(model)]
    for tensor in (total, *found):
        dist.all_reduce(tensor)
    return float(total), found


def difference(
    found: tuple[float, list[torch.Tensor]], expected: tuple[float, list[torch.Tensor]]
) -> tuple[float, float]:
    """Relative differences of the losses, and of the gradients as one vector."""
    of_loss = abs(found[0] - expected[0]) / abs(expected[0])
    one, other = (torch.cat([g.flatten().double() for g in of[1]]) for of in (found, expected))
    return of_loss, float((one - other).norm() / other.norm())


def compare(dp: int, cp: int, seeds: int) -> dict[tuple[str, str], list[float]]:
    """The largest differences of losses and gradients from those of whole rows, row by row."""
    parallel, worst = ParallelLayout(dp=dp, cp=cp), {}
    with process_groups(cp) as group:
        dp_rank, cp_rank = parallel.place(dist.get_rank())
        every = [(*pair, "float64") for pair in itertools.product(range(seeds), LAYOUTS)]
        for seed, layout, name in [*every, (1, "zigzag", "float32")]:
            window = 5 if cp == 2 else 20  # wider than a shard, narrower than an example
            changes = WINDOWED | {"sliding_window": window} if seed % 2 else {}
            model = exact_model("qwen3", "torch_varlen", **changes).to(getattr(torch, name))
            model.train()
            if seed % 3 == 2:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            batch = collated(seed, parallel)
            expected = alone(model, batch)
            model.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for part in batch.chunk(dp)[dp_rank].split(1):
                shard = part.context_shard(cp_rank, cp, layout=layout)
                inputs = shard.model_inputs(model, context_group=group)
                number = batch.metadata["num_loss_tokens"]
                if seed % 2:
                    loss = token_loss(model(**inputs).logits, shard, num_loss_tokens=number)
                else:
                    hidden = model.model(**inputs).last_hidden_state
                    loss = token_loss(hidden, shard, num_loss_tokens=number, head=model.lm_head)
                loss.backward()
                total += loss.detach()
            found = difference(joined_over_ranks(model, total), expected)
            before = worst.get((layout, name), [0.0, 0.0])
            worst[layout, name] = [max(pair) for pair in zip(before, found, strict=True)]
    return worst


def sequence_losses(layout: Any) -> tuple[float, float]:
    """A loss of pairs, whose sums need the log-probs of all ranks."""
    with process_groups(2) as group:
        model = exact_model("qwen3", "torch_varlen")
        batch = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(cp=2))(pairs(1))

        def loss_of(logps: torch.Tensor) -> torch.Tensor:
            sums = segment_sums(logps, batch)
            return dpo(sums, torch.zeros_like(sums) - 3).loss.sum()

        logits = model(**batch.model_inputs(model, labels=False)).logits
        loss = loss_of(token_logps(logits, batch))
        loss.backward()
        expected = float(loss.detach()), [g.clone() for g in gradients(model)]
        model.zero_grad()
        shard = batch.context_shard(dist.get_rank(), 2, layout=layout)
        logits = model(**shard.model_inputs(model, context_group=group)).logits
        logps = context_join(token_logps(logits, shard), shard, group=group)
        loss = loss_of(logps)
        loss.backward()
        _, found = joined_over_ranks(model, torch.zeros(()))
    return difference((float(loss.detach()), found), expected)


def refusals() -> list[str]:
    """What the ranks refuse, in their own words."""
    with process_groups(2) as group:
        rank = dist.get_rank()
        batch = collated(0, ParallelLayout(cp=2))
        other = collated(rank, ParallelLayout(cp=2), max_tokens=256)
        shards = {
            "of another rank": batch.context_shard(1 - rank, 2),
            "of more ranks": batch.context_shard(rank, 1) if not rank else batch,
            "of another batch": other.context_shard(rank, 2),
        }
        if rank:
            del shards["of more ranks"]
        said = []
        for shard in shards.values():
            with pytest.raises(ValueError, match="context rank") as found:
                shard.model_inputs("torch_varlen", context_group=group)
            said.append(str(found.value))
        shard = batch.context_shard(rank, 2, layout=("zigzag", "contiguous")[rank])
        with pytest.raises(ValueError, match="different batches or layouts"):
            context_join(shard["targets"], shard, group=group)
        with pytest.raises(ValueError, match="passes its own values and shard, got 2 tensors"):
            context_join([shard["targets"]] * 2, [shard] * 2, group=group)
    return said


LENGTHS = np.random.default_rng(5).integers(4, 60, 60)


def training(dp: int, cp: int, state: Any, steps: int) -> Any:
    """Train some steps of full rows, from the start or from the state that an earlier run left."""
    examples = [{"input_ids": (np.arange(n) * 7 + 3 * i) % 50 + 3} for i, n in enumerate(LENGTHS)]
    parallel = ParallelLayout(dp=dp, cp=4)  # rows for any cp_size that divides 4
    packing = PackingOptions(128, parallel=parallel, rows_multiple_of=2)
    collate = PackedCollator(0, packing=packing, train_all=True)
    with process_groups(cp) as group:
        dp_rank, cp_rank = ParallelLayout(dp=dp, cp=cp).place(dist.get_rank())
        dataset = TokenizedDataset(examples, train_all=True)
        sampler = PackedBatchSampler(dataset, collate, batch_rows=4, dp_rank=dp_rank, seed=3)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        model = exact_model("qwen3", "torch_varlen")
        ranks = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with PrefetchLoader(loader) as prefetched:
            if state is not None:
                prefetched.load_state_dict(state["loader"])
                model.load_state_dict(state["model"])
            for batch in prefetched.steps(steps):
                parts = batch.split(1)
                for part in parts:
                    shard = part.context_shard(cp_rank, cp)
                    with nullcontext() if part.metadata["is_last_part"] else ranks.no_sync():
                        inputs = shard.model_inputs(ranks, context_group=group)
                        number = part.metadata["num_loss_tokens"]
                        loss = token_loss(ranks(**inputs).logits, shard, num_loss_tokens=number)
                        (loss * dist.get_world_size()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return {"loader": prefetched.state_dict(), "model": model.state_dict()}


@pytest.mark.parametrize(("dp", "cp", "seeds"), [(1, 2, 3), (1, 4, 2), (2, 2, 2)])
def test_losses_and_gradients_are_those_of_whole_rows(dp: int, cp: int, seeds: int) -> None:
    for worst in on_ranks(dp * cp, compare, dp, cp, seeds):
        assert len(worst) == 4
        for (_, dtype), differences in worst.items():
            assert max(differences) < {"float64": 1e-12, "float32": 1e-6}[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_sequences_are_those_of_whole_rows(layout: str) -> None:
    for differences in on_ranks(2, sequence_losses, layout):
        assert max(differences) < 1e-12


def test_shards_that_are_not_of_one_batch_are_refused() -> None:
    of_ranks = on_ranks(2, refusals)
    for rank, said in enumerate(of_ranks):
        assert f"shard of context rank {1 - rank} of 2, and this process is rank {rank}" in said[0]
        assert "of different batches or layouts, with the checksums" in said[-1]
    assert "shard of context rank 0 of 1, and this process is rank 0 of the 2" in of_ranks[0][1]


def test_a_run_goes_on_with_other_context_ranks() -> None:
    whole = on_ranks(1, training, 1, 1, None, 6)[0]
    state = on_ranks(4, training, 1, 4, None, 2)[0]
    state = on_ranks(4, training, 2, 2, state, 2)[2]
    state = on_ranks(2, training, 1, 2, state, 2)[0]
    assert state["loader"] == whole["loader"]
    for name, value in whole["model"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-9, atol=1e-11)
