"""isolate_mixers: packed rows of hybrid models equal each example alone, in a model without it."""

from __future__ import annotations

import copy
import io
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from tests.hybrid_models import ATTENTION, FAMILIES, hybrid_model
from tests.ranks import on_two_ranks
from tests.tiny_models import VOCAB, packed_inputs, tiny_model
from torch_collate_kit import IsolationError, PackedCollator, check_isolation, isolate_mixers

EXACT = [family for family in FAMILIES if family != "glm5_next"]
WITHOUT_ATTENTION = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
ONE_ROW, TWO_ROWS = ([5, 3, 1, 5, 9],), ([5, 3, 5, 9], [7, 7, 1, 7])
BF16 = 0.02
"""Of the largest logit; at most 0.0063 was measured, for Inkling."""


def isolated(
    family: str, attention: str = "torch_varlen", *, training: bool = True, **options: Any
) -> Any:
    model = hybrid_model(family, ATTENTION.get(family, attention), **options).train(training)
    isolate_mixers(model)
    return model


def original(family: str, **options: Any) -> Any:
    """The same weights as :func:`isolated`; attention alone needs no boundaries."""
    default = "eager" if family in WITHOUT_ATTENTION else "sdpa"
    return hybrid_model(family, ATTENTION.get(family, default), **options)


def rows_with_a_pad(*rows: list[int]) -> dict[str, Any]:
    inputs = packed_inputs(*rows)
    inputs["input_ids"][0, 2] = 0  # the pad token, with a random embedding, as text
    return inputs


def alone(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Logits [R, W, V] of every segment run by itself, without boundaries."""
    ids, bounds = inputs["input_ids"], inputs["cu_seq_lens_q"].tolist()
    pieces = [
        model(input_ids=ids.flatten()[None, start:stop], use_cache=False).logits[0]
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(pieces).unflatten(0, ids.shape)


def assert_equal(found: Tensor, expected: Tensor, allowed: float) -> None:
    """Within ``allowed`` of the largest expected value."""
    difference = (found - expected).abs().max().item()
    assert difference <= allowed * expected.abs().max().item()


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters, of random weights times the logits."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (logits * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], allowed: float = 1e-6
) -> None:
    """Parameter by parameter, within ``allowed`` of its largest entry."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference, largest = (found[name] - value).abs().max(), value.abs().max()
        assert difference <= allowed * largest, f"{name}: {difference / largest:.1e}"


class AllInFloat64(TorchFunctionMode):
    """Compute in float64 what a model converts to float32 for precision, as most do in parts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        named = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (kwargs or {}).items()
        }
        return func(*args, **named)


# --- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EXACT)
def test_packed_rows_and_their_gradients_equal_those_alone(family):
    check_gradients(family, TWO_ROWS, 5.0)


def check_gradients(family: str, rows: Any, scale: float) -> None:
    """Nothing but the rounding of float64 differs: no tolerance that a leak could hide in."""
    inputs = rows_with_a_pad(*rows)
    packed = isolated(family, scale=scale, dtype=torch.float64).double()
    reference = original(family, scale=scale, dtype=torch.float64).double()
    with AllInFloat64():
        found, expected = packed(**inputs).logits, alone(reference, inputs)
        assert_equal(found, expected, 1e-13)
        assert_equal_gradients(gradients(packed, found), gradients(reference, expected), 1e-10)
        positions = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
        leaking = reference(**positions).logits
    if scale > 1:
        assert (leaking - expected).abs().max() > 1e-2 * expected.abs().max(), "nothing to isolate"


@pytest.mark.release
@pytest.mark.parametrize("rows", [ONE_ROW, TWO_ROWS, ([40, 3, 17], [1, 30, 29])], ids=str)
@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("family", EXACT)
def test_every_size_and_scale(family, scale, rows):
    inputs = rows_with_a_pad(*rows)
    check_gradients(family, rows, scale)
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, BF16)):
        if dtype == torch.bfloat16 and family == "xlstm":
            continue  # its kernel fails in bfloat16
        with torch.no_grad():
            expected = alone(original(family, scale=scale, dtype=dtype), inputs)
            found = isolated(family, scale=scale, dtype=dtype)(**inputs).logits
        assert_equal(found, expected, allowed)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "mamba", "granitemoehybrid", "rwkv"])
def test_a_batch_passes_check_isolation(family, training):
    examples = [{"input_ids": list(range(3, 3 + n))} for n in (9, 4, 4, 12, 7)]
    batch = PackedCollator(0, max_tokens=20)(examples)
    model = isolated(family, scale=5.0, training=training)
    check_isolation(model, batch)
    assert model(**batch.model_inputs(model)).logits.shape == (*batch["input_ids"].shape, VOCAB)


def test_with_a_block_mask():
    inputs = rows_with_a_pad(*TWO_ROWS)
    ids = torch.repeat_interleave(torch.arange(8), inputs["cu_seq_lens_q"].diff()).view(2, 22)
    blocks = (ids[:, :, None] == ids[:, None]).tril()[:, None]
    model = hybrid_model("granitemoehybrid", "sdpa", scale=5.0)
    isolate_mixers(model)
    expected = alone(original("granitemoehybrid", scale=5.0), inputs)
    assert_equal(model(**inputs, attention_mask=blocks).logits, expected, 1e-6)


def test_positions_that_rows_share():
    inputs = rows_with_a_pad([5, 17], [5, 17])
    options = {"scale": 5.0, "dtype": torch.float64}
    with AllInFloat64():
        expected = alone(original("recurrent_gemma", **options).double(), inputs)
        inputs["position_ids"] = inputs["position_ids"][:1]
        found = isolated("recurrent_gemma", **options).double()(**inputs).logits
    assert_equal(found, expected, 1e-13)


def test_segments_of_one_length_run_together():
    model = hybrid_model("lfm2", scale=5.0)
    mixer = model.model.layers[0].conv
    seen = []
    mixer.register_forward_pre_hook(lambda *_: seen.append("the rows"))
    before = mixer.forward

    def counted(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        seen.append(list(hidden_states.shape[:2]))
        return before(hidden_states, **kwargs)

    mixer.forward = counted  # of somebody else; it is kept
    isolate_mixers(model)
    isolate_mixers(model)
    model(**packed_inputs(*TWO_ROWS))
    assert seen == ["the rows", [2, 5], [1, 3], [1, 9], [3, 7], [1, 1]]
    isolate_mixers(model, undo=True)
    assert mixer.forward is counted


def test_the_host_copy_is_read_and_not_the_device():
    inputs = rows_with_a_pad(*TWO_ROWS)
    model = hybrid_model("qwen3_5", "sdpa")
    isolate_mixers(model)
    expected = model(**inputs).logits
    inputs["cu_seqlens_cpu"] = inputs["cu_seq_lens_q"]
    inputs |= {
        name: inputs["cu_seqlens_cpu"].to("meta") for name in ("cu_seq_lens_q", "cu_seq_lens_k")
    }
    assert torch.equal(model(**inputs).logits, expected)


# --- refused -------------------------------------------------------------------------------------


NOT_HELPED: list[tuple[Any, type[Exception], str]] = [
    (lambda: hybrid_model("glm5_next", "sdpa"), IsolationError, "pools neighbouring tokens"),
    (lambda: tiny_model("qwen3"), ValueError, "Qwen3ForCausalLM has no layers that carry state"),
    (lambda: tiny_model("bloom", "eager"), IsolationError, "takes a 2-D attention_mask only"),
    (lambda: hybrid_model("lfm2", layer_types=["full_attention"] * 2), ValueError,
     r"carry state from token to token \(no Lfm2ShortConv\), so there is nothing"),
    (lambda: torch.nn.Linear(1, 1), ValueError, r"Linear has no layers .*\(none in the table\)"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "error", "message"), NOT_HELPED)
def test_models_that_it_does_not_help_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        isolate_mixers(model())


MASK = torch.ones(2, 22, dtype=torch.int64)
WITHOUT = {"cu_seq_lens_q": None, "cu_seq_lens_k": None}
CALLS = {
    "training": (True, {**WITHOUT, "position_ids": None}, "in training, so packed rows"),
    "positions": (False, WITHOUT, "no cu_seq_lens_q in evaluation with position_ids"),
    "cache": (True, {**WITHOUT, "past_key_values": object()}, "no cu_seq_lens_q in training"),
    "4-D mask": (True, {**WITHOUT, "attention_mask": MASK[:, None, None]}, "in training"),
    "2-D mask": (True, {"attention_mask": MASK}, "2-D attention_mask .* addition to boundaries"),
    "use_cache": (False, {"use_cache": True}, "use_cache=True is passed.* pass use_cache=False"),
    "default": (False, {"use_cache": None}, "use_cache=True is passed, or is the default"),
    "rows": (True, {"cu_seq_lens_q": torch.tensor([0, 30, 44])}, "do not fit 2 rows of 22 tokens"),
    "end": (True, {"cu_seq_lens_q": torch.tensor([0, 22, 40])}, "rise from 0 to 44"),
    "order": (True, {"cu_seq_lens_q": torch.tensor([0, 22, 9, 44])}, r"boundaries \[0, 22, 9, 44"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_could_leak_are_refused(case):
    training, changes, message = CALLS[case]
    inputs = packed_inputs(*TWO_ROWS) | changes
    inputs = {name: value for name, value in inputs.items() if value is not None}
    model = hybrid_model("qwen3_5", "sdpa").train(training)
    isolate_mixers(model)
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # the second from 5.24 on
def test_a_cache_beside_boundaries_is_refused(name):
    model = isolated("qwen3_5", training=False)
    cache = model(input_ids=torch.tensor([[3, 4]])).past_key_values
    with pytest.raises(ValueError, match=rf"{name} is passed.* pass use_cache=False"):
        model(**packed_inputs([22]), **{name: cache})


def test_a_mixer_outside_of_its_model_is_refused_where_gradients_are_made():
    mixer = isolated("lfm2").model.layers[0].conv
    hidden = torch.zeros(1, 4, 32)
    for training in (True, False):
        with pytest.raises(ValueError, match=r"call the model, and checkpoint .* checkpoint_wr"):
            mixer.train(training)(hidden)
    with torch.no_grad():
        assert mixer(hidden).shape == hidden.shape


def test_rows_that_the_model_splits_are_refused():
    model = isolated("xlstm", training=False, max_inference_chunksize=8)
    with pytest.raises(ValueError, match=r"xLSTMLayer got \[2, 8\] tokens, and the boundaries are"):
        model(**packed_inputs(*TWO_ROWS))


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


def wrapped_gradients() -> list[dict[str, Tensor]]:
    """Those of this rank under DDP, and under FSDP2."""
    dist.init_process_group("gloo")
    found = []
    for wrap in (DistributedDataParallel, fully_shard):
        model = isolated("qwen3_5", scale=5.0, dtype=torch.float64)
        for layer in model.model.layers if wrap is fully_shard else ():
            fully_shard(layer)
        model = wrap(model)
        grads = gradients(
            model, model(**rows_with_a_pad(*LAYOUTS_OF_RANKS[dist.get_rank()])).logits
        )
        whole = {k: g.full_tensor() if wrap is fully_shard else g for k, g in grads.items()}
        found.append({name.removeprefix("module."): value for name, value in whole.items()})
    dist.destroy_process_group()
    return found


@pytest.mark.release
def test_two_ranks():
    """DDP and FSDP2 average the gradients of two ranks, as one process does."""
    model = isolated("qwen3_5", scale=5.0, dtype=torch.float64)
    of_ranks = [
        gradients(model, model(**rows_with_a_pad(*rows)).logits) for rows in LAYOUTS_OF_RANKS
    ]
    expected = {name: (of_ranks[0][name] + of_ranks[1][name]) / 2 for name in of_ranks[0]}
    for found in on_two_ranks(wrapped_gradients)[0]:
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
