"""The log of a run: a line per step, a tracker, the bar, and at the end a summary and a plot.

Where the GPU is known, a line has MFU, model FLOPs utilization: the FLOPs of the examples (without
pads and recomputation) over those that the GPU could do in that time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from checkpoints import fail
from tqdm import tqdm

import torch_collate_kit as kit

TRACKERS = sorted({tracker.value for tracker in LoggerType} - {"all"})


class RunLog:
    """The records of all steps, in `metrics.jsonl`, a tracker and the bar of the main process.

    examples/README.md explains what `step` records; other ranks record nothing.
    """

    def __init__(self, model: Any, loader: Any, accelerator: Accelerator, args: Any) -> None:
        self.model, self.loader, self.accelerator, self.args = model, loader, accelerator, args
        self.is_main = accelerator.is_main_process
        self.peak = None
        if self.is_main and accelerator.device.type == "cuda":
            self.peak, why_not = _known_peak(model, accelerator.device)
            if why_not:
                accelerator.print(f"mfu is not recorded: {why_not}")
        self.took: Counter[str] = Counter()  # since this process began

    def __enter__(self) -> RunLog:
        args = self.args
        if self.is_main:
            for name in ("summary.json", "loss.png"):  # of an earlier run, or of fewer steps
                (args.output_dir / name).unlink(missing_ok=True)
            if not args.resume:
                (args.output_dir / "metrics.jsonl").write_text("")
        if args.log_with:  # TensorBoard forgets the steps after the checkpoint, which come again
            kinds = (bool, int, float, str)
            config = {name: of for name, of in vars(args).items() if isinstance(of, kinds)}
            options = {"tensorboard": {"purge_step": args.first_step + 1}}
            name = Path(argparse.ArgumentParser().prog).stem
            self.accelerator.init_trackers(name, config, options)
        options = {"initial": args.first_step, "total": args.num_steps, "disable": not self.is_main}
        line = "{n_fmt}/{total_fmt} {bar} {remaining} left{postfix}"  # at most 80 columns
        self.bar = tqdm(bar_format=line, **options)
        self.ended = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def step(
        self, step: int, parts: list[kit.Batch], loss: float, learning_rate: float, grad_norm: float
    ) -> None:
        """Record a step that is done; `parts` are the micro-batches of this rank."""
        if not self.is_main:
            return
        began, self.ended = self.ended, time.perf_counter()
        waited = self.loader.wait_seconds - self.took["wait_seconds"]
        took: dict[str, Any] = {
            "tokens": parts[0].step.num_tokens,  # of all ranks, as the cells
            "cells": (cells := parts[0].step.num_cells),
            "filled_cells": round(cells * (1 - parts[0].step.padding)),  # without pads
            "seconds": self.ended - began,
            "wait_seconds": waited,
        }
        self.took.update(took)
        record = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm, **took}
        record |= {**_rates(took), "cost_balance": _cost_balance(parts[0], self.args.layout.dp)}
        if self.peak is not None:
            flops = _flops(parts, self.model) / self.args.layout.cp
            record["mfu"] = flops / took["seconds"] / self.peak
        if self.accelerator.device.type == "cuda":
            record["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._write({"step": step, **record})
        self.accelerator.log(record, step=step)
        rates, waited = _rates(self.took), self.took["wait_seconds"]
        speed = tqdm.format_sizeof(rates["tokens_per_second"])
        self.bar.set_postfix_str(
            f"loss {loss:.4g}, {speed} tok/s, {_filled(rates)}, "
            f"waited {waited:.{int(waited < 100)}f} s",
            refresh=False,
        )
        self.bar.update()

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with (self.args.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            fail(
                f"metrics.jsonl could not be written at step {record['step']}: {error}; --resume "
                "goes on from the last checkpoint, if --checkpoint-every saved one"
            )

    def summary(self) -> dict[str, float]:
        """Return sums and means of all steps, also before a resume; empty on other ranks."""
        if not self.is_main:
            return {}
        records = _read(self.args.output_dir)
        names = ("tokens", "cells", "filled_cells", "seconds", "wait_seconds")
        sums = {name: sum(record[name] for record in records) for name in names}
        found = {"steps": len(records), "train_seconds": sums["seconds"], **sums, **_rates(sums)}
        del found["seconds"]
        found["cost_balance"] = sum(record["cost_balance"] for record in records) / len(records)
        if "mfu" in records[-1]:
            known = [record for record in records if "mfu" in record]
            seconds = [record["seconds"] for record in known]
            found["mfu"] = np.average([record["mfu"] for record in known], weights=seconds).item()
        if "peak_memory_gib" in records[-1]:
            found["peak_memory_gib"] = max(r.get("peak_memory_gib", 0) for r in records)
        return found


def checked_tracker(name: str | None) -> str | None:
    """Return the tracker of `--log-with`; refuse one that is not installed."""
    if name and name not in map(str, get_available_trackers()):
        fail(f"--log-with {name}: it is not installed; pip install {name}")
    return name


def check_finite(step: int, loss: float, grad_norm: float, batch: Any, args: Any) -> None:
    """End the run at a step that has broken the weights, before they are saved."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        at = batch.metadata["epoch"], batch.metadata["step"]
        fail(
            f"step {step} has loss {loss} and gradient norm {grad_norm}, and is not "
            "saved; begin anew with a lower --learning-rate, or look at its examples: "
            f"{args.sampler.examples(*at).tolist()} (epoch {at[0]}, step {at[1]})"
        )


def is_finished(args: argparse.Namespace) -> bool:
    """Whether the run that is resumed has trained its last step and written its results."""
    return args.first_step == args.num_steps and (args.output_dir / "summary.json").exists()


def write_results(summary: Mapping[str, float], args: argparse.Namespace) -> None:
    """`loss.png`, and last of all `summary.json`, as a whole: it says that the run is finished."""
    try:
        _plot_loss(summary, args.output_dir)
    except ImportError:
        print("no plot of the loss, loss.png: matplotlib is not installed")
    unfinished = args.output_dir / "summary.new"
    unfinished.write_text(json.dumps(summary, indent=2))
    unfinished.replace(args.output_dir / "summary.json")
    for name, value in summary.items():
        print(f"{name:<24}{value:>12,.0f}" if value >= 1000 else f"{name:<24}{value:>12.4g}")
    print(f"model, metrics and summary are in {args.output_dir}")


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _rates(took: Mapping[str, float]) -> dict[str, float]:
    """Derive speed and padding from tokens, cells and seconds.

    Of rows that share prefixes also the tokens of a cell: a token counts in each of its contexts.
    """
    efficiency = took["filled_cells"] / took["cells"]
    rates = {
        "tokens_per_second": took["tokens"] / took["seconds"],
        "packing_efficiency": efficiency,
        "padding": 1 - efficiency,
    }
    if took["tokens"] > took["filled_cells"]:
        rates["tokens_per_cell"] = took["tokens"] / took["filled_cells"]
    return rates


def _filled(rates: Mapping[str, float]) -> str:
    """Return the padding in words, or of rows that share prefixes the tokens of a cell."""
    if "tokens_per_cell" in rates:
        return f"{rates['tokens_per_cell']:.2f} tok/cell"
    return f"{rates['padding']:.0%} padding"


def _cost_balance(batch: kit.Batch, num_ranks: int) -> float:
    """Return the cost of the heaviest rank over the mean; 1 for padded rows, all of one width."""
    costs = np.zeros(num_ranks)
    for name in ("cost_per_rank", "vision_cost_per_rank"):
        costs += np.reshape(batch.metadata.get(name, costs), (num_ranks, -1)).sum(axis=1)
    return float(costs.max() / costs.mean()) if costs.any() else 1.0


def _known_peak(model: Any, device: torch.device) -> tuple[float | None, str | None]:
    """Return the FLOP/s of the GPU; None and why if they or the model's FLOPs are not known."""
    if hasattr(model.model.config, "vision_config"):
        return None, "the FLOPs of a vision tower are not counted"
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    if len(trained) < len(list(model.parameters())) and not all("lora_" in n for n in trained):
        return None, "some weights are frozen, and not all that are trained are adapters"
    try:
        _flops([], model)
    except ValueError as error:
        return None, str(error)
    name = torch.cuda.get_device_name(device)
    return peak_flops(name), None if peak_flops(name) else f"the peak of {name} is not known"


def _flops(parts: list[kit.Batch], model: Any) -> float:
    """Return the FLOPs of micro-batches; only trained tokens pass a head of their own."""
    parameters = list(model.parameters())
    trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
    none = np.zeros(0, dtype=np.int64)
    lengths = [none, *(part["sub_seq_lengths"].values.cpu().numpy() for part in parts)]
    shares = [part.row_metadata.get("shared_lengths") for part in parts]
    shared = [none, *(of.values for of in shares if of is not None)]
    num_trained = sum(int(part.row_metadata["num_trained"].values.sum()) for part in parts)
    options: dict[str, Any] = {"num_head_tokens": num_trained if model.through_head else None}
    options["shared_lengths"] = np.concatenate(shared) if len(shared) > 1 else 0
    if len(trained) < len(parameters):
        options["num_adapter_parameters"] = sum(trained)
    return flops_per_step(model.model.config, np.concatenate(lengths), **options)


def _plot_loss(summary: Mapping[str, float], folder: Path) -> None:
    """Draw the loss of every step with its running mean, and the held-out loss if it is known."""
    from matplotlib.figure import Figure

    records = _read(folder)
    steps, losses = ([record[name] for record in records] for name in ("step", "loss"))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (mean over trained tokens)")
    axes.plot(steps, losses, ".-", linewidth=0.8, markersize=2, alpha=0.6, label="every step")
    if (width := len(losses) // 20) > 1:
        means = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(steps[width - 1 :], means, label=f"mean of the last {width} steps")
    if "held_out_loss" in summary:
        loss = summary["held_out_loss"]
        label = f"held out, after the last step: {loss:.3f}"
        axes.axhline(loss, color="tab:red", linestyle="--", label=label)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=120)


# --- model FLOPs

# Dense bf16 with fp32 sums, in TFLOP/s, from NVIDIA's data sheets ("with sparsity" halved), for the
# RTX 4090 from its Ada whitepaper, by torch.cuda.get_device_name(): the first name in it counts.
PEAKS = {
    **{"H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.0},
    **{"H100": 989.4, "A100": 312.0, "L40S": 362.05, "RTX 4090": 165.2},
}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU; None if unknown, as of a part of a GPU (MIG)."""
    if " MIG " in device_name or device_name.endswith(("Laptop GPU", "RTX 4090 D")):
        return None
    return next((peak * 1e12 for name, peak in PEAKS.items() if name in device_name), None)


def flops_per_step(
    config: Any,
    lengths: npt.ArrayLike,
    *,
    shared_lengths: npt.ArrayLike = 0,
    num_head_tokens: int | None = None,
    num_adapter_parameters: int | None = None,
) -> float:
    """Return the FLOPs of the forward and backward pass over examples of these true lengths.

    Tokens at their beginnings that they share with others, `shared_lengths`, are computed once.
    The cost of the layers is that of `kit.ModelCost`; attention, 6 per token squared and entry of a
    key and a value, is known in FLOPs, and so its unit. Only `num_head_tokens` pass the head. With
    LoRA adapters a frozen weight costs 4 per token in place of 6. ValueError for layers whose cost
    is not known, and for adapters beside experts.
    """
    lengths_N, text = np.asarray(lengths, dtype=np.int64), config.get_text_config()
    shared_N = np.broadcast_to(np.asarray(shared_lengths, dtype=np.int64), lengths_N.shape)
    num_tokens, cost = int((lengths_N - shared_N).sum()), kit.ModelCost.of(text)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key, value = (getattr(text, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    attending = sum(kind != "linear_attention" for kind in kinds)
    squared = 3 * attending * text.num_attention_heads * (key + value)
    unit = squared / (cost.language_quadratic + cost.language_windowed_quadratic)
    layers = unit * cost.language_linear * num_tokens
    own = cost.language(lengths_N) - cost.language(shared_N)  # a token attends to its path
    attention = unit * float(own.sum()) - layers
    through_head = num_tokens if num_head_tokens is None else num_head_tokens
    linear = layers + 6 * text.hidden_size * text.vocab_size * through_head
    if num_adapter_parameters is not None:
        if getattr(text, "num_experts_per_tok", None):
            raise ValueError("how many tokens pass an adapter of an expert is not known")
        linear = linear * 4 / 6 + 6 * num_adapter_parameters * num_tokens
    return float(linear + attention)
