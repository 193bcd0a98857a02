"""Every chat template of the trl package, every made conversation, every mode: nothing is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.outcomes import MODES, outcomes
from tests.chat.truth import Verdict

TEMPLATES = templates()
# How many of the conversations are taken by "all", "last" and "each", at least.
TAKEN = {
    (0, 1, 0): "deepseek_r1_distill deepseekv3 deepseekv3_training",
    (2, 3, 2): "deepseek_r1_distill_training",
    (24, 60, 60): "qwen3",
    (29, 29, 29): "gemma gemma_training",
    (29, 31, 29): "llava_next llava_next_training",
    (32, 32, 32): "cohere cohere_training gemma3 gemma3_training",
    (32, 33, 33): "cohere2 cohere2_training",
    (34, 58, 58): "gptoss gptoss_training",
    (36, 36, 36): "idefics3 idefics3_training smolvlm smolvlm_training",
    (37, 37, 37): "phi3 phi3_5 phi3_5_training phi3_training",
    (38, 38, 38): ("lfm2 lfm2_training llama3 llama3_training qwen2_5_vl qwen2_5_vl_training"),
    (38, 58, 57): "qwen3_5_nothink qwen3_5_think qwen3_6",
    (49, 52, 52): "glm4moe",
    (52, 53, 52): "gemma4 gemma4_v3 gemma4_v4",
    (52, 55, 52): "llama3_1 llama3_2",
    (54, 55, 54): ("lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_vl qwen3_vl_training"),
    (55, 56, 55): "gemma4_v2 qwen3_instruct_2507 qwen3_instruct_2507_training",
    (55, 57, 56): "diffusion_gemma diffusion_gemma_training gemma4_v5",
    (56, 59, 57): "muse_glimmer muse_glimmer_training",
    (56, 59, 58): (
        "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano "
        "nemotron_3_nano_training nemotron_3_super nemotron_3_super_training "
        "nemotron_3_ultra nemotron_3_ultra_training"
    ),
    (56, 59, 59): "glm4moe_training",
    (57, 58, 57): (
        "qwen3_5_nothink_training qwen3_5_think_training qwen3_6_training qwen3_8 qwen3_8_training"
    ),
    (57, 59, 59): "lfm2_2_5_vl",
    (58, 60, 60): "lfm2_2_5 lfm2_2_5_v2",
    (60, 60, 60): "qwen3_training",
}


Found = dict[tuple[str, str], tuple[Verdict, Any]]  # by conversation and mode
LEAST = {name: counts for counts, names in TAKEN.items() for name in names.split()}


def test_every_template_has_a_line() -> None:
    assert set(LEAST) == set(TEMPLATES)


# A template for training is its plain one with marks around what the assistant says.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.release]
            * (name.removesuffix("_training") in TEMPLATES and name.endswith("_training")),
        )
        for name in sorted(TEMPLATES)
    ],
)
def test_nothing_is_silently_wrong(name: str) -> None:
    """Nor refused that was taken; a plain chat is taken. One test, as the outcomes take long."""
    found = outcomes(name, tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos))
    assert not {key: verdict.why for key, (verdict, _) in found.items() if verdict.kind == "wrong"}
    opens_think = name.startswith("deepseek")  # for a turn which has none in the text
    assert (found[PLAIN, "all"][0].kind == "right") != opens_think
    right = Counter(mode for (_, mode), (verdict, _) in found.items() if verdict.kind == "right")
    assert all(right[mode] >= least for mode, least in zip(MODES, LEAST[name], strict=True)), right
    check_modes_agree(found)
    check_advice_is_good(found)


def check_modes_agree(found: Found) -> None:
    """What "all" takes, "each" takes as the same one example, and "last" takes its last turn."""
    for conversation in CONVERSATIONS:
        (every, whole), (last, _end), (each, parts) = (found[conversation, mode] for mode in MODES)
        if every.kind == "right":
            assert each.kind == last.kind == "right", conversation
            assert parts == [whole], conversation
        if every.kind == "refused" and each.kind == "right":
            assert "train_on='each'" in every.why, (conversation, every.why)
        if each.kind == "right":
            assert last.kind == "right", (conversation, last.why)


def check_advice_is_good(found: Found) -> None:
    """A refusal that names another train_on is of a record which that one takes."""
    for (conversation, mode), (verdict, _) in found.items():
        for other in MODES:
            if verdict.kind == "refused" and f"train_on='{other}'" in verdict.why:
                kind = found[conversation, other][0].kind
                assert kind == "right", (conversation, mode, verdict.why)
