"""Puts media into the tokens of a prompt: each placeholder becomes the tokens that stand for its medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.frontend.media.items import Decoded
from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.parts import NAMES
from pagewire.ipc.wire.embeddings import media_of
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.media import MediaInfo


@dataclass(frozen=True)
class PlacedMedium:
    """A medium with its name, and the tokens that stand for it in a prompt.

    options: arguments of the processor, as canonical JSON.
    """

    medium: Decoded
    name: bytes
    token_ids: Sequence[int]
    options: str = ""

    def at(self, start: int) -> list[Media]:
        """The medium, beginning at this position of a prompt. Embeddings are cut into pieces."""
        medium = self.medium
        if medium.embeddings:
            return media_of(medium.data, start)
        return [
            Media(
                start,
                len(self.token_ids),
                self.name,
                medium.data,
                kind=medium.kind,
                options=self.options,
                uuid=medium.uuid,
            )
        ]


def lay_out(
    token_ids: Sequence[int], media: Sequence[PlacedMedium], info: MediaInfo
) -> tuple[list[int], list[Media]]:
    """The tokens of a prompt with those of its media in place of the placeholders, and the media at their places.

    token_ids: with one placeholder (`MediumInfo.token_id`) for each medium, in the order of `media` for each kind;
    or with none, if the model takes media before the text.

    Raises:
        MediaError: there are more or fewer placeholders of a kind than media.
    """
    waiting: dict[int, list[PlacedMedium]] = {}  # by placeholder; the next one is the last
    leading: list[PlacedMedium] = []
    for kind, medium in info.kinds.items():
        own = [laid for laid in media if laid.medium.kind == kind]
        number = token_ids.count(medium.token_id) if own else 0
        if own and number == 0 and medium.leads:
            leading += own
        elif number != len(own):
            raise MediaError(
                f"the prompt has {len(own)} {NAMES[kind]}, and {number} places for them: it must have the text "
                f"{medium.text!r} once for each"
            )
        elif own:
            waiting[medium.token_id] = own[::-1]
    tokens: list[int] = []
    placed: list[Media] = []

    def add(laid: PlacedMedium) -> None:
        placed.extend(laid.at(len(tokens)))
        tokens.extend(laid.token_ids)

    for laid in leading:
        add(laid)
    for token_id in token_ids:
        if (own_kind := waiting.get(token_id)) is not None:
            add(own_kind.pop())
        else:
            tokens.append(token_id)
    return tokens, placed
