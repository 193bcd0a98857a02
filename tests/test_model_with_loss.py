"""ModelWithLoss: the loss of the logits, under every wrapper; and what its parts do not do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import on_two_ranks
from tests.tiny_models import VOCAB, packed_inputs, tiny_model
from torch_collate_kit import Batch, PackedCollator, segment_sums, token_logps, token_loss
from torch_collate_kit.losses import ModelWithLoss

EXAMPLES = [{"input_ids": list(range(3, 3 + n))} for n in (7, 4, 9, 3, 8, 5, 12)]


def batch() -> Batch:
    return PackedCollator(0, max_tokens=12)(EXAMPLES)


def segment_logps(hidden: Tensor, batch: Batch, **options: Any) -> Tensor:
    return segment_sums(token_logps(hidden, batch, **options), batch)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "opt"])
def test_it_is_the_loss_of_the_logits(kind: str) -> None:
    model, whole = tiny_model(kind), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    expected = token_loss(logits, whole, num_loss_tokens=7)
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, expected)
    sums = ModelWithLoss(model, segment_logps)(whole)
    torch.testing.assert_close(sums, segment_logps(logits, whole))


class Small(nn.Module):
    """What ModelWithLoss asks of a model, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.base_model.forward = lambda input_ids, **_: (self.base_model.weight[input_ids].sin(),)
        self.config = SimpleNamespace()

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_model_is_one_graph_when_compiled() -> None:
    trained, whole = ModelWithLoss(Small()), batch()
    graphs: list[Any] = []
    compiled = torch.compile(trained, backend=lambda graph, _: graphs.append(graph) or graph)
    for rows in (whole, whole[1:]):
        expected = trained(rows, num_loss_tokens=7)
        torch.testing.assert_close(compiled(rows, num_loss_tokens=7), expected)
    assert len(graphs) <= 2  # the second is for any number of rows


def test_caps_are_kept_and_scales_refused() -> None:
    model, whole = tiny_model("gemma2", "eager", final_logit_softcapping=0.5), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    assert logits.abs().max() <= 0.5
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, token_loss(logits, whole, num_loss_tokens=7))
    model = tiny_model("llama")
    trained = ModelWithLoss(model)
    for name in ("logit_scale", "logits_scaling"):  # Cohere, Granite
        setattr(model.config, name, 0.25)
        with pytest.raises(ValueError, match=rf"not those of its head alone \(config.{name}\); co"):
            trained(whole, num_loss_tokens=7)
        setattr(model.config, name, 1.0)
    trained(whole, num_loss_tokens=7)
    for other in (model.model, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"has no head \(base_model.*causal language model"):
            ModelWithLoss(other)


def test_adapters_are_part_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model, whole = peft.get_peft_model(tiny_model("qwen3"), config), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, token_loss(logits, whole, num_loss_tokens=7))
    found.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora" in name)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted = ModelWithLoss(peft.get_peft_model(tiny_model("qwen3"), config))
    with pytest.raises(ValueError, match="prompts that PEFT adds"):
        prompted(whole, num_loss_tokens=7)


# --- ranks ---------------------------------------------------------------------------------------


def norms(how: str) -> float:
    """The norm of the gradients of this rank's rows, of a loss over both ranks."""
    rank, size = 0, 1
    if how != "alone":
        dist.init_process_group("gloo") if not dist.is_initialized() else None
        rank, size = dist.get_rank(), dist.get_world_size()
    trained: Any = ModelWithLoss(tiny_model("qwen3", "sdpa"))
    called = trained
    if how == "ddp" or how == "a part":
        called = DistributedDataParallel(trained)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in trained.model.model.layers:
            fully_shard(layer)
        fully_shard(trained)
    if how == "a part":
        called = called.module
    part = batch().chunk(size)[rank]
    (called(part, num_loss_tokens=batch().metadata["num_loss_tokens"]) * size).backward()
    grads = [p.grad for p in trained.parameters()]
    whole = [g.full_tensor() if how == "fsdp2" else g for g in grads]
    return float(torch.stack([g.norm() for g in whole]).norm())


def of_rank() -> tuple[dict[str, float], str]:
    found = {how: norms(how) for how in ("ddp", "fsdp2", "a part")}
    wrapped = DistributedDataParallel(nn.Linear(2, 4))
    with pytest.raises(TypeError) as caught:
        token_logps(torch.zeros(len(batch()), 12, 2), batch(), head=wrapped)
    dist.destroy_process_group()
    return found, str(caught.value)


def test_gradients_are_exchanged_on_two_ranks() -> None:
    """What a wrapper wraps is called, not a part of it: this is the fault of the old guides."""
    assert len(batch()) % 2 == 0
    (first, refusal), (second, _) = on_two_ranks(of_rank)
    alone = norms("alone")
    for how in ("ddp", "fsdp2"):
        assert first[how] == pytest.approx(second[how], rel=1e-6)
        assert first[how] == pytest.approx(alone, rel=1e-4)
    assert first["a part"] != pytest.approx(second["a part"], rel=1e-2)
    assert "head is a DistributedDataParallel" in refusal
    assert "wrap losses.ModelWithLoss(model), and call what DDP or FSDP returns" in refusal


def test_weights_in_parts_are_refused_as_a_head() -> None:
    class Sharded(nn.Linear):
        """As after fully_shard: a weight that knows the whole."""

    head = Sharded(2, 4)
    head.weight.full_tensor = lambda: None
    with pytest.raises(TypeError, match=r"has weights in parts.*wrap losses.ModelWithLoss"):
        token_loss(torch.zeros(len(batch()), 12, 2), batch(), num_loss_tokens=1, head=head)
    assert packed_inputs([2])["input_ids"].max() < VOCAB
