"""What sft.py makes of Accelerate's settings of FSDP2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sharding
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType


def accelerator(plugin: FullyShardedDataParallelPlugin) -> SimpleNamespace:
    state = SimpleNamespace(fsdp_plugin=plugin)
    return SimpleNamespace(state=state, distributed_type=DistributedType.FSDP, num_processes=2)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")


def test_sums_over_ranks_and_the_loss_are_in_fp32() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")  # as Accelerate does
    policy = plugin.mixed_precision_policy
    assert (policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.bfloat16)
    sharding.check_sharding(accelerator(plugin))
    policy = plugin.mixed_precision_policy
    found = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    assert found == (torch.bfloat16, torch.float32, None)


def test_fsdp1_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type="SHARDED_STATE_DICT")
    with pytest.raises(SystemExit, match=r"other settings: write fsdp_version: 2 in the config"):
        sharding.check_sharding(accelerator(plugin))


def test_without_fsdp_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    sharding.check_sharding(SimpleNamespace())
