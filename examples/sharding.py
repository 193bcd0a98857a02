"""FSDP2 through Accelerate: weights, gradients and optimizer state in parts, one on each rank."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from read_data import fail
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, StateDictType


def check_sharding(accelerator: Accelerator) -> None:
    """Refuse what Accelerate would take and do otherwise, and keep sums in fp32."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    if accelerator.distributed_type != DistributedType.FSDP:
        if accelerator.num_processes > 1:
            fail(
                "FSDP: Accelerate shards on GPUs only, and would use DDP here; choose that instead"
            )
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
    """The trained weights for `save_pretrained`: on the main process, from all ranks."""
    if not accelerator.is_fsdp2:
        return None  # the model has them
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    tied = model.model.all_tied_weights_keys  # a head that is the embedding is saved once
    named = {name.removeprefix("model."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in named.items() if name not in tied}


def whole_model(model: Any, accelerator: Accelerator) -> Any:
    """The model by itself, to generate with: every rank has all of it, and shares nothing more.

    Ranks write answers of different lengths, so none may wait for the weights of another.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
    return accelerator.unwrap_model(model).model
