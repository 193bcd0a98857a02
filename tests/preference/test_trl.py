"""Losses of packed pairs against those of TRL's trainers on padded ones, in fp32."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.preference import pairs
from tests.tiny_models import TINY
from torch_collate_kit import ParallelLayout
from torch_collate_kit.losses import segment_ends
from torch_collate_kit.preference import bradley_terry, dpo, kto

trl = pytest.importorskip("trl")
DATA = pairs.pairs()


def trainer(name: str, model: nn.Module, reference: nn.Module) -> Any:
    """TRL's trainer with what its loss reads, and nothing that its constructor makes."""
    made = object.__new__(getattr(trl, name))
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, num_processes=1)
    alone.gather_for_metrics = alone.gather
    vars(made).update(
        {"model": model, "ref_model": reference, "accelerator": alone, "beta": 0.1},
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        **dict.fromkeys(("aux_loss_enabled", "use_weighting", "precompute_ref_logps"), False),
        **{"ld_alpha": None, "f_divergence_type": "reverse_kl", "label_smoothing": 0.0},
        **{"loss_types": ["sigmoid"], "loss_weights": [1.0], "loss_type": "kto"},
        **{"calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.5},
        **{"_total_train_tokens": 0, "_tp_size": 1},
    )
    return made


def sides(pair: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """The prompt and both answers."""
    num_prompt = pair["loss_mask"][0].count(0)
    chosen, rejected = (ids.tolist() for ids in pair["input_ids"])
    return chosen[:num_prompt], chosen[num_prompt:], rejected[num_prompt:]


def of_trl(name: str, model: Any, reference: Any, head: nn.Linear) -> float:
    from trl.trainer import dpo_trainer, kto_trainer, reward_trainer
    from trl.trainer.utils import add_fused_lm_head

    if name == "bradley_terry":
        keys = ("chosen_ids", "rejected_ids")
        rows: list[dict[str, Any]] = [
            dict(zip(keys, map(list, pair["input_ids"]), strict=True)) | {"margin": pair["margin"]}
            for pair in DATA
        ]
        inputs = reward_trainer.DataCollatorForPreference(pad_token_id=0)(rows)

        def scored(input_ids: Any, attention_mask: Any, margin: Any, use_cache: bool) -> Any:
            hidden = model.model(input_ids, attention_mask, use_cache=use_cache)[0]
            last = attention_mask.sum(1) - 1
            return SimpleNamespace(logits=head(hidden[torch.arange(len(last)), last]))

        made = trainer("RewardTrainer", model, reference)
        return float(made.compute_loss(scored, inputs))
    for each in (model, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    if name == "dpo":
        keys = ("prompt_ids", "chosen_ids", "rejected_ids")
        rows = [dict(zip(keys, sides(pair), strict=True)) for pair in DATA]
        inputs = dpo_trainer.DataCollatorForPreference(pad_token_id=0)(rows)
        return float(trainer("DPOTrainer", model, reference)._compute_loss(model, inputs, False))
    keys = ("prompt_ids", "completion_ids", "KL_completion_ids")
    rows = [
        dict(zip(keys, sides(pair), strict=True)) | {"label": bool(pair["label"])} for pair in DATA
    ]
    inputs = kto_trainer.DataCollatorForUnpairedPreference(pad_token_id=0)(rows)
    return float(trainer("KTOTrainer", model, reference)._compute_loss(model, inputs, False))


@pytest.mark.parametrize("name", pairs.LOSSES)
def test_the_loss_is_that_of_trl(name: str) -> None:
    policy, reference, _ = (module.float() for module in pairs.models(0.05))
    torch.manual_seed(3)
    head = nn.Linear(TINY["hidden_size"], 1)
    batch = pairs.collated(DATA, 400, ParallelLayout())
    with torch.no_grad():
        sums, ref_sums = (pairs.sums_of(model, batch) for model in (policy, reference))
        hidden = policy.model(**batch.model_inputs("torch_varlen", labels=False))[0]
        rewards = head(hidden.flatten(0, 1)[segment_ends(batch)])[:, 0]
        margin, labels = (pairs.per_pair(batch, key) for key in ("margin", "label"))
        found = {
            "dpo": dpo(sums, ref_sums),
            "kto": kto(sums, ref_sums, labels, undesirable_weight=1.5),
            "bradley_terry": bradley_terry(rewards, margin),
        }[name].loss.mean()
        for model in (policy, reference):
            model.set_attn_implementation("sdpa")
        expected = of_trl(name, policy, reference, head)
    assert found.item() == pytest.approx(expected, rel=0, abs=1e-6)
    assert found.item() != pytest.approx(0.693147, abs=1e-3)
