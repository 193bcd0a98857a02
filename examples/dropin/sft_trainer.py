"""TRL's SFTTrainer on packed rows: chats with labels, the kit's collator, no packing of TRL's own.

    python examples/dropin/sft_trainer.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/sft_trainer.py

Columns `input_ids` and `labels` pass TRL's preparation as they are. A `loss_mask` column would be
removed, and every token would train: tokenize with `labels=True`. `packing=True` and
`padding_free=True` of SFTConfig use TRL's collator and refuse another, so they stay off. The
`num_tokens` that TRL logs is the width of a batch, whatever the number of its rows; the count of
`include_num_input_tokens_seen="non_padding"` is that of the tokens.
"""

from __future__ import annotations

import os
import tempfile

import datasets
import tiny
import trl

import torch_collate_kit as kit

ACCUMULATE = 2
num_ranks = int(os.environ.get("WORLD_SIZE", "1"))

tokenizer = tiny.make_tokenizer()
chats = datasets.Dataset.from_list(tiny.make_chats())
examples, skipped = kit.tokenize_chat_dataset(chats, tokenizer, kit.ChatOptions(labels=True))

with tempfile.TemporaryDirectory() as folder:
    settings = trl.SFTConfig(
        output_dir=folder,
        max_steps=tiny.NUM_STEPS,
        per_device_train_batch_size=tiny.BATCH_SIZE // ACCUMULATE // num_ranks,
        gradient_accumulation_steps=ACCUMULATE,
        max_length=None,  # nothing is cut: that of tokenize_chat_dataset drops and counts
        max_grad_norm=0.0,  # the rest is as in the reference: no clipping, no schedule, in order
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",  # right, unlike num_tokens
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    model = tiny.make_model()
    trainer = trl.SFTTrainer(
        model,
        settings,
        train_dataset=examples,
        data_collator=kit.PackedCollator(tokenizer, max_tokens=tiny.MAX_TOKENS).for_trainer(),
        processing_class=tokenizer,
        optimizers=(tiny.make_optimizer(model), None),
    )
    trainer.train()

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = range(0, len(examples), tiny.BATCH_SIZE)
    tiny.compare(losses, [list(range(i, i + tiny.BATCH_SIZE)) for i in steps])

accelerator = trainer.accelerator
del trainer, model  # they hold the process group, in a cycle
accelerator.free_memory()
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
