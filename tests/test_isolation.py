"""check_isolation: the measured table of leaks, and models made to leak in one way each."""

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
from tests.tiny_models import TRANSFORMERS, VOCAB, packed_inputs, tiny_model
from torch_collate_kit import PackedCollator, PaddedCollator
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.errors import IsolationError

ONE_ROW = ([7, 1, 5],)
TWO_ROWS = ([6, 3], [2, 7])


def masked(inputs: dict[str, Any], num_pads: int) -> dict[str, Any]:
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, mask.shape[1] - num_pads :] = 0
    return inputs | {"attention_mask": mask}


def without(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != name}


# --- models made to leak -------------------------------------------------------------------------


class Toy(nn.Module):
    """Logits of a token depend on that token only, but for what ``leak`` adds to them."""

    def __init__(self, leak: Any = None, **config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.leak, self.config = leak, SimpleNamespace(**config)
        self.seen: list[Tensor] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        self.seen.append(input_ids)
        hidden = self.embed(input_ids)
        if self.leak is not None:
            hidden = self.leak(self, hidden)
        return SimpleNamespace(logits=hidden)


def toy_inputs(*rows: list[int]) -> dict[str, Any]:
    return without(packed_inputs(*rows, varlen=False), "use_cache")


def from_cell_to_cell(source: tuple[int, int], target: tuple[int, int], weight: float = 1.0) -> Any:
    def leak(model: nn.Module, hidden: Tensor) -> Tensor:
        if len(hidden) <= max(source[0], target[0]) or hidden.shape[1] <= max(source[1], target[1]):
            return hidden  # an example alone
        change = torch.zeros_like(hidden)
        change[target] = weight * hidden[source]
        return hidden + change

    return leak


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ((0, 0), (0, 4), "row 0 segment 0 leaks into row 0 segment 1"),
        ((0, 4), (0, 7), "row 0 segment 1 leaks into row 0 segment 2"),
        ((0, 0), (0, 7), "row 0 segment 0 leaks into row 0 segment 2"),
        ((1, 0), (1, 8), "row 1 segment 0 leaks into row 1 segment 1"),
        ((0, 2), (1, 0), "row 0 segment 0 leaks into row 1 segment 0"),
        ((1, 8), (0, 0), "row 1 segment 1 leaks into row 0 segment 0"),
    ],
)
def test_one_leaking_cell_is_named(source, target, names):
    rows = ([3, 3, 3], [4, 5]) if source != (0, 4) else ([3, 3, 3],)  # there it is the middle one
    inputs = packed_inputs(*rows, varlen=False)
    check_isolation(Toy(), inputs)
    with pytest.raises(IsolationError, match=rf"{names} .*; 1 of .*a layer of the model mixes"):
        check_isolation(Toy(from_cell_to_cell(source, target)), inputs)


def test_a_leak_into_one_logit_of_many_is_found():
    """And a difference from an example alone, in the same one."""
    wide = nn.Linear(8, 4096, bias=False)

    def into_one(reach: Any) -> Any:
        def leak(model: nn.Module, hidden: Tensor) -> Tensor:
            logits = wide(hidden)
            logits[..., 77] += reach(hidden)
            return logits

        return leak

    def of_the_first(hidden: Tensor) -> Tensor:
        return 3e-3 * hidden[:, :1, 0].expand(hidden.shape[:2])

    def of_the_place(hidden: Tensor) -> Tensor:
        return 3e-3 * torch.arange(hidden.shape[1])

    check_isolation(Toy(into_one(lambda hidden: 0)), toy_inputs([3, 3]))
    with pytest.raises(IsolationError, match="row 0 segment 0 leaks into row 0 segment 1"):
        check_isolation(Toy(into_one(of_the_first)), toy_inputs([3, 3]))
    with pytest.raises(IsolationError, match="row 0 segment 1 differs from a run alone"):
        check_isolation(Toy(into_one(of_the_place)), toy_inputs([3, 3]))


def test_a_leak_in_one_mode_only_is_found():
    def in_training(model: nn.Module, hidden: Tensor) -> Tensor:
        return from_cell_to_cell((0, 0), (0, 4))(model, hidden) if model.training else hidden

    with pytest.raises(IsolationError, match="in training mode"):
        check_isolation(Toy(in_training), toy_inputs([3, 3]))
    check_isolation(Toy(in_training).eval(), toy_inputs([3, 3]))


def test_infinite_logits_that_stay_are_fine():
    def masked_tail(model: nn.Module, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, torch.full_like(hidden, -torch.inf)], -1)

    check_isolation(Toy(masked_tail), toy_inputs([3, 3]))


def test_image_placeholders_are_neither_changed_nor_made():
    image, half = 3, VOCAB // 2
    ids = torch.tensor(
        [[image, 5, 6, image, image + VOCAB - half, 8]]
    )  # the fifth would become one
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    nested = SimpleNamespace(model_type="text", image_token_id=4)
    model = Toy(model_type="toy", image_token_index=image, eos_token_id=5, text_config=nested)
    check_isolation(model, inputs)
    changed = torch.cat([seen for seen in model.seen if seen.shape == ids.shape])
    assert (changed[:, [0, 3]] == image).all()
    assert not torch.isin(changed[:, [1, 2, 4, 5]], torch.tensor([image, 4])).any()
    assert (changed[:, 1] != 5).any(), "an end mark is text, and can be changed"


# --- apart, and not what they are alone ----------------------------------------------------------


def test_a_model_that_knows_the_place_in_the_row_is_found():
    def by_place(model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden + torch.arange(hidden.shape[1])[:, None]

    message = r"row 0 segment 2 differs from.*2 of 3 segments.*depends on the place of an example"
    inputs = toy_inputs([3, 3, 3])
    for given in (inputs, masked(inputs, 0)):  # a 2-D mask of ones hides nothing
        with pytest.raises(IsolationError, match=message):
            check_isolation(Toy(by_place), given)
    blocks = inputs | {"attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}
    with pytest.raises(IsolationError, match=r"mask \[1, 1, 9, 9\] lets tokens see too much"):
        check_isolation(Toy(by_place), blocks)


def test_an_error_of_the_model_is_its_own_unless_it_may_be_about_a_4d_mask():
    def fail(model: nn.Module, hidden: Tensor) -> Tensor:
        raise RuntimeError("out of paper")

    inputs = toy_inputs([3, 3])
    for given in (inputs, masked(inputs, 0)):
        with pytest.raises(RuntimeError, match=r"^out of paper$"):
            check_isolation(Toy(fail), given)
    blocks = inputs | {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}
    message = r"fails with the attention_mask \[1, 1, 6, 6\] \(RuntimeError: out of paper\)"
    with pytest.raises(IsolationError, match=message):
        check_isolation(Toy(fail), blocks)


# --- inputs that cannot be checked ---------------------------------------------------------------


class Other(Toy):
    def forward(self, *args: Any, **inputs: Any) -> Any:
        return SimpleNamespace(scores=super().forward(*args, **inputs).logits)


def showing(leak: Any) -> Any:
    return lambda: Toy(lambda model, hidden: leak(hidden))


def flash() -> Any:
    leak = from_cell_to_cell((0, 0), (0, 4))
    return Toy(leak, _attn_implementation="flash_attention_2", model_type="toy")


ROW, LAST = toy_inputs([3, 3]), {"logits_to_keep": 1}
IMAGES = {"input_ids": torch.full((1, 6), 3)}
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (flash, ROW, IsolationError, r'"flash_attention_2" needs cu_seq_lens_q; pass what Batch.mod'),
    (flash, ROW | {"cu_seq_lens_q": torch.tensor([0, 3, 6])}, IsolationError,
     "a layer of the model mixes positions"),
    (showing(torch.ones_like), ROW, IsolationError, "does not move the logits of.*reads input_ids"),
    (showing(lambda hidden: hidden * torch.nan), ROW, IsolationError, "logits are NaN"),
    (lambda: Toy(image_token_id=3, model_type="toy"), ROW | IMAGES, IsolationError,
     r"no token can be changed.*pass a batch with text"),
    (Toy, ROW | {"position_ids": torch.arange(6)[None]}, ValueError, r"has 1 segment\(s\).*at l"),
    (Toy, ROW | {"position_ids": None}, ValueError, r"neither cu_seq_lens_q nor .*Batch.model_in"),
    (Toy, ROW | {"cu_seq_lens_q": torch.tensor([0, 3])}, ValueError, "cover 3 tokens, but input"),
    (Toy, ROW | {"input_ids": None}, ValueError, r"input_ids must be a tensor \[rows, width\]"),
    (Other, ROW, TypeError, r"SimpleNamespace without logits or last hidden.*head"),
    (lambda: tiny_model("llama"), packed_inputs(*ONE_ROW) | LAST, ValueError,
     r"logits are \[1, 1, 61\] for input_ids \[1, 13\].*no log"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED]
)
def test_what_shows_nothing_or_cannot_be_read_is_refused(model, inputs, error, words):
    with pytest.raises(error, match=words):
        check_isolation(model(), inputs)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 0, 1], [3, 2]),
        ([5, 6, 7, 0, 1], [3, 2]),  # the row starts in the middle of a document
        ([0, 1, 5, 6], [2, 2]),  # a jump forward is a start as well
        ([2, 1, 0], [1, 1, 1]),
        ([3, 3], [1, 1]),
    ],
)
def test_a_segment_starts_where_a_position_does_not_follow(positions, lengths):
    ids = torch.arange(len(positions))[None]
    model = Toy().eval()
    check_isolation(model, {"input_ids": ids, "position_ids": torch.tensor([positions])})
    alone = [seen[0].tolist() for seen in model.seen[-len(lengths) :]]
    assert alone == [segment.tolist() for segment in ids[0].split(lengths)]
    starts = [i for i, position in enumerate(positions) if i == 0 or position == 0]
    if len(starts) > 1:  # of time, height and width of images, which are all 0 at a first token
        three = torch.tensor([positions] * 3)[:, None]
        check_isolation(model, {"input_ids": ids, "position_ids": three})
        assert [seen[0, 0].item() for seen in model.seen[-len(starts) :]] == starts


def test_cells_without_a_token_are_in_no_segment():
    ids = torch.arange(6).view(2, 3)
    mask, positions = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]])
    model = Toy().eval()
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    check_isolation(model, inputs)
    assert [seen.tolist() for seen in model.seen[-2:]] == [[[1, 2]], [[3, 4]]]


def test_a_model_that_is_nan_for_a_segment_alone_only_is_found():
    def leak(model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden * (torch.nan if hidden.shape[:2] == (1, 4) else 1)

    check_isolation(Toy(leak), toy_inputs([3, 3]))
    with pytest.raises(IsolationError, match="row 0 segment 1 differs from a run alone"):
        check_isolation(Toy(leak), toy_inputs([3, 4]))


def test_an_example_that_begins_with_an_image_is_one_segment():
    """Time, height and width: only its first token has 0 in all three."""
    positions = [[0, 0, 0, 0, 2, 3, 0, 1], [0, 0, 1, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 0, 1]]
    model = Toy().eval()
    three = torch.tensor(positions)[:, None]
    check_isolation(model, {"input_ids": torch.arange(8)[None], "position_ids": three})
    assert [seen[0].tolist() for seen in model.seen[-2:]] == [[*range(6)], [6, 7]]


# --- padded rows ---------------------------------------------------------------------------------


def test_pads_on_the_left_that_a_model_reads_are_named():
    """RecurrentGemma, RWKV and xLSTM carry their state through pads: 0.9 to 1.7 of a logit off."""

    def carry(model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden.cumsum(1)

    examples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    check_isolation(Toy(carry), PaddedCollator(0, padding_side="right")(examples))
    message = (
        r"row 1 segment 0 differs from a run alone.*1 of 2 segments differ.*reads the pads on the "
        r'left as tokens \(so do RecurrentGemma, RWKV and xLSTM .*pass padding_side="right"'
    )
    with pytest.raises(IsolationError, match=message):
        check_isolation(Toy(carry), PaddedCollator(0)(examples))


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
        (lambda model, hidden: hidden * 0 + hidden.detach(),
         "the gradient at its embeddings is NaN"),
        (nan_gradient, "the gradient at its embeddings is NaN"),
    ],
)  # fmt: skip
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
