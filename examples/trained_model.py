"""The model of a run: loaded or made, its attention chosen and checked, its loss inside."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
from typing import Any, NamedTuple

import synthetic_chat
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from checkpoints import fail
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, StateDictType
from transformers.modeling_layers import GradientCheckpointingLayer

import torch_collate_kit as kit
from torch_collate_kit.attention import context_join

FLASH = ["flash_attention_3", "flash_attention_2"]
NAMES = [*FLASH, "torch_varlen", "sdpa", "eager"]  # the fastest first

# Raised by attention that cannot do what a model or a batch asks for.
CANNOT = (kit.IsolationError, ImportError, NotImplementedError, RuntimeError, ValueError)


def load_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    options = {"dtype": weight_dtype(args)}
    if args.model:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
        except (OSError, ValueError) as error:
            fail(f"--model {args.model}: {str(error).splitlines()[0]}")
    else:
        model = synthetic_chat.make_model(tokenizer, hidden_size=128, arch=args.arch, **options)
    return prepare(model, args)


def weight_dtype(args: argparse.Namespace) -> torch.dtype:
    """float32, since small updates are lost in bfloat16; weights that are frozen need no more."""
    is_frozen = args.lora and args.precision == "bf16"
    return torch.bfloat16 if is_frozen else torch.float32


def prepare(model: Any, args: argparse.Namespace) -> Any:
    """Add adapters and gradient checkpointing, where the options ask for them."""
    if args.lora:
        from peft import LoraConfig

        alpha = args.lora_alpha or 2 * args.lora
        config = LoraConfig(r=args.lora, lora_alpha=alpha, target_modules="all-linear")
        model.add_adapter(config)  # freezes all else; never on the head
        for parameter in trained_parameters(model):
            parameter.data = parameter.data.float()
    if args.gradient_checkpointing:  # the name in transformers 5.23, else the one it deprecates
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)()
    return model


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Fused: one kernel for all weights, in place of several for each."""
    options = {"betas": (0.9, 0.98), "weight_decay": args.weight_decay, "fused": True}
    return torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, **options)


class Context(NamedTuple):
    """The ranks that compute the same rows, and this one among them."""

    rank: int
    size: int
    group: dist.ProcessGroup


def divide_ranks(args: argparse.Namespace) -> None:
    """Decide which rows this rank reads: with --context-parallel those of its neighbours, too."""
    size = args.context_parallel
    if args.num_ranks % size:
        fail(f"--context-parallel {size}: must divide the number of ranks, {args.num_ranks}")
    args.layout = kit.ParallelLayout(dp=args.num_ranks // size, cp=size)
    args.dp_rank, rank = args.layout.place(args.rank)
    args.context = Context(rank, size, dist.new_subgroups(size)[0]) if size > 1 else None


def loss_or_logps(values: torch.Tensor, batch: kit.Batch, **options: Any) -> torch.Tensor:
    """Return the loss, or without a number to divide by the log-prob of each trained token."""
    if options["num_loss_tokens"] is None:
        del options["num_loss_tokens"]
        return kit.token_logps(values, batch, **options)
    return kit.token_loss(values, batch, **options)


class ModelWithLoss(kit.losses.ModelWithLoss):
    """A model and its loss; checkpoints save its trained weights, with LoRA the adapters alone."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, loss_or_logps)
        self.through_head = True
        self.context: Context | None = None  # ranks that compute the same rows
        named = self.named_parameters(remove_duplicate=False)
        self.frozen = tuple(name for name, value in named if not value.requires_grad)
        self.register_state_dict_post_hook(ModelWithLoss._leave_out_frozen)
        self.register_load_state_dict_post_hook(ModelWithLoss._do_not_miss_frozen)

    def forward(self, batch: kit.Batch, num_loss_tokens: int | None) -> torch.Tensor:
        """Return the loss, or without a number to divide by the log-prob of each trained token."""
        if self.context is not None:
            return self.of_shard(batch, num_loss_tokens, self.context)
        return self.of_rows(batch, batch.model_inputs(self.model, labels=False), num_loss_tokens)

    def of_shard(self, batch: kit.Batch, num_loss_tokens: int | None, context: Context) -> Any:
        """Return the loss of this rank's cells, or the log-probs of all cells of the rows."""
        shard = batch.context_shard(context.rank, context.size)
        inputs = shard.model_inputs(self.model, context_group=context.group)
        found = self.of_rows(shard, inputs, num_loss_tokens)
        if num_loss_tokens is None:
            return context_join(found, shard, group=context.group)
        return found

    def of_rows(self, batch: kit.Batch, inputs: dict, num_loss_tokens: int | None) -> torch.Tensor:
        options = {"num_loss_tokens": num_loss_tokens}
        if not self.through_head:
            return self.loss(self.model(**inputs).logits, batch, **options)
        return super().forward(batch, inputs=inputs, **options)

    @torch.no_grad()
    def check_head(self, batch: kit.Batch) -> None:
        """Give up on `through_head` for models that scale logits after it (Granite, Cohere)."""
        was_training, losses = self.training, []
        self.eval()
        for self.through_head in (False, True):
            with contextlib.suppress(TypeError, ValueError):  # no plain Linear, or scaled logits
                losses.append(self(batch, batch.metadata["num_loss_tokens"]))
        self.through_head = len(losses) == 2 and torch.allclose(*losses, rtol=1e-2)
        self.train(was_training)

    def _leave_out_frozen(self, state: dict, prefix: str, _: Any) -> None:
        for name in self.frozen:
            state.pop(prefix + name, None)

    def _do_not_miss_frozen(self, keys: Any) -> None:
        missing = [name for name in keys.missing_keys if not name.endswith(self.frozen)]
        keys.missing_keys[:] = missing


def with_loss(model: Any, batch: kit.Batch, accelerator: Accelerator, args: Any) -> ModelWithLoss:
    """Choose the attention of the model, check it and the head on `batch`, and add the loss."""
    batch = batch.to(accelerator.device)
    with accelerator.autocast():
        accelerator.print(choose_attention(model, batch, accelerator.device, args))
        trained = ModelWithLoss(model)
        trained.check_head(batch)
    if accelerator.device.type == "cuda" and args.precision == "no":
        accelerator.print("precision: float32, since this GPU does not compute in bfloat16")
    if args.compile:
        compile_layers(model)
    return trained


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile the layers of the decoder one by one: they share one graph, compiled once."""
    torch._dynamo.config.optimize_ddp = False  # would split graphs; layers are apart already
    parts = model.get_decoder().modules()
    layers = [part for part in parts if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        fail(f"--compile: the layers of {type(model).__name__} are not known; leave it out")
    for layer in layers:
        layer.compile(backend=backend)


# --- attention


def choose_attention(
    model: Any, batch: kit.Batch, device: torch.device, args: argparse.Namespace
) -> str:
    """Set the attention of the model; return a line that says which, and why.

    `--attention auto` tries what the device may have, the fastest first. `batch` has two examples,
    which must not see each other where they are packed. A hybrid model for which no kernel keeps
    them apart runs its mixers segment by segment.
    """
    try:
        return "attention: {} ({})".format(*first_that_works(model, batch, device, args))
    except kit.IsolationError as error:
        if args.no_packing:
            raise
        try:
            kit.isolate_mixers(model)
        except (ValueError, kit.IsolationError):  # it has no mixers, or they are not all
            raise error from None
        name, why = first_that_works(model, batch, device, args)
        said = in_short(error).removesuffix(", use --no-packing")
        return f"attention: {name} ({why}); isolate_mixers, since {said} without it"


def first_that_works(
    model: Any, batch: kit.Batch, device: torch.device, args: argparse.Namespace
) -> tuple[str, str]:
    """Set the first attention that computes packed examples as alone; return it and the reason."""
    names = [args.attention]
    if args.attention == "auto":
        names = NAMES if device.type == "cuda" else NAMES[len(FLASH) :]
        names = ["sdpa", "eager"] if args.no_packing else names
    reasons: list[str] = []
    for name in names:
        reason = why_not(name, model, device, args) or why_refused(name, model)
        if reason := reason or why_it_fails(model, batch, args):
            reasons.append(f"{name} {reason}")
            continue
        why = "; ".join(reasons) or f"the first choice on {device.type}"
        return name, "as asked for" if args.attention != "auto" and not reasons else why
    which = "no attention" if args.attention == "auto" else f"--attention {args.attention}"
    how = "" if args.no_packing else " on packed rows, use --no-packing"
    cannot = f"{which} can" if args.attention == "auto" else f"{which} cannot"
    raise kit.IsolationError(f"{cannot} train {type(model).__name__}{how}: {'; '.join(reasons)}")


def why_not(name: str, model: Any, device: torch.device, args: argparse.Namespace) -> str | None:
    """Return why this attention is not tried: it would be wrong or slow; None if it is."""
    config, kind = model.config.get_text_config(), type(model).__name__
    if name == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        return f"leaves out the soft-capping of {kind}"
    if name in FLASH:
        if device.type != "cuda":
            return "needs a CUDA GPU"
        version = name[-1]
        if not getattr(transformers.utils, f"is_flash_attn_{version}_available")():
            return "is not installed"
        # gpt-oss and others have sinks, which most flash attention leaves out in silence
        known = getattr(model, "_compatible_flash_implementations", None) or [name]
        if not model._supports_flash_attn or name not in known:
            return f"is not supported by {kind}"
    elif name != "torch_varlen" or device.type != "cuda":
        return None
    elif importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs a newer torch than {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    this = "this one has {}.{}".format(*capability)
    needs = {
        "a Hopper GPU (compute capability 9), " + this: name[-1] != "3" or capability[0] == 9,
        "a GPU of compute capability 8.0, " + this: capability >= (8, 0),
        "bfloat16, and this run is in float32": args.precision == "bf16",
        f"a head size that divides by 8 and is at most 256, this model has {size}": (
            size % 8 == 0 and size <= 256
        ),
    }
    return next((f"needs {need}" for need, is_met in needs.items() if not is_met), None)


def why_refused(name: str, model: Any) -> str | None:
    """Give the text model this attention; a vision tower keeps its own. Or why it has another."""
    kit.register_torch_varlen()
    has_parts = "text_config" in model.config.sub_configs
    try:
        model.set_attn_implementation({"text_config": name} if has_parts else name)
    except CANNOT as error:
        return f"is refused: {in_short(error)}"
    found = model.config.get_text_config()._attn_implementation
    return None if found == name else f"cannot be set, {type(model).__name__} keeps {found}"


def why_it_fails(model: Any, batch: kit.Batch, args: argparse.Namespace) -> str | None:
    """Return why packed examples are not computed as they are alone; None if they are."""
    if args.no_packing:
        return None
    try:
        kit.check_isolation(model, batch)
    except CANNOT as error:
        return f"fails: {in_short(error)}"
    return None


def in_short(error: Exception) -> str:
    """Return the beginning of a message, without its reasons and ways out."""
    return re.split(r"[:;.] ", " ".join(str(error).split()) or type(error).__name__)[0]


# --- weights in parts


def check_sharding(accelerator: Accelerator) -> None:
    """Refuse settings that Accelerate would replace in silence, and keep sums in fp32."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    if accelerator.distributed_type != DistributedType.FSDP:
        if accelerator.num_processes > 1:
            fail("FSDP: Accelerate shards on GPUs only, and would use DDP here; take DDP instead")
        return
    plugin = accelerator.state.fsdp_plugin
    is_sharded = plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    needed = {
        "fsdp_version: 2": plugin.fsdp_version == 2,
        "fsdp_state_dict_type: SHARDED_STATE_DICT": is_sharded,
        # The others would check a model without weights.
        "fsdp_cpu_ram_efficient_loading: false": not plugin.cpu_ram_efficient_loading,
    }
    if other := [setting for setting, is_met in needed.items() if not is_met]:
        fail(f"FSDP is tested with other settings: write {', '.join(other)} in the configuration")
    if policy := plugin.mixed_precision_policy:  # Accelerate's has bf16 losses and sums of ranks
        options = {"param_dtype": policy.param_dtype, "reduce_dtype": torch.float32}
        plugin.mixed_precision_policy = MixedPrecisionPolicy(**options)


def whole_weights(model: Any, accelerator: Accelerator) -> dict[str, torch.Tensor] | None:
    """Gather the trained weights of all ranks, for `save_pretrained`; None if none are sharded."""
    if not accelerator.is_fsdp2:
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    tied = model.model.all_tied_weights_keys  # a head that is the embedding is saved once
    named = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in named.items() if name not in tied}


def whole_model(model: Any, accelerator: Accelerator) -> Any:
    """Return the model to generate with, whole on every rank, so that none waits for another."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
    return accelerator.unwrap_model(model).model
