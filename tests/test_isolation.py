"""check_isolation: the measured table of leaks, and models made to leak in one way each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import MODELS, VOCAB, packed_inputs, tiny_model
from torch_collate_kit import PaddedCollator
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.attention.recurrent import RECURRENT_MODELS
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.ragged import Ragged

ONE_ROW = ([7, 1, 5],)
TWO_ROWS = ([6, 3], [2, 7])
LAYOUTS = pytest.mark.parametrize("rows", [ONE_ROW, TWO_ROWS], ids=["one", "two"])
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
USES_MASKS = pytest.mark.parametrize("attention", ["eager", "sdpa"])


LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
KINDS_OF_STATE = ("linear", "conv", "recurrent", "mamba", "hybrid")


def masked(inputs: dict[str, Any], num_pads: int) -> dict[str, Any]:
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, mask.shape[1] - num_pads :] = 0
    return inputs | {"attention_mask": mask}


def without(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != name}


# --- transformers: what leaks and what does not --------------------------------------------------


@MODES
@LAYOUTS
@pytest.mark.parametrize("kind", MODELS)
def test_torch_varlen_isolates(kind, rows, training):
    check_isolation(tiny_model(kind).train(training), packed_inputs(*rows))


@MODES
@LAYOUTS
@USES_MASKS
@pytest.mark.parametrize("kind", MODELS)
def test_restarting_positions_isolate(kind, attention, rows, training):
    model = tiny_model(kind, attention).train(training)
    check_isolation(model, packed_inputs(*rows, varlen=False))


@MODES
@LAYOUTS
@USES_MASKS
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("num_pads", [0, 2], ids=["ones", "pad-tail"])
def test_a_2d_mask_leaks(kind, attention, rows, training, num_pads):
    model = tiny_model(kind, attention).train(training)
    with pytest.raises(
        IsolationError, match=r"leaks into.*a 2-D attention_mask is passed.*leave i"
    ):
        check_isolation(model, masked(packed_inputs(*rows, varlen=False), num_pads))


@MODES
@LAYOUTS
@USES_MASKS
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_cache_leaks(kind, attention, rows, training):
    model = tiny_model(kind, attention).train(training)
    inputs = without(packed_inputs(*rows, varlen=False), "use_cache")
    with pytest.raises(
        IsolationError, match=r"leaks into.*use_cache is not False.*use_cache=False"
    ):
        check_isolation(model, inputs)


def test_a_4d_mask_in_eager_leaks():
    blocks = torch.block_diag(*(torch.ones(n, n) for n in ONE_ROW[0])).tril().bool()
    inputs = packed_inputs(*ONE_ROW, varlen=False) | {"attention_mask": blocks[None, None]}
    check_isolation(tiny_model("llama", "sdpa"), inputs)
    with pytest.raises(IsolationError, match=r"the attention_mask \[1, 1, 13, 13\] itself"):
        check_isolation(tiny_model("llama", "eager"), inputs)  # it adds the booleans to the scores


def test_a_segment_that_goes_on_counting_leaks_without_varlen():
    inputs = packed_inputs(*ONE_ROW)
    inputs["position_ids"] = torch.arange(13)[None]
    check_isolation(tiny_model("llama"), inputs)
    with pytest.raises(IsolationError, match='"sdpa" ignores cu_seq_lens, and position_ids do not'):
        check_isolation(tiny_model("llama", "sdpa"), inputs)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_a_leak_that_gradient_checkpointing_hides_is_found():
    model = tiny_model("qwen3", "sdpa")
    model.gradient_checkpointing_enable()  # in training it switches the cache off, in eval not
    inputs = without(packed_inputs(*ONE_ROW, varlen=False), "use_cache")
    with pytest.raises(IsolationError, match=r"in eval mode.*use_cache=False"):
        check_isolation(model.train(), inputs)
    check_isolation(model, inputs | {"use_cache": False})


def test_the_message_says_who_moved_whom_and_by_how_much():
    inputs = masked(packed_inputs(*ONE_ROW, varlen=False), 0)
    with pytest.raises(IsolationError) as error:
        check_isolation(tiny_model("qwen3", "sdpa"), inputs)
    message = str(error.value)
    assert message.startswith("row 0 segment 0 leaks into row 0 segment ")
    assert "(in eval mode): changing its tokens moves the logits there by" in message
    assert "0.0001 of that is allowed; 2 of 2 other segments move" in message


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
def test_bfloat16(attention):
    model = tiny_model("qwen3", attention, dtype=torch.bfloat16, initializer_range=0.02)
    inputs = packed_inputs(*TWO_ROWS, varlen=attention == "torch_varlen")
    check_isolation(model, inputs)
    if attention == "sdpa":
        with pytest.raises(IsolationError, match=r"0\.01 of that is allowed"):
            check_isolation(model, masked(inputs, 0))


def test_training_keeps_its_own_errors():
    model = tiny_model("qwen3").train()
    with pytest.raises(ValueError, match="no cu_seq_lens_q in training"):
        check_isolation(model, packed_inputs(*ONE_ROW, varlen=False))


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_batch_gives_the_inputs_for_the_models_attention(kind, attention):
    inputs = packed_inputs(*TWO_ROWS)
    ids = inputs["input_ids"]
    fields = {
        "input_ids": ids,
        "position_ids": inputs["position_ids"],
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "cu_seq_lens": Ragged(
            torch.tensor([0, 6, 9, 0, 2, 9], dtype=torch.int32), np.array([0, 3, 6])
        ),
    }
    batch = Batch(fields, row_metadata={"max_segment_length": [6, 7]})
    check_isolation(tiny_model(kind, attention).train(), batch)


def test_padding_is_not_looked_at():
    # the pad tail sees the text before it, with a 2-D mask or without; that harms nobody
    inputs = packed_inputs([5, 2], [4, 3], varlen=False)
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]])
    check_isolation(tiny_model("qwen3", "sdpa"), inputs)


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


def test_flash_attention_without_boundaries_is_named():
    leak = from_cell_to_cell((0, 0), (0, 4))
    model = Toy(leak, _attn_implementation="flash_attention_2", model_type="toy")
    message = r'attention "flash_attention_2" needs cu_seq_lens_q; pass what Batch.model_inputs'
    with pytest.raises(IsolationError, match=message):
        check_isolation(model, toy_inputs([3, 3]))
    with pytest.raises(IsolationError, match="a layer of the model mixes positions"):
        check_isolation(model, toy_inputs([3, 3]) | {"cu_seq_lens_q": torch.tensor([0, 3, 6])})


def test_a_leak_in_one_mode_only_is_found():
    def in_training(model: nn.Module, hidden: Tensor) -> Tensor:
        return from_cell_to_cell((0, 0), (0, 4))(model, hidden) if model.training else hidden

    with pytest.raises(IsolationError, match="in training mode"):
        check_isolation(Toy(in_training), toy_inputs([3, 3]))
    check_isolation(Toy(in_training).eval(), toy_inputs([3, 3]))


def test_dropout_is_no_leak():
    def dropout(model: nn.Module, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(hidden, 0.5, model.training)

    check_isolation(Toy(dropout).train(), toy_inputs([3, 3], [4, 2]))


def test_tolerance_is_a_fraction_of_the_own_movement():
    model = Toy(from_cell_to_cell((0, 0), (0, 4), weight=0.01))
    check_isolation(model, toy_inputs([3, 3]), tolerance=0.1)
    with pytest.raises(IsolationError, match=r"0\.001 of that is allowed"):
        check_isolation(model, toy_inputs([3, 3]), tolerance=0.001)


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (torch.ones_like, "does not move the logits of.*reads input_ids"),
        (lambda hidden: hidden * torch.nan, "logits are NaN"),
    ],
)
def test_logits_that_show_nothing_are_refused(leak, message):
    with pytest.raises(IsolationError, match=message):
        check_isolation(Toy(lambda model, hidden: leak(hidden)), toy_inputs([3, 3]))


def test_infinite_logits_that_stay_are_fine():
    def masked_tail(model: nn.Module, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, torch.full_like(hidden, -torch.inf)], -1)

    check_isolation(Toy(masked_tail), toy_inputs([3, 3]))


def test_nothing_is_left_changed():
    model = tiny_model("qwen3", "sdpa", attention_dropout=0.5).train()
    model.model.layers[1].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    inputs = packed_inputs(*ONE_ROW, varlen=False)
    inputs["labels"] = inputs["input_ids"].clone()
    before = {key: torch.as_tensor(value).clone() for key, value in inputs.items()}
    state = torch.get_rng_state()
    check_isolation(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert inputs.keys() == before.keys()
    assert all(torch.equal(torch.as_tensor(inputs[key]), before[key]) for key in before)


def test_modes_are_put_back_after_an_error():
    model = tiny_model("qwen3", "sdpa").train()
    with pytest.raises(IsolationError):
        check_isolation(model, masked(packed_inputs(*ONE_ROW, varlen=False), 0))
    assert all(module.training for module in model.modules())


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


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_learned_positions_that_go_on_counting_are_found(training):
    """Boundaries keep the examples of OPT apart, and each has positions of another place."""
    inputs = packed_inputs(*ONE_ROW)
    model = tiny_model("opt", dropout=0.0).train(training)
    check_isolation(model, inputs)
    inputs["position_ids"] = torch.arange(13)[None]
    message = (
        r"^row 0 segment [12] differs from a run alone, .* differ by .*, and 0\.0001 is allowed; "
        r"2 of 3 segments differ. Likely reason: its position_ids differ from those alone"
    )
    with pytest.raises(IsolationError, match=message):
        check_isolation(model, inputs)
    check_isolation(model, inputs, tolerance=10)


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


def test_nan_alone_is_a_difference():
    def nan_alone(model: nn.Module, hidden: Tensor) -> Tensor:
        return hidden if hidden.shape[1] == 6 else hidden * torch.nan

    with pytest.raises(IsolationError, match=r"differs from a run alone.*by nan.*2 of 2 segments"):
        check_isolation(Toy(nan_alone), toy_inputs([3, 3]))


def test_inputs_per_token_go_with_their_segment():
    seen = []

    class WithTypes(Toy):
        def forward(self, types: Tensor, **inputs: Any) -> Any:
            seen.append(types)
            output = super().forward(**inputs)
            return SimpleNamespace(logits=output.logits + types[..., None])

    inputs = toy_inputs([2, 3], [4, 1])
    inputs["types"] = torch.arange(10).view(2, 5)
    check_isolation(WithTypes().eval(), inputs)
    assert [types.tolist() for types in seen[-4:]] == [
        [[0, 1]],
        [[2, 3, 4]],
        [[5, 6, 7, 8]],
        [[9]],
    ]


def test_a_batch_in_which_no_token_can_change_shows_nothing():
    inputs = toy_inputs([3, 3])
    inputs["input_ids"] = torch.full((1, 6), 3)
    with pytest.raises(IsolationError, match=r"no token can be changed.*pass a batch with text"):
        check_isolation(Toy(image_token_id=3, model_type="toy"), inputs)


# --- inputs that cannot be checked ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_ids": torch.arange(6)[None]}, r"has 1 segment\(s\).*at least two packed"),
        ({"position_ids": None}, r"neither cu_seq_lens_q nor .*Batch.model_inputs\(\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cover 3 tokens, but input_ids has 6 cells"),
        ({"input_ids": None}, r"input_ids must be a tensor \[rows, width\], got inputs \['inp"),
    ],
)
def test_unreadable_segments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_isolation(Toy(), toy_inputs([3, 3]) | change)


def test_other_outputs_are_refused():
    with pytest.raises(TypeError, match=r"BaseModelOutputWithPast without logits.*head"):
        check_isolation(tiny_model("llama").model, packed_inputs(*ONE_ROW))
    message = r"logits are \[1, 1, 61\] for input_ids \[1, 13\].*no log"
    with pytest.raises(ValueError, match=message):
        check_isolation(tiny_model("llama"), packed_inputs(*ONE_ROW) | {"logits_to_keep": 1})


def test_image_positions_with_a_text_row_are_read():
    # [4, rows, width]: the text row first, as Qwen-VL takes packed rows
    inputs = toy_inputs([3, 3], [2, 4])
    text = inputs["position_ids"]
    inputs["position_ids"] = torch.stack([text, *3 * [torch.zeros_like(text)]])
    check_isolation(Toy(), inputs)
    with pytest.raises(IsolationError, match="row 1 segment 0 leaks into row 1 segment 1"):
        check_isolation(Toy(from_cell_to_cell((1, 0), (1, 5))), inputs)


# --- layers that carry state ---------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages with the names of the kernels that take boundaries can be imported."""
    for name in ("fla", "causal_conv1d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert all(importlib.util.find_spec(name) for name in ("fla", "causal_conv1d"))


@pytest.mark.parametrize("boundaries", [{}, {"cu_seq_lens_q": torch.tensor([0, 3, 6])}])
@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["conv"]},
        {"layers_block_type": ["mamba", "attention"]},
        {"block_types": ["recurrent"]},
        {"get_text_config": lambda: SimpleNamespace(layer_types=["hybrid"])},
    ],
)
@pytest.mark.usefixtures("kernels")
def test_recurrent_layers_are_refused(config, boundaries):
    message = r"the model has \['.*'\] layers, which carry state from one segment.*use PaddedCollat"
    with pytest.raises(IsolationError, match=message):
        check_isolation(Toy(**config), toy_inputs([3, 3]) | boundaries)


@pytest.mark.parametrize("model_type", sorted(RECURRENT_MODELS))
@pytest.mark.usefixtures("kernels")
def test_recurrent_models_are_refused_by_their_type(model_type):
    message = (
        rf"{model_type} model has recurrent, convolution or linear-attention layers, .*whatever "
        r'kernels are installed too; use PaddedCollator\(\.\.\., padding_side="right"\)'
    )
    text = SimpleNamespace(model_type=model_type)
    for config in (
        {"model_type": model_type},
        {"model_type": "x", "get_text_config": lambda: text},
    ):
        with pytest.raises(IsolationError, match=message):
            check_isolation(Toy(**config), toy_inputs([3, 3]))


@pytest.mark.usefixtures("kernels")
def test_a_leak_smaller_than_the_tolerance_of_bfloat16_is_refused():
    """The convolution of LFM2 at initial weights leaks less than bfloat16 rounds."""
    model = tiny_model("lfm2", "sdpa", dtype=torch.bfloat16, initializer_range=0.02)
    with pytest.raises(IsolationError, match=r"lfm2 model has \['conv'\] layers"):
        check_isolation(model, packed_inputs(*ONE_ROW))


@pytest.mark.filterwarnings("ignore")
def test_no_recurrent_model_of_transformers_is_missing():
    """Of those that write text: their config lists such layers, or that of their text model."""
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    of_text = modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {**of_text, **modeling.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    found = set()
    for name in names.keys() - {"gemma4_assistant"}:  # whose config has no valid defaults
        text = auto.CONFIG_MAPPING[name]().get_text_config(decoder=True)
        layers = [str(kind) for key in LAYER_LISTS for kind in getattr(text, key, None) or ()]
        has_state = any(part in kind.lower() for kind in layers for part in KINDS_OF_STATE)
        if has_state or text.model_type in RECURRENT_MODELS:
            found |= {name, text.model_type}
    assert len(found) > 10
    assert found <= RECURRENT_MODELS


def test_recurrent_layers_are_fine_with_one_example_a_row():
    check_isolation(Toy(layer_types=["conv"], model_type="lfm2"), toy_inputs([3], [3]))


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
