"""The structured outputs of a whole engine: what holds for each request with a JSON schema."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.ipc.bounds import check_fields, unknown_name
from pagewire.ipc.compatibility import NAMES, KnowsArguments
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import JSON_STRUCTURES, StructuredOutputsParams


class StructuredOutputsConfig(
    msgspec.Struct, metaclass=KnowsArguments, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Settings for all structured outputs of an engine; requests may ask for the same one by one.

    Attributes:
        disable_any_whitespace: no whitespace between the tokens of JSON, unless a request gives a
            `whitespace_pattern`.
        disable_additional_properties: objects have no properties but those that the schema names.

    Raises:
        TypeError: a value of the wrong type. ValueError: a field of vLLM's that pagewire does not have.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsConfig:
        """The settings in a dict, in another `StructuredOutputsConfig`, or in nothing.

        Raises:
            ValueError: an unknown name. TypeError: something else. And as the class.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise TypeError(
                f"structured_outputs_config must be a StructuredOutputsConfig or a dict, got {quoted(value)}"
            )
        for name in value:
            if name not in cls.__struct_fields__ and f"{cls.__name__}({name})" not in NAMES:
                raise ValueError(
                    unknown_name("field of structured_outputs_config", name, cls.__struct_fields__)
                )
        return cls(**value)

    def completed(self, structure: StructuredOutputsParams) -> StructuredOutputsParams:
        """The form that the output of a request must have, completed by these settings."""
        if structure.kind not in JSON_STRUCTURES or self == StructuredOutputsConfig():
            return structure
        compact = self.disable_any_whitespace and structure.whitespace_pattern is None
        return msgspec.structs.replace(
            structure,
            disable_any_whitespace=structure.disable_any_whitespace or compact,
            disable_additional_properties=structure.disable_additional_properties
            or self.disable_additional_properties,
        )
