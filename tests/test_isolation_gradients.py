"""check_isolation by gradients: leaks that are too small for any tolerance, and its own traces."""

from __future__ import annotations

import contextlib
import copy
import warnings
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.batch_checks import same_value
from tests.hybrid_models import ATTENTION, hybrid_model
from tests.test_isolation import Toy, from_cell_to_cell, toy_inputs
from tests.tiny_models import TRANSFORMERS, packed_inputs, tiny_model
from torch_collate_kit import IsolationError, PackedCollator, check_isolation

ROWS = ([2, 1, 3], [1, 3, 2])
FIRST_CELLS = [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 4)]
COMPARED_ONLY = "check_isolation has compared logits only, with a tolerance: "
BY_GRADIENT = r"have a gradient of \S+ at the inputs of the former, of \S+ at its own, and only 0"


# --- what it finds -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_of_a_millionth_between_any_two_segments_is_named(dtype):
    inputs = toy_inputs(*ROWS)
    check_isolation(Toy().to(dtype), inputs)
    for (first, source), (second, target) in permutations(enumerate(FIRST_CELLS), 2):
        model = Toy(from_cell_to_cell(source, target, weight=1e-6)).to(dtype).eval()
        names = [f"row {k // 3} segment {k % 3}" for k in (first, second)]
        message = rf"{names[0]} leaks into {names[1]} \(in eval mode\).*{BY_GRADIENT}.*; 1 of 5 "
        with pytest.raises(IsolationError, match=message):
            check_isolation(model, inputs)


def test_a_tolerance_is_for_movements_only():
    def by_choice(model: nn.Module, hidden: Tensor) -> Tensor:
        return from_cell_to_cell((0, 0), (0, 4), weight=0.01)(model, hidden.detach()) + (
            hidden - hidden.detach()
        )

    inputs = toy_inputs([3, 3])
    check_isolation(Toy(by_choice), inputs, tolerance=0.1)
    with pytest.raises(IsolationError, match=r"0\.001 of that is allowed"):
        check_isolation(Toy(by_choice), inputs, tolerance=0.001)
    with pytest.raises(IsolationError, match=BY_GRADIENT):
        check_isolation(Toy(from_cell_to_cell((0, 0), (0, 4), weight=0.01)), inputs, tolerance=0.1)


def test_a_small_leak_in_training_mode_is_found():
    def in_training(model: nn.Module, hidden: Tensor) -> Tensor:
        return leak(model, hidden) if model.training else hidden

    leak = from_cell_to_cell((0, 0), (0, 4), weight=1e-6)
    with pytest.raises(IsolationError, match=rf"in training mode.*{BY_GRADIENT}"):
        check_isolation(Toy(in_training), toy_inputs([3, 3]))


class Unseen(nn.Module):
    """A model whose family is not seen, so that nothing is refused before it runs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.models = [model]  # not a submodule
        self.config = SimpleNamespace(_attn_implementation=model.config._attn_implementation)
        self.get_input_embeddings = model.get_input_embeddings

    def forward(self, **inputs: Any) -> Any:
        return self.models[0](**inputs)


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(100), marks=pytest.mark.release)], ids=["2", "100"]
)
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "jamba", "inkling"])
def test_a_convolution_over_segments_is_found_in_bfloat16_at_initial_weights(family, seeds):
    """As with the kernels installed and seq_idx forgotten: the table is passed by."""
    model = hybrid_model(family, ATTENTION.get(family, "sdpa"), dtype=torch.bfloat16)
    for seed in seeds:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model.apply(model._init_weights)
        with pytest.raises(IsolationError, match="row 0 segment 0 leaks into row 0 segment 1"):
            check_isolation(Unseen(model).eval(), packed_inputs([7, 5, 8], varlen=False))


# --- what it leaves ------------------------------------------------------------------------------


class Checkpointed(Toy):
    """A layer under checkpointing, reentrant or not, with dropout."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__(self.run)
        self.layer, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def run(self, model: nn.Module, hidden: Tensor) -> Tensor:
        def layer(hidden: Tensor) -> Tensor:
            return nn.functional.dropout(self.layer(hidden), 0.5, self.training)

        return hidden + checkpoint(layer, hidden, use_reentrant=self.use_reentrant)


CONTEXTS = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("frozen", [True, False], ids=["all frozen", "in part"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nothing_is_left(use_reentrant, frozen, context):
    model = Checkpointed(use_reentrant=use_reentrant)
    model.layer.weight.requires_grad_(False)
    if frozen:
        model.requires_grad_(False)
    model.layer.bias.grad = torch.ones(8)
    before = [parameter.requires_grad for parameter in model.parameters()]
    model.train().layer.eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    inputs = toy_inputs(*ROWS)
    given, state = copy.deepcopy(inputs), torch.get_rng_state()
    with context(), warnings.catch_warnings():
        warnings.simplefilter("error")
        check_isolation(model, inputs)
    assert same_value(inputs, given)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert torch.equal(model.layer.bias.grad, torch.ones(8))
    assert model.embed.weight.grad is None
    assert model.layer.weight.grad is None
    assert not model.embed._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_under_gradient_checkpointing_passes_without_a_warning(use_reentrant, recwarn):
    model = tiny_model("qwen3", "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    check_isolation(model, packed_inputs(*ROWS, varlen=False))
    assert not [each for each in recwarn if "tolerance" in str(each.message)]


# --- models without a gradient -------------------------------------------------------------------


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no backward kernel")


def nan_gradient(model: nn.Module, hidden: Tensor) -> Tensor:
    return hidden + (hidden - hidden).sqrt()


@pytest.mark.parametrize(
    ("leak", "reason"),
    [
        (lambda model, hidden: NoBackward.apply(hidden), "RuntimeError: no backward kernel"),
        (lambda model, hidden: hidden.detach(), "RuntimeError: element 0 of tensors does not req"),
        (
            lambda model, hidden: hidden * 0 + hidden.detach(),
            "the gradient at its embeddings is NaN",
        ),
        (nan_gradient, "the gradient at its embeddings is NaN"),
    ],
)
def test_a_model_without_a_gradient_is_compared_only(leak, reason):
    inputs = toy_inputs([3, 3])
    with pytest.warns(UserWarning, match=COMPARED_ONLY + reason):
        check_isolation(Toy(leak).eval(), inputs)

    def both(model: nn.Module, hidden: Tensor) -> Tensor:
        return leak(model, from_cell_to_cell((0, 0), (0, 4))(model, hidden))

    with pytest.raises(IsolationError, match="changing its tokens moves the logits there"):
        check_isolation(Toy(both).eval(), inputs)


class OwnLookup(Toy):
    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=nn.functional.embedding(input_ids, self.embed.weight))


def test_a_model_that_does_not_call_its_embeddings_is_compared_only():
    model = OwnLookup().eval()
    model.config = SimpleNamespace()
    with pytest.warns(UserWarning, match=COMPARED_ONLY):
        check_isolation(model, toy_inputs([3, 3]))
    model.get_input_embeddings = lambda: None
    with pytest.warns(UserWarning, match=r"OwnLookup has no get_input_embeddings\(\)"):
        check_isolation(model, toy_inputs([3, 3]))


# --- kernels that are not installed --------------------------------------------------------------


@pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers raise nothing, and leak")
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("lfm2", "causal_conv1d"),
        ("bamba", "mamba_ssm and causal_conv1d"),
        ("qwen3_5", "fla and ca"),
    ],
)
def test_missing_kernels_are_named_with_the_way_out(family, kernels):
    examples = [{"input_ids": list(range(3, 3 + n))} for n in (5, 3, 4)]
    batch = PackedCollator(0, max_tokens=12)(examples)
    message = rf"{family} models need the kernels of {kernels}.* call isolate_mixers\(model\)"
    with pytest.raises(IsolationError, match=message):
        check_isolation(hybrid_model(family), batch)
