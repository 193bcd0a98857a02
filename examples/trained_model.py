"""The model of a run: loaded or made, with its loss inside, and checked before it is trained."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from typing import Any

import synthetic_chat
import torch
import transformers
from accelerate import Accelerator
from attention_choice import Attention, choose_attention
from read_data import fail
from transformers.modeling_layers import GradientCheckpointingLayer

import torch_collate_kit as kit

# What differs from batch to batch in rows of one shape: how many segments there are, and how long
# the longest is. A layer that is compiled takes any number.
VARYING = ".*cu_seq_lens_[qk].*,.*max_length_[qk].*"


def check_arguments(args: argparse.Namespace) -> None:
    """What cannot be; and `args.precision`, of what a step computes."""
    if args.compile and args.no_packing:
        fail("--compile: padded rows have another width in every batch; leave out --no-packing")
    if args.lora and not args.model:
        fail(f"--lora {args.lora}: adapters are of a trained model; pass --model")
    if args.lora_alpha and not args.lora:
        fail(f"--lora-alpha {args.lora_alpha}: there are no adapters without --lora")
    if args.lora and importlib.util.find_spec("peft") is None:
        fail(f'--lora {args.lora}: needs peft; pip install "torch_collate_kit[lora]"')
    # float16 needs a loss scale, whose first steps overflow by design
    has_bf16 = not args.cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    args.precision = "bf16" if has_bf16 else "no"


def load_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    options = {"dtype": weight_dtype(args)}
    if args.model:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
        except (OSError, ValueError) as error:
            fail(f"--model {args.model}: {str(error).splitlines()[0]}")
    else:
        model = synthetic_chat.make_model(tokenizer, **options)
    return prepare(model, args)


def weight_dtype(args: argparse.Namespace) -> torch.dtype:
    """float32, since small updates are lost in bfloat16; weights that are frozen need no more."""
    is_frozen = args.lora and args.precision == "bf16"
    return torch.bfloat16 if is_frozen else torch.float32


def prepare(model: Any, args: argparse.Namespace) -> Any:
    """With adapters, if they are what is trained, and with gradient checkpointing."""
    if args.lora:
        from peft import LoraConfig

        alpha = args.lora_alpha or 2 * args.lora
        config = LoraConfig(r=args.lora, lora_alpha=alpha, target_modules="all-linear")
        model.add_adapter(config)  # freezes all else; never on the head
        for parameter in trained_parameters(model):
            parameter.data = parameter.data.float()
    if args.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: Any) -> None:
    """By the name that transformers 5.23 gives it, else by that of 5.17, which 5.23 warns of."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)()


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Fused: one kernel for all weights, in place of several for each."""
    options = {"betas": (0.9, 0.98), "weight_decay": args.weight_decay, "fused": True}
    return torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, **options)


class ModelWithLoss(torch.nn.Module):
    """What is trained: a model and its loss, with the logits of a few tokens at a time.

    Its state, which checkpoints save, leaves out what is frozen: with adapters it is the adapters.
    """

    def __init__(self, model: Any, attention: Attention) -> None:
        super().__init__()
        self.model, self.attention, self.through_head = model, attention, True
        self._no_split_modules = model._no_split_modules  # FSDP2 shards these layers one by one
        named = self.named_parameters(remove_duplicate=False)
        self.frozen = tuple(name for name, value in named if not value.requires_grad)
        self.register_state_dict_post_hook(leave_out_frozen)
        self.register_load_state_dict_post_hook(do_not_miss_frozen)

    def forward(self, batch: kit.Batch, num_loss_tokens: int) -> torch.Tensor:
        inputs = batch.model_inputs(**self.attention._asdict(), labels=False)
        options: dict[str, Any] = {"num_loss_tokens": num_loss_tokens}
        if not self.through_head:
            return kit.token_loss(self.model(**inputs).logits, batch, **options)
        config = self.model.config.get_text_config()
        options["logit_softcap"] = getattr(config, "final_logit_softcapping", None)
        hidden = self.model.base_model(**inputs).last_hidden_state
        return kit.token_loss(hidden, batch, head=self.model.get_output_embeddings(), **options)

    @torch.no_grad()
    def check_head(self, batch: kit.Batch) -> None:
        """Some models scale the logits after the head (Granite, Cohere): take these as they are."""
        was_training, losses = self.training, []
        self.eval()
        for self.through_head in (False, True):
            with contextlib.suppress(TypeError):  # a head that is not a plain Linear
                losses.append(self(batch, batch.metadata["num_loss_tokens"]))
        self.through_head = len(losses) == 2 and torch.allclose(*losses, rtol=1e-2)
        self.train(was_training)


def leave_out_frozen(model: ModelWithLoss, state: dict, prefix: str, _: Any) -> None:
    for name in model.frozen:
        state.pop(prefix + name, None)


def do_not_miss_frozen(model: ModelWithLoss, keys: Any) -> None:
    missing = [name for name in keys.missing_keys if not name.endswith(model.frozen)]
    keys.missing_keys[:] = missing


def with_loss(model: Any, batch: kit.Batch, accelerator: Accelerator, args: Any) -> ModelWithLoss:
    """The model to train: its attention chosen, and checked on a few examples; and its head."""
    batch = batch.to(accelerator.device)
    with accelerator.autocast():
        attention, line = choose_attention(model, batch, accelerator.device, args)
        accelerator.print(line)
        trained = ModelWithLoss(model, attention)
        trained.check_head(batch)
    if accelerator.device.type == "cuda" and args.precision == "no":
        accelerator.print("precision: float32, since this GPU does not compute in bfloat16")
    if args.compile:
        compile_layers(model)
    return trained


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile the layers of the decoder: one by one they are one graph, compiled once for all.

    Outside of them a step does little. `optimize_ddp` would cut the graph where buckets of
    gradients end; between layers it is cut already.
    """
    torch.compiler.config.dynamic_sources = VARYING
    torch._dynamo.config.optimize_ddp = False
    parts = model.get_decoder().modules()
    layers = [part for part in parts if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        fail(f"--compile: {type(model).__name__} has no layers that are known; leave it out")
    for layer in layers:
        layer.compile(backend=backend)
