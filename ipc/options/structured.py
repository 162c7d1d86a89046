"""What an engine demands of every structured output, beside what requests say."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.ipc.bounds import check_fields, unknown_name
from pagewire.ipc.compatibility import OPTIONS, settle
from pagewire.ipc.wire.params import JSON_STRUCTURES, StructuredOutputsParams


class StructuredOutputsConfig(msgspec.Struct, frozen=True):
    """The option `structured_outputs_config`; names and meanings are those of `StructuredOutputsParams`.

    disable_additional_properties also holds for the arguments of tool calls that are constrained to their schemas.
    backend: has no effect, see `OPTIONS` of `ipc.compatibility`. disable_fallback: nor has this.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def read(cls, values: dict[str, Any]) -> StructuredOutputsConfig:
        """The options in a dict.

        Raises:
            ValueError: an unknown name, or a backend that does not exist. TypeError: a value of another type.
        """
        for name in values:
            if name not in cls.__struct_fields__:
                hint = "; --reasoning-parser names the format of reasoning" * (name == "reasoning_parser")
                raise ValueError(
                    unknown_name("key of structured_outputs_config", name, cls.__struct_fields__) + hint
                )
        config = cls(**values)
        check_fields(config)
        settle("backend", config.backend, OPTIONS["guided_decoding_backend"])
        return config

    def applied(self, structure: StructuredOutputsParams) -> StructuredOutputsParams:
        """A request's parameters with what the engine demands; a pattern for white space is the request's own."""
        if structure.kind not in JSON_STRUCTURES:
            return structure
        no_whitespace = self.disable_any_whitespace and structure.whitespace_pattern is None
        if not (no_whitespace or self.disable_additional_properties):
            return structure
        return msgspec.structs.replace(
            structure,
            disable_any_whitespace=structure.disable_any_whitespace or no_whitespace,
            disable_additional_properties=structure.disable_additional_properties
            or self.disable_additional_properties,
        )
