"""Two-way models through transformers' FlashAttention path: ``python -m tests.kernels.encoders``.

It prints JSON: how far packed rows are from each text alone, run with sdpa. A process of its own,
since the package must look installed before transformers is imported.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch

from tests.kernels import stand_ins
from tests.kernels.stand_ins import claim_cuda, install

_attend = stand_ins._attend


def _in_any_dtype(q: Any, k: Any, v: Any, options: Any) -> Any:
    with mock.patch.object(torch, "float16", q.dtype):  # the kernels take 16 bits only
        return _attend(q, k, v, options)


def main() -> None:
    stand_ins._attend = _in_any_dtype
    install()
    claim_cuda()
    from tests.encoder_models import ENCODERS, compared, encoder_model, packed, texts

    found: dict[str, float] = {}
    for number, (name, options, attention, bounds) in enumerate(ENCODERS):
        if "flash" in attention:
            model = encoder_model(name, "flash_attention_2", **options)
            examples = texts(model)
            alone = encoder_model(name, "sdpa", **options)
            worst = max(compared(model, packed(model, examples), examples, alone))
            found[f"{name} {number}"] = worst / bounds[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
