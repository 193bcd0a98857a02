"""The launch configurations, read by Accelerate: what they start, and that no key is made up."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trained_model
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from tests.examples.rank_server import EXAMPLES, parse_launch

EXPECTED = {  # ranks, machines, FSDP, bf16
    "cpu": (1, 1, False, False),
    "eight_gpus_ddp": (8, 1, False, True),
    "eight_gpus_fsdp2": (8, 1, True, True),
    "one_gpu": (1, 1, False, True),
    "two_nodes_fsdp2": (16, 2, True, True),
}


CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_it_starts(path: Path) -> None:
    """And no key is made up: the reader refuses unknown ones, but takes any below fsdp_config."""
    args = parse_launch(path)
    found = (args.num_processes, args.num_machines, args.use_fsdp, args.mixed_precision == "bf16")
    assert found == EXPECTED[path.stem]
    assert args.multi_gpu == (path.stem == "eight_gpus_ddp")
    known = vars(launch_command_parser().parse_args(["sft.py"]))
    config = load_config_from_file(str(path))
    assert set(config.fsdp_config) <= set(known)
    assert bool(config.fsdp_config) == path.stem.endswith("fsdp2")


def test_the_slurm_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "configs" / "slurm.sh"], check=True)


def test_sums_over_ranks_and_the_loss_are_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")  # as Accelerate does
    state = SimpleNamespace(fsdp_plugin=plugin)
    sharded = {"state": state, "distributed_type": DistributedType.FSDP, "num_processes": 2}
    trained_model.check_sharding(SimpleNamespace(**sharded))
    policy = plugin.mixed_precision_policy
    found = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    assert found == (torch.bfloat16, torch.float32, None)
