"""Run a script with FSDP2 on CPU ranks: `torchrun ... fsdp_on_cpu.py examples/sft.py --cpu ...`.

Accelerate shards on accelerators only. On a CPU it leaves ACCELERATE_USE_FSDP aside and trains with
DDP, without a word. Nothing else in it or in torch asks for a GPU, so here is what its state would
say on one; everything that follows is Accelerate's own code for FSDP2, over gloo.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """As accelerate.state does for MULTI_GPU where a plugin is given."""
    whole = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        whole(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.use_distributed:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_plugin


if __name__ == "__main__":
    shard_on_cpu()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
