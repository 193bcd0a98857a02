"""Properties of a model that decide its inputs: its attention, and its family in the table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.families import (
    ISOLATED,
    NO_FAMILY,
    Family,
    attention_dropout,
    attention_of,
    family_of,
    is_two_way,
    left_padding_fault,
    odd_layers,
    sliding_window,
    text_config,
    two_way_window,
)

_VARLEN_ATTENTION = ("torch_varlen", *(f"flash_attention_{version}" for version in (2, 3, 4)))
_MASK_ATTENTION = ("sdpa", "eager", "flex_attention")
_UNKNOWN = "tokens see later ones there, and it is not in the table of two-way models"
_CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice")
_HEADS_OF_CELL_0 = ("Pooler", "pooler", "ClassificationHead", *_CLASSIFIERS)
_HEADS: tuple[tuple[str, ...], ...] = (
    (*_CLASSIFIERS, "ForQuestionAnswering", "ForNextSentencePrediction"),
    ("ForTokenClassification", "ForMaskedLM"),
    ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
)
"""Names of heads whose loss is of a row, of a token's own label, and of the next token's."""
_SECOND_POSITION = ("mra", "nystromformer", "yoso")
_PAD_ON_THE_RIGHT = 'use PaddedCollator(..., padding_side="right")'


@dataclass(frozen=True)
class ModelKind:
    """Properties of a model; the name of an attention alone has no family and no window."""

    attention: str
    family: Family = NO_FAMILY
    is_isolated: bool = False  # whether isolate_mixers runs its mixers segment by segment
    window: int | None = None
    is_known: bool = False  # whether this is read from a model, and not the name of an attention
    left_padding_fault: str = ""
    all_slide: bool = False  # whether every layer has the sliding window
    dropout: float = 0.0  # dropout of its attention in training
    odd_layers: tuple[str, ...] = ()  # kinds of attention layers other than full and sliding ones
    head: str = ""  # class of the model, which ends in the name of its head
    is_two_way: bool = False  # whether tokens see later ones, too
    first_position: int = 0  # the position of the first token of a text
    num_positions: int | None = None  # the longest text that its table of positions has room for
    counts_cells: bool = False
    """Whether the table counts the cells of a row, whatever positions it is passed."""
    num_token_types: int = 0  # the types in its table of token_type_ids

    @classmethod
    def of(cls, model: Any) -> ModelKind:
        """Read a model, the name of its attention, or its ``attn_implementation``."""
        if isinstance(model, cls):
            return model
        if not isinstance(model, nn.Module):
            return cls(_checked_attention(model))
        config = config_of(model)
        if config is None:
            way_out = "so its inputs are unknown; pass the name of its attention"
            raise ValueError(f"{type(model).__name__} has no config, {way_out}")
        _refuse_kind(config, model)
        modules = list(model.modules())
        names = {type(module).__name__ for module in modules}
        attention = _checked_attention(attention_of(config) or "sdpa")
        two_way = is_two_way(config, _causal_flags(config, modules), names)
        family, fault = family_of(config, names), left_padding_fault(config)
        if reason := _refusal(family, config, attention, model, two_way=two_way):
            family = replace(family, refused=reason)
        if two_way or family.two_way or not family.model_types:  # the row has another's name
            family = replace(family, name=str(getattr(config, "model_type", family.name)))
        window, all_slide = sliding_window(config)
        return cls(
            attention,
            family,
            any(hasattr(module, ISOLATED) for module in modules),
            two_way_window(config) if two_way else window,
            is_known=True,
            left_padding_fault=fault or (_pooling_fault(config, model, names) if two_way else ""),
            all_slide=all_slide,
            dropout=attention_dropout(config),
            odd_layers=odd_layers(config),
            head=type(inside(model)).__name__,
            is_two_way=two_way,
            **_positions_of(config, model),
            num_token_types=int(getattr(text_config(config), "type_vocab_size", None) or 0),
        )

    @property
    def takes_mask(self) -> bool:
        """Whether its attention reads a mask of a block per segment."""
        return self.attention in ("sdpa", "eager")

    @property
    def keywords(self) -> tuple[str, ...]:
        """The inputs that its attention and mixers read, ``cu_seq_lens`` for four of them."""
        varlen = () if self.attention in _MASK_ATTENTION else ("cu_seq_lens",)
        of_mixers = ("cu_seq_lens", "cu_seqlens_cpu") if self.is_isolated else self.family.keywords
        return (*varlen, *of_mixers)

    @property
    def takes_one_row(self) -> bool:
        """Whether all rows are passed as one."""
        return self.family.one_row and not self.is_isolated

    def refuse_packed(self) -> None:
        """Refuse packed rows if the table has a reason."""
        family = self.family
        if family.refused:
            raise IsolationError(
                f"packed rows are not isolated in {family.name} models: {family.refused}; "
                f"{_PAD_ON_THE_RIGHT}"
            )
        if family.needs_isolation and not self.is_isolated:
            raise IsolationError(
                f"packed rows are not isolated in {family.name} models: {family.needs_isolation}; "
                f"call isolate_mixers(model), or {_PAD_ON_THE_RIGHT}"
            )

    def check_head(self, targets: TargetKind, *, is_packed: bool) -> None:
        """Check that the model's own loss, as of a Trainer, is that of a batch's labels."""
        is_of_rows, is_of_tokens, shifts = map(self.head.endswith, _HEADS)
        if is_packed and is_of_rows:
            raise IsolationError(
                f"{self.head} reads one cell of a row, and a packed row holds several examples; "
                "train with the Batch: targets=None, losses.segment_pool and your own loss"
            )
        if targets is None:
            raise ValueError(
                "for_trainer() passes on labels, and with targets=None a batch has none; train "
                "with the Batch: losses.segment_pool and losses.global_num_examples"
            )
        if targets == "same_token" and not self.is_known:
            raise ValueError('targets="same_token" follows the model: pass for_trainer(model)')
        if shifts and targets == "same_token":
            raise ValueError(
                f'the loss of {self.head} shifts labels by a token, and with targets="same_token" '
                "they stay; take the Batch and token_loss"
            )
        if (is_of_tokens or self.is_two_way) and targets == "next_token":
            raise ValueError(
                f"{self.head} is trained on labels of the tokens themselves (a two-way model sees "
                'the next ones); pass targets="same_token" to the collator'
            )

    def refuse_missing(self, inputs: Mapping[str, Any]) -> None:
        """Refuse inputs of packed rows that lack what the mixers read."""
        needed = [name.replace("seq_lens", "seq_lens_q") for name in self.family.keywords]
        if self.is_isolated:
            needed = ["cu_seq_lens_q"]
        missing = [name for name in needed if name not in (*inputs, "cu_seqlens_cpu")]
        if missing:
            raise IsolationError(
                f"packed rows of {self.family.name} models need {' and '.join(missing)}, and the "
                f"inputs are {sorted(inputs)}; pass what batch.model_inputs(model) returns"
            )
        rows = len(inputs["input_ids"])
        if self.takes_one_row and rows > 1:
            raise IsolationError(
                f"the kernels of {self.family.name} models take one row, and the inputs have "
                f"{rows}; pass what batch.model_inputs(model) returns, which is [1, R * W]"
            )

    def refuse_left_padding(self) -> None:
        """Refuse rows padded on the left if the table has a reason."""
        if self.left_padding_fault:
            raise IsolationError(
                f"rows padded on the left are wrong in {self.family.name} models: "
                f"{self.left_padding_fault}; {_PAD_ON_THE_RIGHT}"
            )


def _causal_flags(config: Any, modules: Iterable[Any]) -> set[bool]:
    """Return ``is_causal`` of the text model's modules: a vision tower does not count."""
    kinds = (None, getattr(text_config(config), "model_type", None))
    flags = [m for m in modules if getattr(m, "is_causal", None) is not None]
    configs = [getattr(module, "config", None) for module in flags]
    of_text = [getattr(own, "model_type", None) in kinds for own in configs]
    return {bool(m.is_causal) for m, is_text in zip(flags, of_text, strict=True) if is_text}


def _pooling_fault(config: Any, model: nn.Module, names: Collection[str]) -> str:
    """Return why rows padded on the left are wrong: a head that reads cell 0; or nothing."""
    parts = (path.rpartition(".")[2] for path, _ in model.named_modules())
    is_head = any(name.endswith(_HEADS_OF_CELL_0) for name in (*names, *parts))
    if is_head and getattr(config, "classifier_pooling", "cls") not in ("mean", "late"):
        return "its head reads the first cell of a row, which is a pad"
    return ""


def _refuse_kind(config: Any, model: nn.Module) -> None:
    """Refuse models for which the inputs of any batch are wrong."""
    configs = () if type(inside(model)).__name__.endswith("EncoderModel") else (config,)
    if any(getattr(c, "is_encoder_decoder", False) for c in (*configs, *map(text_config, configs))):
        raise IsolationError(
            f"{getattr(config, 'model_type', None)} is an encoder-decoder, and batches are of "
            "decoders or encoders alone: its decoder reads tokens of its own; use "
            "DataCollatorForSeq2Seq of transformers"
        )


def _refusal(
    family: Family, config: Any, attention: str, model: nn.Module, *, two_way: bool
) -> str:
    """Return why packed rows are wrong in the model with this attention, or nothing."""
    if family.refused:
        return family.refused
    is_masked = attention in _MASK_ATTENTION
    if not two_way:
        takes_any = getattr(inside(model), "is_backend_compatible", None)
        ignores = not is_masked and takes_any is not None and not takes_any()
        return f"it ignores attention {attention!r}" if ignores and not family.mixers else ""
    if not family.two_way:
        return _UNKNOWN
    name, value = family.option
    if name and getattr(config, name, value) != value:
        return f"with {name}={getattr(config, name)!r} they are wrong; set {name}={value!r}"
    exact, reason = family.two_way, family.no_other or "its kernel was not tried"
    if getattr(text_config(config), "is_causal", None) is False and sliding_window(config)[0]:
        exact = tuple(name for name in exact if name != "flash")
        reason = "its flash attention has a window of one cell less"
    if (attention if is_masked or attention == "torch_varlen" else "flash") in exact:
        return ""
    if attention == "flex_attention" and {"sdpa", "torch_varlen"} <= {*exact}:
        return ""
    return (
        f"attention {attention!r} is wrong there ({reason}), load it with "
        f"attn_implementation={' or '.join(map(repr, exact))}"
    )


def _positions_of(config: Any, model: nn.Module) -> dict[str, Any]:
    """Return the properties of the model's table of positions."""
    kind = getattr(config, "model_type", "")
    name = "embed_positions" if kind == "roformer" else "position_embeddings"
    modules = model.named_modules() if text_config(config) is config else ()  # none of a tower
    for module in (module for path, module in modules if path.rpartition(".")[2] == name):
        padding, size = getattr(module, "padding_idx", None), getattr(module, "num_embeddings", 0)
        first = 2 if kind in _SECOND_POSITION else 0 if padding is None else padding + 1
        most = size - first if size else None
        return {"first_position": first, "num_positions": most, "counts_cells": kind == "roformer"}
    return {}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and similar wrappers."""
    inner = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def inside(model: nn.Module) -> Any:
    """Return the model of transformers inside wrappers, ``torch.compile`` and adapters."""
    inner = unwrap(getattr(model, "_orig_mod", model))
    base = getattr(inner, "get_base_model", None)
    return inner if base is None else base()


def config_of(model: nn.Module) -> Any:
    """Return the config of a model, also inside DistributedDataParallel and similar wrappers."""
    return getattr(unwrap(model), "config", None)


def _checked_attention(attention: Any) -> str:
    """Return the attention of the text model."""
    if isinstance(attention, Mapping):
        example = '{"text_config": "torch_varlen", "vision_config": "sdpa"}'
        if "text_config" not in attention:
            raise ValueError(
                f"attention={dict(attention)} has no text_config, whose attention gets the packed "
                f"rows; pass the attn_implementation of the model, such as {example}"
            )
        for part, name in attention.items():
            if part not in ("", "text_config") and name == "torch_varlen":
                raise ValueError(
                    f'attention "torch_varlen" for {part}: it is causal, and a vision tower is '
                    f"not; load the model with attn_implementation={example}"
                )
        attention = attention["text_config"]
    is_kernel = isinstance(attention, str) and "/" in attention and "flash" in attention
    if not is_kernel and attention not in (*_VARLEN_ATTENTION, *_MASK_ATTENTION):
        known = ", ".join((*_VARLEN_ATTENTION, *_MASK_ATTENTION))
        raise ValueError(
            f"attention={attention!r:.60} is unknown; use one of {known}, the model, or a kernel "
            "of the Hugging Face Hub such as kernels-community/flash-attn2"
        )
    return str(attention)
