"""Names with a quantisation, and the files of a repository that they mean."""

from __future__ import annotations

import pytest

from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.files.hub_names import HubName, choose_gguf, hub_name, quantisation_of
from pagewire.ipc.files.names import short_name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hf:a/b", HubName("a/b")),
        ("hf.co/a/b:latest", HubName("a/b")),
        ("hf:a/b:q4_k_m", HubName("a/b", "Q4_K_M")),
        ("hf:a/b:FP16", HubName("a/b", "F16")),
        ("huggingface.co/a-1/b.c_d:UD-Q4_K_XL", HubName("a-1/b.c_d", "UD-Q4_K_XL")),
        ("hf.co/a/b:Some-Model.gguf", HubName("a/b", "Some-Model.gguf")),
    ],
)
def test_names(name: str, meant: HubName) -> None:
    assert hub_name(name) == meant
    assert hub_name(str(meant)) == meant and short_name(name) == str(meant)


@pytest.mark.parametrize("name", ["a/b", "demo", "./hf:a", "a/b/c.gguf", "s3://a/b"])
def test_other_names(name: str) -> None:
    assert hub_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "hf:",
            "hf:a",
            "hf:a/",
            "hf:/b",
            "hf:a/b:",
            "hf:a/b/c",
            "hf:a/b:Q4:K",
            "hf:../b",
            "hf:a/..",
            "hf:a/b:..",
        ),
        *(
            "hf:a/b:x/y.gguf",
            "hf:a--b/c",
            "hf:a/b:../x.gguf",
            "hf:a/.b",
            "hf:a/b\n",
            "hf:a b/c",
            "hf:" + "a" * 99 + "/b",
        ),
    ],
)
def test_no_name_leads_elsewhere(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is no name of a model: write hf:owner/repository"):
        hub_name(name)


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q8_0.gguf", "Q8_0"),
        ("qwen2.5-7b-instruct-q4_0-00001-of-00002.gguf", "Q4_0"),
        ("model_q4_k_m.gguf", "Q4_K_M"),
        ("UD-Q2_K_XL/DeepSeek-R1-UD-Q2_K_XL-00001-of-00005.gguf", "UD-Q2_K_XL"),
        ("Q5_K_M/model.gguf", "Q5_K_M"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("ggml-model-fp16.gguf", "F16"),
        ("Model-IQ2_XXS.gguf", "IQ2_XXS"),
        ("Model-BF16.gguf", "BF16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Qwen3-4B.gguf", None),
    ],
)
def test_quantisations(file: str, found: str | None) -> None:
    assert quantisation_of(file) == found


FILES = [
    "README.md",
    "config.json",
    "M-IQ4_XS.gguf",
    "M-Q4_0.gguf",
    "M-Q4_K_M.gguf",
    "M-large-Q4_K_M.gguf",
    "M-UD-Q4_K_XL.gguf",
    "M-f16-00001-of-00002.gguf",
    "M-f16-00002-of-00002.gguf",
    "Q8_0/M-Q8_0-00001-of-00003.gguf",
    "Q8_0/M-Q8_0-00002-of-00003.gguf",
    "mmproj-M-Q4_K_M.gguf",
    "M-imatrix.gguf",
    "../M-Q6_K.gguf",
]


@pytest.mark.parametrize(
    ("tag", "left_out", "files"),
    [
        (None, "", ["M-Q4_K_M.gguf"]),
        (None, "K_M", ["M-UD-Q4_K_XL.gguf"]),
        (None, "_K", ["M-Q4_0.gguf"]),
        (None, "Q", ["M-f16-00001-of-00002.gguf", "M-f16-00002-of-00002.gguf"]),
        (None, "gguf", []),
        ("Q4_K_M", "", ["M-Q4_K_M.gguf"]),
        ("IQ4_XS", "", ["M-IQ4_XS.gguf"]),
        ("Q4_K_XL", "", ["M-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", "", ["M-UD-Q4_K_XL.gguf"]),
        ("F16", "", ["M-f16-00001-of-00002.gguf", "M-f16-00002-of-00002.gguf"]),
        ("M-large-Q4_K_M.gguf", "", ["M-large-Q4_K_M.gguf"]),
        ("M-f16-00002-of-00002.gguf", "", ["M-f16-00001-of-00002.gguf", "M-f16-00002-of-00002.gguf"]),
    ],
)
def test_the_file_that_is_meant(tag: str | None, left_out: str, files: list[str]) -> None:
    there = [file for file in FILES if not left_out or left_out not in file]
    assert choose_gguf(there, HubName("a/b", tag)) == files
    assert choose_gguf(reversed(there), HubName("a/b", tag)) == files


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("Q5_K_M", r"a/b has no 'Q5_K_M'; it has: .*Q4_0, .*Q4_K_M"),
        ("Q6_K", r"a/b has no 'Q6_K'"),  # its path leads out of the repository
        ("X", r"a/b has no 'X'"),
        ("Q8_0", r"a/b lacks Q8_0/M-Q8_0-00003-of-00003\.gguf, a part of Q8_0/M-Q8_0-00001-of-00003\.gguf"),
        ("mmproj-M-Q4_K_M.gguf", r"a/b has no 'mmproj-M-Q4_K_M\.gguf'"),
    ],
)
def test_what_is_not_there_is_said(tag: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        choose_gguf(FILES, HubName("a/b", tag))


def test_a_repository_without_gguf_files_has_no_quantisations() -> None:
    with pytest.raises(ModelNotFoundError, match="a/b has no 'Q4_K_M'; it has: no GGUF file"):
        choose_gguf(["config.json", "model.safetensors"], HubName("a/b", "Q4_K_M"))
