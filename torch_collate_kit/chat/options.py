"""The checked options of tokenize_chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int
from torch_collate_kit.vision.expansion import ImageProcessing, image_processing
from torch_collate_kit.vision.images import image_files

__all__ = ["ChatOptions", "Overflow", "TrainOn"]

TrainOn = Literal["all", "last", "each"]
Overflow = Literal["raise", "truncate", "drop"]


class ChatOptions:
    """The checked options of :func:`~torch_collate_kit.tokenize_chat`.

    >>> ChatOptions(None, train_on="first")
    Traceback (most recent call last):
    ValueError: train_on must be one of 'all', 'last', 'each'; got 'first'
    """

    def __init__(
        self,
        tokenizer: Any,
        processor: Any = None,
        *,
        train_on: str = "all",
        max_length: int | None = None,
        overflow: str = "raise",
        allow_empty: bool = False,
        tools: Sequence[Any] | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: bool = False,
        pixels: bool = True,
        image_root: Any = None,
        max_pixels: int | None = None,
    ) -> None:
        checked_choice("train_on", train_on, ("all", "last", "each"))
        checked_choice("overflow", overflow, ("raise", "truncate", "drop"))
        if max_length is not None:
            max_length = checked_int(
                "max_length", max_length, minimum=2, hint="None means no limit"
            )
        self.images: ImageProcessing | None = None
        if processor is not None:
            files = image_files(image_root, max_pixels)
            self.images = image_processing(processor, files, checked_bool("pixels", pixels))
            if tokenizer not in (None, processor.tokenizer):
                raise ValueError(
                    "tokenizer and processor are both given, and the processor has another "
                    "tokenizer; pass the processor alone"
                )
            tokenizer = processor.tokenizer
        elif (pixels, image_root, max_pixels) != (True, None, None):
            raise ValueError("pixels, image_root and max_pixels need a processor; pass processor=")
        if not hasattr(tokenizer, "get_chat_template"):
            raise TypeError(
                f"tokenizer must be a tokenizer, got {type(tokenizer).__name__}; load it with "
                "AutoTokenizer.from_pretrained, or pass a processor as processor="
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.max_length = max_length
        self.overflow = overflow
        self.allow_empty = checked_bool("allow_empty", allow_empty)
        self.tools = tools
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.labels = checked_bool("labels", labels)

    def chat_template(self, asked: str | None, tools: Any) -> str | None:
        """The template, or the name of one, that a record's ``asked`` and ``tools`` select.

        None: the tokenizer decides. A processor's own templates come first.
        """
        own = None if self.images is None else getattr(self.images.processor, "chat_template", None)
        if isinstance(own, str):
            return own if asked is None else asked
        if isinstance(own, Mapping):
            name = asked or ("tool_use" if tools and "tool_use" in own else "default")
            return own.get(name, asked)
        return asked
