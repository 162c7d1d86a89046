"""The media of prompts: from `multi_modal_data` to their places among the prompt's tokens.

prompt --MediaLoader--> Decoded --layouts from the engine--> tokens with places, Media
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.cache import RecentKeys
from pagewire.frontend.media.items import Decoded, MediaItem
from pagewire.frontend.media.keys import KEYS, MediaFieldError
from pagewire.frontend.media.layout import PlacedMedium, lay_out
from pagewire.frontend.media.loader import MediaLoader
from pagewire.frontend.media.objects import item_of
from pagewire.frontend.media.parts import too_many
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.tenants import current_tenant
from pagewire.ipc.wire.budget import MAX_OPTIONS_CHARS
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.embeddings import PLACEHOLDER
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.media import (
    TOKEN_TYPE,
    MediaInfo,
    MediaLayout,
    check_layout,
    uuid_name,
)

LAYOUT_SECONDS = 3600.0
MAX_LAYOUT_BYTES = 32 << 20
MAX_SHAPE_BYTES = 4 << 20

# Asks the engine what stands for a medium of this kind and shape, with these arguments of its processor.
AskLayout = Callable[[str, Sequence[int], str], MediaLayout]


class MediaIntake:
    """Puts the media of prompts into their places. Thread-safe; `place` blocks while media are fetched and decoded.

    info: what the engine takes. ask: a call of the engine. max_model_len: tokens of a prompt.
    """

    def __init__(self, info: MediaInfo, loader: MediaLoader, ask: AskLayout, max_model_len: int) -> None:
        self.info, self.loader = info, loader
        self._ask, self._max_model_len = ask, max_model_len
        self._layouts = RecentKeys(LAYOUT_SECONDS, MAX_LAYOUT_BYTES)
        self._shapes = RecentKeys(
            LAYOUT_SECONDS, MAX_SHAPE_BYTES
        )  # of media with a caller's name, by that name

    def place(
        self, token_ids: Sequence[int], prompt: Mapping[str, Any], salt: str | None
    ) -> tuple[list[int], list[Media]]:
        """The tokens of a prompt with its media, and these at their places.

        salt: the prompt's cache salt. Only prompts with the same salt share what was fetched and decoded.

        Raises:
            MediaError: one is no picture or sound, cannot be had, or has no place in the prompt.
            EngineBusyError: other requests take too long. EngineDeadError: the core is lost.
        """
        options = media_options(prompt.get("mm_processor_kwargs"))
        media = self.contents(prompt, salt)
        laid = [self._place(medium, options, salt or "") for medium in media]
        return lay_out(token_ids, laid, self.info)

    def contents(self, prompt: Mapping[str, Any], salt: str | None) -> list[Decoded]:
        """The media of a prompt, fetched and decoded. salt, raises: as `place`."""
        items = items_in(prompt, self.info)
        if salt is None and any(item.uuid for item in items):
            raise MediaFieldError("multi_modal_uuids", "need a cache_salt: the names hold beside it only")
        encoded = [item for item in items if isinstance(item, MediaItem)]
        loaded = iter(self.loader.load(encoded, salt or ""))
        return [next(loaded) if isinstance(item, MediaItem) else item for item in items]

    def clear(self) -> None:
        """Forget what was fetched and decoded, and the callers' names for it."""
        self.loader.clear()
        self._shapes.clear()

    def _place(self, medium: Decoded, options: str, salt: str) -> PlacedMedium:
        if medium.embeddings:
            return PlacedMedium(medium, b"", [PLACEHOLDER] * medium.data.shape[0])
        if not medium.uuid:
            return PlacedMedium(
                medium, medium.name(options), self._layout(medium.kind, medium.data.shape, options), options
            )
        name = uuid_name(medium.kind, salt, medium.uuid, options)
        shape = medium.data.shape if medium.data.data else self._shapes.get(name)
        if shape is None:
            raise MediaFieldError(
                medium.place or "multi_modal_uuids",
                f": nothing is known by the name {quoted(medium.uuid)} any more: send the content as well",
            )
        self._shapes.put(name, shape, 0)
        return PlacedMedium(medium, name, self._layout(medium.kind, shape, options), options)

    def _layout(self, kind: str, shape: Sequence[int], options: str) -> Sequence[int]:
        key = (kind, tuple(shape), options)
        token_ids: Sequence[int] | None = self._layouts.get(key)
        if token_ids is None:
            answered = self._ask(kind, list(shape), options).token_ids
            check_layout(kind, len(answered), self._max_model_len)
            kept = array(TOKEN_TYPE, answered)
            self._layouts.put(key, kept, len(kept) * kept.itemsize + len(options))
            return kept
        return token_ids


def media_intake(
    info: MediaInfo, access: MediaAccess, call: Callable[..., Future[Any]], max_model_len: int
) -> MediaIntake:
    """The intake that puts media into the prompts of an engine. call: sends a call to the engine."""
    layout = CALLS["media_layout"]

    def ask(kind: str, shape: Sequence[int], options: str) -> MediaLayout:
        waiting = call(layout.name, kind, list(shape), options, current_tenant.get())
        try:
            answer: MediaLayout = layout.answer(waiting.result(layout.seconds))
        except FutureTimeoutError:
            raise EngineBusyError(f"{kind}: others before it took {layout.seconds:g} s") from None
        return answer

    return MediaIntake(info, MediaLoader(access, info.sampling_rate), ask, max_model_len)


def media_options(kwargs: Any) -> str:
    """Arguments of the processor as canonical JSON; "" for none.

    Raises:
        MediaError: they are no JSON object, or too long.
    """
    if not kwargs:
        return ""
    try:
        text = json.dumps(kwargs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = ""
    if not isinstance(kwargs, Mapping) or not text:
        raise MediaFieldError("mm_processor_kwargs", "must be an object of JSON values")
    if len(text) > MAX_OPTIONS_CHARS:
        raise MediaFieldError("mm_processor_kwargs", f"have more than {MAX_OPTIONS_CHARS} characters")
    return text


def items_in(prompt: Mapping[str, Any], info: MediaInfo) -> list[MediaItem | Decoded]:
    """The media of a prompt's `multi_modal_data` and `multi_modal_uuids`, by kind and in order.

    Raises:
        MediaError: the model takes no such media, or not so many; or a value is none.
    """
    data, uuids = (by_kind(name, prompt.get(name)) for name in KEYS[:2])
    items: list[MediaItem | Decoded] = []
    for kind in dict.fromkeys([*data, *uuids]):
        if kind not in info.kinds:
            raise MediaFieldError(
                "multi_modal_data", f"has {quoted(kind)}, and the model takes {', '.join(info.kinds)} only"
            )
        values, names = data.get(kind), uuids.get(kind, [])
        if values is None:
            values = [None] * len(names)
        if names and len(names) != len(values):
            raise MediaFieldError(
                "multi_modal_uuids", f"has {len(names)} names for {len(values)} of {quoted(kind)}"
            )
        if len(values) > info.kinds[kind].limit:
            raise too_many(kind, info)
        for index, value in enumerate(values):
            uuid = names[index] if names else None
            if uuid is not None and not isinstance(uuid, str):
                raise MediaFieldError(f"multi_modal_uuids['{kind}'][{index}]", "must be a string or None")
            items.append(item_of(kind, value, info, f"multi_modal_data['{kind}'][{index}]", uuid or ""))
    return items


def by_kind(name: str, given: Any) -> dict[str, list[Any]]:
    """The values of a prompt's key by kind, a single one as a list. Raises MediaError if it is no dict."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise MediaFieldError(
            name, f"must be a dict by kind, such as {{'image': ...}}, got {type(given).__name__}"
        )
    return {str(kind): value if isinstance(value, list) else [value] for kind, value in given.items()}
