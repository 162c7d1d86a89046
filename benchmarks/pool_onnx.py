"""onnxruntime as a peer of embeddings: BERT exported by torch, and in 8 bits as onnxruntime quantises it.

    pip install onnxruntime onnx onnxscript

Batches are sorted by length and padded, as sentence-transformers does it; means and lengths are numpy's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

PEER_BATCH = 32
Embed = Callable[[list[str]], np.ndarray]


class Exported(nn.Module):
    """BERT with plain tensors as inputs and output."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        from transformers import AutoModel

        self.base = AutoModel.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """int64 [B, T] each, to hidden states [B, T, H]."""
        return self.base(  # type: ignore[no-any-return]
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )[0]


def export(model: Path, to: Path) -> None:
    """Write a BERT as ONNX, for any batch and length."""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    example = tuple(torch.ones(2, 9, dtype=torch.int64) for _ in range(3))
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}
    program = torch.onnx.export(
        Exported(model),
        example,
        input_names=names,
        output_names=["states"],
        dynamic_shapes=dict.fromkeys(names, axes),
        dynamo=True,
        verbose=False,
    )
    program.save(str(to))


def session(path: Path, threads: int) -> Any:
    """An onnxruntime session with all its optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def fused(path: Path, model: Path) -> Path:
    """The graph with onnxruntime's fused operators for BERT; as it is where its tool cannot do that."""
    import json

    from onnxruntime.transformers import optimizer

    config = json.loads((model / "config.json").read_text())
    to = path.with_name("fused.onnx")
    whole = optimizer.optimize_model(
        str(path),
        "bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        opt_level=0,
    )
    whole.save_model_to_file(str(to))
    counts = whole.get_fused_operator_statistics()
    print("onnxruntime: fused " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))
    return to


@contextmanager
def onnxruntime(model: Path, threads: int, int8: bool = False) -> Iterator[Embed]:
    """onnxruntime in float32, or with weights and activations of 8 bits."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]") or 0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(model, path)
        path = fused(path, model)
        if int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            exact, path = path, Path(folder) / "int8.onnx"
            quantize_dynamic(str(exact), str(path), weight_type=QuantType.QInt8)
        run = session(path, threads)
        inputs = {value.name for value in run.get_inputs()}

        def states(texts: list[str]) -> np.ndarray:
            parts = tokenizer.encode_batch(texts)
            mask = np.array([part.attention_mask for part in parts], np.int64)
            feed = {
                "input_ids": np.array([part.ids for part in parts], np.int64),
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(mask),
            }
            (hidden,) = run.run(None, {name: value for name, value in feed.items() if name in inputs})
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            return mean / np.linalg.norm(mean, axis=1, keepdims=True)  # type: ignore[no-any-return]

        def embed(texts: list[str]) -> np.ndarray:
            order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
            batches = [order[i : i + PEER_BATCH] for i in range(0, len(order), PEER_BATCH)]
            found = np.concatenate([states([texts[i] for i in batch]) for batch in batches])
            back = np.empty_like(found)
            back[order] = found
            return back

        yield embed
