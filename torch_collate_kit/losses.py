"""Token-mean loss, its denominator over micro-batches and ranks, and per-token outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.model_inputs import response_cells

__all__ = ["PerTokenOutputs", "global_num_loss_tokens", "token_loss"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PerTokenOutputs:
    """Values of the response tokens, one array an example, in the order of the examples.

    ``example_indices`` int64 ``[E]`` ascends and names the examples of the batch's rows (a slice of
    a batch has some of them). ``nll[i]`` is float32 ``[n]``, in host memory: of example
    ``example_indices[i]`` the last ``n = row_metadata["num_actions"]`` tokens. Of a split example
    these are the response tokens of its pieces, joined in order; nothing predicts the first token
    of a piece.

    >>> from torch_collate_kit.collators import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [1, 2]}, {"input_ids": [3, 1, 2]}])
    >>> logits = torch.zeros(1, 5, 4)
    >>> _, outputs = token_loss(logits, batch, num_loss_tokens=3, return_per_token_outputs=True)
    >>> outputs.example_indices.tolist(), [len(values) for values in outputs.nll]
    ([0, 1], [1, 2])
    """

    example_indices: np.ndarray
    nll: list[np.ndarray]

    @property
    def log_probs(self) -> list[np.ndarray]:
        """Log-probabilities of the same tokens: ``-nll``, a copy."""
        return [-values for values in self.nll]


@overload
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    return_per_token_outputs: Literal[False] = False,
) -> Tensor: ...
@overload
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    return_per_token_outputs: Literal[True],
) -> tuple[Tensor, PerTokenOutputs]: ...
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    return_per_token_outputs: bool = False,
) -> Tensor | tuple[Tensor, PerTokenOutputs]:
    """Sum of weighted token losses over ``num_loss_tokens``: a scalar, fp32 for half logits.

    ``num_loss_tokens`` is the number of loss tokens of the whole optimizer step, over all
    micro-batches and ranks (:func:`global_num_loss_tokens`). Then the sum of the losses of all
    micro-batches and ranks is the token mean, however the examples were laid out (a mean of means
    is not). DistributedDataParallel averages gradients over ranks: multiply by the number of ranks
    there. 0 divides by 1. (A tensor is not looked at, since that would wait for the device; one
    that is no count, negative or not finite, makes the loss NaN.)

    Of a collator's batch only the logits that predict response tokens are cast and kept for the
    backward pass: 4 bytes per response token and entry of the vocabulary, not 4 per cell. (Of bf16
    logits ``[4, 512, 8192]``, a tenth of the cells responses: 6.7 MB instead of 67, and 104 MB at
    the peak of the backward pass instead of 235.) Their number is in host memory, so nothing waits
    for the device. Of plain labels, and where ``loss_mask`` was replaced or changed in place, the
    logits of all predicting cells are taken.

    Args:
        logits: ``[R, W, V]``, or with a Batch only the last ``K >= A + 1`` columns (what
            ``model(..., logits_to_keep=A + 1)`` gives), where ``A = metadata["response_length"]``.
        batch_or_labels: the Batch (its ``loss_mask`` may hold weights and may be normalised, which
            is undone), or unshifted labels ``[R, W]`` with -100 where nothing is trained.
        num_loss_tokens: a number, or a scalar tensor on the device of the logits.
        return_per_token_outputs: also return :class:`PerTokenOutputs`. Off, nothing of it is
            computed or copied to the host; the loss is the same to the last bit.

    Raises:
        ValueError: shapes that do not fit, a ``num_loss_tokens`` that is negative, infinite or NaN,
            or per-token outputs asked of plain labels, which do not say where examples lie.

    >>> logits = torch.zeros(1, 3, 4)
    >>> labels = torch.tensor([[-100, 2, 3]])
    >>> round(token_loss(logits, labels, num_loss_tokens=2).item(), 4)  # log(4)
    1.3863
    """
    _check_types(logits, batch_or_labels, num_loss_tokens)
    checked_bool("return_per_token_outputs", return_per_token_outputs)
    if isinstance(batch_or_labels, Batch):
        batch: Batch | None = batch_or_labels
        mask = batch_or_labels["loss_mask"]
        labels = _labels(batch_or_labels, mask)
        response_length = mask.shape[1]
        divisor = batch_or_labels.metadata.get("loss_mask_divisor", 1)
    else:
        batch, labels, divisor = None, batch_or_labels, 1
        response_length = labels.shape[-1] - 1
        mask = labels[..., 1:] != IGNORE_INDEX
    _check_shapes(logits, labels, response_length, from_batch=batch is not None)
    targets = labels[..., labels.shape[-1] - response_length :]
    if return_per_token_outputs:
        if batch is None:
            raise ValueError(
                "return_per_token_outputs needs a Batch, got plain labels, which do not say where "
                "examples lie; pass the Batch that the collator returned"
            )
        ids = batch["input_ids"][:, labels.shape[-1] - response_length :]
        targets = torch.where(targets == IGNORE_INDEX, ids, targets)
    nll = _token_nll(logits, targets, None if batch is None else response_cells(batch))
    # where() first: an infinite loss of a token that is not trained must not become 0 * inf.
    weighted = torch.where(mask != 0, nll, 0) * mask.to(nll.dtype)
    loss = _divided(weighted.sum() * divisor, num_loss_tokens)
    if batch is not None and return_per_token_outputs:
        return loss, _per_token_outputs(batch, nll)
    return loss


def global_num_loss_tokens(
    batches: Batch | Tensor | Iterable[Batch | Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Loss tokens of an optimizer step, over its micro-batches and all ranks: the divisor.

    The cells of ``loss_mask`` that are not 0 (or the labels that are trained) are counted in the
    rows that are given, whatever their metadata say, so slices of a batch count once each. With
    ``torch.distributed`` initialised the counts are summed over the ranks in one all-reduce of 8
    bytes; every rank must call it, one without rows with an empty list.

    Args:
        batches: this rank's micro-batches of the step: a Batch, unshifted labels ``[R, W]``, or any
            number of these.
        group: the ranks that hold different rows, all by default. With tensor, context or pipeline
            parallelism these are the data-parallel ranks.

    Returns:
        int64, a scalar tensor on the device of the batches, or on one that the backend can reduce
        on. Nothing waits for it; ``token_loss`` takes it as it is.

    Raises:
        TypeError: something that is neither a Batch nor labels.

    >>> from torch_collate_kit.collators import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> micro_batches = [batch[i : i + 1] for i in range(len(batch))]
    >>> global_num_loss_tokens(micro_batches)
    tensor(3)
    """
    single = isinstance(batches, Batch | Tensor | dict) or not isinstance(batches, Iterable)
    counts = [_num_loss_tokens(batch) for batch in ([batches] if single else batches)]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    if dist.is_available() and dist.is_initialized():
        total = total.to(_reducing_device(total.device, group))
        dist.all_reduce(total, group=group)
    return total


def _num_loss_tokens(batch: Any) -> Tensor:
    if isinstance(batch, Batch):
        return torch.count_nonzero(batch["loss_mask"])
    if isinstance(batch, Tensor):
        return torch.count_nonzero(batch[..., 1:] != IGNORE_INDEX)
    raise TypeError(
        "global_num_loss_tokens takes a Batch, labels or a list of these, got "
        f"{type(batch).__name__}; pass the Batch that the collator returned, or "
        'inputs["labels"] of a collator with model_inputs=True'
    )


def _reducing_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """``device``, or where the backend has none for it (nccl for the host) one that it has."""
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    types = [part.partition(":")[0] for part in backends.split(",")]
    return device if device.type in types else torch.device(types[0])


def _labels(batch: Batch, mask: Tensor) -> Tensor:
    """Of a batch of rollouts, which has none: its ids where the mask is not 0."""
    if "labels" in batch:
        return batch["labels"]
    ids: Tensor = batch["input_ids"]
    hidden = ids.shape[1] - mask.shape[1]
    return torch.where(F.pad(mask, (hidden, 0)) != 0, ids, IGNORE_INDEX)


def _token_nll(logits: Tensor, targets: Tensor, cells: Tensor | None) -> Tensor:
    """Negative log-likelihood of the targets [R, A] in ``cells``, or of all of them; else 0.

    Logits are taken where they are needed before anything of their size is made of them.
    """
    last, width = logits.shape[-2] - 1, targets.shape[-1]
    flat, flat_targets = logits.reshape(-1, logits.shape[-1]), targets.long().flatten()
    if cells is None:
        cells = torch.arange(len(flat_targets), device=logits.device)
    predicted_at = cells + cells // max(width, 1) * (last + 1 - width) + (last - width)
    taken = flat.index_select(0, predicted_at)
    taken = taken.float() if taken.dtype in _HALF else taken
    nll = F.cross_entropy(taken, flat_targets[cells], ignore_index=IGNORE_INDEX, reduction="none")
    return nll.new_zeros(len(flat_targets)).index_copy(0, cells, nll).view(targets.shape)


def _divided(total: Tensor, num_loss_tokens: float | Tensor) -> Tensor:
    if isinstance(num_loss_tokens, Tensor):
        number = num_loss_tokens.reshape(()).to(total.dtype)
        is_count = (number >= 0) & (number < math.inf)
        return total / torch.where(is_count, torch.where(number == 0, 1, number), math.nan)
    if not 0 <= num_loss_tokens < math.inf:  # NaN too
        raise ValueError(
            f"num_loss_tokens must be finite and 0 or more, got {num_loss_tokens}; it is the "
            "number of loss tokens of the step, what global_num_loss_tokens(micro_batches) returns"
        )
    return total / (num_loss_tokens or 1)


def _check_types(logits: Any, batch_or_labels: Any, num_loss_tokens: Any) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"logits must be a tensor, got {type(logits).__name__}; pass model(...).logits"
        )
    if not isinstance(batch_or_labels, Batch | Tensor):
        raise TypeError(
            "the second argument must be the Batch or labels, got "
            f"{type(batch_or_labels).__name__}; pass what the collator returned"
        )
    if isinstance(num_loss_tokens, Tensor):
        if num_loss_tokens.numel() != 1:
            raise ValueError(
                f"num_loss_tokens must be one number, got shape {list(num_loss_tokens.shape)}; "
                "sum it over the micro-batches, or pass global_num_loss_tokens(micro_batches)"
            )
    elif isinstance(num_loss_tokens, bool) or not isinstance(
        num_loss_tokens, int | float | np.number
    ):
        raise TypeError(
            f"num_loss_tokens must be a number, got {type(num_loss_tokens).__name__}; it is the "
            "number of loss tokens of the step, what global_num_loss_tokens(micro_batches) returns"
        )


def _check_shapes(
    logits: Tensor, labels: Tensor, response_length: int, *, from_batch: bool
) -> None:
    fits = logits.ndim == labels.ndim + 1 and logits.shape[:-2] == labels.shape[:-1]
    if fits and logits.shape[-2] != labels.shape[-1]:
        fits = from_batch and response_length < logits.shape[-2] < labels.shape[-1]
    if not fits:
        wanted = f"{[*labels.shape, 'V']}"
        also = f", or at least its last {response_length + 1} columns" if from_batch else ""
        raise ValueError(
            f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}; logits must be "
            f"{wanted}{also}: give those of the same rows, not shifted"
        )


def _per_token_outputs(batch: Batch, nll_RA: Tensor) -> PerTokenOutputs:
    """Cut the response of every sub-sequence out of [R, A]; column j is cell W - A + j."""
    values = nll_RA.detach().float().cpu().numpy()
    hidden = batch["input_ids"].shape[1] - values.shape[1]
    lengths = batch["sub_seq_lengths"].to("cpu")
    if "cu_seq_lens" in batch:
        starts = [row.tolist() for row in batch["cu_seq_lens"].to("cpu")]
    else:
        starts = [[first] for first in batch["attention_mask"].argmax(dim=1).tolist()]
    columns = [batch.row_metadata[k] for k in ("example_indices", "example_starts", "num_actions")]
    pieces: dict[int, list[tuple[int, np.ndarray]]] = {}
    for row, entries in enumerate(zip(*columns, strict=True)):
        spans = zip(*(e.tolist() for e in entries), lengths[row].tolist(), strict=True)
        for k, (example, first, n, length) in enumerate(spans):
            end = starts[row][k] + length - hidden
            pieces.setdefault(example, []).append((first, values[row, end - n : end]))
    for example, found in pieces.items():
        if len({first for first, _ in found}) < len(found):
            raise ValueError(
                f"a piece of example {example} is in the batch twice, so its token values have no "
                "order; ask for per-token outputs before batches are joined or rows repeated"
            )
    order = sorted(pieces)
    joined = [np.concatenate([v for _, v in sorted(pieces[i], key=itemgetter(0))]) for i in order]
    return PerTokenOutputs(np.array(order, dtype=np.int64), joined)
