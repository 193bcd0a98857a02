"""transformers.Trainer under its defaults: the loss is that of the trained tokens, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from tests.chat.chats import byte_tokenizer, chat
from torch_collate_kit import ChatOptions, tokenize_chat_dataset
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import DataError

CHATS = [
    chat("user: hello", "assistant: good morning"),
    chat("user: what is 1+1", "assistant: 2", "user: sure?", "assistant: yes, it is 2"),
    chat("assistant: I speak first", "user: ok", "assistant: fine"),
    chat("user: a long question about nothing in particular", "assistant: no"),
    chat("user: x", "assistant: y"),
    chat("user: bye", "assistant: see you"),
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model(vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config)


def losses_of_trainer(
    folder: Path, model: Any, dataset: Any, collate: PackedCollator, **settings: Any
) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def token_mean(model: Any, rows: list[dict[str, Any]]) -> float:
    """Of the labels, one conversation at a time."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
    return total / count


@pytest.mark.parametrize("as_labels", [True, False])
def test_the_loss_is_exact(tmp_path, as_labels):
    """A loss_mask column was removed before the collator saw it, and everything trained."""
    tokenizer, source = byte_tokenizer(TEMPLATE), datasets.Dataset.from_list(CHATS)
    dataset, skips = tokenize_chat_dataset(source, tokenizer, ChatOptions(labels=True))
    assert not skips
    model = tiny_model(len(tokenizer))
    expected = token_mean(model, list(dataset))
    every_token = token_mean(model, [{**row, "labels": row["input_ids"]} for row in dataset])
    assert abs(every_token - expected) > 1e-3, "a wrong loss would not be seen"
    losses = losses_of_trainer(
        tmp_path,
        model,
        dataset if as_labels else tokenize_chat_dataset(source, tokenizer)[0],
        PackedCollator(0, max_tokens=128).for_trainer(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=2,
        learning_rate=0.0,
        remove_unused_columns=as_labels,
    )
    assert losses == pytest.approx([expected] * 2, abs=2e-5)


def test_a_weight_of_0_or_1_is_in_the_labels():
    collate = PackedCollator(0, max_tokens=8).for_trainer()
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "weight": n} for n in (0, 1)]
    assert collate(rows)["labels"].tolist() == [[-100, -100, -100, -100, 6, 7]]
    with pytest.raises(DataError, match=r"a token has weight 0\.5; give masks \(and weights of e"):
        collate([{**rows[0], "weight": 0.5}])


def test_a_loss_mask_that_trainer_removes_is_an_error(tmp_path):
    tokenizer = byte_tokenizer(TEMPLATE)
    dataset, _ = tokenize_chat_dataset(datasets.Dataset.from_list(CHATS), tokenizer)
    assert "loss_mask" in dataset.column_names
    collate = PackedCollator(0, max_tokens=128).for_trainer()
    with pytest.raises(DataError, match=r"no loss target: transformers\.Trainer and TRL remove"):
        losses_of_trainer(tmp_path, tiny_model(len(tokenizer)), dataset, collate, max_steps=1)


def test_compute_metrics_sees_examples(tmp_path):
    """label_names hands the positions to compute_metrics, which tell where examples begin."""
    examples = [{"input_ids": list(range(1, 4 + i % 5))} for i in range(11)]
    model = tiny_model(32)
    seen = []

    def compute_metrics(prediction):
        labels, positions = prediction.label_ids
        begins = np.diff(positions, axis=1, prepend=-2) != 1
        owners = (np.cumsum(begins) - 1).reshape(labels.shape)[:, 1:].ravel()  # of each target
        targets = labels[:, 1:].ravel()
        is_right = (targets != -100) & (prediction.predictions[:, :-1].ravel() == targets)
        counts, sums = (np.bincount(owners, of) for of in (targets != -100, is_right))
        seen.extend(counts[counts > 0].tolist())
        return {"accuracy": float((sums[counts > 0] / counts[counts > 0]).mean())}

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_eval_batch_size=4,
        label_names=["labels", "position_ids"],
    )
    trainer = Trainer(
        model,
        arguments,
        eval_dataset=examples,
        data_collator=PackedCollator(
            0, max_tokens=16, strategy="sequential", train_all=True
        ).for_trainer(),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    metrics = trainer.evaluate()
    expected = []
    for example, num_targets in zip(examples, seen, strict=True):
        ids = torch.tensor([example["input_ids"]])
        assert num_targets == ids.numel() - 1, "sequential rows keep the order of the data"
        with torch.no_grad():
            alone = model(input_ids=ids).logits.argmax(-1)[0]
        expected.append((alone[:-1] == ids[0, 1:]).float().mean().item())
    assert metrics["eval_accuracy"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)
