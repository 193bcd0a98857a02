"""Other trainers on the same examples: transformers.Trainer with flattened rows, and TRL's packing.

Each run begins with the same weights and a new optimizer, and trains as many steps on the examples
that our steps have, with the same clipping, rate and micro-batches of about as many tokens. Runs
alternate. TRL packs on its own, so its steps have other examples, of as many tokens.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from run_log import flops_per_step, peak_flops

from gpu.lengths import ROWS, Mix, loader_of
from gpu.models import Setting, optimizer_of
from gpu.speed import OURS, about, prepared
from gpu.training import train_step
from gpu.where import Where, is_out_of_memory
from torch_collate_kit import PrefetchingSampler

__all__ = ["TRAINERS", "against_peers"]

_WARM_UP = 2  # steps that are not timed


def against_peers(
    where: Where,
    *,
    size: str,
    trainers: list[str],
    max_tokens: int = 8192,
    steps: int = 6,
    rounds: int = 2,
) -> dict[str, Any]:
    """Tokens per second and losses of every trainer of ``trainers`` that is installed."""
    mix, model, optimizer, setting, too_large = prepared(where, size, max_tokens)
    del optimizer
    initial = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    run = _Run(where, model, setting, mix, steps)
    results: dict[str, dict[str, Any]] = {name: {"variant": name} for name in trainers}
    for i in range(rounds):
        first = i % len(trainers)
        for name in trainers[first:] + trainers[:first]:
            if "error" in results[name]:
                continue
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    value.copy_(initial[key])
            _one_run(results[name], TRAINERS[name], run)
    variants = [_rated(result, model, where) for result in results.values()]
    return {**about(size, mix, setting, too_large), "variants": variants}


class _Run:
    """What each trainer gets, and what it reports."""

    def __init__(self, where: Where, model: Any, setting: Setting, mix: Mix, steps: int) -> None:
        self.where, self.model, self.setting = where, model, setting
        self.mix, self.steps = mix, steps
        sampler = PrefetchingSampler(mix.dataset, batch_size=mix.batch_size, seed=0, tail="drop")
        self.indices = [list(indices) for _, indices in zip(range(steps), sampler, strict=False)]

    def examples(self) -> list[dict[str, list[int]]]:
        """Those of all steps, in their order."""
        rows = self.mix.dataset.__getitems__(np.concatenate(self.indices))["input_ids"].tolist()
        return [{"input_ids": row, "labels": row} for row in rows]

    def lengths(self) -> list[np.ndarray]:
        """Of the timed steps."""
        return [self.mix.dataset.lengths[np.array(i)] for i in self.indices[_WARM_UP:]]


class _Missing(Exception):
    """A trainer, or what it needs, is not installed."""


def _one_run(result: dict[str, Any], trainer: Callable[[_Run], Any], run: _Run) -> None:
    gc.collect()
    if run.where.is_cuda:
        torch.cuda.empty_cache()
    run.where.reset_peak()
    try:
        seconds, losses, lengths = trainer(run)
    except _Missing as missing:
        result["error"] = f"not installed: {missing}"
    except Exception as error:  # of one trainer: the others are measured
        is_memory = is_out_of_memory(error)
        result["error"] = "out of memory" if is_memory else f"{type(error).__name__}: {error}"[:300]
    else:
        result.setdefault("seconds", []).append(seconds)
        result.setdefault("losses", []).append(losses)
        result["lengths"] = [int(n) for step in lengths for n in step]
        result["peak_bytes"] = max(result.get("peak_bytes", 0), run.where.peak())
    run.model.zero_grad()
    for name in ("forward", "_original_forward"):  # in which accelerate wraps it, again each time
        vars(run.model).pop(name, None)


def _rated(result: dict[str, Any], model: Any, where: Where) -> dict[str, Any]:
    lengths = result.pop("lengths", None)
    if lengths is None or "error" in result:
        return result
    per_round = float(sum(result["seconds"])) / len(result["seconds"])
    flops = flops_per_step(model.config, lengths) / per_round
    peak = peak_flops(torch.cuda.get_device_name()) if where.is_cuda else None
    losses = result["losses"][0]
    return result | {
        "tokens_per_second": sum(lengths) / per_round,
        "mfu": flops / peak if peak else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _ours(run: _Run) -> Any:
    """Our loader and loss, with a loop."""
    run.model.set_attn_implementation(OURS.attention)
    optimizer = optimizer_of(run.model)
    losses = []
    with loader_of(run.mix, OURS.layout, run.where) as loader:
        for step, batch in enumerate(loader.steps(run.steps)):
            if step == _WARM_UP:
                run.where.wait()
                began = time.perf_counter()
            losses.append(train_step(run.model, optimizer, batch, OURS, run.setting, run.where))
        run.where.wait()
        seconds = time.perf_counter() - began
    return seconds, losses, run.lengths()


def _flattening(attention: str, *, needs: str = "transformers", **options: Any) -> Any:
    """transformers.Trainer, each micro-batch one row: the examples one after the other."""

    def train(run: _Run) -> Any:
        from transformers import DataCollatorWithFlattening, Trainer

        if importlib.util.find_spec(needs) is None:
            raise _Missing(needs)
        run.model.set_attn_implementation(attention)
        with tempfile.TemporaryDirectory() as folder:
            arguments = _arguments(run, folder, run.mix.batch_size // ROWS, **options)
            collator = DataCollatorWithFlattening(return_flash_attn_kwargs=attention != "sdpa")
            clock = _clock(run.where)
            trainer = Trainer(
                run.model,
                arguments,
                data_collator=collator,
                train_dataset=run.examples(),
                callbacks=[clock],
            )
            trainer.train()
        return clock.seconds, _losses(trainer), run.lengths()

    return train


def _trl(run: _Run) -> Any:
    """TRL's own packing (best fit), with the attention that it asks for where it is installed."""
    for name in ("trl", "datasets"):
        if importlib.util.find_spec(name) is None:
            raise _Missing(name)
    import datasets
    from trl import SFTConfig, SFTTrainer

    has_flash = importlib.util.find_spec("flash_attn") is not None and run.where.is_cuda
    run.model.set_attn_implementation("flash_attention_2" if has_flash else "sdpa")
    rows = datasets.Dataset.from_list([{"input_ids": e["input_ids"]} for e in run.examples()] * 2)
    with tempfile.TemporaryDirectory() as folder:
        options = {"packing": True, "packing_strategy": "bfd", "max_length": run.mix.max_tokens}
        options["gradient_checkpointing"] = run.setting.checkpointing  # True if it is not given
        clock = _clock(run.where)
        trainer = SFTTrainer(
            run.model,
            _arguments(run, folder, 1, SFTConfig, **options),
            train_dataset=rows,
            processing_class=_no_tokenizer(),
            callbacks=[clock],
        )
        trainer.train()
    packed = trainer.train_dataset["seq_lengths"][_WARM_UP * ROWS : run.steps * ROWS]
    return clock.seconds, _losses(trainer), packed


def _arguments(run: _Run, folder: str, per_part: int, kind: Any = None, **options: Any) -> Any:
    """The settings of our loop; a step is four micro-batches of ``per_part`` rows."""
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        output_dir=folder,
        max_steps=run.steps,
        per_device_train_batch_size=per_part,
        gradient_accumulation_steps=ROWS,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        bf16=run.setting.weights == "float32",
        train_sampling_strategy="sequential",
        dataloader_num_workers=0 if run.where.is_tiny else 2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not run.where.is_cuda,
        **options,
    )


def _clock(where: Where) -> Any:
    """Seconds from the end of the warm-up to the end of the last step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        seconds = began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == _WARM_UP:
                where.wait()
                self.began = time.perf_counter()
            elif state.global_step == state.max_steps:
                where.wait()
                self.seconds = time.perf_counter() - self.began

    return Clock()


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _no_tokenizer() -> Any:
    """TRL wants one, also for examples that are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


TRAINERS: dict[str, Callable[[_Run], Any]] = {
    "ours: packed, torch_varlen": _ours,
    "Trainer, flattened, torch_varlen": _flattening("torch_varlen"),
    "Trainer, flattened, flash_attention_2": _flattening("flash_attention_2", needs="flash_attn"),
    "Trainer, flattened, sdpa": _flattening("sdpa"),
    "TRL, packed": _trl,
    # It changes the model itself, so it is not compared in the process of the others.
    "Trainer, flattened, torch_varlen, Liger": _flattening(
        "torch_varlen", needs="liger_kernel", use_liger_kernel=True
    ),
}
