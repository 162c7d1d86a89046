"""What the core checks of the pictures and sounds of a prompt, but for names and layouts (`engine_core.media`)."""

from __future__ import annotations

from collections import Counter

from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.media import MediaInfo, check_kind

NAME_BYTES = 32


def check_encoded(prompt: Prompt, info: MediaInfo | None) -> None:
    """Check the pictures and sounds of a prompt. Their places are checked with those of embeddings.

    Raises:
        ValueError: the engine does not take them, or they do not fit the prompt.
    """
    counts: Counter[str] = Counter()
    within: Counter[int] = Counter()  # tokens in whose place an embedding goes, within media
    for medium in prompt.encoded:
        own = info.kinds.get(medium.kind) if info is not None else None
        check_content(medium, info)
        assert own is not None
        counts[medium.kind] += 1
        if counts[medium.kind] > own.limit:
            raise ValueError(
                f"a prompt may have {own.limit} media of the kind {medium.kind} (limit_mm_per_prompt), and this "
                "one has more"
            )
        within[own.embedding_id] += prompt.token_ids[medium.start : medium.end].count(own.embedding_id)
    for kind, own in ({} if info is None else info.kinds).items():
        if prompt.token_ids.count(own.embedding_id) != within[own.embedding_id]:
            raise ValueError(
                f"the prompt has the token {own.embedding_id}, which stands for a part of a medium ({kind}), "
                "outside of any"
            )


def check_content(medium: Media, info: MediaInfo | None) -> None:
    """Check kind, shape, dtype and length of the name of a medium; raises ValueError."""
    if len(medium.name) != NAME_BYTES:
        raise ValueError(f"{medium.kind}: its name must have {NAME_BYTES} bytes, got {len(medium.name)}")
    is_image = medium.kind == "image"
    if medium.uuid and not medium.data.data:  # the engine may have it
        return check_kind(info, medium.kind, (1, 1, 3) if is_image else (1,))
    check_kind(info, medium.kind, medium.data.shape)
    if medium.data.dtype != (dtype := "uint8" if is_image else "float32"):
        raise ValueError(f"{medium.kind}: {dtype} expected, got {medium.data.dtype}")
    return None
