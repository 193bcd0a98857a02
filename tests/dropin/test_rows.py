"""Packed rows train to the same losses in Trainer, in SFTTrainer and in a loop of one's own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.utils.data import DataLoader

import torch_collate_kit as kit
from tests.dropin.launching import load_script, skip_without

tiny = load_script("tiny")

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "optim": "sgd",
    "learning_rate": 0.2,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 3,
}


def rows_of(target: str = "labels") -> tuple[kit.PackedRows, Any]:
    """The rows, and the collator; ``target`` is the column that says what is trained."""
    examples = tiny.make_examples()
    for example in examples:
        example["loss_mask"] = [int(label != -100) for label in example["labels"]]
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS).for_trainer()
    dataset = kit.TokenizedDataset(examples, columns=["input_ids", target])
    return kit.PackedRows(dataset, collate), tiny.Noting(collate)


def losses_of(trainer: Any, resume_from: str | None = None) -> list[float]:
    trainer.train(resume_from_checkpoint=resume_from)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_of(folder: Path, target: str = "labels", **settings: Any) -> Any:
    rows, noting = rows_of(target)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), **{"save_strategy": "no", **SETTINGS, **settings}
    )
    return transformers.Trainer(
        tiny.make_model(), arguments, train_dataset=rows, data_collator=noting
    )


def losses_of_a_loop(batches: list[list[list[int]]]) -> list[float]:
    """Train the same rows, each told by the numbers of its examples."""
    rows, _ = rows_of()
    number_of = {tuple(row.examples): row.number for row in rows}
    numbers = [[number_of[tuple(row)] for row in batch] for batch in batches]
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS)
    model = tiny.make_model()
    optimizer = tiny.make_optimizer(model)
    losses = []
    for step, batch in enumerate(DataLoader(rows, batch_sampler=numbers, collate_fn=collate)):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * (1 - step / len(batches))
        logits = model(**batch.model_inputs(labels=False)).logits
        count = batch.metadata["num_loss_tokens"]
        loss = kit.token_loss(logits, batch, num_loss_tokens=count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trainer_and_a_loop_train_the_same_rows_to_the_same_losses(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    losses, steps = losses_of(trainer), trainer.data_collator.steps(1)
    assert len(losses) == len(steps) == 48
    epochs = [list(chain(*steps[:24])), list(chain(*steps[24:]))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(160))
    assert epochs[0] != epochs[1], "the trainer shuffles"
    assert losses == pytest.approx(losses_of_a_loop(trainer.data_collator.batches), abs=1e-6)


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, save_strategy="steps", save_steps=31)
    expected, steps = losses_of(whole), whole.data_collator.steps(1)
    resumed = trainer_of(tmp_path)
    assert losses_of(resumed, str(tmp_path / "checkpoint-31")) == expected
    assert resumed.data_collator.steps(1)[-17:] == steps[31:]


def test_rows_are_not_grouped_by_length(tmp_path: Path) -> None:
    """They are full and cost alike; of ``to_datasets`` a Trainer can read their lengths."""
    for strategy in ("group_by_length", "batch_rebalance"):
        with pytest.raises(TypeError, match="rows are not grouped by length: packed rows are full"):
            trainer_of(tmp_path, train_sampling_strategy=strategy).train()
    rows, _ = rows_of()
    sampler = transformers.trainer_pt_utils.LengthGroupedSampler(2, rows.to_datasets())
    assert sampler.lengths == rows.plan.row_tokens.tolist()
    assert sorted(sampler) == list(range(len(rows)))


def test_dispatch_batches_that_cut_the_boundaries_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, accelerator_config={"dispatch_batches": True})
    with pytest.raises(ValueError, match=r"entries for 2 rows: it .* pass dispatch_batches=False$"):
        trainer.train()


class OverALoader(transformers.Trainer):
    loader: Any = None

    def get_train_dataloader(self) -> Any:
        return self.loader


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_trainer_over_a_loader_that_it_cannot_resume_is_refused(
    kind: str, tmp_path: Path
) -> None:
    rows, collate = rows_of()
    if kind == "sampler":
        sampler = kit.PrefetchingSampler(rows, batch_size=2)
        source: Any = DataLoader(rows, batch_sampler=sampler, collate_fn=collate)
    else:
        inner = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS)
        stream = kit.PackedIterableDataset(tiny.make_examples(), inner, batch_rows=2)
        source = DataLoader(stream, batch_size=None, collate_fn=inputs_of)

    def train(resume_from: str | None = None, **settings: Any) -> int:
        given = {**SETTINGS, "max_steps": 3, "save_steps": 2, **settings}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **given)
        trainer = OverALoader(tiny.make_model(), arguments)
        with kit.PrefetchLoader(source) as trainer.loader:
            trainer.train(resume_from_checkpoint=resume_from)
        return int(trainer.state.global_step)

    way_out = r"give Trainer PackedRows\(.*, read a stream in a loop .*ignore_data_skip=True"
    with pytest.raises(TypeError, match=way_out):
        train()
    assert not list(tmp_path.iterdir()), "before any step"
    assert train(ignore_data_skip=True) == 3
    assert train(str(tmp_path / "checkpoint-2"), ignore_data_skip=True) == 3


def inputs_of(batch: Any) -> Any:
    return batch.model_inputs("torch_varlen")


def test_sft_trainer_trains_the_rows_of_trainer_to_the_same_losses(tmp_path: Path) -> None:
    skip_without("trl", "peft")
    import trl

    plain = trainer_of(tmp_path)
    expected, steps = losses_of(plain), plain.data_collator.steps(1)
    rows, noting = rows_of()

    def sft(dataset: Any, **settings: Any) -> Any:
        return trl.SFTTrainer(
            tiny.make_model(),
            trl.SFTConfig(
                output_dir=str(tmp_path), save_strategy="no", bf16=False, **SETTINGS, **settings
            ),
            train_dataset=dataset,
            data_collator=noting,
            processing_class=tiny.make_tokenizer(),
        )

    trainer = sft(rows.to_datasets(), dataset_kwargs={"skip_prepare_dataset": True})
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-6)
    assert noting.steps(1) == steps
    assert losses_of_a_loop(noting.batches) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(TypeError, match="`train_dataset` must be a `Dataset` or `IterableDataset`"):
        sft(rows)
    with pytest.raises(ValueError, match=r"Pass `dataset_kwargs=\{'skip_prepare_dataset': True\}`"):
        sft(rows.to_datasets())
