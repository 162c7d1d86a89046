"""Opens what an engine does with media: the processor of its model starts while the workers load the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagewire.engine_core.media.encoder_cache import EncoderCache
from pagewire.engine_core.media.jobs import Described
from pagewire.engine_core.media.processor import ConfinedProcessor
from pagewire.engine_core.media.store import MediaLimits, MediaStore
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.ipc.families.media import MediaFamily
from pagewire.ipc.wire.media import KEPT_EMBEDDINGS, MediaInfo, MediumInfo
from pagewire.ipc.wire.worker_messages import Ready

if TYPE_CHECKING:
    from pagewire.engine_core.config.config import EngineConfig

DEFAULT_LIMIT = 1  # media of a kind in a prompt


class MediaStart:
    """A processor that starts in the background.

    limits: of media in a prompt, by kind. arguments: see `ConfinedProcessor`.
    """

    def __init__(self, folder: Path, family: MediaFamily, limits: Mapping[str, int], arguments: str) -> None:
        self.processor = ConfinedProcessor(folder, arguments)
        self._family, self._limits = family, limits
        self._described: Described | Exception
        self._thread = threading.Thread(target=self._describe, name="media start", daemon=True)
        self._thread.start()

    def info(self, embedding_size: int) -> MediaInfo:
        """What the engine takes. Blocks.

        embedding_size: of the model.

        Raises:
            ValueError: the processor cannot be loaded; says why, and how to do without.
            RuntimeError: it fails, or did not start in time; likewise.
        """
        self._thread.join()
        if isinstance(self._described, Exception):
            none = ",".join(f"{kind}=0" for kind in self._family.kinds)
            kept = ValueError if isinstance(self._described, ValueError) else RuntimeError
            raise kept(
                f"{self._described}; to serve the model for text only, give --limit-mm-per-prompt {none}"
            ) from self._described
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
            self._described = error


def start_media(config: EngineConfig) -> MediaStart | None:
    """The processor of an engine's model, which starts beside its workers; None if the model takes no media."""
    if config.media is None:
        return None
    args = config.args
    arguments = msgspec.json.encode(args.mm_processor_kwargs).decode() if args.mm_processor_kwargs else ""
    return MediaStart(config.model_path, config.media, args.media_limits(), arguments)


def open_encoder(ready: Ready, limits: SchedulerConfig) -> EncoderCache | None:
    """What the workers keep of encoded media; None where they take none."""
    return (
        EncoderCache(KEPT_EMBEDDINGS, limits.max_num_batched_tokens, ready.encoder_layers)
        if ready.media
        else None
    )


def open_media(
    start: MediaStart | None, ready: Ready, limits: SchedulerConfig, wake: Callable[[], None]
) -> MediaStore | None:
    """What makes features of media; None where the model or the workers take none. Blocks.

    wake: wakes the core's loop.

    Raises:
        ValueError, RuntimeError: see `MediaStart.info`.
    """
    if start is None:
        return None
    if not ready.media:
        start.processor.close()
        return None
    info = start.info(ready.embedding_size)
    num_tokens = limits.max_num_batched_tokens if info.whole else 0
    media_limits = MediaLimits(KEPT_EMBEDDINGS, limits.max_model_len, num_tokens)
    return MediaStore(start.processor, info, media_limits, wake)
