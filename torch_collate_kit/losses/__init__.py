"""The loss of a batch and its divisors, log-probs of tokens, and sums over segments."""

from torch_collate_kit.losses.segments import (
    example_losses,
    segment_ends,
    segment_pool,
    segment_sums,
    segment_values,
    sums_by,
)
from torch_collate_kit.losses.token_logps import token_logps, trained_values
from torch_collate_kit.losses.token_loss import (
    ModelWithLoss,
    PerTokenOutputs,
    global_num_examples,
    global_num_loss_tokens,
    token_loss,
)

__all__ = [
    "ModelWithLoss",
    "PerTokenOutputs",
    "example_losses",
    "global_num_examples",
    "global_num_loss_tokens",
    "segment_ends",
    "segment_pool",
    "segment_sums",
    "segment_values",
    "sums_by",
    "token_logps",
    "token_loss",
    "trained_values",
]
