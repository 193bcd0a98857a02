"""transformers.Trainer on a dataset of packed rows: full steps, in the order of its own sampler.

    python examples/dropin/trainer.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/trainer.py

An item of PackedRows is a planned row: `per_device_train_batch_size` counts rows, and the shuffle,
schedule and resume are Trainer's own. Trainer counts the labels of a step over micro-batches and
ranks, and the model divides by that count (`num_items_in_batch`), so the loss is the exact token
mean. `eval_loss` is not: it is a mean of row means. `compute_metrics` below takes the loss of each
example out of the rows.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import tiny
import torch
import torch.nn.functional as F
import transformers

import torch_collate_kit as kit

ACCUMULATE = 2
num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
collate = kit.PackedCollator(tiny.PAD, max_tokens=62).for_trainer()


def rows_of(examples: list[dict[str, Any]]) -> kit.PackedRows:
    """Return the examples as packed rows; the trainer's sampler shuffles and divides them."""
    dataset = kit.TokenizedDataset(examples, columns=["input_ids", "labels"])
    return kit.PackedRows(dataset, collate)


train_rows = rows_of(tiny.make_examples())
eval_examples = tiny.make_examples(21, seed=1)
eval_rows = rows_of(eval_examples)


def token_losses(logits: torch.Tensor, labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Reduce logits to the loss of every token but the first, [rows, width - 1]."""
    targets = labels[0][:, 1:]
    return F.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )


def sums_and_counts(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each example in the order of the rows: the sum of its losses, and its targets.

    All of them have targets: pads and examples without any are left out, and the next moves up.
    """
    labels, positions = prediction.label_ids
    begins = np.diff(positions, axis=1, prepend=-2) != 1
    owners = (np.cumsum(begins) - 1).reshape(labels.shape)[:, 1:].ravel()  # of each target
    is_target = (labels[:, 1:] != -100).ravel()
    sums = np.bincount(owners, prediction.predictions.ravel() * is_target)
    counts = np.bincount(owners, is_target)
    return sums[counts > 0], counts[counts > 0]


def compute_metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
    sums, counts = sums_and_counts(prediction)
    return {"token_mean": sums.sum() / counts.sum(), "example_mean": (sums / counts).mean()}


with tempfile.TemporaryDirectory() as folder:
    settings = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,  # of the same rows, in another order
        per_device_train_batch_size=tiny.ROWS_PER_STEP // ACCUMULATE // num_ranks,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_eval_batch_size=1,
        label_names=["labels", "position_ids"],  # compute_metrics needs both to find the examples
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
    trainer = transformers.Trainer(
        model,
        settings,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=noting,
        optimizers=(tiny.make_optimizer(model), None),
        preprocess_logits_for_metrics=token_losses,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    steps = noting.steps(ACCUMULATE)
    trainer.evaluate()  # prints its metrics
    sums, counts = sums_and_counts(trainer.predict(eval_rows))

if trainer.is_world_process_zero():
    alone = tiny.make_model("eager")
    alone.load_state_dict(model.state_dict())
    in_rows = [eval_examples[i] for row in eval_rows for i in row.examples]
    expected = [tiny.nll_of(alone, e).item() / tiny.num_targets([e]) for e in in_rows]
    difference = np.abs(sums / counts - expected).max()
    print(f"evaluation: {len(sums)} examples, the largest difference is {difference:.1e}")
    if not difference <= tiny.ACCURACY:
        raise SystemExit("the losses of examples differ from those of each example alone")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tiny.compare(losses, steps)

accelerator = trainer.accelerator
del trainer, model  # they hold the process group, in a cycle
accelerator.free_memory()
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
