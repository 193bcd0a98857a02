"""check_isolation of tiny models of transformers: what leaks, and what does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hybrid_models import ATTENTION, FAMILIES, hybrid_model
from tests.test_isolation import ONE_ROW, TWO_ROWS, Toy, masked, toy_inputs, without
from tests.tiny_models import MODELS, TRANSFORMERS, VOCAB, packed_inputs, tiny_model
from torch_collate_kit import Batch, PaddedCollator, check_isolation, packing_report
from torch_collate_kit.errors import IsolationError

LAYOUTS = pytest.mark.parametrize("rows", [ONE_ROW, TWO_ROWS], ids=["one", "two"])
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
KINDS_OF_STATE = ("linear", "conv", "recurrent", "mamba", "hybrid")
BOTH = ["eager", "sdpa"]
MASK_2D = r"leaks into.*a 2-D attention_mask is passed.*leave i"
CACHE = r"leaks into.*use_cache is not False.*use_cache=False"


# --- transformers: what leaks and what does not --------------------------------------------------


@MODES
@LAYOUTS
@pytest.mark.parametrize("attention", ["torch_varlen", "eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_boundaries_or_restarting_positions_isolate(kind, attention, rows, training):
    model = tiny_model(kind, attention).train(training)
    check_isolation(model, packed_inputs(*rows, varlen=attention == "torch_varlen"))


def plain(*rows):
    return packed_inputs(*rows, varlen=False)


def in_blocks(*rows):
    blocks = torch.block_diag(*(torch.ones(n, n) for n in rows[0])).tril().bool()
    return plain(*rows) | {"attention_mask": blocks[None, None]}


def counting_on(*rows):
    return packed_inputs(*rows) | {"position_ids": torch.arange(13)[None]}


LEAKS = {  # the inputs, the attentions that leak, the words, and an attention that does not leak
    "2-D mask": (lambda *of: masked(plain(*of), 0), BOTH, MASK_2D, None),
    "2-D mask of pads": (lambda *of: masked(plain(*of), 2), BOTH, MASK_2D, None),
    "cache": (lambda *of: without(plain(*of), "use_cache"), BOTH, CACHE, None),
    "4-D mask": (in_blocks, ["eager"], r"the attention_mask \[1, 1, 13, 13\] itself", "sdpa"),
    "positions": (counting_on, ["sdpa"], '"sdpa" ignores cu_seq_lens, and pos', "torch_varlen"),
}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("leak", LEAKS)
def test_what_leaks_is_named(leak, kind):
    make, attentions, words, exact = LEAKS[leak]
    for rows in (ONE_ROW,) if exact else (ONE_ROW, TWO_ROWS):
        for attention in attentions:
            for training in (False, True):
                model = tiny_model("llama" if exact else kind, attention).train(training)
                with pytest.raises(IsolationError, match=words):
                    check_isolation(model, make(*rows))
    if exact:
        check_isolation(tiny_model("llama", exact), make(*ONE_ROW))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_a_leak_that_gradient_checkpointing_hides_is_found():
    model = tiny_model("qwen3", "sdpa")
    model.gradient_checkpointing_enable()  # in training it switches the cache off, in eval not
    inputs = without(plain(*ONE_ROW), "use_cache")
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
)  # fmt: skip
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


WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
ALWAYS_WRONG = ("recurrent_gemma", "rwkv", "xlstm")
WITH_A_BIAS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "nemotron_h"), "use_bias"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "zamba"), "mamba_proj_bias"
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "conv_bias"),
    "zamba2": "add_bias_linear",
}
CASES = [(name, {}) for name in FAMILIES] + [(name, {of: True}) for name, of in WITH_A_BIAS.items()]
FEW = [*ALWAYS_WRONG, "qwen3_5"], ["bamba", "lfm2", "nemotron_h"]


def is_quick(name: str, options: dict[str, Any]) -> bool:
    return name in FEW[bool(options)]


def model_of(name: str, options: dict[str, Any]) -> Any:
    """Biases are random, as after training; they begin at 0, which hides the fault."""
    attention = ATTENTION.get(name, "eager" if name in WITHOUT_ATTENTION else "sdpa")
    model = hybrid_model(name, attention, scale=5.0, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if of.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def padded(side: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (11, 3, 7)]
    return PaddedCollator(0, padding_side=side)([{"input_ids": each} for each in ids])


@torch.no_grad()
def difference(model: Any, batch: Batch) -> float:
    """The largest difference of a logit from the example alone, relative to the largest."""
    fields = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**fields, use_cache=False).logits
    found = []
    for row, is_real in enumerate(batch["attention_mask"].bool()):
        alone = model(input_ids=batch["input_ids"][row, is_real][None], use_cache=False).logits[0]
        found.append((alone - logits[row, is_real]).abs().max() / alone.abs().max())
    return float(max(found))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.release, id=str(case))
        for case in CASES
    ],
)
def test_the_table_of_padding_sides(name: str, options: dict[str, Any]) -> None:
    model = model_of(name, options)
    is_wrong = name in ALWAYS_WRONG or bool(options)
    notes = packing_report([1], 8, model=model, show=False)["recommended"]["notes"]
    assert any("padded on the left are wrong" in note for note in notes) == is_wrong
    assert difference(model, padded("right")) < 2e-5
    left = difference(model, padded("left"))
    assert left > 0.01 if is_wrong else left < 2e-5


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("recurrent_gemma", {}, "recurrent_gemma models: its recurrent layers ignore the mask"),
        ("rwkv", {}, "rwkv models: it has no use for the mask"),
        ("lfm2", {"conv_bias": True}, "lfm2 models: with conv_bias=True pads on the left"),
    ],
)
def test_pads_on_the_left_are_refused_with_the_reason(
    name: str, options: dict[str, Any], reason: str
) -> None:
    model, (left, right) = model_of(name, options), map(padded, ("left", "right"))
    attention = model.config._attn_implementation
    for inputs in (left, left.model_inputs(attention)):
        with pytest.raises(IsolationError, match=rf"{reason}.*padding_side=\"right\""):
            check_isolation(model, inputs)
    for inputs in (right, right.model_inputs(attention)):
        check_isolation(model, inputs)


def test_without_a_config_pads_are_measured() -> None:
    model = Toy()
    del model.config
    inputs = padded("left").model_inputs("sdpa", labels=False)
    check_isolation(model, inputs)
