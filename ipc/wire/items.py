"""The parts that messages between frontends, core and workers share.

Numerous items (rows, deltas, requests) are arrays, which are compact. Messages are tagged maps, so an unknown one
is detected and a dump is readable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

import msgspec

from pagewire.ipc.shapes import Shape
from pagewire.ipc.wire.budget import MAX_MEDIA, MAX_NAME_CHARS, MAX_OPTIONS_CHARS, MAX_TOKENS
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.params import Name, NumTokens, SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams

TokenIds: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]
NOTHING = Tensor("uint8", (0,), b"")


class Item(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of numerous items in messages: encoded by position, and not tracked by the garbage collector."""


class TensorForm(Item):
    """A tensor without its numbers. dtype: as safetensors files have it, such as "BF16"."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Shape


class WeightFile(Item):
    """A safetensors file that the core keeps open.

    path: by which processes of its user on its machine open it. state: see `ipc.files.weight_files.state_of`.
    """

    path: str
    state: list[int]


class Message(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Base of messages: encoded as a map with a tag."""


class LogprobRows(Item):
    """Log probabilities at n positions. Column 0 is the actual token, the others are the k most likely tokens.

    token_ids: int32 [n, 1 + k]; logprobs: float32 [n, 1 + k]; ranks: int32 [n], 1 = most likely.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def first(self, count: int) -> LogprobRows:
        """The first `count` of the n positions."""
        if count == self.ranks.shape[0]:
            return self
        return LogprobRows(*(_first(tensor, count) for tensor in (self.token_ids, self.logprobs, self.ranks)))

    def after(self, count: int) -> LogprobRows:
        """The n positions but the first `count`; all for a negative one."""
        if count <= 0:
            return self
        return LogprobRows(*(_after(tensor, count) for tensor in (self.token_ids, self.logprobs, self.ranks)))

    @staticmethod
    def join(parts: list[LogprobRows]) -> LogprobRows | None:
        """The positions of all parts, in order; None if there are no parts. All parts have the same k."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        return LogprobRows(
            _joined([part.token_ids for part in parts]),
            _joined([part.logprobs for part in parts]),
            _joined([part.ranks for part in parts]),
        )


def _first(tensor: Tensor, count: int) -> Tensor:
    size = len(tensor.data) // tensor.shape[0]
    return Tensor(tensor.dtype, (count, *tensor.shape[1:]), tensor.data[: count * size])


def _after(tensor: Tensor, count: int) -> Tensor:
    number = tensor.shape[0]
    count = min(count, number)
    size = len(tensor.data) // max(1, number)
    return Tensor(tensor.dtype, (number - count, *tensor.shape[1:]), tensor.data[count * size :])


def _joined(parts: list[Tensor]) -> Tensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Tensor(parts[0].dtype, shape, b"".join(bytes(part.data) for part in parts))


class Media(Item):
    """A picture, a sound or the like, or embeddings, which take the place of some tokens of a prompt.

    start, num_tokens: the tokens that stand for it: its layout (`ipc.wire.media`), or what embeddings replace.
    name: by which its keys and values are shared: `media_name` of its content, `uuid_name` if the caller has named
        it, or the `name_of` embeddings.
    data: the decoded content: of a picture uint8 [height, width, 3], of a sound float32 [samples] at the engine's
        sampling rate. Empty: the engine may still have what it has made of it, under the caller's name.
    embeddings: data are the embeddings of these tokens [num_tokens, E] (`ipc.embeddings`), of which a step may
        compute a part.
    kind: "image" or "audio". options: arguments of the model's processor, as canonical JSON; empty for none.
    uuid: the caller's name; it holds beside the prompt's cache salt only, which must then be set.
    """

    start: int
    num_tokens: int
    name: bytes
    data: Tensor
    embeddings: bool = False
    kind: Name = "image"
    options: Annotated[str, msgspec.Meta(max_length=MAX_OPTIONS_CHARS)] = ""
    uuid: Name = ""

    @property
    def end(self) -> int:
        """The position behind its tokens."""
        return self.start + self.num_tokens

    def rows(self, start: int, end: int) -> Media:
        """The embeddings of the positions from `start` to `end` among its own; their bytes are not copied."""
        first, last = max(start, self.start), min(end, self.end)
        size = len(self.data.data) // self.num_tokens
        part = memoryview(self.data.data)[(first - self.start) * size : (last - self.start) * size]
        data = Tensor(self.data.dtype, (last - first, *self.data.shape[1:]), part)
        return Media(first, last - first, self.name, data, True)


class Prompt(Item):
    """Everything that the keys and values of a request's prompt depend on.

    media: in the order of `start`, apart from each other. adapter: sha256 of the content of an adapter of the
    model's weights; empty for none. cache_salt: requests share cached prefixes only if their salts are equal.
    """

    token_ids: TokenIds
    media: Annotated[list[Media], msgspec.Meta(max_length=MAX_MEDIA)] = []
    adapter: Annotated[bytes, msgspec.Meta(max_length=MAX_NAME_CHARS)] = b""
    cache_salt: Name | None = None

    def embeddings(self, start: int, end: int) -> list[Media]:
        """The embeddings that take the place of tokens from position `start` to `end`, cut to these."""
        return [medium.rows(start, end) for medium in self._media_in(start, end) if medium.embeddings]

    @property
    def encoded(self) -> list[Media]:
        """The pictures and sounds, which the model's encoder takes."""
        return [medium for medium in self.media if not medium.embeddings]

    def places(self, grids: Iterable[Tensor] = ()) -> list[Media]:
        """The media as a worker gets them at once, without contents: rows bring embeddings, and entries the rest.

        grids: of the pictures and sounds, in order (`SlotInit`); none of a source, which comes whole.
        """
        grid = iter(grids)
        return [
            Media(medium.start, medium.num_tokens, medium.name, NOTHING, True)
            if medium.embeddings
            else Media(medium.start, medium.num_tokens, medium.name, own, False, medium.kind)
            if (own := next(grid, None)) is not None
            else medium
            for medium in self.media
        ]

    def block_keys(self, index: int, block_size: int) -> list[tuple[str | bytes | int, ...]]:
        """The keys of KV block `index` beside its tokens and the blocks before it.

        Salt and adapter are keys of the first block, and so of all, because names of blocks are chained. A medium
        is a key of every block that it touches, with its place relative to the block.
        """
        keys: list[tuple[str | bytes | int, ...]] = []
        if index == 0 and self.cache_salt:
            keys.append(("salt", self.cache_salt))
        if index == 0 and self.adapter:
            keys.append(("adapter", self.adapter))
        begin = index * block_size
        for medium in self._media_in(begin, begin + block_size):
            keys.append(("media", medium.name, medium.start - begin, medium.num_tokens))
        return keys

    def _media_in(self, start: int, end: int) -> Iterator[Media]:
        """The media at positions from `start` to `end`, without a look at others, which may be a thousand."""
        place = bisect_right(self.media, start, key=lambda medium: medium.end)
        while place < len(self.media) and (medium := self.media[place]).start < end:
            yield medium
            place += 1


MAX_RETENTIONS = 4  # of a request
MAX_RETAINED_SECONDS = 86_400.0
RETAINED_SECONDS = 300.0  # where an API names no time


class Retention(Item):
    """A request's wish that the KV blocks of its prefix stay in the cache, whatever others need.

    seconds: how long, from the request's last token on.
    name: of a session or the like, by which promises are released; empty: only their time ends them.
    num_tokens: of the prompt, from its beginning; 0: all of it. Only full blocks are kept.
    with_output: the output is kept too, behind a whole prompt.
    """

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_RETAINED_SECONDS)] = RETAINED_SECONDS
    name: Name = ""
    num_tokens: NumTokens = 0
    with_output: bool = False


class RetainedPrefix(Item):
    """The outcome of a `Retention`.

    num_tokens: of the sequence, from its beginning, that are kept. refusal: why these are not all; empty: they are.
    """

    num_tokens: int
    refusal: str = ""


Task: TypeAlias = SamplingParams | PoolingParams
