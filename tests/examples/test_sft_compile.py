"""torch.compile in examples/sft.py: nothing is compiled twice, and the losses are the same.

The backend is "aot_eager": graphs of the forward and the backward pass, which torch runs as they
are. What is compiled again does not depend on the backend.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sft
import torch
import trained_model
from datasets import Dataset
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters
from trained_model import Attention, ModelWithLoss, compile_layers

import torch_collate_kit as kit
from tests.tiny_models import VOCAB, tiny_model

ARGS = Namespace(
    **{"rows_multiple_of": None, "batch_size": 8, "seed": 0, "no_packing": False, "rank": 0},
    **{"max_tokens": 256, "compile": True, "rows_per_micro_batch": 2, "num_ranks": 1},
    **{"num_workers": 0, "prefetch": False},
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing is compiled yet, and what a test configures is forgotten."""
    torch._dynamo.reset()
    counters.clear()
    before = torch._dynamo.config.optimize_ddp
    with (
        torch.compiler.config.patch(dynamic_sources=""),
        torch._dynamo.config.patch(optimize_ddp=before),
    ):
        yield
    torch._dynamo.reset()


def micro_batches(examples: kit.TokenizedDataset, count: int) -> list[kit.Batch]:
    """As sft.py makes them, of the first epochs."""
    accelerator: Any = Namespace(device=torch.device("cpu"))
    found: list[kit.Batch] = []
    collate = sft.make_collator(0, tiny_model("qwen3"), ARGS)
    with sft.make_loader(examples, collate, accelerator, ARGS, shuffle=True) as loader:
        while len(found) < count:
            for batch in loader:
                found += sft.micro_batches(batch, ARGS)
    return found[:count]


def seeded_mix(count: int) -> kit.TokenizedDataset:
    """Short and long conversations, of one to a hundred and more in a row."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, count).astype(int).clip(3, ARGS.max_tokens)
    rows = [rng.integers(3, VOCAB, length).tolist() for length in lengths]
    mask = [[0, *rng.integers(0, 2, len(row) - 2).tolist(), 1] for row in rows]
    return kit.TokenizedDataset(Dataset.from_dict({"input_ids": rows, "loss_mask": mask}))


def losses_and_gradients(
    model: ModelWithLoss, batches: list[kit.Batch]
) -> tuple[list[float], torch.Tensor]:
    """The loss of every batch, and the sum of all gradients."""
    losses = []
    for batch in batches:
        loss = model(batch, 100)
        loss.backward()
        losses.append(loss.item())
    return losses, torch.cat([p.grad.flatten() for p in trained_model.trained_parameters(model)])


def assert_compiled_once_and_equal(
    model: Any, batches: list[kit.Batch], num_graphs: int = 1
) -> None:
    """In the first batch and never again, where it would raise."""
    plain = ModelWithLoss(model.train(), Attention("torch_varlen"))
    compiled = copy.deepcopy(plain)
    compile_layers(compiled.model, backend="aot_eager")
    losses_and_gradients(compiled, batches[:1])
    assert counters["stats"]["unique_graphs"] == num_graphs
    compiled.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, gradients = losses_and_gradients(compiled, batches)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]
    expected, expected_gradients = losses_and_gradients(plain, batches)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-4)


def test_a_seeded_mix_compiles_once() -> None:
    """Rows of one shape, but other numbers of segments, and another longest one."""
    batches = micro_batches(seeded_mix(200), 30)
    assert {batch["input_ids"].shape for batch in batches} == {(2, ARGS.max_tokens)}
    added = [batch["sub_seq_lengths"][-1].numel() == 0 for batch in batches]
    assert 0 < sum(added) < len(added)  # a last row that fills up, and has nothing to train
    inputs = [batch.model_inputs() for batch in batches]
    assert len({len(i["cu_seq_lens_q"]) for i in inputs}) >= 5
    assert len({i["max_length_q"] for i in inputs}) >= 5
    assert_compiled_once_and_equal(tiny_model("qwen3"), batches)


def test_with_adapters() -> None:
    """The first layer is a graph of its own: what it is given needs no gradient."""
    pytest.importorskip("peft")
    args = Namespace(lora=4, lora_alpha=None, gradient_checkpointing=False)
    model = trained_model.prepare(tiny_model("qwen3"), args)
    assert_compiled_once_and_equal(model, micro_batches(seeded_mix(80), 6), num_graphs=2)


def test_without_varying_lengths_it_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "VARYING", "")
    with pytest.raises(RecompileError, match=r"cu_seq_lens_q|max_length_q"):
        assert_compiled_once_and_equal(tiny_model("qwen3"), micro_batches(seeded_mix(80), 6))
