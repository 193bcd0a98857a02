"""Loading processors with and without torchvision, and which models read images."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.chat_images.truth import chat, image, text
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import tokenize_chat
from torch_collate_kit.vision import families as module
from torch_collate_kit.vision import is_vision_language, load_processor

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
_DEMANDS_TORCHVISION = type(transformers.Idefics3ImageProcessorPil).__name__ == "DummyObject"
NEEDS_VIDEO = ["qwen2_vl", "qwen3_vl", "glm4v", "internvl", "llava_onevision"]


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_family_are_vision_language(name: str) -> None:
    model = FAMILIES[name].model()
    assert is_vision_language(model)
    assert is_vision_language(model.config)
    assert not is_vision_language(model.config.get_text_config())


def test_others_are_not() -> None:
    for config in (transformers.Qwen3Config(), transformers.CLIPConfig(), transformers.ViTConfig()):
        assert not is_vision_language(config)
    with pytest.raises(TypeError, match="expected a transformers config or model, got str; load"):
        is_vision_language("Qwen/Qwen3-VL-2B-Instruct")


def record() -> Any:
    import numpy as np

    picture = draw(np.random.default_rng(0), 60, 90)
    return {"messages": chat([image(), text("What?")], "A cat."), "images": [picture]}


@pytest.mark.parametrize("name", ["llava_next", "idefics3", "gemma3"])
def test_processors_without_a_video_part(name: str, tmp_path: Path) -> None:
    if name == "idefics3" and _DEMANDS_TORCHVISION:
        pytest.skip("this transformers demands torchvision, though nothing of it is used")
    saved = FAMILIES[name].make_processor()
    saved.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded) is type(saved)
    wanted, found = (tokenize_chat(record(), p) for p in (saved, loaded))
    assert found["input_ids"] == wanted["input_ids"]
    assert (found["pixel_values"] == wanted["pixel_values"]).all()


@pytest.mark.skipif(HAS_TORCHVISION, reason="with torchvision these load as they are")
@pytest.mark.parametrize("name", NEEDS_VIDEO)
def test_processors_that_demand_one(name: str, tmp_path: Path, caplog: Any) -> None:
    saved = FAMILIES[name].make_processor()
    saved.save_pretrained(tmp_path)
    module._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "torch_collate_kit.vision"):
        loaded = load_processor(str(tmp_path))
        load_processor(tmp_path)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("torch_collate")] == [
        f"torchvision is not installed: {type(saved).__name__} is built without its video "
        "processor, and images are processed with PIL, whose pixels differ slightly"
    ]
    wanted = tokenize_chat(record(), saved)
    for processor in (loaded, pickle.loads(pickle.dumps(loaded)), copy.copy(loaded)):
        found = tokenize_chat(record(), processor)
        assert found["input_ids"] == wanted["input_ids"]
        assert (found["pixel_values"] == wanted["pixel_values"]).all()
    assert isinstance(loaded, getattr(transformers, type(saved).__name__))
    changed = copy.copy(loaded)
    changed.tokenizer = None
    assert loaded.tokenizer is not None


@pytest.mark.skipif(HAS_TORCHVISION, reason="with torchvision this one loads as it is")
def test_a_processor_that_cannot_do_without(tmp_path: Path) -> None:
    FAMILIES["smolvlm"].make_processor().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=r"SmolVLMProcessor demands .* pip install torchvision"):
        load_processor(tmp_path)


def test_a_model_without_processor_gives_its_tokenizer(tmp_path: Path) -> None:
    FAMILIES["gemma3"].make_processor().tokenizer.save_pretrained(tmp_path)
    transformers.Qwen3Config().save_pretrained(tmp_path)
    found = load_processor(tmp_path)
    assert isinstance(found, transformers.PreTrainedTokenizerBase)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=r"'.*' is neither a folder nor a name on the hub with a processor"
    ):
        load_processor(tmp_path / "nothing")
    with pytest.raises(OSError, match=r"the folder .* holds no processor or tokenizer that can be"):
        load_processor(tmp_path)
