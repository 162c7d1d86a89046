"""Files become pixels and samples as Pillow, soundfile and soxr have them, and what does not ends alone."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image, ImageOps

from pagewire.frontend.media import decode_process, loader
from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.decode_process import decode
from pagewire.frontend.media.items import MediaItem
from pagewire.frontend.media.keys import MediaError
from pagewire.frontend.media.loader import MediaLoader, from_base64
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.host.confined import Confined
from pagewire.ipc.tenants import current_tenant
from pagewire.ipc.wire.codec import Tensor
from tests.benchmarks.loading import load_from

files = load_from("siege", "media_files")
RATE = 16_000
NOISE = np.random.default_rng(1)


def pixels(tensor: Tensor) -> Any:
    return np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)


def samples(tensor: Tensor) -> Any:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def file_of(picture: Image.Image, form: str, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def photo(mode: str = "RGB", width: int = 60, height: int = 40) -> Image.Image:
    return Image.fromarray(NOISE.integers(0, 255, (height, width, 4), np.uint8), "RGBA").convert(mode)


def sound_file(form: str, rate: int = 44_100, channels: int = 2, **options: Any) -> bytes:
    file = BytesIO()
    soundfile.write(file, NOISE.uniform(-0.5, 0.5, (rate // 2, channels)), rate, format=form, **options)
    return file.getvalue()


def test_pictures_are_those_of_pillow() -> None:
    """Of all formats and modes; an animation is its first picture; upright as EXIF data say."""
    turned = Image.Exif()
    turned[0x0112] = 6
    made = [file_of(photo(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")]
    made += [file_of(photo(mode), "JPEG") for mode in ("RGB", "L", "CMYK")]
    made += [
        file_of(photo(mode), "WEBP", lossless=lossless) for mode in ("RGB", "RGBA") for lossless in (0, 1)
    ]
    made += [file_of(photo("P"), "GIF", save_all=True, append_images=[photo("P")])]
    made += [file_of(photo(), "WEBP", save_all=True, append_images=[photo()])]
    made += [file_of(photo(), form, exif=turned) for form in ("JPEG", "PNG", "WEBP")]
    for data in made:
        expected = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB"))
        assert np.array_equal(pixels(decode("image", data)), expected)
    assert decode("image", made[-1]).shape == (60, 40, 3)
    assert decode("image", files.png_with_more_rows()).shape == (1, 1, 3)


def test_sounds_are_those_of_soundfile_and_soxr() -> None:
    for form, rate, channels, options in (
        ("WAV", 44_100, 2, {}),
        ("WAV", 8000, 1, {"subtype": "FLOAT"}),
        ("WAV", RATE, 1, {"subtype": "PCM_24"}),
        ("FLAC", 48_000, 3, {}),
        ("OGG", 22_050, 2, {}),
        ("MP3", 44_100, 1, {}),
    ):
        data = sound_file(form, rate, channels, **options)
        read, own = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)
        mono = read.mean(axis=1, dtype=np.float32)
        assert np.allclose(samples(decode("audio", data)), mono, atol=1e-7)
        expected = soxr.resample(mono, own, RATE, quality="soxr_hq") if own != RATE else mono
        found = samples(decode("audio", data, RATE))
        assert len(found) == -(-len(mono) * RATE // own)
        count = min(len(found), len(expected))
        assert np.allclose(found[:count], expected[:count], atol=1e-6)
    whole = NOISE.uniform(-1, 1, 1000).astype("<f4")
    assert np.array_equal(samples(decode("samples", whole.tobytes(), RATE, RATE)), whole)
    assert decode("samples", whole.tobytes(), RATE, 8000).shape == (2000,)


@pytest.mark.parametrize("name", files.BOMBS)
def test_bombs_are_refused_and_the_next_picture_is_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = msgspec.structs.replace(decode_process.LIMITS, cpu_seconds=1.0)
    monkeypatch.setattr(decode_process, "LIMITS", limits)
    kind, make = files.BOMBS[name]
    with pytest.raises(MediaError, match=r"may have|damaged|takes too long") as caught:
        decode(kind, make(), RATE)
    assert caught.value.__cause__ is None
    assert pixels(decode("image", files.plain_png(2, 1, (1, 2, 3)))).tolist() == [[[1, 2, 3], [1, 2, 3]]]


def test_files_that_are_damaged_or_of_other_formats_are_refused_in_our_own_words() -> None:
    picture = photo(width=300, height=200)
    cut = [
        file_of(picture.convert("P") if form == "GIF" else picture, form)
        for form in ("PNG", "JPEG", "WEBP", "GIF")
    ]
    others = [file_of(picture, form) for form in ("BMP", "TIFF", "PPM", "ICO", "PDF", "TGA")]
    others += [b"", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"%!PS-Adobe", bytes(100), sound_file("WAV")]
    words = "a picture (has none of the formats PNG, JPEG, WebP and GIF|is damaged or truncated)$"
    for data in [*(data[: len(data) // 2] for data in cut), *others]:
        with pytest.raises(MediaError, match=words):
            decode("image", data)
    sounds = [sound_file("FLAC")[:5000], *(sound_file(form) for form in ("AIFF", "AU", "CAF"))]
    sounds += [
        b"",
        b"fLaC",
        b"ID3",
        b"OggS",
        b"\xff\xfb",
        files.wav(0),
        files.wav(10, named=0),
        file_of(picture, "JPEG"),
    ]
    words = "a sound (has none of the formats WAV, FLAC, OGG and MP3|is damaged or truncated|has no samples)$"
    for data in sounds:
        with pytest.raises(MediaError, match=words):
            decode("audio", data, RATE)
    with pytest.raises(MediaError, match="no finite numbers"):
        decode("samples", np.array([np.nan], "<f4").tobytes(), RATE, RATE)
    with pytest.raises(MediaError, match="samples over"):
        decode("samples", np.array([0.1, -3e38], "<f4").tobytes(), RATE, RATE)
    for rate, channels, message in ((100, 1, "samples a second"), (8000, 40, "16 channels")):
        with pytest.raises(MediaError, match=message):
            decode("audio", files.wav(10, rate, channels), RATE)


def test_random_damage_never_gets_past_the_process() -> None:
    """Whatever the bytes: a picture or sound, or our own error."""
    rng = random.Random(3)
    whole = [("image", file_of(photo(), form)) for form in ("PNG", "JPEG", "WEBP")]
    whole += [("audio", sound_file(form, 8000, 1)) for form in ("WAV", "FLAC", "OGG", "MP3")]
    for kind, data in whole:
        for _ in range(3):
            damaged = bytearray(data)
            for _ in range(10):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                decode(kind, bytes(damaged), RATE)
            except MediaError as error:
                assert str(error).startswith("a picture" if kind == "image" else "a sound")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Confined]:
    """Decoders that crash when a content says so."""
    confined = Confined(
        "tests.frontend.media.crashing_decoder",
        num_parallel=decode_process.NUM_PARALLEL,
        num_reserved=decode_process.NUM_RESERVED,
    )
    monkeypatch.setattr(decode_process, "decode_processes", lambda: confined)
    yield confined
    confined.close()


def test_a_decoder_that_crashes_takes_nothing_else_with_it(faulty: Confined) -> None:
    good = files.plain_png(3, 2)
    assert decode("image", good).shape == (2, 3, 3)
    server = faulty.pid
    for data, message in (
        (b"crash", "its decoder failed or ran out of memory"),
        (b"exit", "its decoder failed"),
        (b"fill", "ran out of memory"),
    ):
        for _ in range(2):  # the second time without a process
            with pytest.raises(MediaError, match=message):
                decode("image", data)
        assert decode("image", good).shape == (2, 3, 3)
    assert faulty.pid == server


def test_slow_content_of_one_tenant_leaves_a_decoder_to_others(
    faulty: Confined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def within(seconds: float) -> None:
        limits = msgspec.structs.replace(decode_process.LIMITS, seconds=seconds)
        monkeypatch.setattr(decode_process, "LIMITS", limits)

    within(300.0)
    fifos = [tmp_path / str(number) for number in range(decode_process.NUM_PARALLEL)]
    for fifo in fifos:
        os.mkfifo(fifo)

    def hold(fifo: Path) -> None:
        with suppress(MediaError, EngineBusyError):
            decode("image", b"hold " + bytes(fifo))

    current_tenant.set("a")
    holding = [threading.Thread(target=copy_context().run, args=(hold, fifo)) for fifo in fifos]
    for thread, fifo in zip(holding[:-1], fifos, strict=False):
        thread.start()
        with fifo.open("rb"):  # blocks until its decoder has begun
            pass
    holding[-1].start()
    while faulty._places.num_before("a") < len(fifos):
        pass
    within(60.0)
    current_tenant.set("b")
    try:
        for size in (2, 3, 4):
            assert decode("image", files.plain_png(size, 2)).shape == (2, size, 3)
    finally:
        current_tenant.set("")
        faulty.close()
        for thread in holding:
            thread.join()


def test_the_same_content_is_decoded_once_for_each_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counted(kind: str, data: bytes, *rates: int) -> Tensor:
        decoded.append(len(data))
        return decode(kind, data, *rates)

    monkeypatch.setattr(loader, "decode", counted)
    own = MediaLoader(MediaAccess(), RATE)
    first, second = (
        MediaItem("image", data=files.plain_png(3, 2)),
        MediaItem("image", data=files.plain_png(2, 3)),
    )
    one, other, again = own.load([first, second, first], "a")
    assert one is again and one.data != other.data and len(decoded) == 2
    assert own.load([first], "a")[0] is one and len(decoded) == 2
    assert own.load([first], "b")[0] is not one and len(decoded) == 3
    own.clear()
    assert own.load([first], "a")[0].data == one.data and len(decoded) == 4
    assert own.load([MediaItem("audio", data=files.wav(800))], "a")[0].data.shape == (1600,)
    with pytest.raises(MediaError, match=r"^here\[1\]: a picture has none"):
        own.load([first, MediaItem("image", data=b"x", place="here[1]")], "a")


def test_a_picture_of_low_detail_is_made_smaller() -> None:
    own = MediaLoader(MediaAccess())
    shapes = {(1024, 300): (150, 512, 3), (300, 1024): (512, 150, 3), (40, 60): (60, 40, 3)}
    for (width, height), shape in shapes.items():
        data = files.plain_png(width, height)
        low, whole = own.load([MediaItem("image", data=data, max_side=512), MediaItem("image", data=data)])
        assert (low.data.shape, whole.data.shape) == (shape, (height, width, 3))


def test_base64_is_strict_and_bounded() -> None:
    import base64

    data = bytes(range(256)) * 9000
    assert from_base64(base64.b64encode(data).decode(), len(data)) == data
    for text in ("a", "ab=c", "a b=", "\u00e4\u00e4\u00e4\u00e4", "=" * 8, "aa==" * 300_000):
        with pytest.raises(MediaError, match="not valid base64"):
            from_base64(text, 1 << 20)
    with pytest.raises(MediaError, match="more than 10 bytes"):
        from_base64("a" * 100, 10)


def test_assets_are_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagewire.assets.audio import AudioAsset
    from pagewire.assets.image import ImageAsset

    monkeypatch.setenv("PAGEWIRE_ASSETS_CACHE", str(tmp_path))
    (tmp_path / "cherry.png").write_bytes(files.plain_png(3, 2))
    (tmp_path / "lamb.wav").write_bytes(files.wav(50))
    assert ImageAsset("cherry").pil_image.size == (3, 2)
    samples, rate = AudioAsset("lamb").audio_and_sample_rate
    assert (samples.shape, rate) == ((50,), 8000)
    with pytest.raises(FileNotFoundError, match=r"no lamb\.jpg in .* not downloaded"):
        ImageAsset("lamb").pil_image  # noqa: B018
