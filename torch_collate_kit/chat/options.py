"""The options of tokenize_chat, and the tokenizer or processor that they are applied with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from torch_collate_kit._checks import checked_bool, checked_choice, checked_int, dataclass_repr
from torch_collate_kit.vision.expansion import ImageProcessing, image_processing
from torch_collate_kit.vision.images import image_files


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of turning conversations into examples, checked once; immutable.

    ``tokenize_chat``, ``tokenize_chat_dataset``, ``VisionLanguageCollator`` and ``audit`` accept
    it. Columns of a record (``tools``, ``chat_template_kwargs``) override it.

    Raises:
        ValueError: an unknown choice; a ``max_length`` below 2; ``group_turns`` without
            ``train_on="each"`` or windows; windows with "each" or without ``max_length``; a
            ``chat_template`` among the ``chat_template_kwargs``.
        TypeError: a number that is not an int, a flag that is not a bool.

    >>> ChatOptions(train_on="last", max_length=4096)
    ChatOptions(train_on='last', max_length=4096)
    """

    train_on: Literal["all", "last", "each"] = "all"
    """Trained turns: "all" assistant turns in one example; only the "last"; or "each" in the
    context that the model sees at inference, in as few examples as the template allows."""
    group_turns: bool = False
    """With ``train_on="each"`` or windows, make one example of a conversation, with a segment for
    each, so that ``PackedCollator(share_prefixes=True)`` computes what they begin with once."""
    max_length: int | None = None
    """The most tokens of an example; None for no limit."""
    overflow: Literal["raise", "truncate", "drop", "windows"] | None = None
    """Treatment of a longer example: "raise"; "truncate" keeps its first ``max_length`` tokens, so
    that its last answer may have no end; "drop" skips it; "windows" makes examples of its prompt
    and a run of what follows, which train each answer once. None: "drop" for a whole dataset, so
    that one long chat does not stop it, and "raise" otherwise."""
    allow_empty: bool = False
    """Train answers without text and tool calls, which teach the model to say nothing. They are
    refused by default."""
    tools: Sequence[Any] | str | None = None
    """Schemas of tools, for records without a column ``tools``."""
    chat_template: str | None = None
    """A template as text, or the name of one of the tokenizer's, in place of its default one. The
    tokenizer is not changed."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables for the template, such as ``{"enable_thinking": False}``."""
    image_root: str | PathLike[str] | None = None
    """The folder where relative paths of images start, and which no path may leave. None: the
    working directory, and any path."""
    max_pixels: int | None = None
    """The most pixels of an image, checked before it is decoded; None for the limit of PIL."""
    labels: bool = False
    """Return ``labels`` (-100 where not trained) in place of ``loss_mask``. transformers.Trainer
    and TRL keep them, and drop a ``loss_mask`` column by default."""
    pixels: bool = True
    """False reads only the sizes of image files: the same ids, and of the vision fields those that
    planning needs."""

    def __post_init__(self) -> None:
        checked_choice("train_on", self.train_on, ("all", "last", "each"))
        checked_choice("overflow", self.overflow, ("raise", "truncate", "drop", "windows", None))
        if self.max_length is not None:
            hint = "None means no limit"
            limit = checked_int("max_length", self.max_length, minimum=2, hint=hint)
            object.__setattr__(self, "max_length", limit)
        for name in ("group_turns", "allow_empty", "labels", "pixels"):
            checked_bool(name, getattr(self, name))
        if self.overflow == "windows" and (self.train_on == "each" or self.max_length is None):
            raise ValueError(
                "overflow='windows' cuts one example of a conversation into windows of max_length, "
                f"got {self!r}; give max_length, and train_on='all' or 'last'"
            )
        if self.group_turns and self.train_on != "each" and self.overflow != "windows":
            given = f'train_on="{self.train_on}" makes one'
            raise ValueError(
                f"group_turns=True puts the examples of a conversation together, and {given}; "
                'pass train_on="each", or leave group_turns out'
            )
        if "chat_template" in (self.chat_template_kwargs or {}):
            why = "has 'chat_template', which is an option of its own; pass chat_template="
            raise ValueError(f"chat_template_kwargs {why}")

    def __repr__(self) -> str:
        return dataclass_repr(self)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of every rendering, with ``chat_template`` if one is given."""
        given = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {**(self.chat_template_kwargs or {}), **given}


DEFAULT_OPTIONS = ChatOptions()


class ChatSetup:
    """Checked options with the tokenizer they are used with, and its processor if there is one."""

    def __init__(
        self,
        tokenizer: Any,
        options: ChatOptions,
        *,
        overflow: str = "raise",
        may_split: bool = True,
    ) -> None:
        if not isinstance(options, ChatOptions):
            raise TypeError(
                f"options must be ChatOptions, got {type(options).__name__}; pass "
                "ChatOptions(train_on='last')"
            )
        self.images: ImageProcessing | None = None
        if hasattr(tokenizer, "image_processor"):
            if options.group_turns or options.overflow == "windows":
                given = "group_turns=True" if options.group_turns else "overflow='windows'"
                raise ValueError(
                    f"{given} is for text, whose segments can share what they begin with; leave it "
                    "out for conversations with images, or pass the processor's tokenizer"
                )
            files = image_files(options.image_root, options.max_pixels)
            self.images = image_processing(tokenizer, files, options.pixels)
            tokenizer = tokenizer.tokenizer
        elif (options.pixels, options.image_root, options.max_pixels) != (True, None, None):
            raise ValueError(
                "pixels, image_root and max_pixels are for images, which a tokenizer alone does "
                "not read; pass the processor in place of the tokenizer"
            )
        if not hasattr(tokenizer, "get_chat_template"):
            raise TypeError(
                f"tokenizer must be a tokenizer or processor, got {type(tokenizer).__name__}; load "
                "it with AutoTokenizer.from_pretrained or AutoProcessor.from_pretrained"
            )
        self.tokenizer = tokenizer
        self.options = options
        self.overflow = options.overflow or overflow
        self.may_split = may_split
        """Whether a refusal may advise ``train_on="each"``."""

    def chat_template(self, asked: str | None, tools: Any) -> str | None:
        """Return the template, or the name of one, that ``asked`` and ``tools`` select.

        None: the tokenizer decides. A processor's own templates come first.
        """
        own = None if self.images is None else getattr(self.images.processor, "chat_template", None)
        if isinstance(own, str):
            return own if asked is None else asked
        if isinstance(own, Mapping):
            name = asked or ("tool_use" if tools and "tool_use" in own else "default")
            return own.get(name, asked)
        return asked
