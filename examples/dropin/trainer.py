"""transformers.Trainer on packed rows: accumulation, evaluation, and metrics per example.

    python examples/dropin/trainer.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/trainer.py

Trainer counts the labels of a step over micro-batches and ranks, and the model divides by that
count (`num_items_in_batch`), so the loss is the exact token mean. `eval_loss` is not: it is a mean
of batch means. `compute_metrics` below takes the loss of each example out of the rows.
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
train_examples, eval_examples = tiny.make_examples(), tiny.make_examples(21, seed=1)

# One row per micro-batch. In evaluation Trainer gathers rows: their number must be the same on all
# ranks. "sequential" keeps the examples of a row in their order, and so that of the results.
longest = max(len(example["input_ids"]) for example in train_examples + eval_examples)
collate = kit.PackedCollator(
    tiny.PAD,
    max_tokens=tiny.BATCH_SIZE * longest,
    strategy="sequential",
).for_trainer()


def token_losses(logits: torch.Tensor, labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Reduce logits to the loss of every token but the first, [rows, width - 1]."""
    targets = labels[0][:, 1:]
    return F.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )


def sums_and_counts(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each example in the order of the dataset: the sum of its losses, and its targets.

    All of them have targets: unpack leaves out an example without any, and the next moves up.
    """
    labels, position_ids = prediction.label_ids
    inputs = {"labels": labels, "position_ids": position_ids}
    # On several ranks the last batch was filled up with examples of the beginning: cut them off.
    losses = kit.unpack(prediction.predictions, inputs)[: len(eval_examples)]
    targets = kit.unpack(labels, inputs)[: len(eval_examples)]
    counts = [np.count_nonzero(part != -100) for part in targets]
    return np.array([part.sum() for part in losses]), np.array(counts)


def compute_metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
    sums, counts = sums_and_counts(prediction)
    return {"token_mean": sums.sum() / counts.sum(), "example_mean": (sums / counts).mean()}


with tempfile.TemporaryDirectory() as folder:
    settings = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=tiny.NUM_STEPS,
        per_device_train_batch_size=tiny.BATCH_SIZE // ACCUMULATE // num_ranks,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_eval_batch_size=tiny.BATCH_SIZE,
        label_names=["labels", "position_ids"],  # compute_metrics needs both to find the examples
        max_grad_norm=0.0,  # the rest is as in the reference: no clipping, no schedule, in order
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    model = tiny.make_model()
    trainer = transformers.Trainer(
        model,
        settings,
        train_dataset=train_examples,
        eval_dataset=eval_examples,
        data_collator=collate,
        optimizers=(tiny.make_optimizer(model), None),
        preprocess_logits_for_metrics=token_losses,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.evaluate()  # prints its metrics
    sums, counts = sums_and_counts(trainer.predict(eval_examples))

if trainer.is_world_process_zero():
    alone = tiny.make_model("eager")
    alone.load_state_dict(model.state_dict())
    expected = [tiny.nll_of(alone, e).item() / tiny.num_targets([e]) for e in eval_examples]
    difference = np.abs(sums / counts - expected).max()
    print(f"evaluation: {len(sums)} examples, the largest difference is {difference:.1e}")
    if not difference <= tiny.ACCURACY:
        raise SystemExit("the losses of examples differ from those of each example alone")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = range(0, len(train_examples), tiny.BATCH_SIZE)
    tiny.compare(losses, [list(range(i, i + tiny.BATCH_SIZE)) for i in steps])

accelerator = trainer.accelerator
del trainer, model  # they hold the process group, in a cycle
accelerator.free_memory()
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
