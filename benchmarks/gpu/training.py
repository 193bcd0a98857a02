"""One optimizer step as a user writes it, and blocks of steps of several variants in turn."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from run_log import flops_per_step, peak_flops
from torch import Tensor

from gpu.lengths import Layout, Mix, loader_of
from gpu.models import Setting
from gpu.where import Where, is_out_of_memory
from torch_collate_kit import Batch, isolate_mixers, token_loss
from torch_collate_kit.batch.model_kind import ModelKind

__all__ = ["Runner", "Variant", "alternated", "as_in", "train_step"]


@dataclass(frozen=True)
class Variant:
    """One way to train on the same examples."""

    name: str
    layout: Layout = field(default_factory=lambda: Layout("packed"))
    attention: str = "torch_varlen"
    whole_logits: bool = False
    """All logits of a micro-batch at once, in place of ``token_loss(head=)``."""
    compiled: bool = False
    """Every layer under torch.compile; needs rows of one width."""
    isolated: bool = False
    """The mixers of a hybrid under ``isolate_mixers``."""


def as_in(variant: Variant, model: Any, where: Where) -> None:
    """Change the model to what this variant has."""
    if model.config._attn_implementation != variant.attention:
        model.set_attn_implementation(variant.attention)
    if ModelKind.of(model).is_isolated != variant.isolated:
        isolate_mixers(model, undo=not variant.isolated)
    compiled = {layer._compiled_call_impl is not None for layer in model.model.layers}
    if compiled == {variant.compiled}:
        return
    for layer in model.model.layers:
        if variant.compiled:
            layer.compile(backend=where.backend)
        else:
            layer._compiled_call_impl = None


def loss_of(model: Any, part: Batch, variant: Variant, num_loss_tokens: int) -> Tensor:
    inputs = part.model_inputs(model, labels=False)
    if variant.compiled:  # one number for all rows, or each new maximum would compile again
        width = inputs["input_ids"].shape[1]
        inputs |= {name: width for name in inputs if name.startswith("max_length")}
        torch._dynamo.maybe_mark_dynamic(inputs["cu_seq_lens_q"], 0)
    hidden = model.model(**inputs).last_hidden_state
    options = {"num_loss_tokens": num_loss_tokens}
    if variant.whole_logits:
        return token_loss(model.lm_head(hidden), part, **options)
    return token_loss(hidden, part, head=model.lm_head, **options)


def parts_of(batch: Batch | Sequence[Batch]) -> tuple[list[Batch], int, int]:
    """Micro-batches of a step, its loss tokens, and its tokens."""
    whole = [batch] if isinstance(batch, Batch) else list(batch)
    counts = sum(b.metadata["num_loss_tokens"] for b in whole), sum(b.num_tokens for b in whole)
    if isinstance(batch, Batch):
        whole = [batch[i : i + 1] for i in range(len(batch))]
    return whole, *counts


def train_step(
    model: Any, optimizer: Any, batch: Any, variant: Variant, setting: Setting, where: Where
) -> float:
    """Its loss, read from the device as a training loop does, which ends the step there too."""
    parts, num_loss_tokens, _ = parts_of(batch)
    total = torch.zeros((), device=where.device)
    for part in parts:
        with autocast_of(setting, where):
            loss = loss_of(model, part, variant, num_loss_tokens)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


def autocast_of(setting: Setting, where: Where) -> Any:
    """float32 weights compute in bf16; bf16 weights need no autocast."""
    return where.autocast() if setting.weights == "float32" else contextlib.nullcontext()


class Runner:
    """One variant: its loader, and what its steps took.

    The model and its optimizer are those of all variants of a comparison.
    """

    def __init__(
        self, variant: Variant, model: Any, optimizer: Any, setting: Setting, mix: Mix, where: Where
    ) -> None:
        self.variant, self._model, self._optimizer = variant, model, optimizer
        self._setting, self._mix, self._where = setting, mix, where
        self.loader = loader_of(mix, variant.layout, where)
        self.error: str | None = None
        self.first_loss: float | None = None
        self._seconds: list[float] = []
        self._tokens = self._cells = self._steps = self._graphs = self._peak = 0
        self._flops = self._waited = self._waited_of = 0.0
        self._hidden: list[bool] = []
        self._copies = _Copies(self.loader, where)

    def look(self) -> None:
        """The loss of the first step's examples, before any training: the same in every variant.

        With gradients, though they are not used: a compiled model would be compiled twice without.
        """
        as_in(self.variant, self._model, self._where)
        with contextlib.closing(self.loader.steps(1)) as steps:
            parts, num_loss_tokens, _ = parts_of(next(steps))
        with autocast_of(self._setting, self._where):
            self.first_loss = sum(
                loss_of(self._model, part, self.variant, num_loss_tokens).item() for part in parts
            )

    def warm_up(self, num_steps: int) -> None:
        as_in(self.variant, self._model, self._where)
        for batch in self.loader.steps(num_steps):
            self._train(batch)

    def block(self, num_steps: int) -> None:
        """Timed steps. The first one is left out of the waiting: its batch had a block's time."""
        as_in(self.variant, self._model, self._where)
        graphs, taken = _num_graphs(), []
        self._where.wait()
        self._where.reset_peak()
        for batch in self.loader.steps(num_steps):
            self._train(batch)
            self._copies.step_ended(batch)
            taken.append(batch)
        self._where.wait()
        self._peak = max(self._peak, self._where.peak())
        self._graphs += _num_graphs() - graphs
        self._hidden += self._copies.block_ended()
        steps = self.loader.timeline[-num_steps:]
        self._steps += num_steps
        self._seconds += [step.train_ended - step.wait_began for step in steps]
        self._waited += sum(step.wait_seconds for step in steps[1:])
        self._waited_of += sum(step.train_ended - step.wait_began for step in steps[1:])
        for batch in taken:
            self._count(batch)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"variant": self.variant.name, "error": self.error}
        found["first_loss"] = self.first_loss
        if not self._seconds or self.error:
            return found
        seconds = sum(self._seconds)
        peak = peak_flops(torch.cuda.get_device_name()) if self._where.is_cuda else None
        return found | {
            "steps": self._steps,
            "seconds": self._seconds,
            "tokens_per_second": self._tokens / seconds,
            "efficiency": self._tokens / self._cells,
            "flops_per_second": self._flops / seconds,
            "mfu": self._flops / seconds / peak if peak else None,
            "peak_bytes": self._peak,
            "wait_share": self._waited / self._waited_of if self._waited_of else None,
            "graphs_after_warm_up": self._graphs,
            "copies_hidden": sum(self._hidden) / len(self._hidden) if self._hidden else None,
        }

    def close(self) -> None:
        self.loader.close()

    def _train(self, batch: Any) -> float:
        return train_step(
            self._model, self._optimizer, batch, self.variant, self._setting, self._where
        )

    def _count(self, batch: Any) -> None:
        whole = [batch] if isinstance(batch, Batch) else batch
        lengths = [n for b in whole for row in b["sub_seq_lengths"].tolist() for n in row]
        parts, num_loss_tokens, num_tokens = parts_of(batch)
        self._tokens += num_tokens
        self._cells += sum(part.num_cells for part in parts)
        self._flops += flops_per_step(self._model.config, lengths, num_head_tokens=num_loss_tokens)


def alternated(
    runners: Sequence[Runner], where: Where, *, rounds: int, steps: int, warm_up: int
) -> list[dict[str, Any]]:
    """Results of all, after blocks of steps in turn, each round beginning with another one.

    One that runs out of memory is left out from there on.
    """
    for what in (lambda r: r.look(), lambda r: r.warm_up(warm_up)):
        for runner in runners:
            _guarded(runner, what, where)
    for i in range(rounds):
        first = i % len(runners)
        for runner in [*runners[first:], *runners[:first]]:
            _guarded(runner, lambda r: r.block(steps), where)
    results = [runner.result() for runner in runners]
    for runner in runners:
        runner.close()
    return results


def _guarded(runner: Runner, what: Any, where: Where) -> None:
    if runner.error:
        return
    try:
        what(runner)
    except Exception as error:  # of one variant: the others are measured
        is_memory = is_out_of_memory(error)
        runner.error = "out of memory" if is_memory else f"{type(error).__name__}: {error}"[:300]
    if runner.error:
        runner._model.zero_grad()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # after an illegal access nothing works any more
            torch.cuda.empty_cache()


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class _Copies:
    """Whether each copy to the device had ended before the GPU ended the step before it.

    Copies have a stream of their own: an event after each copy, and one after each step, say which
    came first. On the CPU there are none.
    """

    def __init__(self, loader: Any, where: Where) -> None:
        self._is_cuda = where.is_cuda
        self._copied: dict[int, Any] = {}  # by the id of the batch
        self._pairs: list[tuple[Any, Any]] = []
        self._last: Any = None
        if self._is_cuda:
            self._watch(loader._copy)

    def _watch(self, copy: Any) -> None:
        send = copy.send

        def watched(batch: Any) -> Any:
            sent = send(batch)
            event = torch.cuda.Event(enable_timing=True)
            event.record(copy._stream)
            self._copied[id(sent.batch)] = event
            return sent

        copy.send = watched

    def step_ended(self, batch: Any) -> None:
        if not self._is_cuda:
            return
        copied = self._copied.pop(id(batch), None)
        if self._last is not None and copied is not None:
            self._pairs.append((copied, self._last))
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record()

    def block_ended(self) -> list[bool]:
        """Of the steps of the block but its first; the device has done all of them."""
        hidden = [copied.elapsed_time(ended) >= 0 for copied, ended in self._pairs]
        self._pairs, self._last = [], None
        return hidden
