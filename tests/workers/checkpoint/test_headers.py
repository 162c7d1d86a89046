"""The headers of checkpoints: what they list, and files that are no checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.workers.checkpoint.headers import MAX_FILES, TensorHeader, read_headers, safetensors_header
from pagewire.workers.errors import LoadError


def test_tensors_of_all_files_and_the_configuration_are_read(tmp_path: Path) -> None:
    for name, shape in (("a", (10, 10)), ("b", (28,))):
        save_file({name: torch.zeros(shape, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"hidden_size": 10, "vocab_size": 3}')
    headers = read_headers(tmp_path, {"vocab_size": 4})
    assert headers.tensors == [
        TensorHeader("a", (10, 10), "BF16", 200),
        TensorHeader("b", (28,), "BF16", 56),
    ]
    assert (headers.form, headers.num_files) == ("safetensors", 2)
    assert headers.config == {"hidden_size": 10, "vocab_size": 4}


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b'{"a": 1}', b'{"a": {"shape": "x"}}', b"[" * 200_000),
        b'{"a": {"shape": [-1], "dtype": "F32", "data_offsets": [0, 4]}}',
        b'{"a": {"shape": [1], "dtype": "F32", "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": [' + b"1," * 1_000_000 + b"1]}}",
        b'{"a": {"shape": [1000000000], "dtype": "F32", "data_offsets": [0, 4000000000]}}',
    ],
)
def test_a_header_of_another_form_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(LoadError, match=r"cannot load .*model\.safetensors"):
        safetensors_header(file)
    file.write_bytes((1 << 62).to_bytes(8, "little") + header)
    with pytest.raises(LoadError, match="a header of 4611686018427387904 bytes"):
        safetensors_header(file)


def test_an_index_of_too_many_files_is_refused(tmp_path: Path) -> None:
    names = {str(number): f"{number}.safetensors" for number in range(MAX_FILES + 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(LoadError, match=f"names {MAX_FILES + 1} files, and at most {MAX_FILES} are read"):
        read_headers(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds neither model\.safetensors nor"):
        read_headers(tmp_path)
