"""Finds out what media a model's processor takes, while the workers load the model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from pagewire.engine_core.media.jobs import Described
from pagewire.engine_core.media.processor import ConfinedProcessor
from pagewire.ipc.families.media import MediaFamily
from pagewire.ipc.wire.media import MediaInfo, MediumInfo

logger = logging.getLogger("pagewire.core")

FILES = ("processor_config.json", "preprocessor_config.json")
DEFAULT_LIMIT = 1  # media of a kind in a prompt


def has_processor(folder: Path) -> bool:
    """True if a model's folder has a processor of media."""
    return any((folder / name).is_file() for name in FILES)


class MediaStart:
    """A processor that starts in the background. limits: of media in a prompt, by kind."""

    def __init__(self, folder: Path, family: MediaFamily, limits: Mapping[str, int]) -> None:
        self.processor = ConfinedProcessor(folder)
        self._family, self._limits = family, limits
        self._described: Described | None = None
        self._thread = threading.Thread(target=self._describe, name="media start", daemon=True)
        self._thread.start()

    def info(self, embedding_size: int) -> MediaInfo | None:
        """What the engine takes; None, with a warning in the log, where the processor cannot be had. Blocks.

        embedding_size: of the model.
        """
        self._thread.join()
        if self._described is None:
            return None
        kinds = {
            kind: MediumInfo(token_id, text, place, limit, leads=self._family.leads)
            for kind, (token_id, text, place) in self._described.kinds.items()
            if (limit := self._limits.get(kind, DEFAULT_LIMIT)) > 0
        }
        return MediaInfo(kinds, self._described.sampling_rate, embedding_size, self._family.whole)

    def _describe(self) -> None:
        try:
            self._described = self.processor.describe()
        except Exception as error:
            logger.warning("the model is served for text only: %s", error)
            self.processor.close()
