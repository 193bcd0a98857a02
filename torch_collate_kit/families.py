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
_RECURRENCE = _WITHOUT_BOUNDARIES.format("recurrence")
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
    one_row: bool = False  # whether the kernels take one row only, [1, R * W]
    packages: tuple[str, ...] = ()
    """The packages of the kernels, without which the model refuses the keywords."""
    blind_mask: bool = False  # whether the model makes its attention mask without position_ids
    needs_isolation: str = ""  # the reason why packed rows need isolate_mixers
    refused: str = ""  # the reason why packed rows are refused, with isolate_mixers too
    two_way: tuple[str, ...] = ()
    """The attention with which packed rows are exact where tokens see later ones; none: no such."""
    no_other: str = ""  # the reason why no other attention is, of those models
    option: tuple[str, Any] = ("", None)  # an option that the config needs for it, and its value
    left_padding: str = ""  # the reason why rows padded on the left are wrong
    bias_before_mixing: str = ""
    """The option of the config with which rows padded on the left are wrong."""


_DELTA = ("seq_idx", "cu_seq_lens", "cu_seqlens_cpu")
_KDA = ("seq_idx", "cu_seqlens", "cu_seqlens_cpu")
_FLA = ("fla", "causal_conv1d")
_SSM = ("mamba_ssm", "causal_conv1d")


def _family(types: str, mixers: str = "", **others: Any) -> Family:
    """Return a family, whose name is the first of its types."""
    names = tuple(types.split())
    return Family(names[0], names, tuple(mixers.split()), **others)


def _delta(types: str, mixer: str, keywords: tuple[str, ...] = _DELTA) -> Family:
    """Return a family of gated delta nets, whose kernels (fla) take one row."""
    return _family(types, mixer, keywords=keywords, one_row=True, packages=_FLA)


def _seq_idx(types: str, mixer: str, bias: str, **others: Any) -> Family:
    """Return a family of Mamba-2 or of short convolutions."""
    packages = {"packages": _SSM, **others}
    return _family(types, mixer, keywords=("seq_idx",), bias_before_mixing=bias, **packages)


def _apart(types: str, mixers: str, reason: str, **others: Any) -> Family:
    """Return a family that needs ``isolate_mixers``."""
    return _family(types, mixers, needs_isolation=reason, **others)


_MASKS, _VARLEN = ("sdpa", "eager"), ("torch_varlen", "flash")
_IGNORED = "transformers accepts other names and ignores them"
_BY_2D_MASK = "it multiplies its embeddings by a 2-D attention_mask"
_NO_4D_MASK = "it takes a 2-D attention_mask only"
_NO_POSITIONS = "its decoder takes no position_ids, and counts all cells of a row before a token"
_WHOLE_ROW = "its attention takes no mask of blocks, and sees the whole row before a token"
_ENCODERS = (
    "bert albert bert-generation camembert data2vec-text distilbert electra embedding_gemma2 "
    "embedding_gemma2_text ernie eurobert gte jina_embeddings_v3 modernbert nomic_bert roberta "
    "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod"
)
# with config.is_causal=False, or Gemma-3's use_bidirectional_attention=True
_DECODERS = "llama gemma gemma3_text granite ministral ministral3 mistral olmo2 phi3 qwen2 qwen3"


def _eager(reason: str, types: str, **others: Any) -> Family:
    """Return a family that is two-way, and exact with eager attention alone."""
    return _family(types, two_way=("eager",), no_other=reason, **others)


def _refused(reason: str, types: str, **others: Any) -> Family:
    return _family(types, refused=reason, **others)


FAMILIES = (
    _delta("qwen3_next", "Qwen3NextGatedDeltaNet"),
    _delta(
        "qwen3_5 qwen3_5_text qwen3_5_vision minicpm_ocr minicpmv4_6 minicpmv4_7",
        "Qwen3_5GatedDeltaNet",
    ),
    _delta("qwen3_5_moe qwen3_5_moe_text qwen3_5_moe_vision", "Qwen3_5MoeGatedDeltaNet"),
    _delta("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
    _delta("kimi_linear", "KimiLinearDeltaAttention", _KDA),
    _delta("bailing_hybrid", "BailingHybridDeltaAttention", _KDA),
    _seq_idx("bamba", "BambaMixer", "mamba_proj_bias"),
    _seq_idx("falcon_h1", "FalconH1Mixer", "mamba_proj_bias"),
    _seq_idx("nemotron_h nemotron_h_omni nemo_speechlm", "NemotronHMamba2Mixer", "use_bias"),
    _seq_idx("zamba2", "Zamba2MambaMixer", "add_bias_linear"),
    _seq_idx("granitemoehybrid", "GraniteMoeHybridMambaLayer", "mamba_proj_bias", blind_mask=True),
    _seq_idx("lfm2 lfm2_vl", "Lfm2ShortConv", "conv_bias", packages=_FLA[1:]),
    _seq_idx("lfm2_moe", "Lfm2MoeShortConv", "conv_bias", packages=_FLA[1:]),
    _apart(
        "mamba2",
        "Mamba2Mixer",
        "Mamba2ForCausalLM does not hand seq_idx to its backbone; "
        "model.backbone(input_ids, seq_idx=...) and model.lm_head do",
        packages=_SSM,
        bias_before_mixing="use_bias",
    ),
    _apart("mamba", "MambaMixer", _MAMBA_1, bias_before_mixing="use_bias"),
    _apart("falcon_mamba", "FalconMambaMixer", _MAMBA_1, bias_before_mixing="use_bias"),
    _apart("jamba", "JambaMambaMixer", _MAMBA_1, bias_before_mixing="mamba_proj_bias"),
    _apart("zamba", "ZambaMambaMixer", _MAMBA_1, bias_before_mixing="mamba_proj_bias"),
    _apart(
        "lfm3 lfm3_vl",
        "Lfm3ShortConv",
        _WITHOUT_BOUNDARIES.format("convolution of width 7"),
        bias_before_mixing="conv_bias",
    ),
    Family(
        "inkling",
        ("inkling_mm_model", "inkling_text", "inkling_audio", "inkling_vision"),
        ("InklingShortConvolution",),
        needs_isolation=_NOT_PASSED,
    ),
    _apart(
        "inkling2 inkling2_text inkling2_vision",
        "Inkling2ShortConvolution Inkling2DynamicShortConvolution",
        _NOT_PASSED,
    ),
    _apart(
        "minimax", "MiniMaxLightningAttention", _WITHOUT_BOUNDARIES.format("lightning attention")
    ),
    _apart(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        "its recurrence begins anew at position 0, its convolution does not",
        left_padding="its recurrent layers ignore the mask, so pads on the left enter their state",
    ),
    _apart("rwkv", "RwkvSelfAttention RwkvFeedForward", _RECURRENCE, left_padding=_NO_MASK),
    _apart("xlstm", "xLSTMLayer", _RECURRENCE, left_padding=_NO_MASK),
    _apart("zaya", "ZayaCCAProjection", _WITHOUT_BOUNDARIES.format("convolutional attention")),
    _apart(
        "qwen4_exp qwen4_exp_text qwen4_exp_vision",
        "Qwen4ExpTextGatedDeltaNet Qwen4ExpTextPLELayer",
        "its dilated convolutions and n-grams of tokens take no boundaries",
    ),
    _family(
        "glm5_next glm5_next_text glm5_next_vision",
        "Glm5NextTextLinearAttention",
        refused="its sparse attention pools neighbouring tokens, also those of two examples",
    ),
    Family(
        "mask without positions",
        ("afmoe", "biogpt", "falcon", "gpt_oss", "mpt", "opt", "xglm"),
        blind_mask=True,
    ),
    _family(_ENCODERS, blind_mask=True, two_way=_MASKS + _VARLEN),
    _family(f"{_DECODERS} smollm3", two_way=_MASKS + _VARLEN),
    _family("t5 mt5 umt5", two_way=_MASKS, no_other="they lose its position bias"),
    _eager("it has soft-capping", "t5gemma"),
    _eager(_IGNORED, "mpnet megatron-bert rembert roformer", blind_mask=True),
    _eager(_IGNORED, "big_bird", blind_mask=True, option=("attention_type", "original_full")),
    _family("esm", two_way=_VARLEN, no_other=_BY_2D_MASK, option=("token_dropout", False)),
    _refused(_BY_2D_MASK, "deberta deberta-v2"),
    _refused("a layer mixes neighbouring cells", "convbert fnet funnel ibert"),
    _refused(_NO_4D_MASK, "bloom canine flaubert layoutlm longformer mra nystromformer xlm yoso"),
    _refused(
        _NO_POSITIONS,
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
        "prophetnet trocr",
        left_padding="its decoder takes no position_ids, so it counts the pads",
    ),
    _refused(_WHOLE_ROW, "imagegpt openai-gpt"),
    _family("jev", refused="it decides one prompt per call"),
)
_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
NO_FAMILY = Family("other", ())

# Of models whose modules do not have ``is_causal``: their attention sees later tokens, too.
_TWO_WAY = (
    *("big_bird", "bros", "canine", "convbert", "deberta", "deberta-v2", "esm", "flaubert", "fnet"),
    *("funnel", "ibert", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "longformer", "longt5"),
    *("luke", "lxmert", "markuplm", "megatron-bert", "mpnet", "mra", "mt5", "nystromformer"),
    *("perceiver", "reformer", "rembert", "roformer", "splinter", "squeezebert"),
    *("switch_transformers", "t5", "tapas", "umt5", "visual_bert", "xlm", "xlnet", "yoso"),
)
# Causal by their mask, or for text alone, whatever their modules say.
_CAUSAL = ("aimv2", "clip", "groupvit", "metaclip_2", "owl", "paligemma", "pi0", "x_clip", "xclip")
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


def two_way_window(config: Any) -> int | None:
    """Return the window of the sliding layers to both sides, which counts the token itself."""
    window, _ = sliding_window(config)
    if window is None or getattr(text_config(config), "use_bidirectional_attention", False):
        return window  # Gemma-3 counts it
    return window + 1


def length_to_check(config: Any, shortest: int, longest: int) -> int | None:
    """Return a length of segments that shows all that layers do; None: every length counts.

    Windows and chunks of the ``longest`` segment and above do nothing.
    """
    text = text_config(config)
    scaling = f"{getattr(text, 'rope_parameters', '')}{getattr(text, 'rope_scaling', '')}"
    odd = [kind for kind in odd_layers(config) if not any(part in kind for part in _LAYER_KINDS)]
    if odd or "dynamic" in scaling or "longrope" in scaling:
        return None
    names = ("index_topk", "chunk_size", "mamba_chunk_size")
    reach = [getattr(text, name, None) for name in names] + [sliding_window(config)[0]]
    return max([shortest, *(n + 32 for n in reach if isinstance(n, int) and n < longest)])


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


def is_two_way(config: Any, flags: Collection[bool], class_names: Collection[str]) -> bool:
    """Return whether tokens see those after them; ``flags`` are ``is_causal`` of text modules."""
    text = text_config(config)
    name = str(getattr(text, "model_type", ""))
    if getattr(text, "is_causal", None) is not None:
        return not text.is_causal
    if str(getattr(config, "model_type", "")).startswith(_CAUSAL) or name.startswith(_CAUSAL):
        return False
    if flags:
        return not any(flags)
    is_causal = getattr(text, "is_decoder", False) or getattr(text, "causal", False)
    return not is_causal and (
        name in _TWO_WAY or any(n.endswith("ForMaskedLM") for n in class_names)
    )


def left_padding_fault(config: Any) -> str:
    """Return the reason why rows padded on the left are wrong in the model, or nothing."""
    family = family_of(config)
    option = family.bias_before_mixing
    if option and getattr(text_config(config), option, False):
        return f"with {option}=True pads on the left enter its state through the bias"
    return family.left_padding
