"""The loss of a batch: a token mean with an explicit denominator."""

from __future__ import annotations

from torch_collate_kit.losses.loss_tokens import global_num_loss_tokens
from torch_collate_kit.losses.token_loss import PerTokenOutputs, token_loss

__all__ = ["PerTokenOutputs", "global_num_loss_tokens", "token_loss"]
