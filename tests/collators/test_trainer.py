"""transformers.Trainer under its defaults: the loss is that of the trained tokens, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from tests.chat.chats import byte_tokenizer, chat
from torch_collate_kit import ChatOptions, tokenize_chat_dataset
from torch_collate_kit.collators import PackedCollator

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
