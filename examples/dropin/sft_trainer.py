"""TRL's SFTTrainer on the kit's packed rows, in place of TRL's packing.

    python examples/dropin/sft_trainer.py
    torchrun --standalone --nproc_per_node 2 examples/dropin/sft_trainer.py

SFTTrainer accepts nothing but a `datasets.Dataset`, so it gets `rows.to_datasets()`, which reads a
row when it is asked for; `skip_prepare_dataset` leaves the rows alone, and
`per_device_train_batch_size` counts them. `packing=True` and `padding_free=True` of SFTConfig use
TRL's collator and refuse another, so they stay off. The `num_tokens` that TRL logs is the width of
a batch, whatever the number of its rows; the count of `include_num_input_tokens_seen="non_padding"`
is that of the tokens.
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
collate = kit.PackedCollator(tokenizer, max_tokens=62).for_trainer()
rows = kit.PackedRows(kit.TokenizedDataset(examples), collate)

with tempfile.TemporaryDirectory() as folder:
    settings = trl.SFTConfig(
        output_dir=folder,
        num_train_epochs=2,  # of the same rows, in another order
        per_device_train_batch_size=tiny.ROWS_PER_STEP // ACCUMULATE // num_ranks,
        gradient_accumulation_steps=ACCUMULATE,
        dataset_kwargs={"skip_prepare_dataset": True},  # the examples are tokenized
        max_grad_norm=0.0,  # the rest is as in the reference: no clipping, no schedule
        lr_scheduler_type="constant",
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",  # right, unlike num_tokens
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    model, noting = tiny.make_model(), tiny.Noting(collate)
    trainer = trl.SFTTrainer(
        model,
        settings,
        train_dataset=rows.to_datasets(),
        data_collator=noting,
        processing_class=tokenizer,
        optimizers=(tiny.make_optimizer(model), None),
    )
    trainer.train()
    steps = noting.steps(ACCUMULATE)

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tiny.compare(losses, steps)

accelerator = trainer.accelerator
del trainer, model  # they hold the process group, in a cycle
accelerator.free_memory()
accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
accelerator.end_training()
