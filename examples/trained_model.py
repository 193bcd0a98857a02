"""The model of a run: loaded or made, with its loss inside, and checked before it is trained."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import synthetic_chat
import torch
import transformers
from accelerate import Accelerator
from read_data import fail

import torch_collate_kit as kit


def load_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    kit.register_torch_varlen()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": args.attention}
    if args.model:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
        except (OSError, ValueError) as error:
            fail(f"--model {args.model}: {str(error).splitlines()[0]}")
    else:
        model = synthetic_chat.make_model(tokenizer, **options)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


class ModelWithLoss(torch.nn.Module):
    """What is trained: a model and its loss, with the logits of a few tokens at a time."""

    def __init__(self, model: Any, attention: str) -> None:
        super().__init__()
        self.model, self.attention, self.through_head = model, attention, True
        self._no_split_modules = model._no_split_modules  # FSDP2 shards these layers one by one

    def forward(self, batch: kit.Batch, num_loss_tokens: int) -> torch.Tensor:
        inputs = batch.model_inputs(self.attention, labels=False)
        options: dict[str, Any] = {"num_loss_tokens": num_loss_tokens}
        if not self.through_head:
            return kit.token_loss(self.model(**inputs).logits, batch, **options)
        config = self.model.config.get_text_config()
        options["logit_softcap"] = getattr(config, "final_logit_softcapping", None)
        hidden = self.model.base_model(**inputs).last_hidden_state
        return kit.token_loss(hidden, batch, head=self.model.get_output_embeddings(), **options)

    @torch.no_grad()
    def check_head(self, batch: kit.Batch) -> None:
        """Some models scale the logits after the head (Granite, Cohere): take these as they are."""
        was_training, losses = self.training, []
        self.eval()
        for self.through_head in (False, True):
            with contextlib.suppress(TypeError):  # a head that is not a plain Linear
                losses.append(self(batch, batch.metadata["num_loss_tokens"]))
        self.through_head = len(losses) == 2 and torch.allclose(*losses, rtol=1e-2)
        self.train(was_training)


def with_loss(model: Any, batch: kit.Batch, accelerator: Accelerator, args: Any) -> ModelWithLoss:
    """The model to train, checked on a few examples: packed ones are apart; what its head does."""
    trained, batch = ModelWithLoss(model, args.attention), batch.to(accelerator.device)
    with accelerator.autocast():
        if not args.no_packing:
            kit.check_isolation(model, batch)
        trained.check_head(batch)
    return trained
