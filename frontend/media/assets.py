"""Pictures and sounds by name, for examples: files in the folder `PAGEWIRE_ASSETS_CACHE`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.ipc.environment import cache_root

if TYPE_CHECKING:
    from PIL import Image


def assets_folder() -> Path:
    """The folder: that of the environment variable, else `assets` in pagewire's cache."""
    if given := os.environ.get("PAGEWIRE_ASSETS_CACHE"):
        return Path(given).expanduser()
    return cache_root() / "assets"


def asset_path(name: str, endings: tuple[str, ...]) -> Path:
    """The file of an asset.

    Raises:
        FileNotFoundError: there is none in the folder. Nothing is downloaded.
    """
    folder = assets_folder()
    for ending in endings:
        if (path := folder / f"{name}.{ending}").is_file():
            return path
    raise FileNotFoundError(
        f"there is no {name}.{endings[0]} in {folder} (PAGEWIRE_ASSETS_CACHE): put one there; assets are not "
        "downloaded"
    )


@dataclass(frozen=True)
class ImageAsset:
    """A picture. name: of its file, without the ending."""

    name: str

    @property
    def pil_image(self) -> Image.Image:
        """The picture, for `multi_modal_data`. Raises FileNotFoundError."""
        from PIL import Image

        return Image.open(asset_path(self.name, ("jpg", "jpeg", "png", "webp")))


@dataclass(frozen=True)
class AudioAsset:
    """A sound. name: of its file, without the ending."""

    name: str

    @property
    def audio_and_sample_rate(self) -> tuple[Any, int]:
        """Its samples, float32 [n] (channels averaged), and their number a second. Raises FileNotFoundError."""
        import soundfile

        path = asset_path(self.name, ("ogg", "wav", "flac", "mp3"))
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return samples.mean(axis=1), int(rate)
