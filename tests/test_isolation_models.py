"""check_isolation of tiny models of transformers: what leaks, and what does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_isolation import ONE_ROW, TWO_ROWS, Toy, masked, toy_inputs, without
from tests.tiny_models import MODELS, TRANSFORMERS, packed_inputs, tiny_model
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.errors import IsolationError

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
KINDS_OF_STATE = ("linear", "conv", "recurrent", "mamba", "hybrid")
# --- transformers: what leaks and what does not --------------------------------------------------


def cached(inputs: dict[str, Any]) -> dict[str, Any]:
    return without(inputs, "use_cache")


WRONG: list[tuple[str, Any, str]] = [
    ("qwen3", lambda inputs: masked(inputs, 0), r"a 2-D attention_mask is passed.*leave i"),
    ("gemma3", lambda inputs: masked(inputs, 2), r"a 2-D attention_mask is passed.*leave i"),
    ("qwen3", cached, r"use_cache is not False.*use_cache=False"),
    ("gemma3", cached, r"use_cache is not False.*use_cache=False"),
]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "change", "words"), WRONG)
def test_inputs_leak_that_hide_the_boundaries(kind, change, words, attention, training):
    model, inputs = (
        tiny_model(kind, attention).train(training),
        packed_inputs(*TWO_ROWS, varlen=False),
    )
    check_isolation(model, inputs)
    with pytest.raises(IsolationError, match=rf"leaks into.*{words}"):
        check_isolation(model, change(inputs))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("kind", MODELS)
def test_boundaries_isolate(kind, training):
    check_isolation(tiny_model(kind).train(training), packed_inputs(*TWO_ROWS))


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


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
def test_bfloat16(attention):
    model = tiny_model("qwen3", attention, dtype=torch.bfloat16, initializer_range=0.02)
    inputs = packed_inputs(*TWO_ROWS, varlen=attention == "torch_varlen")
    check_isolation(model, inputs)
    if attention == "sdpa":
        with pytest.raises(IsolationError, match=r"0\.01 of that is allowed"):
            check_isolation(model, masked(inputs, 0))


def test_padding_is_not_looked_at():
    # the pad tail sees the text before it, with a 2-D mask or without; that harms nobody
    inputs = packed_inputs([5, 2], [4, 3], varlen=False)
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]])
    check_isolation(tiny_model("qwen3", "sdpa"), inputs)


# --- layers that carry state ---------------------------------------------------------------------


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
def test_recurrent_layers_of_an_unknown_model_are_refused(config, boundaries):
    message = r"new models: its \['.*'\] layers carry state.* not in the table .*use PaddedCollator"
    with pytest.raises(IsolationError, match=message):
        check_isolation(Toy(model_type="new", **config), toy_inputs([3, 3]) | boundaries)


class GatedDeltaNet(torch.nn.Identity):
    """A layer of which the config says nothing."""


def test_an_unknown_model_with_a_recurrent_class_is_refused():
    model = Toy(model_type="new")
    model.mixer = GatedDeltaNet()
    with pytest.raises(IsolationError, match=r"its \['GatedDeltaNet'\] layers carry state"):
        check_isolation(model, toy_inputs([3, 3]))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", r"mamba models: no kernel of its Mamba-1 scan takes.* isolate_mixers\(model\)"),
        ("inkling2_text", "in inkling2 models: its layers do not hand boundaries"),
        ("glm5_next_text", "in glm5_next models: its sparse attention pools.*; use PaddedCollator"),
        ("qwen3_next", r"qwen3_next models need seq_idx and cu_seq_lens_q, and the inputs are \["),
        ("lfm2", r"lfm2 models need seq_idx, .*; pass what batch.model_inputs\(model\) returns"),
    ],
)
def test_recurrent_models_are_refused_by_their_type(model_type, message):
    text = SimpleNamespace(model_type=model_type)
    for config in (
        {"model_type": model_type},
        {"model_type": "x", "get_text_config": lambda: text},
    ):
        with pytest.raises(IsolationError, match=message):
            check_isolation(Toy(**config), toy_inputs([3, 3]))


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_no_recurrent_model_of_transformers_is_missing():
    """Of those that write text: their config lists such layers, or that of their text model."""
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    of_text = modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = {**of_text, **modeling.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    found = 0
    for name in names.keys() - {"gemma4_assistant"}:  # whose config has no valid defaults
        text = auto.CONFIG_MAPPING[name]().get_text_config(decoder=True)
        layers = [str(kind) for key in LAYER_LISTS for kind in getattr(text, key, None) or ()]
        has_state = any(part in kind.lower() for kind in layers for part in KINDS_OF_STATE)
        if has_state:
            found += 1
            # what came after 5.23 is not in the table, and is refused for its layers
            is_new = TRANSFORMERS >= (5, 24) and name.startswith(("lara_mini", "inkling2_loop"))
            assert is_refused(name) or is_new, name
        assert is_refused(text.model_type) == is_refused(name), name
    assert found > 10


def is_refused(model_type: str) -> bool:
    try:
        check_isolation(Toy(model_type=model_type), toy_inputs([3, 3]))
    except IsolationError as error:
        return "packed rows" in str(error)
    return False


def test_recurrent_layers_are_fine_with_one_example_a_row():
    check_isolation(Toy(layer_types=["conv"], model_type="lfm2"), toy_inputs([3], [3]))
