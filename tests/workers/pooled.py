"""Tiny random models that pool, what the worker makes of prompts, and what transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingParams
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import COMMON, GROUPED
from tests.workers.biting import bite
from tests.workers.driver import load_runner
from tests.workers.versions import skip_unless_known

SIZES: dict[str, Any] = {
    name: value for name, value in COMMON.items() if name not in ("bos_token_id", "eos_token_id")
}
PACKED = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "nomic_bert", "modernbert", "gte")
ENCODERS = {
    **{name: SIZES | {"pad_token_id": 1} for name in PACKED},
    "distilbert": {"dim": 64, "hidden_dim": 100, "n_heads": 4, "n_layers": 2, "vocab_size": 128},
    "modernbert": SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    "mpnet": SIZES | {"pad_token_id": 1},
    "deberta-v2": SIZES
    | {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
    },
}
MORE_ENCODERS: dict[str, dict[str, Any]] = {
    name: SIZES | {"pad_token_id": 1}
    for name in (
        *("albert", "convbert", "data2vec-text", "electra", "ernie", "eurobert", "jina_embeddings_v3"),
        *("megatron-bert", "rembert", "roberta-prelayernorm", "xlm-roberta-xl"),
    )
}
MORE_ENCODERS["albert"]["embedding_size"] = 32
MORE_ENCODERS["electra"]["embedding_size"] = 48
MORE_ENCODERS["eurobert"] |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {
    "llama": COMMON | GROUPED,
    "qwen2": COMMON | {"num_key_value_heads": 2},
    "qwen3": COMMON | GROUPED,
    "mistral": COMMON | GROUPED | {"sliding_window": 7},
    "gpt2": {
        "vocab_size": 128,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.15,
    },
}


def write(
    folder: Path, model_type: str, head: str = "AutoModel", dtype: str = "float32", **fields: Any
) -> Path:
    """A checkpoint with random weights in `folder`."""
    import transformers

    skip_unless_known(model_type)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **((ENCODERS | MORE_ENCODERS | CAUSAL)[model_type] | fields)
    )
    model = getattr(transformers, head).from_config(config).to(getattr(torch, dtype))
    bite(model)
    model.save_pretrained(folder)
    return folder


def sentence_transformer(
    folder: Path, mode: str, *, normalize: bool = True, dense: int | None = None
) -> None:
    """Write the files of sentence-transformers beside a checkpoint. dense: outputs of a linear layer with tanh."""
    from safetensors.torch import save_file

    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}
        )
    )
    if dense is not None:
        modules.append(("2_Dense", "Dense"))
        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        settings = {"in_features": 64, "out_features": dense, "bias": True, "activation_function": activation}
        (folder / "2_Dense/config.json").write_text(json.dumps(settings))
        weights = {"linear.weight": torch.randn(dense, 64) / 8, "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def pool(
    runner: Runner,
    prompts: Sequence[Sequence[int] | Prompt],
    task: PoolingParams | Sequence[PoolingParams],
    budget: int | None = None,
    adapters: Sequence[int] = (),
) -> list[Tensor]:
    """The result of each prompt: all in one step, or in steps of at most `budget` tokens of the prompts in turn.

    adapters: the index of each one's; empty for none.
    """
    tasks = [task] * len(prompts) if isinstance(task, PoolingParams) else task
    size = runner.config.block_size
    free = list(range(runner.num_blocks))[::-1]
    inits = []
    contents = [prompt if isinstance(prompt, Prompt) else Prompt(list(prompt)) for prompt in prompts]
    lengths = [len(content.token_ids) for content in contents]
    for slot, (content, own) in enumerate(zip(contents, tasks, strict=True)):
        prompt = content.token_ids
        num_blocks = 1 if runner.model.model.encodes else -(-len(prompt) // size)
        blocks = [free.pop() for _ in range(num_blocks)]
        adapter, media = adapters[slot] if adapters else 0, content.places()
        inits.append(SlotInit(slot, prompt, len(prompt), blocks, own, 0, media=media, adapter=adapter))
    done, results = [0] * len(prompts), [torch.empty(0)] * len(prompts)
    while done != lengths:
        left, rows = budget or 1 << 30, []
        for slot, content in enumerate(contents):
            if count := min(left, lengths[slot] - done[slot]):
                media = content.embeddings(done[slot], done[slot] + count)
                row = Row(slot, done[slot], count, pool=True, media=media)
                if runner.num_states:  # those of each prompt stay in a slot of its own
                    row.state, row.states = slot if done[slot] else -1, [(done[slot] + count, slot)]
                rows.append(row)
                done[slot] += count
                left -= count
        new, inits = (
            [i for i in inits if i.slot <= rows[-1].slot],
            [i for i in inits if i.slot > rows[-1].slot],
        )
        for row, result in zip(rows, runner.step(StepPlan(1, rows, new)).rows, strict=True):
            assert result.error is None
            assert (result.pooled is not None) == (done[row.slot] == lengths[row.slot])
            if result.pooled is not None:
                results[row.slot] = torch.tensor(result.pooled.tolist()).view(result.pooled.shape)
    runner.step(StepPlan(2, [], [], list(range(len(prompts)))))
    return results


def hidden_states(folder: Path, prompts: Sequence[Sequence[int]], head: str = "AutoModel") -> list[Tensor]:
    """transformers' hidden states [n, H] of each prompt in float32, or logits [L], one prompt at a time."""
    import transformers

    model = getattr(transformers, head).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([list(prompt)]))[0][0] for prompt in prompts]


def our_hidden_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The worker's hidden states [n, H] of each prompt in float32, all in one step.

    Raises:
        LoadError: the model is refused.
    """
    config = PoolerConfig(normalize=False)
    runner, _ = load_runner(folder, dtype="float32", runner="pooling", pooler_config=config)
    return pool(runner, prompts, PoolingParams(task="token_embed", all_tokens=True))


def cosine(a: Tensor, b: Tensor) -> float:
    """The least cosine of corresponding rows."""
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min())
