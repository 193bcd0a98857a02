"""DPO on packed pairs in transformers.Trainer: its loss is `compute_loss`, a few lines.

    python examples/dropin/dpo_trainer.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/dpo_trainer.py

The dataset is `PackedRows` of pairs and the collator returns the Batch itself, which says where the
segments of a row are. Trainer counts the labels of a step over micro-batches and ranks, to divide
by; a loss of pairs is divided by their number, so `_get_num_items_in_batch` counts those.
`_prepare_inputs` would make a dict of the Batch; Accelerate has moved it to the device already.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import tiny
import torch
import torch.nn.functional as F
import transformers

import torch_collate_kit as kit
from torch_collate_kit import preference
from torch_collate_kit.loading import map_segments
from torch_collate_kit.losses import global_num_examples

ACCUMULATE, BETA = 2, 0.1
num_ranks = int(os.environ.get("WORLD_SIZE", "1"))


class DPOTrainer(transformers.Trainer):
    """A Trainer of pairs, whose dataset has the log-probs of the reference."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        outputs = model(**inputs.model_inputs(self.model, labels=False))
        logps = kit.token_logps(outputs.logits, inputs)
        losses = preference.dpo(kit.segment_sums(logps, inputs), inputs["ref_logps"], beta=BETA)
        if num_items_in_batch is None:  # in an evaluation
            loss = losses.loss.mean()
        else:  # DDP averages over ranks
            loss = losses.loss.sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[kit.Batch], device: Any) -> torch.Tensor:
        return global_num_examples(batch_samples).to(device)

    def _prepare_inputs(self, inputs: kit.Batch) -> kit.Batch:
        return inputs


def make_pairs() -> list[dict[str, Any]]:
    """Return pairs: the letters of a question backwards, rather than as they are."""
    pairs = []
    for example in tiny.make_examples():
        ids, labels = example["input_ids"], example["labels"]
        start = next(i for i, label in enumerate(labels) if label != -100)
        other = [*ids[:start], *ids[start:-1][::-1], ids[-1]]
        sides = [ids, other]
        labels = [[-100] * start + side[start:] for side in sides]
        pairs.append({"input_ids": sides, "labels": labels})
    return pairs


def answer_logps(model: Any, pair: dict[str, Any]) -> list[torch.Tensor]:
    """Return the log-probability of each answer, with nothing else in the batch."""
    found = []
    for ids, labels in zip(pair["input_ids"], pair["labels"], strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        targets = torch.tensor(labels[1:])
        found.append(-F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
    return found


def reference_losses(steps: list[list[dict[str, Any]]]) -> list[float]:
    """Return the loss of each step, one pair at a time."""
    model, reference = tiny.make_model("eager"), tiny.make_model("eager")
    optimizer, losses = tiny.make_optimizer(model), []
    for pairs in steps:
        total = 0.0
        for pair in pairs:
            chosen, rejected = answer_logps(model, pair)
            with torch.no_grad():
                ref_chosen, ref_rejected = answer_logps(reference, pair)
            margin = (chosen - ref_chosen) - (rejected - ref_rejected)
            loss = -F.logsigmoid(BETA * margin) / len(pairs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def score(batch: kit.Batch) -> torch.Tensor:
    """Return the log-probability of each answer of packed pairs, before training."""
    logits = tiny.make_model()(**batch.model_inputs(labels=False)).logits
    return kit.segment_sums(kit.token_logps(logits, batch), batch)


pairs = make_pairs()
plain = kit.PackedCollator(tiny.PAD, max_tokens=128)
ref_logps = map_segments(score, kit.TokenizedDataset(pairs), plain)
examples = [{**pair, "ref_logps": of} for pair, of in zip(pairs, ref_logps.tolist(), strict=True)]
fields = {"ref_logps": kit.PerExample(torch.float32, shape=(2,))}
collate = kit.PackedCollator(tiny.PAD, max_tokens=128, fields=fields)
rows = kit.PackedRows(kit.TokenizedDataset(examples, columns=[*examples[0]]), collate)

with tempfile.TemporaryDirectory() as folder:
    settings = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,  # of the same rows, in another order
        per_device_train_batch_size=tiny.ROWS_PER_STEP // ACCUMULATE // num_ranks,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=0.0,  # the rest is as in the reference: no clipping, no schedule
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    model, noting = tiny.make_model(), tiny.Noting(collate)
    trainer = DPOTrainer(
        model,
        settings,
        train_dataset=rows,
        data_collator=noting,
        optimizers=(tiny.make_optimizer(model), None),
    )
    trainer.train()
    steps = noting.steps(ACCUMULATE)

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tiny.compare(losses, steps, reference_losses([[pairs[i] for i in step] for step in steps]))

accelerator = trainer.accelerator
del trainer, model  # they hold the process group, in a cycle
accelerator.free_memory()
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
