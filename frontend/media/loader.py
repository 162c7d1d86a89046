"""From pictures and sounds as clients give them to decoded content.

MediaItem --URL: downloaded, read or taken from base64--> bytes --a process that may be lost--> Decoded
                \\_______________ what came a short time ago is not fetched or decoded again ___/
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from hashlib import sha256
from urllib.parse import unquote, urlsplit

from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.cache import DecodedCache, RecentKeys
from pagewire.frontend.media.decode_process import decode
from pagewire.frontend.media.items import Decoded, MediaItem
from pagewire.frontend.media.keys import MediaError, MediaFieldError
from pagewire.frontend.media.limits import MAX_DECODED_BYTES, MAX_SOURCE_BYTES, MAX_SOURCES_BYTES
from pagewire.frontend.media.local_file import read_local_file
from pagewire.ipc.environment import env_float
from pagewire.ipc.wire.items import NOTHING

FETCH_SECONDS = 5.0  # default time for one download
NUM_DOWNLOADS = 4  # of one request at the same time
CACHE_BYTES = 256 << 20
BASE64_CHARS = 1 << 20  # decoded at a time
URL_SECONDS = 60.0  # how long the content of a URL is taken to be the same
MAX_URL_BYTES = 8 << 20  # of URLs whose content is known
TIMEOUTS = {"image": "PAGEWIRE_IMAGE_FETCH_TIMEOUT", "audio": "PAGEWIRE_AUDIO_FETCH_TIMEOUT"}


class MediaLoader:
    """Fetches and decodes the media of requests. Thread-safe; all methods block.

    access: what may be fetched. sampling_rate: of sounds, in samples a second; 0: their own.
    """

    def __init__(self, access: MediaAccess, sampling_rate: int = 0) -> None:
        self._access, self._rate = access, sampling_rate
        self._cache = DecodedCache(CACHE_BYTES)
        self._urls = RecentKeys(URL_SECONDS, MAX_URL_BYTES)
        self._seconds = {kind: fetch_seconds(name) for kind, name in TIMEOUTS.items()}

    def load(self, items: Sequence[MediaItem], tenant: str = "") -> list[Decoded]:
        """The content of the media of one request, in order.

        tenant: whose request it is; no other's content is reused.

        Raises:
            MediaError: one cannot be fetched or decoded, or they are too large together.
            EngineBusyError: other requests take too long.
        """
        budget = SourceBudget(MAX_SOURCES_BYTES)
        is_remote = [item.url[:5].lower() == "http:" or item.url[:6].lower() == "https:" for item in items]
        if sum(is_remote) < 2:
            return self._decode_all(items, [None] * len(items), tenant, budget)
        with ThreadPoolExecutor(NUM_DOWNLOADS, "download") as pool:
            futures = [
                pool.submit(copy_context().run, self._fetch_named, item, tenant, budget) if remote else None
                for item, remote in zip(items, is_remote, strict=True)
            ]
            try:
                sources = [None if future is None else future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return self._decode_all(items, sources, tenant, budget)

    def clear(self) -> None:
        """Forget what was fetched and decoded."""
        self._cache.clear()
        self._urls.clear()

    def _decode_all(
        self,
        items: Sequence[MediaItem],
        sources: Sequence[MediaSource | None],
        tenant: str,
        budget: SourceBudget,
    ) -> list[Decoded]:
        """Decode media, one after the other: another request's wait no longer than for one of them."""
        decoded: list[Decoded] = []
        room = MAX_DECODED_BYTES
        for item, source in zip(items, sources, strict=True):
            if item.is_empty:
                decoded.append(Decoded(item.kind, NOTHING, uuid=item.uuid, place=item.place))
                continue
            with naming(item):
                content = self._decoded(item, source or self._fetch(item, tenant, budget))
            room -= len(content.data.data)
            if room < 0:
                raise MediaError(
                    f"the pictures and sounds of a prompt may have {MAX_DECODED_BYTES} bytes when they are decoded"
                )
            decoded.append(name_content(content, item))
        return decoded

    def _fetch_named(self, item: MediaItem, tenant: str, budget: SourceBudget) -> MediaSource:
        with naming(item):
            return self._fetch(item, tenant, budget)

    def _fetch(self, item: MediaItem, tenant: str, budget: SourceBudget) -> MediaSource:
        """The bytes of an item; of a URL that came a short time ago, only their key."""
        address = (tenant, item.kind, item.url, item.max_side)
        scheme = item.url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            known = self._urls.get(address)
            if known is not None and (content := self._cache.get(known)) is not None:
                return MediaSource(known, b"", content)
        data = self._read(item, scheme, budget.room(MAX_SOURCE_BYTES[item.kind]))
        budget.take(len(data))
        digest = sha256(data).digest()
        form = (self._rate, item.samples) if item.kind == "audio" else item.max_side
        key = (tenant, item.kind, form, digest)
        if scheme in ("http", "https"):
            self._urls.put(address, key, len(item.url) + 2 * len(tenant))
        return MediaSource(key, data)

    def _read(self, item: MediaItem, scheme: str, max_bytes: int) -> bytes:
        if not item.url:
            return item.data
        if scheme == "data":
            return from_data_url(item.url, max_bytes)
        if scheme == "file":
            parts = urlsplit(item.url)
            if parts.netloc not in ("", "localhost"):
                raise MediaError("a file: URL must not name another host: write file:///path")
            return read_local_file(unquote(parts.path), self._access.folder, max_bytes)
        if scheme not in ("http", "https"):
            raise MediaError("only http, https, data and (where the server allows it) file URLs can be used")
        from pagewire.frontend.media.download import (  # aiohttp is slow to import
            DownloadLimits,
            download_media,
        )

        return download_media(item.url, self._access, DownloadLimits(self._seconds[item.kind], max_bytes))

    def _decoded(self, item: MediaItem, source: MediaSource) -> Decoded:
        if source.content is not None:
            return source.content
        kind = item.kind if not item.samples else "samples"
        rate = self._rate if item.kind == "audio" else 0
        return self._cache.get_or_make(
            source.key,
            lambda: Decoded(item.kind, decode(kind, source.data, rate, item.samples, item.max_side)),
        )


class MediaSource:
    """The bytes of an item, and the key of what they decode to; or that content itself."""

    __slots__ = ("content", "data", "key")

    def __init__(self, key: Hashable, data: bytes, content: Decoded | None = None) -> None:
        self.key, self.data, self.content = key, data, content


class SourceBudget:
    """The bytes that the items of one request may have before they are decoded. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes
        self._lock = threading.Lock()

    def room(self, wanted: int) -> int:
        """The bytes that are left for one item that may have `wanted` of them."""
        return min(wanted, self._left)

    def take(self, num_bytes: int) -> None:
        """Count an item's bytes. Raises MediaError if they are too many."""
        with self._lock:
            self._left -= num_bytes
            if self._left < 0:
                raise MediaError(f"the pictures and sounds of a prompt may have {self._max_bytes} bytes")


@contextmanager
def naming(item: MediaItem) -> Iterator[None]:
    """A context whose errors say where in its request an item is."""
    try:
        yield
    except MediaError as error:
        raise (MediaFieldError(item.place, f": {error}") if item.place else MediaError(str(error))) from None


def name_content(content: Decoded, item: MediaItem) -> Decoded:
    """The content under a caller's name, if it has one."""
    return Decoded(content.kind, content.data, uuid=item.uuid) if item.uuid else content


def from_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a data: URL in base64.

    Raises:
        MediaError: it is malformed or too long.
    """
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError("a data: URL must be like data:image/png;base64,...")
    return from_base64(text, max_bytes)


def from_base64(text: str, max_bytes: int) -> bytes:
    """The bytes of text in base64.

    Raises:
        MediaError: it is none, or too long.
    """
    if len(text) > max_bytes // 3 * 4 + 4:
        raise MediaError(f"a picture or sound has more than {max_bytes} bytes")
    try:
        # In pieces: other threads wait while one of them is decoded.
        pieces = [
            base64.b64decode(text[start : start + BASE64_CHARS], validate=True)
            for start in range(0, len(text), BASE64_CHARS)
        ]
    except (binascii.Error, ValueError):
        raise MediaError("a picture or sound is not valid base64") from None
    if any(len(piece) != BASE64_CHARS // 4 * 3 for piece in pieces[:-1]):  # padding within
        raise MediaError("a picture or sound is not valid base64")
    return b"".join(pieces)


def fetch_seconds(name: str) -> float:
    """The time that a download may take, from an environment variable.

    Raises:
        ValueError: it is no positive number.
    """
    seconds = env_float(name, FETCH_SECONDS)
    if not 0 < seconds <= 3600:
        raise ValueError(f"{name} must be over 0 and at most 3600 (seconds), got {seconds:g}")
    return seconds
