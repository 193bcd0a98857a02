"""Pairs in packed rows, their losses over micro-batches and ranks, and each pair alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tiny_models import TINY, VOCAB, tiny_model
from torch_collate_kit import (
    Batch,
    PackedCollator,
    ParallelLayout,
    PerExample,
    pack,
    segment_sums,
    token_logps,
)
from torch_collate_kit.losses import global_num_examples, segment_ends, sums_by
from torch_collate_kit.preference import PreferenceLoss, bradley_terry, dpo, kto
from torch_collate_kit.ragged import Ragged

FIELDS = {"label": PerExample(torch.int64), "margin": PerExample(torch.float64)}
LOSSES = ("dpo", "kto", "bradley_terry")


def pairs(count: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with two answers, of which the last tokens are trained."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 9))
        sides = [rng.integers(3, VOCAB, rng.integers(1, 12)) for _ in range(2)]
        made.append(
            {
                "input_ids": [np.concatenate([prompt, side]) for side in sides],
                "loss_mask": [[0] * len(prompt) + [1] * len(side) for side in sides],
                "label": int(rng.integers(2)),
                "margin": float(rng.random()),
                "source": "ab"[i % 2],
            }
        )
    return made


def collated(data: list[dict[str, Any]], max_tokens: int, parallel: ParallelLayout) -> Batch:
    """Return packed rows of whole pairs, two segments each."""
    align = parallel.align
    sizes = [[-(-len(side) // align) * align for side in pair["input_ids"]] for pair in data]
    plan = pack([sum(pair) for pair in sizes], max_tokens, parallel=ParallelLayout(dp=parallel.dp))
    fields = {**FIELDS, "source": PerExample(str)}
    collate = PackedCollator(
        0,
        max_tokens=max_tokens,
        strategy="sequential",
        parallel=ParallelLayout(tp=parallel.tp),
        fixed_width=True,
        normalize_loss=False,
        fields=fields,
    )
    rows = []
    for members in plan.bins:
        sides = [
            {k: v[side] if isinstance(v, list) else v for k, v in data[i].items()}
            for i in members
            for side in range(2)
        ]
        row = collate(sides)
        numbers = row.row_metadata["example_indices"]
        assert numbers.tolist() == [list(range(2 * len(members)))]
        owners = np.repeat(np.array(members), 2)
        row.row_metadata["example_indices"] = Ragged(owners, numbers.offsets)
        row.row_metadata["segment_numbers"] = Ragged(numbers.values % 2, numbers.offsets)
        rows.append(row)
    metadata = {k: v for k, v in rows[0].metadata.items() if k != "response_length"}
    return Batch.cat(rows, metadata)


def per_pair(batch: Batch, name: str) -> Tensor:
    """The values of a PerExample field, one per pair."""
    return batch[name].values[::2]


def models(noise: float) -> tuple[Any, Any, nn.Linear]:
    """A reference, a policy that is off by noise, and a score head; fp64."""
    policy, reference = (tiny_model("qwen3", "torch_varlen", dtype=torch.float64) for _ in "pr")
    generator = torch.Generator().manual_seed(1)
    for weight in policy.parameters():
        added = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data += noise * added
    with torch.random.fork_rng():
        torch.manual_seed(2)
        score = nn.Linear(TINY["hidden_size"], 1, dtype=torch.float64)
    return policy, reference.requires_grad_(False), score


def sums_of(model: Any, batch: Batch) -> Tensor:
    hidden = model.model(**batch.model_inputs("torch_varlen", labels=False)).last_hidden_state
    return segment_sums(token_logps(hidden, batch, head=model.lm_head), batch)


def loss_of(
    name: str, policy: Any, reference: Any, score: nn.Linear, batch: Batch, kl: float
) -> PreferenceLoss:
    if name == "bradley_terry":
        hidden = policy.model(**batch.model_inputs("torch_varlen", labels=False))[0]
        rewards = score(hidden.flatten(0, 1)[segment_ends(batch)])[:, 0]
        return bradley_terry(rewards, per_pair(batch, "margin"))
    sums = sums_of(policy, batch)
    with torch.no_grad():
        ref_sums = sums_of(reference, batch)
    if name == "kto":
        return kto(sums, ref_sums, per_pair(batch, "label"), kl=kl, undesirable_weight=1.5)
    return dpo(sums, ref_sums, label_smoothing=0.1)


def gradients(*modules: nn.Module) -> Tensor:
    given = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in given])


def step(name: str, noise: float, micro_batches: list[Batch], kl: float) -> dict[str, Any]:
    """Loss and gradients of micro-batches, summed over the ranks if there are any."""
    policy, reference, score = models(noise)
    number = global_num_examples(micro_batches)
    total = torch.zeros((), dtype=torch.float64)
    found = []
    for batch in micro_batches:
        found.append(loss_of(name, policy, reference, score, batch, kl))
        loss = found[-1].loss.sum() / number
        loss.backward()
        total += loss.detach()
    gradient = gradients(policy, score)
    if dist.is_initialized():
        dist.all_reduce(total)
        dist.all_reduce(gradient)
    per_source = sums_by([of.loss for of in found], micro_batches, "source", per="example")
    return {"loss": total.item(), "gradient": gradient.numpy(), "per_source": per_source}


def on_rank(cases: list[tuple[str, float]], max_tokens: int, kl: float) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    batch = collated(pairs(), max_tokens, ParallelLayout(dp=2))
    micro_batches = batch.chunk(2)[dist.get_rank()].split(1)
    found = [step(name, noise, micro_batches, kl) for name, noise in cases]
    dist.destroy_process_group()
    return found


# --- each pair alone, without the kit ------------------------------------------------------------


def _alone(model: Any, ids: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """The summed log-prob of the trained tokens, and the last hidden state."""
    row = torch.as_tensor(ids)[None]
    hidden = model.model(input_ids=row, use_cache=False).last_hidden_state[0]
    logps = model.lm_head(hidden).log_softmax(-1)
    trained = [t for t in range(1, len(ids)) if mask[t]]
    return torch.stack([logps[t - 1, ids[t]] for t in trained]).sum(), hidden[-1]


def expected(name: str, noise: float, data: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean loss of pairs one by one, from the formulas of the papers."""
    policy, reference, score = models(noise)
    policy.set_attn_implementation("sdpa")
    reference.set_attn_implementation("sdpa")
    ratios, rewards = [], []
    for pair in data:
        sides = list(zip(pair["input_ids"], pair["loss_mask"], strict=True))
        outputs = [_alone(policy, *side) for side in sides]
        rewards.append([score(hidden)[0] for _, hidden in outputs])
        of_reference = [_alone(reference, *side)[0] for side in sides]
        pairs_of = zip(outputs, of_reference, strict=True)
        ratios.append([of_policy[0] - ref for of_policy, ref in pairs_of])
    kl = max(0.0, sum(other.item() for _, other in ratios) / len(data))
    beta, sigmoid = 0.1, torch.sigmoid
    losses = []
    for pair, (c, r), (reward_c, reward_r) in zip(data, ratios, rewards, strict=True):
        if name == "dpo":  # with a tenth of the labels taken as wrong
            p = sigmoid(beta * c - beta * r)
            losses.append(-0.9 * p.log() - 0.1 * (1 - p).log())
        elif name == "kto":
            value = sigmoid(beta * (c - kl)) if pair["label"] else sigmoid(beta * (kl - c))
            losses.append((1 if pair["label"] else 1.5) * (1 - value))
        else:
            losses.append(-sigmoid(reward_c - reward_r - pair["margin"]).log())
    loss = torch.stack(losses).mean()
    loss.backward()
    keys = [pair["source"] for pair in data]
    per_source = {
        key: (
            sum(of.item() for of, k in zip(losses, keys, strict=True) if k == key),
            keys.count(key),
        )
        for key in sorted(set(keys))
    }
    found = {"loss": loss.item(), "gradient": gradients(policy, score).numpy()}
    return {**found, "per_source": per_source, "kl": kl}
