"""The log of a run: a line per step, a tracker, the bar, and at the end a summary and a plot.

Where the GPU is known, a line has MFU, model FLOPs utilization: the work that the model asks for
(forward and backward, without pads, recomputation and attention between examples) over what the GPU
could do in that time, `flops_per_step(config, lengths) / seconds / peak_flops(name)`.
"""

from __future__ import annotations

import argparse
import functools
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
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from checkpoints import fail
from tqdm import tqdm

import torch_collate_kit as kit

TRACKERS = sorted({tracker.value for tracker in LoggerType} - {"all"})


class RunLog:
    """What every step took, recorded by the main process; the other ranks record nothing.

    Entered, it begins `metrics.jsonl` or goes on with it, starts the tracker of `--log-with` and
    shows the bar. examples/README.md explains what `step` records.
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
        if args.log_with:
            self._start_tracker()
        options = {"initial": args.first_step, "total": args.num_steps, "disable": not self.is_main}
        self.bar = tqdm(**options)
        self.ended = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def _start_tracker(self) -> None:
        """TensorBoard then forgets the steps after the checkpoint, which are done again."""
        kinds = (bool, int, float, str)
        config = {name: of for name, of in vars(self.args).items() if isinstance(of, kinds)}
        options = {"tensorboard": {"purge_step": self.args.first_step + 1}}
        name = Path(argparse.ArgumentParser().prog).stem
        self.accelerator.init_trackers(name, config, options)

    def step(
        self, step: int, parts: list[kit.Batch], loss: float, learning_rate: float, grad_norm: float
    ) -> None:
        """Record a step that is done; `parts` are the micro-batches of this rank."""
        if not self.is_main:
            return
        began, self.ended = self.ended, time.perf_counter()
        waited = self.loader.wait_seconds - self.took["wait_seconds"]
        took: dict[str, Any] = {  # tokens and cells of all ranks
            "tokens": parts[0].metadata["num_tokens"],
            "cells": self.args.num_ranks * sum(part["input_ids"].numel() for part in parts),
            "seconds": self.ended - began,
            "wait_seconds": waited,
        }
        self.took.update(took)
        record = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm, **took}
        record |= {**_rates(took), "cost_balance": _cost_balance(parts[0], self.args.num_ranks)}
        if self.peak is not None:
            record["mfu"] = _flops(parts, self.model) / took["seconds"] / self.peak
        if self.accelerator.device.type == "cuda":
            record["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._write({"step": step, **record})
        self.accelerator.log(record, step=step)
        self._move_bar(loss)

    def _write(self, record: dict[str, Any]) -> None:
        try:
            with (self.args.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            fail(
                f"metrics.jsonl could not be written at step {record['step']}: {error}; --resume "
                "goes on from the last checkpoint, if --checkpoint-every saved one"
            )

    def _move_bar(self, loss: float) -> None:
        rates = _rates(self.took)
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {rates['tokens_per_second']:,.0f} tokens/s, "
            f"{rates['padding']:.0%} padding, waited {self.took['wait_seconds']:.1f} s",
            refresh=False,
        )
        self.bar.update()

    def summary(self) -> dict[str, float]:
        """Of all steps, those before a resume too; empty on the other ranks."""
        if not self.is_main:
            return {}
        lines = (self.args.output_dir / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        names = ("tokens", "cells", "seconds", "wait_seconds")
        sums = {name: sum(record[name] for record in records) for name in names}
        found = {"steps": len(records), "train_seconds": sums["seconds"], **sums, **_rates(sums)}
        del found["seconds"]
        found["cost_balance"] = sum(record["cost_balance"] for record in records) / len(records)
        if known := [record for record in records if "mfu" in record]:
            of_seconds = sum(record["mfu"] * record["seconds"] for record in known)
            found["mfu"] = of_seconds / sum(record["seconds"] for record in known)
        if peaks := [r["peak_memory_gib"] for r in records if "peak_memory_gib" in r]:
            found["peak_memory_gib"] = max(peaks)
        return found


def checked_tracker(name: str | None) -> str | None:
    """The tracker of `--log-with`, if it is installed."""
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


def _rates(took: Mapping[str, float]) -> dict[str, float]:
    """What follows from tokens, cells and seconds."""
    efficiency = took["tokens"] / took["cells"]
    return {
        "tokens_per_second": took["tokens"] / took["seconds"],
        "packing_efficiency": efficiency,
        "padding": 1 - efficiency,
    }


def _cost_balance(batch: kit.Batch, num_ranks: int) -> float:
    """The heaviest rank over the mean. Padded, every rank has as many rows of one width."""
    costs = np.zeros(num_ranks)
    for name in ("cost_per_rank", "vision_cost_per_rank"):
        costs += np.reshape(batch.metadata.get(name, costs), (num_ranks, -1)).sum(axis=1)
    return float(costs.max() / costs.mean()) if costs.any() else 1.0


def _known_peak(model: Any, device: torch.device) -> tuple[float | None, str | None]:
    """FLOP/s of the GPU; None where they are not known, or those of the model are not, and why."""
    if hasattr(model.model.config, "vision_config"):
        return None, "the FLOPs of a vision tower are not counted"
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    if len(trained) < len(list(model.parameters())) and not all("lora_" in n for n in trained):
        return None, "some weights are frozen, and not all that are trained are adapters"
    adapters = _num_adapter_parameters(model)
    try:
        flops_per_step(model.model.config, [1], num_adapter_parameters=adapters)
    except ValueError as error:
        return None, str(error)
    name = torch.cuda.get_device_name(device)
    return peak_flops(name), None if peak_flops(name) else f"the peak of {name} is not known"


def _num_adapter_parameters(model: Any) -> int | None:
    """Of what is trained beside frozen weights; None where nothing is frozen."""
    parameters = list(model.parameters())
    trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
    return None if len(trained) == len(parameters) else sum(trained)


def _flops(parts: list[kit.Batch], model: Any) -> float:
    """Of the examples in these rows, forward and backward; the head sees trained tokens only."""
    lengths = torch.cat([part["sub_seq_lengths"].values for part in parts]).cpu()
    trained = sum(int(part.row_metadata["num_trained"].values.sum()) for part in parts)
    options = {"num_head_tokens": trained if model.through_head else None}
    options["num_adapter_parameters"] = _num_adapter_parameters(model)
    return flops_per_step(model.model.config, lengths, **options)


def _plot_loss(summary: Mapping[str, float], folder: Path) -> None:
    """The loss of every step, thin, and its running mean; the held-out loss where it is known."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, losses = ([record[name] for record in records] for name in ("step", "loss"))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, losses, color="#56B4E9", linewidth=0.8, marker=marker, label="every step")
    if half := len(losses) // 40:
        sums, middle = np.append(0, np.cumsum(losses)), np.arange(len(losses))
        first, stop = np.maximum(middle - half, 0), np.minimum(middle + half + 1, len(losses))
        means, label = (sums[stop] - sums[first]) / (stop - first), f"mean of {2 * half + 1} steps"
        axes.plot(steps, means, color="#0072B2", linewidth=2, label=label)
    if "held_out_loss" in summary:
        loss = summary["held_out_loss"]
        label = f"held out, after the last step: {loss:.3f}"
        axes.axhline(loss, color="#D55E00", linewidth=1.2, linestyle="--", label=label)
    axes.set(xlabel="step", ylabel="loss (mean over trained tokens)")
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
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
    num_head_tokens: int | None = None,
    num_adapter_parameters: int | None = None,
) -> float:
    """Return the FLOPs of the forward and backward pass over examples of these true lengths.

    ``6 * matmul parameters * tokens``, and ``12 * heads * head_dim`` per layer and pair of a token
    and one that it sees. Only `num_head_tokens` pass the head. With LoRA adapters a frozen weight
    costs 4 per token. ValueError for layers other than attention, and adapters beside experts.
    """
    lengths_N = np.asarray(lengths, dtype=np.float64)
    text = config.get_text_config()
    layers, head = flops_per_token(text)
    num_tokens = lengths_N.sum()
    through_head = num_tokens if num_head_tokens is None else num_head_tokens
    linear = layers * num_tokens + head * through_head
    if num_adapter_parameters is not None:
        if _experts(text)[0]:
            raise ValueError(
                "the FLOPs of adapters in a mixture of experts are not known: how many tokens pass "
                "them depends on where they are; leave MFU out for this model"
            )
        linear = linear * 4 / 6 + 6 * num_adapter_parameters * num_tokens
    per_pair = 6 * text.num_attention_heads * _head_sizes(text)
    pairs = sum(count * _seen(lengths_N, window) for window, count in _windows(text).items())
    return float(linear + per_pair * pairs)


def flops_per_token(config: Any) -> tuple[float, float]:
    """Return the FLOPs of linear layers per token, forward and backward: all but the head, head."""
    return _counted(type(config), json.dumps(config.to_dict(), sort_keys=True, default=str))


@functools.cache
def _counted(config_type: type, written: str) -> tuple[float, float]:
    """Count on a model without memory: a matrix is one product per token, except embeddings.

    A token passes only the experts that it is routed to.
    """
    config = config_type.from_dict(json.loads(written))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    output = model.get_output_embeddings().weight
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    looked_up = {id(weight) for module in embeddings for weight in module.parameters()}
    experts, taken = _experts(config)
    layers = 0.0
    for weight in model.parameters():
        if weight.ndim < 2 or weight is output or id(weight) in looked_up:
            continue
        is_of_experts = weight.ndim == 3 and weight.shape[0] == experts
        layers += weight.numel() * (taken / experts if is_of_experts else 1)
    return 6.0 * layers, 6.0 * output.numel()


def _experts(config: Any) -> tuple[int, int]:
    """Return the experts of a layer, and those that a token passes; 0 in a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((n for name in names if (n := getattr(config, name, None))), 0)
    return number, getattr(config, "num_experts_per_tok", None) or 0


def _head_sizes(config: Any) -> int:
    """Return the entries of a key and a value of one head: they differ in DeepSeek's models."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key = getattr(config, "qk_head_dim", None) or size
    return key + (getattr(config, "v_head_dim", None) or size)


def _windows(config: Any) -> dict[int | None, int]:
    """Count the layers per attention window; None: a token sees all before it."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {window: config.num_hidden_layers}
    chunk = getattr(config, "attention_chunk_size", None)
    known = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    if other := sorted(set(kinds) - set(known)):
        raise ValueError(
            f"the FLOPs of a {other[0]!r} layer are not known, only those of {sorted(known)}; "
            "leave MFU out for this model"
        )
    return dict(Counter(known[kind] for kind in kinds))


def _seen(lengths_N: np.ndarray, window: int | None) -> float:
    """Count pairs of a token and one that it sees, itself included."""
    cut = lengths_N if window is None else np.minimum(lengths_N, window)
    return float((cut * (cut + 1) / 2 + (lengths_N - cut) * cut).sum())
