"""The token-mean loss, its divisors, and a model and its loss in one module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.batch import IGNORE_INDEX, Batch
from torch_collate_kit.batch.context_shards import is_shard, refuse_shard
from torch_collate_kit.batch.dense import trained_labels
from torch_collate_kit.batch.model_kind import config_of, inside
from torch_collate_kit.batch.unpacking import (
    cells_by_example,
    in_rows,
    response_cells,
    shares_prefixes,
    targets_of,
    values_of_cells,
)
from torch_collate_kit.families import text_config
from torch_collate_kit.losses.token_logps import (
    check_fit,
    check_floats,
    check_head,
    ids_of_tokens,
    is_one_number,
    is_trained_in,
    linear_nll,
    loss_mask_of,
    predicting,
    trained_cells,
    widened,
)
from torch_collate_kit.ragged import Ragged

_COUNT = "pass the loss tokens of the step, as global_num_loss_tokens(micro_batches) returns them"
_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


@dataclass(frozen=True)
class PerTokenOutputs:
    """Values of the response tokens, one array per example, in the order of the examples.

    ``example_indices`` int64 ``[E]``, ascending, names the examples of the batch's rows, one of a
    rollout of several segments once for each. ``nll[i]``
    float32 ``[n]``, in host memory, has the last ``n = row_metadata["num_actions"]`` tokens of
    example ``example_indices[i]``, with ``targets="same_token"`` 0 where there is no label. The
    pieces of a split example are joined in order, without the
    first token of each piece, which nothing predicts. An added row has no example.

    >>> from torch_collate_kit import PackedCollator
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
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: Literal[False] = False,
) -> Tensor: ...
@overload
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor,
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: Literal[True],
) -> tuple[Tensor, PerTokenOutputs]: ...
def token_loss(
    logits: Tensor,
    batch_or_labels: Batch | Tensor,
    *,
    num_loss_tokens: float | Tensor | None = None,
    head: torch.nn.Linear | None = None,
    logit_softcap: float | None = None,
    return_per_token_outputs: bool = False,
) -> Tensor | tuple[Tensor, PerTokenOutputs]:
    """Divide the sum of weighted token losses by ``num_loss_tokens``: a scalar, fp32 for half.

    ``num_loss_tokens`` counts the whole optimizer step, over all micro-batches and ranks
    (:func:`global_num_loss_tokens`). Then the losses of all micro-batches and ranks add up to the
    token mean, whatever the layout. Where gradients are averaged over ranks
    (DistributedDataParallel), multiply the loss by ``dp_size``.

    From a collator's batch only the logits that predict response tokens are kept for the backward
    pass; of plain labels, or of a ``loss_mask`` of your own, all. Nothing waits for the device.

    With ``head`` the logits of at most 1,024 tokens exist at a time, here and in the backward pass,
    which then runs once (no ``retain_graph``); :class:`~torch_collate_kit.losses.ModelWithLoss`
    passes hidden states and head. Of what a model does to its logits only a softcap is applied.

    Args:
        logits: ``[R, W, V]``, or with a Batch only the last ``K >= A + 1`` columns (as
            ``logits_to_keep=A + 1`` returns), where ``A = metadata["response_length"]``, or
            ``[1, R * W, V]`` of a model that gets all rows as one. With ``head`` hidden states of
            that shape, with the hidden size for V.
        batch_or_labels: the Batch (its ``loss_mask`` may hold weights, divided or not), or
            unshifted labels ``[R, W]`` with -100 where nothing is trained. A context shard needs
            logits of its own cells; the losses of all context ranks add up to that of the batch.
        num_loss_tokens: a number, or a scalar tensor on the device of the logits; 0 divides by 1.
            A tensor that is negative or not finite makes the loss NaN: checking would wait for it.
        head: the layer that makes logits of hidden states, ``model.lm_head``.
        logit_softcap: with ``head``, ``config.final_logit_softcapping`` of Gemma models.
        return_per_token_outputs: also return :class:`PerTokenOutputs`, copied to the host.

    Raises:
        ValueError: shapes that do not fit; a number that is negative, infinite or NaN; per-token
            outputs of plain labels, which do not say where examples lie.
        TypeError: arguments of another type.

    >>> logits = torch.zeros(1, 3, 4)
    >>> labels = torch.tensor([[-100, 2, 3]])
    >>> round(token_loss(logits, labels, num_loss_tokens=2).item(), 4)  # log(4)
    1.3863
    """
    num_loss_tokens = _checked_types(logits, batch_or_labels, num_loss_tokens)
    check_head(logits, head, logit_softcap)
    checked_bool("return_per_token_outputs", return_per_token_outputs)
    if isinstance(batch_or_labels, Tensor):
        if return_per_token_outputs:
            raise ValueError(
                "return_per_token_outputs needs a Batch, got plain labels, which do not say where "
                "examples lie; pass the Batch that the collator returned"
            )
        labels, mask = batch_or_labels, batch_or_labels[..., 1:] != IGNORE_INDEX
        check_fit(logits, labels, mask.shape[-1], from_batch=False)
        total, _ = _total_and_nll(logits, labels[..., 1:], mask, None, head, logit_softcap)
        return _divided(total, num_loss_tokens)
    batch = batch_or_labels
    mask, ids = loss_mask_of(batch), ids_of_tokens(batch)
    hidden = ids.shape[1] - mask.shape[1]
    cells_RW = batch["input_ids"]
    logits = in_rows(logits, *cells_RW.shape)
    if is_shard(batch) and return_per_token_outputs:
        raise ValueError(
            "return_per_token_outputs needs whole examples, and a context shard has parts of "
            "them; join token_logps() of all ranks with attention.context_join()"
        )
    labels_RU: Any = trained_labels(batch)
    if labels_RU is None:
        labels_RU = batch.get("targets" if is_shard(batch) else "labels")
    if labels_RU is None:  # rollouts
        labels_RU = torch.where(F.pad(mask, (hidden, 0)) != 0, ids, IGNORE_INDEX)
    check_fit(logits, cells_RW, mask.shape[1], from_batch=not shares_prefixes(batch))
    targets, cells = labels_RU[:, hidden:], response_cells(batch)
    if targets_of(batch) == "same_token":  # of which few may have a label, and an id is no class
        cells = cells if cells is None else trained_cells(batch)
    elif return_per_token_outputs:
        targets = torch.where(targets == IGNORE_INDEX, ids[:, hidden:], targets)
    total, nll = _total_and_nll(logits, targets, mask, cells, head, logit_softcap, batch)
    loss = _divided(total * batch.metadata.get("loss_mask_divisor", 1), num_loss_tokens)
    if not return_per_token_outputs:
        return loss
    examples, of_examples = cells_by_example(batch, mask.shape[1])
    return loss, PerTokenOutputs(examples, list(values_of_cells(nll, of_examples, torch.float32)))


def _total_and_nll(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    cells: Tensor | None,
    head: torch.nn.Linear | None,
    softcap: float | None,
    batch: Batch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum, and the nll [R, A] of the targets in ``cells`` (None: all), else 0.

    The logits needed are selected before anything of the size of all logits is made.
    """
    flat_targets = targets.long().flatten()
    if cells is None:
        cells = torch.arange(len(flat_targets), device=logits.device)
    taken, wanted = predicting(logits, cells, targets.shape[-1], batch), flat_targets[cells]
    if head is not None:
        ignored = wanted == IGNORE_INDEX
        weights = mask.flatten()[cells].masked_fill(ignored, 0)
        wanted = wanted.masked_fill(ignored, 0)
        total, nll = linear_nll(taken, head.weight, head.bias, wanted, weights, softcap)
        nll = nll.masked_fill(ignored, 0)
    else:
        nll = F.cross_entropy(widened(taken), wanted, ignore_index=IGNORE_INDEX, reduction="none")
    nll = nll.new_zeros(len(flat_targets)).index_copy(0, cells, nll).view(targets.shape)
    if head is None:
        # where() first: an infinite loss of a token that is not trained must not become 0 * inf.
        total = (torch.where(mask != 0, nll, 0) * mask.to(nll.dtype)).sum()
    return total, nll


def _divided(total: Tensor, num_loss_tokens: float | Tensor) -> Tensor:
    if isinstance(num_loss_tokens, Tensor):
        number = num_loss_tokens.reshape(()).to(total.dtype)
        is_count = (number >= 0) & (number < math.inf)
        return total / torch.where(is_count, torch.where(number == 0, 1, number), math.nan)
    if not 0 <= num_loss_tokens < math.inf:  # NaN too
        raise ValueError(
            f"num_loss_tokens must be finite and 0 or more, got {num_loss_tokens}; {_COUNT}"
        )
    return total / (num_loss_tokens or 1)


def _checked_types(logits: Any, batch_or_labels: Any, num_loss_tokens: Any) -> float | Tensor:
    check_floats("logits", logits)
    if not isinstance(batch_or_labels, Batch | Tensor):
        raise TypeError(
            "the second argument must be the Batch or labels, got "
            f"{type(batch_or_labels).__name__}; pass what the collator returned"
        )
    if isinstance(batch_or_labels, Tensor):
        check_labels(batch_or_labels)
    if not (isinstance(num_loss_tokens, Tensor) or is_one_number(num_loss_tokens)):
        found = type(num_loss_tokens).__name__
        raise TypeError(f"num_loss_tokens must be a number, got {found}; {_COUNT}")
    if isinstance(num_loss_tokens, Tensor) and num_loss_tokens.numel() != 1:
        shape = list(num_loss_tokens.shape)
        raise ValueError(f"num_loss_tokens must be one number, got shape {shape}; {_COUNT}")
    return num_loss_tokens


def global_num_loss_tokens(
    batches: Batch | Tensor | Iterable[Batch | Tensor], *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the loss tokens of an optimizer step, over its micro-batches and all ranks.

    This is the divisor of :func:`token_loss`: the cells of ``loss_mask`` that are not 0 and whose
    label is not -100, or the trained labels. Every rank of ``torch.distributed`` must call it, a
    rank without rows with an empty list: one all-reduce of 8 bytes sums over them.

    Args:
        batches: this rank's micro-batches of the step: a Batch, unshifted labels ``[R, W]``, or any
            number of these.
        group: the data-parallel ranks, all ranks by default. Of context shards all ranks count;
            of whole batches that they share, one rank of each context group does.

    Returns:
        A scalar int64 tensor on the device of the batches, or on one that the backend can reduce
        on. Nothing waits for it.

    Raises:
        TypeError: neither a Batch nor labels.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> micro_batches = [batch[i : i + 1] for i in range(len(batch))]
    >>> global_num_loss_tokens(micro_batches)
    tensor(3)
    """
    counts = [_num_loss_tokens(batch) for batch in _listed(batches)]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    return _over_ranks(total, group)


def global_num_examples(
    batches: Batch | Iterable[Batch], *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the examples of an optimizer step, over its micro-batches and all ranks.

    This is the divisor of losses per example, such as those of ``torch_collate_kit.preference``:
    an example of several segments or pieces counts once, an added row not at all. Ranks are summed
    over as by :func:`global_num_loss_tokens`.

    Args:
        batches: this rank's micro-batches of the step: a Batch, or any number of these.
        group: the data-parallel ranks, all ranks by default.

    Returns:
        A scalar int64 tensor in host memory, or on a device that the backend can reduce on. Where
        a step may have no example (all dropped), divide by ``.clamp(min=1)``.

    Raises:
        TypeError: not a Batch.
        ValueError: a Batch without the row metadata of a collator.

    >>> from torch_collate_kit import PackedCollator
    >>> batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> global_num_examples([batch[0:1], batch[1:2]])
    tensor(2)
    """
    total = sum(_num_examples(batch) for batch in _listed(batches))
    return _over_ranks(torch.tensor(total, dtype=torch.int64), group)


def _listed(batches: Any) -> Iterable[Any]:
    is_single = isinstance(batches, Mapping | Tensor) or not isinstance(batches, Iterable)
    return [batches] if is_single else batches


def _over_ranks(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks of the group, if there are any."""
    if dist.is_available() and dist.is_initialized():
        backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
        devices = [part.partition(":")[0] for part in backends.split(",")]
        if total.device.type not in devices:  # nccl has none for the host
            total = total.to(devices[0])
        dist.all_reduce(total, group=group)
    return total


def _num_loss_tokens(batch: Any) -> Tensor:
    if isinstance(batch, Batch):
        return torch.count_nonzero(is_trained_in(batch))
    if isinstance(batch, Tensor):
        check_labels(batch)
        return torch.count_nonzero(batch[..., 1:] != IGNORE_INDEX)
    raise TypeError(
        "global_num_loss_tokens needs a Batch, labels or a list of these, got "
        f"{type(batch).__name__}; pass the Batch that the collator returned, or its labels, "
        'batch["labels"]'
    )


def _num_examples(batch: Any) -> int:
    if not isinstance(batch, Batch):
        raise TypeError(
            f"global_num_examples needs a Batch or a list of these, got {type(batch).__name__}; "
            "pass the Batch that the collator returned"
        )
    refuse_shard(batch.stored(), "counted by examples", "count the batch, group= its data ranks")
    starts = batch.row_metadata.get("example_starts")
    if not isinstance(starts, Ragged):
        raise ValueError(
            "the batch was built without the row metadata of a collator, so it does not say where "
            "examples begin; pass the Batch that the collator returned"
        )
    begins = np.asarray(starts.values) == 0
    if (numbers := batch.row_metadata.get("segment_numbers")) is not None:
        begins &= np.asarray(numbers.values) == 0
    return int(begins.sum())


def check_labels(labels: Tensor) -> None:
    """Refuse a mask under the name of labels, and unsigned labels, whose -100 is a token id."""
    if labels.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(
            f"labels must be token ids or {IGNORE_INDEX}, got {labels.dtype}; pass the Batch, or "
            'unshifted labels, batch["labels"]'
        )


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
        inner = inside(model)
        if not hasattr(inner, "base_model") or inner.get_output_embeddings() is None:
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
        has_layers = type(model).__name__.endswith("ForMaskedLM")  # between hidden states and head
        if scales or has_layers or getattr(adapter, "is_prompt_learning", False):
            found = f"config.{scales[0]}" if scales else "prompts that PEFT adds"
            found = "layers of ForMaskedLM before it" if has_layers else found
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
    """Call a function that reads the batch in host memory, outside of compiled graphs."""
    return function(*args, **options)


@functools.cache
def _keep_out_of_graphs() -> None:
    """Disable compilation of such calls; on first use, since it loads the compiler."""
    compiler: Any = torch.compiler  # whose functions have no types
    globals()["_eager"] = compiler.disable(_eager)
