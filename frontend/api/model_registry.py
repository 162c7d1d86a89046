"""`ModelRegistry`: registers models of one's own, and answers which architectures are supported."""

from __future__ import annotations

from typing import Any

from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.families.registry import SERVED
from pagewire.ipc.models.architectures import (
    EMBED,
    ENCODER_DECODERS,
    GENERATE,
    MULTIMODAL,
    REWARD,
    has_base,
    kind_of,
    pools,
)
from pagewire.ipc.models.plugins import load_allowed_plugins
from pagewire.ipc.models.registrations import add_family, add_model, all_registrations, import_path

OF_FAMILIES = frozenset(name for family in SERVED for name in family.architectures)
"""Names of repositories' own classes, all of language models."""


class ModelRegistry:
    """The architectures that engines serve, by their names in config.json.

    What is registered here reaches the engines that this process starts afterwards, and their workers, by name. A
    plugin registers in every engine of its environment (docs/own_models.md). Questions load the plugins, and import
    no model.
    """

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type) -> None:
        """Serve an architecture by a class: a `PreTrainedModel` of transformers or of one's own.

        model_cls: its import path, such as "acme.model:AcmeForCausalLM", or the class. A path imports nothing here.

        Raises:
            TypeError: model_cls is neither. ValueError: a bad name, or a class that other processes cannot import.
        """
        if isinstance(model_cls, type):
            model_cls = import_path(model_cls)
        if not isinstance(model_arch, str) or not isinstance(model_cls, str):
            raise TypeError("register_model takes an architecture, and a class or its import path")
        add_model(model_arch, model_cls)

    @staticmethod
    def register_family(table: str) -> None:
        """Read checkpoints with names of their own by a table, a `Family` (`pagewire.ipc.families.family`).

        table: its import path, such as "acme.table:ACME", in a module that imports no torch.

        Raises:
            TypeError: it is no text. ValueError: it is no import path.
        """
        if not isinstance(table, str):
            raise TypeError(f"register_family takes the import path of a table, got {type(table).__name__}")
        add_family(table)

    @staticmethod
    def get_supported_archs() -> list[str]:
        """The architectures that tests cover, and those that are registered, in order.

        Other ones of transformers may be served as well: loading them proves it. What embeds may have a head for
        classification in its place (`LlamaForSequenceClassification` for `LlamaModel`).
        """
        load_allowed_plugins()
        known = GENERATE | MULTIMODAL | ENCODER_DECODERS | EMBED | REWARD | OF_FAMILIES
        return sorted(known.union(all_registrations().models))

    @staticmethod
    def get_supported_models() -> list[str]:
        """The same names: a model is supported by its architecture."""
        return ModelRegistry.get_supported_archs()

    @staticmethod
    def get_model_info(model_arch: str) -> dict[str, Any]:
        """A description of an architecture.

        Returns:
            "architecture"; "model_cls": the import path that is registered, or None; "runner": "generate" or
            "pooling"; "convert": what it pools to ("embed", "classify", "token_classify"), or None; "is_...": the
            answers of the methods below.

        Raises:
            ValueError: it is not supported; the text has the most similar name.
        """
        supported = ModelRegistry.get_supported_archs()
        if model_arch not in supported and not has_base(model_arch):
            raise ValueError(unknown_name("architecture", model_arch, supported))
        pooling = pools(model_arch) and model_arch not in OF_FAMILIES
        kind = "token_classify" if model_arch in REWARD else kind_of(model_arch)
        return {
            "architecture": model_arch,
            "model_cls": all_registrations().models.get(model_arch),
            "runner": "pooling" if pooling else "generate",
            "convert": kind if pooling else None,
            "is_text_generation_model": not pooling,
            "is_pooling_model": pooling,
            "is_embedding_model": pooling and kind == "embed",
            "is_multimodal_model": model_arch in MULTIMODAL,
        }

    @staticmethod
    def is_text_generation_model(model_arch: str) -> bool:
        """True if the architecture generates text where no option says otherwise.

        Raises:
            ValueError: it is not supported. So do the other questions.
        """
        return bool(ModelRegistry.get_model_info(model_arch)["is_text_generation_model"])

    @staticmethod
    def is_pooling_model(model_arch: str) -> bool:
        """True if the architecture embeds or classifies where no option says otherwise."""
        return bool(ModelRegistry.get_model_info(model_arch)["is_pooling_model"])

    @staticmethod
    def is_embedding_model(model_arch: str) -> bool:
        """True if the architecture embeds where no option says otherwise."""
        return bool(ModelRegistry.get_model_info(model_arch)["is_embedding_model"])

    @staticmethod
    def is_multimodal_model(model_arch: str) -> bool:
        """True if the architecture takes pictures or sounds."""
        return bool(ModelRegistry.get_model_info(model_arch)["is_multimodal_model"])
