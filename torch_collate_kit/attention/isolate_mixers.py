"""Layers that carry state from token to token, run on each segment of packed rows by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torch_collate_kit._checks import checked_bool
from torch_collate_kit.attention.models import is_2d
from torch_collate_kit.batch.model_kind import config_of
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.families import ISOLATED, family_of, text_config

_PASS = "pass what batch.model_inputs(model) returns"
_PADDED = "for padded rows pass their attention_mask"
_BOUNDARIES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens_cpu"}
_OF_KERNELS = _BOUNDARIES | {"seq_idx", "cu_seqlens"}
_CACHES = ("past_key_values", "cache", "cache_params", "state")
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")  # of transformers, and of torch


class _SegmentGroups:
    """The segments of the rows ``[R, W]`` of one call, and which of them have the same length."""

    def __init__(self, bounds: list[int], rows: int, width: int) -> None:
        ends = {*bounds, 0}
        if sorted(bounds) != bounds or not {*range(0, rows * width + 1, width or 1)} <= ends:
            raise ValueError(
                f"boundaries {_shown(bounds)} do not fit {rows} rows of {width} tokens: they must "
                f"rise from 0 to {rows * width} and include the end of every row; {_PASS}"
            )
        self.rows, self.width = rows, width
        spans = pairwise(bounds)
        self.lengths = [stop - start for start, stop in spans if stop > start]
        self.groups: dict[int, list[int]] = {}
        for segment, length in enumerate(self.lengths):
            self.groups.setdefault(length, []).append(segment)

    def cut(self, value: Any) -> Any:
        """Return a list of values of each group ``[n, length, ...]`` if it has one per cell."""
        if isinstance(value, (tuple, list)):
            parts = [self.cut(each) for each in value]
            return [type(value)(each[group] for each in parts) for group in range(len(self.groups))]
        cells = (self.rows, self.width)
        if not isinstance(value, Tensor) or value.shape[:2] not in (cells, (1, self.width)):
            return [value] * len(self.groups)
        flat = value.expand(self.rows, *value.shape[1:]).flatten(0, 1)
        segments = torch.split(flat, self.lengths)
        return [_stacked([segments[each] for each in group]) for group in self.groups.values()]

    def join(self, results: Sequence[Any]) -> Any:
        """Return the value ``[R, W, ...]`` of each group's; None for a state of the segments."""
        first = results[0]
        if isinstance(first, (tuple, list)):
            return type(first)(self.join(each) for each in zip(*results, strict=True))
        if not isinstance(first, Tensor):
            return first
        segments: list[Tensor] = [first] * len(self.lengths)
        for (length, group), result in zip(self.groups.items(), results, strict=True):
            if result.shape[:2] != (len(group), length):
                return None
            for segment, value in zip(group, result.unbind(), strict=True):
                segments[segment] = value
        return torch.cat(segments).view(self.rows, self.width, *segments[0].shape[1:])


_OUTSIDE = object()
_call: ContextVar[Any] = ContextVar("_call", default=_OUTSIDE)
"""The segments of the running call of the model, None if its rows are not packed."""


@contextmanager
def _running(segments: Any) -> Iterator[None]:
    token = _call.set(segments)
    try:
        yield
    finally:
        _call.reset(token)


def _run_with(segments: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _running(segments):
        return function(*args, **kwargs)


class _Forward:
    """A ``forward`` that calls the one before it: of the class, or set on the module.

    A callable object, not a bound method, so that a copied or pickled module gets its own.
    """

    module: nn.Module
    replaced: Callable[..., Any] | None

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__({"module": module, "replaced": module.__dict__.get("forward")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        _keep_out_of_graphs()
        self.__dict__.update(state)

    @property
    def before(self) -> Callable[..., Any]:
        return self.replaced or partial(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.before)


class _MixerForward(_Forward):
    """Call a mixer once per length of segment."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segments = _call.get()
        if segments is None:
            return self.before(*args, **kwargs)
        name = type(self.module).__name__
        if segments is _OUTSIDE:
            if self.module.training or torch.is_grad_enabled():
                raise ValueError(
                    f"{name} is called outside of its model's forward, so the boundaries of its "
                    "rows are unknown; call the model, and checkpoint activations by "
                    "model.gradient_checkpointing_enable() or torch's checkpoint_wrapper"
                )
            return self.before(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in _OF_KERNELS}
        _refuse_other_rows(name, segments, [*args, *kwargs.values()])
        cut = [segments.cut(value) for value in (*args, *kwargs.values())]
        results = [
            self.before(*each[: len(args)], **dict(zip(kwargs, each[len(args) :], strict=True)))
            for each in zip(*cut, strict=True)
        ]
        return segments.join(results)


def _refuse_other_rows(name: str, segments: _SegmentGroups, values: list[Any]) -> None:
    shape = next((value.shape[:2] for value in values if isinstance(value, Tensor)), None)
    if shape != (segments.rows, segments.width):
        raise ValueError(
            f"{name} got {list(shape or ())} tokens, and the boundaries are of "
            f"{[segments.rows, segments.width]}: the model splits its rows; use PaddedCollator"
        )


class _ModelForward(_Forward):
    """Read the boundaries of a call, for the mixers inside."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate's unwrap_model binds forward once more
            args = args[1:]
        if _call.get() is not _OUTSIDE:
            return self.before(*args, **kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        segments, kwargs = self._read(args, kwargs)
        with _running(segments):
            return self.before(*args, **kwargs)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the segments of a call, and the keywords that its forward accepts."""
        parameters = self.__signature__.parameters
        segments = self._segments_of({**dict(zip(parameters, args, strict=False)), **kwargs})
        for module in self.module.modules():  # checkpointing may have begun after the last call
            _Checkpoint.replace(module)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            extra = {*_BOUNDARIES, "position_ids"} - {*parameters}
            kwargs = {name: value for name, value in kwargs.items() if name not in extra}
        return segments, kwargs

    def _segments_of(self, inputs: Mapping[str, Any]) -> _SegmentGroups | None:
        given = (inputs.get(name) for name in ("cu_seqlens_cpu", "cu_seq_lens_q"))
        bounds = next((each for each in given if each is not None), None)
        masked = is_2d(inputs.get("attention_mask"))
        cached = next((name for name in _CACHES if inputs.get(name) is not None), None)
        if bounds is None:
            self._refuse_unknown(
                inputs, masked or (cached is not None and not self.module.training)
            )
            return None
        if masked:
            raise ValueError(
                "a 2-D attention_mask is passed in addition to boundaries; remove it: pads are a "
                "segment of their own"
            )
        default = getattr(text_config(config_of(self.module)), "use_cache", False)
        if inputs.get("use_cache", default) or cached:
            raise ValueError(
                f"{cached or 'use_cache=True'} is passed, or is the default, beside boundaries of "
                "packed rows; pass use_cache=False"
            )
        tokens = inputs.get("input_ids")
        rows, width = (inputs["inputs_embeds"] if tokens is None else tokens).shape[:2]
        return _SegmentGroups(torch.as_tensor(bounds).tolist(), rows, width)

    def _refuse_unknown(self, inputs: Mapping[str, Any], known: bool) -> None:
        """Refuse rows that may be packed without boundaries."""
        looks_packed = self.module.training or inputs.get("position_ids") is not None
        if looks_packed and not known:
            mode = "training" if self.module.training else "evaluation with position_ids"
            raise ValueError(
                f"{type(self.module).__name__} runs its mixers by segment, and got no "
                f"cu_seq_lens_q in {mode}, so packed rows would leak; {_PASS}; {_PADDED}"
            )


@functools.cache
def _keep_out_of_graphs() -> None:
    """Disable compilation of calls that read boundaries; on first use: it loads the compiler."""
    compiler: Any = torch.compiler  # whose functions have no types
    reason = "isolate_mixers cuts rows by boundaries in host memory"
    whole = [(_MixerForward, "__call__", True), (_ModelForward, "_read", True)]
    for forward, name, recursive in [*whole, (_ModelForward, "_run", False)]:
        method = getattr(forward, name)
        setattr(forward, name, compiler.disable(method, recursive=recursive, reason=reason))


class _Checkpoint:
    """A function that checkpoints a layer, and runs it again with the segments of the first run.

    A layer is run again in the backward pass, perhaps in another thread and after other calls.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(partial(_run_with, _call.get(), function), *args, **kwargs)

    @classmethod
    def replace(cls, module: nn.Module, *, undo: bool = False) -> None:
        for name in _CHECKPOINTS:
            function = module.__dict__.get(name)
            if undo and isinstance(function, cls):
                setattr(module, name, function.checkpoint)
            elif not undo and function is not None and not isinstance(function, cls):
                setattr(module, name, cls(function))


def _mixers_and_models(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the mixers of a model, and the models of transformers that hold them."""
    modules = list(model.modules())
    family = family_of(config_of(model), {type(module).__name__ for module in modules})
    if family.refused:
        raise IsolationError(
            f"isolate_mixers does not help {family.name} models: {family.refused}; "
            'use PaddedCollator(..., padding_side="right")'
        )
    mixers = [m for m in modules if {c.__name__ for c in type(m).__mro__} & {*family.mixers}]
    models = [m for m in modules if hasattr(type(m), "base_model_prefix")]
    models = [m for m in models if any(each in mixers for each in m.modules())]
    if models:
        return mixers, models
    looked_for = f"no {' or '.join(family.mixers)}" if family.mixers else "none in the table"
    raise ValueError(
        f"{type(model).__name__} has no layers that carry state from token to token "
        f"({looked_for}), so there is nothing to isolate; {_PASS}, and prove it by "
        "check_isolation(model, batch)"
    )


def isolate_mixers(model: nn.Module, *, undo: bool = False) -> None:
    """Run the layers that carry state from token to token on each packed segment by itself.

    Such layers, mixers for short, are linear attention, Mamba, recurrences and convolutions. Packed
    rows are then exact in 27 of the 28 families of transformers that have them, on CPU and CUDA,
    with or without kernels: a mixer is called once per length, with all segments of that length
    ``[n, length, ...]``. Attention is not changed, so choose one that reads boundaries or
    positions, such as ``torch_varlen``. Changed in place: ``forward`` of the mixers and of the
    models that hold them; weights, ``state_dict``, ``save_pretrained`` and copies are as before.

    The model accepts what ``batch.model_inputs(model)`` returns: ``cu_seq_lens_q`` ``[S + 1]``,
    flat over the rows, and the same as ``cu_seqlens_cpu`` in host memory, without which every call
    waits for the GPU once. Padded batches with a 2-D ``attention_mask``, and ``generate()``, run as
    before. It works with several rows, gradient checkpointing, autocast, LoRA, DDP and FSDP2;
    ``torch.compile`` has one graph break per mixer, which itself is not compiled.

    Args:
        model: A model of transformers, also inside PEFT, DDP or FSDP2. Calling twice is the same as
            once.
        undo: Whether to restore what was there before.

    Raises:
        IsolationError: The model stays wrong with isolated mixers (GLM-5-Next), or has layers that
            carry state and is not in the table of families.
        ValueError: The model has no such layers; with ``undo``, ``forward`` was replaced
            since. In the model's forward: training without boundaries and without a 2-D mask;
            evaluation with ``position_ids`` and without boundaries, mask or cache; boundaries
            beside a cache or a 2-D mask, or that do not fit the rows; a mixer called outside of
            its model.

    >>> import torch, transformers
    >>> from torch_collate_kit import PackedCollator
    >>> config = transformers.Lfm2Config(
    ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_attention_heads=2,
    ...     num_key_value_heads=2, layer_types=["conv", "full_attention"], num_hidden_layers=2)
    >>> model = transformers.Lfm2ForCausalLM(config)
    >>> isolate_mixers(model)
    >>> batch = PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> packed = model(**batch.model_inputs(model)).logits
    >>> alone = PackedCollator(0, max_tokens=8)([{"input_ids": [8, 9]}])
    >>> alone = model(**alone.model_inputs(model)).logits
    >>> torch.allclose(packed[0, 3:5], alone[0, :2], atol=1e-6)
    True
    """
    checked_bool("undo", undo)
    mixers, models = _mixers_and_models(model)
    for module in [*mixers, *models]:
        forward, is_isolated = module.__dict__.get("forward"), hasattr(module, ISOLATED)
        if undo and is_isolated and not isinstance(forward, _Forward):
            raise ValueError(
                f"forward of {type(module).__name__} was replaced after isolate_mixers, by "
                f"{forward!r}; undo that first"
            )
        if undo and isinstance(forward, _Forward):
            del module.forward, module.__dict__[ISOLATED]
            if forward.replaced is not None:
                module.forward = forward.replaced
        elif not undo and not is_isolated:
            module.forward = (_MixerForward if module in mixers else _ModelForward)(module)
            setattr(module, ISOLATED, True)
    if undo:
        for module in model.modules():
            _Checkpoint.replace(module, undo=True)


def _stacked(values: list[Tensor]) -> Tensor:
    return values[0][None] if len(values) == 1 else torch.stack(values)


def _shown(bounds: list[int]) -> str:
    return str(bounds if len(bounds) < 9 else [*bounds[:4], "...", *bounds[-3:]])
