"""Models under isolate_mixers: trained in every way, copied, saved, compiled, and as before."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hybrid_models import hybrid_model
from tests.test_isolate_mixers import (
    BF16,
    TWO_ROWS,
    alone,
    assert_equal,
    assert_equal_gradients,
    gradients,
    isolated,
    original,
    rows_with_a_pad,
)
from tests.tiny_models import packed_inputs
from torch_collate_kit import isolate_mixers

# --- training ------------------------------------------------------------------------------------


def checkpointed(how: str, family: str) -> Any:
    model = isolated(family, scale=5.0, dtype=torch.float64)
    if how == "wrapped":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
    else:
        options = {"use_reentrant": how == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    return model


def of_the_model(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): found[name] for name in found}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "wrapped"])
def test_gradient_checkpointing_of_two_batches_at_once(how, family):
    """Both forward passes come before the backward pass, which runs in a thread of its own."""
    inputs = rows_with_a_pad(*TWO_ROWS), rows_with_a_pad([11, 11], [22])
    plain, model = isolated(family, scale=5.0, dtype=torch.float64), checkpointed(how, family)
    expected = gradients(plain, torch.cat([plain(**each).logits for each in inputs]))
    logits = torch.cat([model(**each).logits for each in inputs])
    found: dict[str, Tensor] = {}
    thread = threading.Thread(target=lambda: found.update(gradients(model, logits)))
    thread.start()
    thread.join()
    assert_equal_gradients(of_the_model(found), expected)


def test_a_layer_that_is_checkpointed_by_hand_is_refused():
    model = isolated("lfm2")
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(
        forward, *args, use_reentrant=False, **kwargs
    )
    logits = model(**packed_inputs(*TWO_ROWS)).logits
    with pytest.raises(ValueError, match="Lfm2ShortConv is called outside of its model's forward"):
        logits.sum().backward()


@pytest.mark.parametrize("first", ["peft", "isolate_mixers"])
def test_lora_inside_mixers(first):
    peft = pytest.importorskip("peft")
    inputs = rows_with_a_pad(*TWO_ROWS)
    config = peft.LoraConfig(target_modules=["in_proj_qkv", "out_proj"], init_lora_weights=False)
    model = hybrid_model("qwen3_5").train()
    if first == "isolate_mixers":
        isolate_mixers(model)
    model = peft.get_peft_model(model, config)
    if first == "peft":
        isolate_mixers(model)
    found = model(**inputs).logits
    found.sum().backward()
    adapters = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in adapters.values())
    isolate_mixers(model, undo=True)
    model.base_model.model.config._attn_implementation = "sdpa"
    assert_equal(found, alone(model.eval(), inputs), 1e-6)


@pytest.mark.release
def test_compiled_with_one_break_per_mixer():
    import torch._dynamo

    model = hybrid_model(
        "lfm2", "sdpa", num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"]
    )
    isolate_mixers(model)
    inputs, others = packed_inputs(*TWO_ROWS), packed_inputs([4, 18], [1, 21])
    torch._dynamo.reset()
    reasons = torch._dynamo.explain(model)(**inputs).break_reasons
    assert len(reasons) == 1
    assert "_MixerForward.__call__" in reasons[0].reason
    compiled = torch.compile(model, backend="eager")
    for each in (inputs, others):
        assert_equal(compiled(**each).logits, model(**each).logits, 1e-6)


LAYOUTS_OF_RANKS = TWO_ROWS, ([11, 11], [1, 21])


@pytest.mark.release
def test_two_ranks(tmp_path):
    """DDP and FSDP2 average the gradients of two ranks, as one process does."""
    script, out = Path(__file__).with_name("two_ranks_isolated.py"), tmp_path / "found.pt"
    root = script.parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), str(out)], cwd=root, env=environment, check=True)
    model = isolated("qwen3_5", scale=5.0, dtype=torch.float64)
    of_ranks = [
        gradients(model, model(**rows_with_a_pad(*rows)).logits) for rows in LAYOUTS_OF_RANKS
    ]
    expected = {name: (of_ranks[0][name] + of_ranks[1][name]) / 2 for name in of_ranks[0]}
    for found in torch.load(out).values():
        assert_equal_gradients(found, expected)


# --- as before -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "lfm2"])
def test_padded_batches_and_generation_are_as_before(family):
    model, reference = isolated(family, "eager"), hybrid_model(family, "eager")
    ids = packed_inputs(*TWO_ROWS)["input_ids"]
    mask = torch.arange(22) < torch.tensor([[22], [17]])
    padded = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
    assert torch.equal(model(**padded).logits, reference.train()(**padded).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found, expected = (each.eval().generate(ids, **options) for each in (model, reference))
    assert torch.equal(found, expected)
    assert torch.equal(model(ids).logits, reference(ids).logits)


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_runs_its_own_mixers(copied):
    model = isolated("lfm2", scale=5.0)
    inputs = rows_with_a_pad(*TWO_ROWS)
    found = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(found(**inputs).logits, alone(original("lfm2", scale=5.0), inputs), 1e-6)


def test_saved_weights_are_as_before(tmp_path):
    model, reference = isolated("lfm2"), original("lfm2")
    assert model.state_dict().keys() == reference.state_dict().keys()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, reference(ids).logits)


def test_undo_restores_everything():
    model = hybrid_model("lfm2")
    before = [{**module.__dict__} for module in model.modules()]
    isolate_mixers(model)
    isolate_mixers(model, undo=True)
    isolate_mixers(model, undo=True)
    after = [module.__dict__ for module in model.modules()]
    assert all(one.keys() == other.keys() for one, other in zip(before, after, strict=True))
    isolate_mixers(model)
    model.forward = lambda *args: None
    with pytest.raises(ValueError, match="forward of Lfm2ForCausalLM was replaced after isolate_m"):
        isolate_mixers(model, undo=True)
    with pytest.raises(TypeError, match="undo must be True or False, got 1"):
        isolate_mixers(model, **{"undo": 1})


def test_mixed_precision_of_accelerate_and_back():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer before
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    inputs = rows_with_a_pad(*TWO_ROWS)
    model = isolated("lfm2", scale=5.0)
    expected = model(**inputs).logits
    prepared = accelerator.prepare_model(model)
    isolate_mixers(prepared)
    assert_equal(prepared(**inputs).logits, expected, BF16)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(unwrapped(**inputs).logits, expected)


def test_a_forward_without_keywords_gets_only_what_it_takes():
    model = hybrid_model("rwkv", scale=5.0)
    forward = model.forward
    model.forward = lambda input_ids, use_cache=None: forward(input_ids, use_cache=use_cache)
    isolate_mixers(model)
    inputs = rows_with_a_pad(*TWO_ROWS)
    assert_equal(model(**inputs).logits, alone(original("rwkv", scale=5.0), inputs), 1e-6)
