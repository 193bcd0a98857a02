"""The table of model families: what keeps the segments of a packed row apart, by ``model_type``.

Positions that restart do so in most models of attention alone, which need no entry. What is said
of transformers' kernels holds for 5.17 to 5.24; docs/isolation.md has how it was measured.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

ISOLATED = "_isolated_by_segment"
"""The attribute of the mixers of a model under ``isolate_mixers``."""
_WITHOUT_BOUNDARIES = "no kernel of its {} takes boundaries"
_MAMBA_1 = _WITHOUT_BOUNDARIES.format("Mamba-1 scan")
_NOT_PASSED = "its layers do not hand boundaries to their convolutions"
_NO_MASK = "it has no use for the mask, so pads on the left enter its state"


@dataclass(frozen=True)
class Family:
    """Properties of the models of one kind, beyond attention that reads positions."""

    name: str
    model_types: tuple[str, ...]
    """``config.model_type``, of the text model too; towers and wrappers included."""
    mixers: tuple[str, ...] = ()
    """Class names of the layers that carry state from token to token, in the text model."""
    keywords: tuple[str, ...] = ()
    """Model inputs that keep segments apart in the mixers' kernels; none: nothing does."""
    one_row: bool = False
    """Whether the kernels take one row only, ``[1, R * W]``."""
    packages: tuple[str, ...] = ()
    """The packages of the kernels, without which the model refuses the keywords."""
    blind_mask: bool = False
    """Whether the model makes its attention mask without ``position_ids``."""
    needs_isolation: str = ""
    """The reason why packed rows need ``isolate_mixers``."""
    refused: str = ""
    """The reason why packed rows are refused, with ``isolate_mixers`` too."""
    left_padding: str = ""
    """The reason why rows padded on the left are wrong."""
    bias_before_mixing: str = ""
    """The option of the config with which rows padded on the left are wrong."""


_DELTA = ("seq_idx", "cu_seq_lens", "cu_seqlens_cpu")
_KDA = ("seq_idx", "cu_seqlens", "cu_seqlens_cpu")
_FLA = ("fla", "causal_conv1d")
_SSM = ("mamba_ssm", "causal_conv1d")


def _delta(name: str, mixer: str, *parts: str, keywords: tuple[str, ...] = _DELTA) -> Family:
    """Return a family of gated delta nets, whose kernels (fla) take one row."""
    return Family(name, (name, *parts), (mixer,), keywords, one_row=True, packages=_FLA)


def _mamba_2(name: str, mixer: str, bias: str, *parts: str, blind_mask: bool = False) -> Family:
    return Family(
        name,
        (name, *parts),
        (mixer,),
        ("seq_idx",),
        packages=_SSM,
        blind_mask=blind_mask,
        bias_before_mixing=bias,
    )


def _convolutions(name: str, mixer: str, *parts: str) -> Family:
    return Family(
        name,
        (name, *parts),
        (mixer,),
        ("seq_idx",),
        packages=("causal_conv1d",),
        bias_before_mixing="conv_bias",
    )


FAMILIES = (
    _delta("qwen3_next", "Qwen3NextGatedDeltaNet"),
    _delta(
        "qwen3_5",
        "Qwen3_5GatedDeltaNet",
        "qwen3_5_text",
        "qwen3_5_vision",
        "minicpm_ocr",
        "minicpmv4_6",
        "minicpmv4_7",
    ),
    _delta("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "qwen3_5_moe_text", "qwen3_5_moe_vision"),
    _delta("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
    _delta("kimi_linear", "KimiLinearDeltaAttention", keywords=_KDA),
    _delta("bailing_hybrid", "BailingHybridDeltaAttention", keywords=_KDA),
    _mamba_2("bamba", "BambaMixer", "mamba_proj_bias"),
    _mamba_2("falcon_h1", "FalconH1Mixer", "mamba_proj_bias"),
    _mamba_2("nemotron_h", "NemotronHMamba2Mixer", "use_bias", "nemotron_h_omni", "nemo_speechlm"),
    _mamba_2("zamba2", "Zamba2MambaMixer", "add_bias_linear"),
    _mamba_2("granitemoehybrid", "GraniteMoeHybridMambaLayer", "mamba_proj_bias", blind_mask=True),
    _convolutions("lfm2", "Lfm2ShortConv", "lfm2_vl"),
    _convolutions("lfm2_moe", "Lfm2MoeShortConv"),
    Family(
        "mamba2",
        ("mamba2",),
        ("Mamba2Mixer",),
        packages=_SSM,
        needs_isolation="Mamba2ForCausalLM does not hand seq_idx to its backbone; "
        "model.backbone(input_ids, seq_idx=...) and model.lm_head do",
        bias_before_mixing="use_bias",
    ),
    Family(
        "mamba",
        ("mamba",),
        ("MambaMixer",),
        needs_isolation=_MAMBA_1,
        bias_before_mixing="use_bias",
    ),
    Family(
        "falcon_mamba",
        ("falcon_mamba",),
        ("FalconMambaMixer",),
        needs_isolation=_MAMBA_1,
        bias_before_mixing="use_bias",
    ),
    Family(
        "jamba",
        ("jamba",),
        ("JambaMambaMixer",),
        needs_isolation=_MAMBA_1,
        bias_before_mixing="mamba_proj_bias",
    ),
    Family(
        "zamba",
        ("zamba",),
        ("ZambaMambaMixer",),
        needs_isolation=_MAMBA_1,
        bias_before_mixing="mamba_proj_bias",
    ),
    Family(
        "lfm3",
        ("lfm3", "lfm3_vl"),
        ("Lfm3ShortConv",),
        needs_isolation=_WITHOUT_BOUNDARIES.format("convolution of width 7"),
        bias_before_mixing="conv_bias",
    ),
    Family(
        "inkling",
        ("inkling_mm_model", "inkling_text", "inkling_audio", "inkling_vision"),
        ("InklingShortConvolution",),
        needs_isolation=_NOT_PASSED,
    ),
    Family(
        "inkling2",
        ("inkling2", "inkling2_text", "inkling2_vision"),
        ("Inkling2ShortConvolution", "Inkling2DynamicShortConvolution"),
        needs_isolation=_NOT_PASSED,
    ),
    Family(
        "minimax",
        ("minimax",),
        ("MiniMaxLightningAttention",),
        needs_isolation=_WITHOUT_BOUNDARIES.format("lightning attention"),
    ),
    Family(
        "recurrent_gemma",
        ("recurrent_gemma",),
        ("RecurrentGemmaRecurrentBlock",),
        needs_isolation="its recurrence begins anew at position 0, its convolution does not",
        left_padding="its recurrent layers ignore the mask, so pads on the left enter their state",
    ),
    Family(
        "rwkv",
        ("rwkv",),
        ("RwkvSelfAttention", "RwkvFeedForward"),
        needs_isolation=_WITHOUT_BOUNDARIES.format("recurrence"),
        left_padding=_NO_MASK,
    ),
    Family(
        "xlstm",
        ("xlstm",),
        ("xLSTMLayer",),
        needs_isolation=_WITHOUT_BOUNDARIES.format("recurrence"),
        left_padding=_NO_MASK,
    ),
    Family(
        "zaya",
        ("zaya",),
        ("ZayaCCAProjection",),
        needs_isolation=_WITHOUT_BOUNDARIES.format("convolutional attention"),
    ),
    Family(
        "qwen4_exp",
        ("qwen4_exp", "qwen4_exp_text", "qwen4_exp_vision"),
        ("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextPLELayer"),
        needs_isolation="its dilated convolutions and n-grams of tokens take no boundaries",
    ),
    Family(
        "glm5_next",
        ("glm5_next", "glm5_next_text", "glm5_next_vision"),
        ("Glm5NextTextLinearAttention",),
        refused="its sparse attention pools neighbouring tokens, also those of two examples",
    ),
    Family(
        "mask without positions",
        ("afmoe", "biogpt", "falcon", "gpt_oss", "mpt", "opt", "xglm"),
        blind_mask=True,
    ),
    Family("bloom", ("bloom",), refused="it takes a 2-D attention_mask only"),
    Family("jev", ("jev",), refused="it decides one prompt per call"),
)
_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
NO_FAMILY = Family("other", ())
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_LAYER_KINDS = ("linear", "conv", "recurrent", "mamba", "ssm", "rwkv", "delta", "hybrid")
_CLASS_ENDINGS = (
    *("DeltaNet", "DeltaAttention", "LightningAttention", "ShortConv", "ShortConvolution"),
    *("MambaMixer", "Mamba2Mixer", "MambaLayer", "RecurrentBlock", "RetentionLayer"),
)


def text_config(config: Any) -> Any:
    """Return the config of the text model, which reads the packed rows."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(config: Any) -> str | None:
    """Return the attention implementation of the text model."""
    return getattr(text_config(config), "_attn_implementation", None)


def sliding_window(config: Any) -> tuple[int | None, bool]:
    """Return the window of the sliding layers or None, and whether all layers slide."""
    config = text_config(config)
    window: int | None = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if layers is None:
        return (window if getattr(config, "use_sliding_window", True) else None), True
    return (window if "sliding_attention" in layers else None), set(layers) == {"sliding_attention"}


def attention_dropout(config: Any) -> float:
    """Return the dropout of the attention of the text model."""
    config = text_config(config)
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
    return max(float(getattr(config, name, None) or 0) for name in names)


def odd_layers(config: Any) -> tuple[str, ...]:
    """Return kinds of attention layers other than full and sliding ones, such as chunked ones."""
    config = text_config(config)
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    chunked = {"chunked_attention"} if getattr(config, "attention_chunk_size", None) else set()
    return tuple(sorted((kinds | chunked) - {"full_attention", "sliding_attention"}))


def family_of(config: Any, class_names: Collection[str] = ()) -> Family:
    """Return the family of the whole model, else of its text model, or NO_FAMILY.

    A model that is not in the table is refused if the config lists layers that carry state, or the
    ``class_names`` of its modules have such.
    """
    text = text_config(config)
    types = [getattr(each, "model_type", None) for each in (config, text)]
    if types[1] == "falcon" and getattr(text, "alibi", False):
        return _BY_TYPE["bloom"]
    found = next((_BY_TYPE[name] for name in types if name in _BY_TYPE), None)
    if found is not None:
        return found
    kinds = [str(kind) for name in _LAYER_LISTS for kind in getattr(text, name, None) or ()]
    layers = {kind for kind in kinds if any(part in kind.lower() for part in _LAYER_KINDS)}
    layers |= {name for name in class_names if name.endswith(_CLASS_ENDINGS)}
    if not layers:
        return NO_FAMILY
    reason = f"its {sorted(layers)} layers carry state, and it is not in the table of families"
    return Family(str(types[0]), (), refused=reason)


def left_padding_fault(config: Any) -> str:
    """Return the reason why rows padded on the left are wrong in the model, or nothing."""
    family = family_of(config)
    option = family.bias_before_mixing
    if option and getattr(text_config(config), option, False):
        return f"with {option}=True pads on the left enter its state through the bias"
    return family.left_padding
