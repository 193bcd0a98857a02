"""A model and its loss in one module, which is what wrappers for several ranks must wrap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_kind import config_of, inside
from torch_collate_kit.families import text_config
from torch_collate_kit.losses.token_loss import token_loss

_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


class ModelWithLoss(nn.Module):
    """A causal language model whose forward pass returns the loss of a batch, through the head.

    Wrap this in DistributedDataParallel, FSDP2 or ``torch.compile``, and call what they return:
    a part of a wrapped model that is called by itself (``ddp.module.model(...)``) exchanges no
    gradients, and nothing says so. The model may have adapters of PEFT. With ``token_logps``, or a
    function of yours around it, as the loss, losses of preferences follow from what is returned.

    Args:
        model: of transformers, with ``base_model`` and ``get_output_embeddings()``.
        loss: ``loss(hidden, batch, *, head, **options)``; of a model that caps its logits (Gemma)
            it gets ``logit_softcap``, too.

    Raises:
        TypeError: a model without a head.
        ValueError: in forward passes, a model that scales its logits (Cohere, Granite), or prompts
            that PEFT adds.

    >>> import transformers
    >>> from torch_collate_kit import PackedCollator
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=2, attn_implementation="sdpa")
    >>> trained = ModelWithLoss(transformers.LlamaForCausalLM(config))
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    >>> trained(batch, num_loss_tokens=2).shape
    torch.Size([])
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] = token_loss) -> None:
        super().__init__()
        if (
            not hasattr(inside(model), "base_model")
            or inside(model).get_output_embeddings() is None
        ):
            raise TypeError(
                f"{type(model).__name__} has no head (base_model and get_output_embeddings()), "
                "through which the loss is computed; pass a causal language model of transformers"
            )
        _keep_out_of_graphs()
        self.model, self.loss = model, loss
        self._no_split_modules = getattr(model, "_no_split_modules", None)  # read for FSDP2

    def forward(
        self, batch: Batch, *, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Return ``loss(hidden, batch, head=head, **options)``.

        ``inputs`` stand for ``batch.model_inputs(model)``, such as those of a shard with its group.
        """
        if inputs is None:
            inputs = _eager(batch.model_inputs, self.model, labels=False)
        model, config = inside(self.model), text_config(config_of(self.model))
        scales = [name for name in _SCALES if getattr(config, name, None) not in (None, 1)]
        adapter = getattr(self.model, "active_peft_config", None)
        if scales or getattr(adapter, "is_prompt_learning", False):
            found = f"config.{scales[0]}" if scales else "prompts that PEFT adds"
            raise ValueError(
                f"the logits of the model are not those of its head alone ({found}); compute "
                "token_loss(model(**batch.model_inputs(model)).logits, batch, ...) in a module of "
                "your own"
            )
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            options = {"logit_softcap": cap, **options}
        hidden = model.base_model(**inputs)[0]
        return _eager(self.loss, hidden, batch, head=model.get_output_embeddings(), **options)


def _eager(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call what reads the batch in host memory, which has no graph."""
    return function(*args, **options)


@functools.cache
def _keep_out_of_graphs() -> None:
    """Disable compilation of such calls; on first use, since it loads the compiler."""
    compiler: Any = torch.compiler  # whose functions have no types
    globals()["_eager"] = compiler.disable(_eager)
