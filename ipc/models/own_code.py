"""Code of one's own that the operator names when the engine starts: logits processors and methods of workers.

Only import paths travel, such as "acme.sampling:Processor"; the workers import them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagewire.ipc.bounds import MAX_PROCESSORS
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.models.registrations import checked_path, import_path
from pagewire.ipc.quoting import quoted


class ProcessorSource(msgspec.Struct, frozen=True, array_like=True):
    """A logits processor of the engine.

    path: from which workers import it. name: by which requests ask for it; empty: it applies to every sequence.
    """

    path: str
    name: str = ""

    @property
    def label(self) -> str:
        """Its name for messages."""
        return self.name or self.path


def processor_sources(given: Sequence[str]) -> tuple[ProcessorSource, ...]:
    """The logits processors that an option lists: "module:Class" for all sequences, "NAME=module:Class" by name.

    Raises:
        ValueError: it is of another form, or names one twice.
    """
    sources = []
    for text in given:
        before, equals, after = text.rpartition("=")
        if equals and not before.isidentifier():
            raise FieldValueError(
                "logits_processors", f": the name of a processor is an identifier, got {quoted(before)}"
            )
        try:
            sources.append(ProcessorSource(checked_path(after), before))
        except ValueError as error:
            raise FieldValueError("logits_processors", f": {error}, or 'NAME=package.module:Name'") from None
    labels = [source.label for source in sources]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise FieldValueError("logits_processors", f": {quoted(min(twice))} is there twice")
    if len(sources) > MAX_PROCESSORS:
        raise FieldValueError("logits_processors", f": at most {MAX_PROCESSORS}, got {len(sources)}")
    return tuple(sources)


def check_processors(names: Iterable[str], known: Sequence[str]) -> None:
    """Check the logits processors that a request names. known: the names that the engine was started with.

    Raises:
        ValueError: the engine does not have one of them.
    """
    for name in names:
        if name not in known:
            here = (
                f"this engine has {', '.join(known)}"
                if known
                else (
                    "this engine has none by name; --logits-processors NAME=module:Class adds one when it starts"
                )
            )
            raise FieldValueError("logits_processors", f": {quoted(name)} is unknown: {here}")


def path_of(code: Any) -> Any:
    """The import path of a class, so that it can be given in the place of its path; anything else as it is.

    Raises:
        ValueError: workers would not find it.
    """
    return import_path(code) if isinstance(code, type) else code
