"""Errors of chat completions in the terms of other APIs, whose requests become chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.frontend.server.http.errors import APIError, named_field


@dataclass(frozen=True)
class Terms:
    """The names of one API for what chat completions and the engine's parameters call otherwise.

    fields: of its requests. renamed: its fields, by those that they become. rewrites: patterns in messages, in
    order, and what replaces them.
    """

    fields: tuple[str, ...]
    renamed: Mapping[str, str]
    rewrites: Sequence[tuple[str, str]]

    def __call__(self, error: APIError) -> APIError:
        """Return an error that names the API's own fields."""
        message = error.message
        for pattern, replacement in self.rewrites:
            message = re.sub(pattern, replacement, message)
        param = self.renamed.get(error.param or "", error.param) or named_field(message, self.fields)
        return APIError(error.status, message, param=param, code=error.code, headers=error.headers)
