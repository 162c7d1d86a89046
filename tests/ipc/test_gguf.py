"""GGUF files as strangers: what their headers say, and that a broken one is an error and nothing worse."""

from __future__ import annotations

import math
import os
import random
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.gguf import file as gguf_file
from pagewire.ipc.gguf.config import ARCHITECTURES, generation_config, gguf_model_config
from pagewire.ipc.gguf.file import GgufError, read_gguf, read_metadata
from tests.gguf_headers import Tensor, content, text, write

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 8,
    "llama.block_count": 2,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>"],
    "tokenizer.ggml.token_type": [3, 3, 1, 3, 1],
    "tokenizer.ggml.eos_token_id": 1,
}
EMBEDDING: Tensor = ("token_embd.weight", (5, 8), 0, bytes(160))
FREQUENCIES: Tensor = ("rope_freqs.weight", (2,), 0, struct.pack("<2f", 1.0, 8.0))


def test_metadata_and_tensors(tmp_path: Path) -> None:
    fields = LLAMA | {"x.flag": True, "x.floats": [0.5, 1.5], "x.flags": [True, False]}
    file = read_gguf(
        write(tmp_path / "a.gguf", fields, [EMBEDDING, FREQUENCIES, ("q", (3, 64), 2, bytes(108))])
    )
    assert file.architecture == "llama" and file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.tokens"] == LLAMA["tokenizer.ggml.tokens"]
    assert file.metadata["x.floats"] == array("f", [0.5, 1.5]) and list(file.metadata["x.flags"]) == [1, 0]
    assert file.metadata["x.flag"] is True
    assert {name: (info.shape, info.type, info.num_bytes) for name, info in file.tensors.items()} == {
        "token_embd.weight": ((5, 8), "F32", 160),
        "rope_freqs.weight": ((2,), "F32", 8),
        "q": ((3, 64), "Q4_0", 108),
    }
    info = file.tensors["rope_freqs.weight"]
    assert info.path.read_bytes()[info.offset :][: info.num_bytes] == FREQUENCIES[3]


def test_a_header_longer_than_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", LLAMA, [EMBEDDING])
    whole = read_gguf(path)
    for size in (4, 50, 333):
        monkeypatch.setattr(gguf_file, "FIRST_READ", size)
        assert read_gguf(path) == whole
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 400)
    with pytest.raises(GgufError, match="its header is longer than it may be"):
        read_gguf(path)


def test_split_files(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    write(parts[0], LLAMA | {"split.no": 0, "split.count": 2}, [EMBEDDING])
    write(parts[1], {"split.no": 1, "split.count": 2}, [FREQUENCIES])
    for part in parts:
        file = read_gguf(part)
        assert file.path == parts[0] and file.architecture == "llama"
        assert [info.path for info in file.tensors.values()] == parts
        assert list(read_metadata(part).tensors) == ["token_embd.weight"]
    write(parts[1], {"split.no": 0, "split.count": 2}, [FREQUENCIES])
    with pytest.raises(GgufError, match="is not part 2 of 2, as its name says"):
        read_gguf(parts[0])
    write(parts[1], {}, [EMBEDDING])
    with pytest.raises(GgufError, match=r"'token_embd\.weight' is in another part, too"):
        read_gguf(parts[0])
    parts[1].unlink()
    with pytest.raises(GgufError, match=r"00002-of-00002\.gguf: No such file"):
        read_gguf(parts[0])
    with pytest.raises(GgufError, match="is a part of a split file, but is not named like one"):
        read_gguf(parts[0].rename(tmp_path / "m.gguf"))


def counts(num_tensors: int, num_fields: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + rest


HUGE = 1 << 62
BROKEN = {
    "empty": (b"", "does not begin with the letters GGUF"),
    "zip": (b"PK\3\4" + bytes(100), "does not begin with the letters GGUF"),
    "version 1": (content({}, version=1), "is of version 1; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is in big-endian order"),
    "many fields": (counts(0, HUGE), f"0 tensors and {HUGE} metadata fields"),
    "many tensors": (counts(HUGE, 0), f"{HUGE} tensors"),
    "long key": (counts(0, 1, struct.pack("<Q", HUGE)), f"has a value of {HUGE} bytes"),
    "long text": (counts(0, 1, text("k") + struct.pack("<IQ", 8, HUGE)), f"has a value of {HUGE} bytes"),
    "long array": (counts(0, 1, text("k") + struct.pack("<IIQ", 9, 6, HUGE)), "has a value of"),
    "many strings": (
        counts(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE)),
        f"'k' claims to have {HUGE} strings",
    ),
    "string beyond": (counts(0, 1, text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE)), "has a value of"),
    "unknown type": (counts(0, 1, text("k") + struct.pack("<I", 13)), "'k' is of the unknown type 13"),
    "nested": (counts(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1)), "'k' is an array of type 9"),
    "dimensions": (
        counts(1, 0, text("t") + struct.pack("<I", 1 << 31)),
        "claims to have 2147483648 dimensions",
    ),
    "tensor type": (content({}, [("t", (2,), 38, bytes(8))]), "is of the unknown type 38"),
    "blocks": (content({}, [("t", (2, 33), 2, bytes(99))]), r"of type Q4_0 cannot be of shape \(2, 33\)"),
    "no values": (content({}, [("t", (0, 4), 0, b"")]), r"cannot be of shape \(0, 4\)"),
    "huge shape": (content({}, [("t", (HUGE, HUGE), 0, b"")]), r"the tensor .t.: a shape has at most"),
    "beyond the end": (
        content({}, [("t", (9,), 0, bytes(4))]),
        "does not lie within the file; it may be cut off",
    ),
    "twice": (content({}, [("t", (1,), 0, bytes(4))] * 2), "two tensors 't'"),
    "alignment": (content({"general.alignment": 1}), "general.alignment is 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_their_fault(name: str, tmp_path: Path) -> None:
    broken, words = BROKEN[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(broken)
    for read in (read_gguf, read_metadata, read_configs):
        with pytest.raises(ModelNotFoundError, match=words):
            read(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").mkdir()
    for name, words in (("a", "not a regular file"), ("b", "regular file|directory"), ("c", "No such file")):
        with pytest.raises(GgufError, match=words):
            read_gguf(tmp_path / f"{name}.gguf")


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    """Cut anywhere, and with bytes changed at random: never another exception, and never without end."""
    whole, path = content(LLAMA, [EMBEDDING, FREQUENCIES]), tmp_path / "a.gguf"
    for size in range(0, len(whole) - 24, 7):  # the last 24 bytes are padding
        path.write_bytes(whole[:size])
        with pytest.raises(GgufError):
            read_configs(path)
    draw, num_read = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(whole) - 200)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            read_configs(path)
            num_read += 1
        except GgufError:
            pass
    assert 0 < num_read < 400


def test_configuration(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    file = read_gguf(write(tmp_path / "a.gguf", LLAMA | sampling, [EMBEDDING, FREQUENCIES]))
    config = gguf_model_config(file)
    assert (config["model_type"], config["vocab_size"], config["hidden_size"], config["head_dim"]) == (
        "llama",
        5,
        8,
        4,
    )
    assert config["tie_word_embeddings"] and config["num_key_value_heads"] == 2
    assert config["rope_scaling"]["short_factor"] == config["rope_scaling"]["long_factor"] == [1.0, 8.0]
    assert generation_config(file) == {
        "eos_token_id": [1, 3],
        "temperature": 0.5,
        "top_k": 7,
    }  # 4 is no control token


@pytest.mark.parametrize(("types", "dtype"), [((0, 0), "float32"), ((1, 1), "float16"), ((0, 1), "bfloat16")])
def test_the_dtype_is_that_of_plain_matrices(types: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    tensors = [(EMBEDDING[0], (5, 8), types[0], bytes(160)), ("output.weight", (5, 8), types[1], bytes(160))]
    assert gguf_model_config(read_gguf(write(tmp_path / "a.gguf", LLAMA, tensors)))["dtype"] == dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"general.architecture": "rwkv7"},
            f"'rwkv7' are not served, but of {', '.join(sorted(ARCHITECTURES))}",
        ),
        ({"general.architecture": 3}, "general.architecture"),
        ({"llama.block_count": -1}, "llama.block_count is -1, not a positive integer"),
        ({"llama.block_count": "two"}, "llama.block_count is of a wrong type, str"),
        ({"llama.block_count": 1 << 20}, "claims to have 1048576 layers"),
        ({"llama.attention.head_count": [2, 4]}, "layers differ in attention.head_count"),
        ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base is inf"),
        ({"llama.rope.scaling.type": "odd"}, "rope.scaling.type 'odd' is none of none, linear, yarn"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is of a wrong type"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_served(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        read_configs(write(tmp_path / "a.gguf", LLAMA | change, [EMBEDDING]))
