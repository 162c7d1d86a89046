"""Finds out what media a model's processor takes, while the workers load the model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.engine_core.media.jobs import Described
from pagewire.engine_core.media.processor import ConfinedProcessor
from pagewire.engine_core.media.store import MediaLimits, MediaStore
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.ipc.families.media import MediaFamily
from pagewire.ipc.wire.media import MediaInfo, MediumInfo
from pagewire.ipc.wire.worker_messages import Ready

if TYPE_CHECKING:
    from pagewire.engine_core.config.config import EngineConfig

logger = logging.getLogger("pagewire.core")

DEFAULT_LIMIT = 1  # media of a kind in a prompt


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


def start_media(config: EngineConfig) -> MediaStart | None:
    """The processor of an engine's model, which starts beside its workers; None if the model takes no media."""
    if config.media is None:
        return None
    return MediaStart(config.model_path, config.media, config.args.media_limits())


def open_media(
    start: MediaStart | None, ready: Ready, limits: SchedulerConfig, wake: Callable[[], None]
) -> MediaStore | None:
    """What makes features of media; None where the workers or the processor take none. Blocks.

    wake: wakes the core's loop.
    """
    info = start.info(ready.embedding_size) if start is not None and ready.media else None
    if start is None or info is None:
        if start is not None:
            start.processor.close()
        return None
    num_tokens = limits.max_num_batched_tokens if info.whole else 0
    return MediaStore(start.processor, info, MediaLimits(limits.encoder_capacity, num_tokens), wake)
