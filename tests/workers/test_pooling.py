"""Embeddings and scores of the worker: against transformers, and the same bits alone, in a batch and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.ipc.wire.pooling import PoolerConfig, PoolingInfo, PoolingParams
from pagewire.workers.errors import LoadError
from pagewire.workers.families.encoder_structures import STRUCTURES
from pagewire.workers.network.network import Network
from pagewire.workers.network.pooler import Pooler, PoolingSlot
from pagewire.workers.network.pooling_spec import PoolingSpec
from tests.frontend.word_pieces import write_tokenizer
from tests.workers import pooled
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.driver import load_runner
from tests.workers.parity import make_prompts
from tests.workers.pooled import (
    CAUSAL,
    ENCODERS,
    MORE_ENCODERS,
    cosine,
    hidden_states,
    pool,
    sentence_transformer,
    write,
)

LENGTHS = (23, 1, 64, 5, 17, 40)
EMBED = PoolingParams(task="embed")
TOKENS = PoolingParams(task="token_embed", all_tokens=True)
MEAN = PoolingParams(task="embed", all_tokens=True)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_causal_models_embed(model_type: str, tmp_path: Path) -> None:
    """The last token's state by default; a mean needs that of every chunk. Of a checkpoint with an output layer."""
    folder = write(tmp_path, model_type, "AutoModelForCausalLM")
    prompts = make_prompts(128, LENGTHS)
    expected = hidden_states(folder, prompts)
    runner, ready = load_runner(folder, convert="embed")
    assert ready.pooling is not None and ready.pooling.pooling_type == "LAST" and ready.pooling.size == 64
    for budget in (None, 16):
        found = pool(runner, prompts, EMBED, budget)
        for vector, hidden in zip(found, expected, strict=True):
            assert cosine(vector, hidden[-1]) > 0.999999 and abs(vector.norm() - 1) < 1e-5
    (tokens,) = pool(runner, prompts[:1], TOKENS, 16)
    assert cosine(tokens, expected[0]) > 0.999999
    mean, info = load_runner(folder, runner="pooling", pooler_config=PoolerConfig(pooling_type="mean"))
    assert info.pooling is not None and info.pooling.needs_all_tokens("embed")
    for budget in (None, 16):
        for vector, hidden in zip(pool(mean, prompts, MEAN, budget), expected, strict=True):
            assert cosine(vector, hidden.mean(0)) > 0.999999


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", [name for name in SERVED if name not in pooled.MORE_ENCODERS | ENCODERS])
def test_every_architecture_embeds(name: str, tmp_path: Path) -> None:
    """But decoders of encoders' types, which pool as encoders alone."""
    folder = SERVED[name].write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    runner, _ = load_runner(folder, convert="embed")
    for vector, hidden in zip(pool(runner, prompts, EMBED, 16), hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden[-1]) > 0.999999


@pytest.mark.parametrize(
    ("model_type", "mode"), [*((name, "mean_tokens") for name in ENCODERS), ("bert", "cls_token")]
)
def test_encoders_embed(model_type: str, mode: str, tmp_path: Path) -> None:
    folder = write(tmp_path, model_type)
    sentence_transformer(folder, mode, normalize=False)
    prompts = make_prompts(128, LENGTHS)
    runner, ready = load_runner(folder)
    assert ready.pooling is not None and ready.pooling.whole_prompts
    assert isinstance(runner.model.model.base, Network) == (model_type in STRUCTURES)
    for vector, hidden in zip(pool(runner, prompts, MEAN), hidden_states(folder, prompts), strict=True):
        expected = hidden.mean(0) if mode == "mean_tokens" else hidden[0]
        torch.testing.assert_close(vector, expected, atol=2e-5, rtol=2e-5)
        assert cosine(vector, expected) > 0.999999


@pytest.mark.every_architecture
@pytest.mark.parametrize("model_type", MORE_ENCODERS)
def test_every_encoder_embeds(model_type: str, tmp_path: Path) -> None:
    """To the bits of each prompt alone."""
    folder = write(tmp_path, model_type)
    prompts = make_prompts(128, LENGTHS)
    runner, _ = load_runner(folder, pooler_config=PoolerConfig(pooling_type="MEAN"))
    is_stack = model_type in STRUCTURES and model_type != "electra"  # whose embeddings are smaller here
    assert isinstance(runner.model.model.base, Network) == is_stack
    crowd = pool(runner, prompts, MEAN)
    for prompt, vector, hidden in zip(prompts, crowd, hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden.mean(0)) > 0.999999
        assert torch.equal(pool(runner, [prompt], MEAN)[0], vector)


@pytest.mark.parametrize("model_type", ["bert", "nomic_bert", "modernbert", "mpnet"])
def test_encoders_are_quantised_while_they_are_loaded(model_type: str, tmp_path: Path) -> None:
    """In 8 bits, in the same call; to the bits of each prompt alone."""
    folder = write(tmp_path, model_type)
    prompts = make_prompts(128, LENGTHS)
    mean = PoolerConfig(pooling_type="MEAN")
    runner, _ = load_runner(folder, pooler_config=mean, quantization="int8", dtype="bfloat16")
    base = runner.model.model.base
    assert isinstance(base, Network) and base.stack.layers[1].down.scheme.bits == 8
    crowd = pool(runner, prompts, MEAN)
    for prompt, vector, hidden in zip(prompts, crowd, hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden.mean(0)) > 0.995
        assert torch.equal(pool(runner, [prompt], MEAN)[0], vector)


def test_a_causal_model_of_sentence_transformers(tmp_path: Path) -> None:
    """As e5-mistral-7b-instruct: the last token's state, normalised."""
    folder = write(tmp_path, "mistral")
    sentence_transformer(folder, "lasttoken")
    prompts = make_prompts(128, LENGTHS)
    runner, ready = load_runner(folder)
    assert ready.pooling is not None and (ready.pooling.pooling_type, ready.pooling.normalize) == (
        "LAST",
        True,
    )
    for vector, hidden in zip(pool(runner, prompts, EMBED, 16), hidden_states(folder, prompts), strict=True):
        assert cosine(vector, hidden[-1]) > 0.999999 and abs(vector.norm() - 1) < 1e-5


def test_gte_under_the_name_of_its_own_code(tmp_path: Path) -> None:
    import json

    folder = write(tmp_path, "gte")
    prompts = make_prompts(128, LENGTHS)
    expected = hidden_states(folder, prompts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "new", "architectures": ["NewModel"]})
    )
    with pytest.raises(LoadError, match="loads it as transformers' own 'gte'"):
        load_runner(folder)
    runner, _ = load_runner(folder, hf_overrides={"model_type": "gte"})
    for vector, hidden in zip(pool(runner, prompts, MEAN), expected, strict=True):
        assert cosine(vector, hidden[0]) > 0.999999


def test_what_is_not_finite_is_no_result(tmp_path: Path) -> None:
    runner, _ = load_runner(write(tmp_path, "bert"))
    pooler = runner.model.pooler
    assert pooler is not None
    for task in (MEAN, TOKENS):
        with pytest.raises(ValueError, match="are not finite"):
            pooler.add(PoolingSlot(task, 2), torch.full((2, 64), float("nan")), 0)


@pytest.mark.parametrize("pooling_type", ["MEAN", "CLS", "LAST"])
def test_prompts_that_are_pooled_together(pooling_type: str) -> None:
    """To the bits of each by itself; where they want different things, or one is not finite, not at all."""
    spec = PoolingSpec("embed", pooling_type, encoder=True)
    info = PoolingInfo(["embed"], pooling_type, 24)
    pooler = Pooler(spec, info, [], None, torch.float32)
    lengths = [3, 1, 40, 7]
    hidden, ends = torch.randn(sum(lengths), 24), torch.tensor(lengths).cumsum(0)
    for task in (
        EMBED,
        PoolingParams(task="embed", dimensions=5),
        PoolingParams(task="embed", normalize=False),
    ):
        slots = [PoolingSlot(task, length) for length in lengths]
        found = pooler.together(slots, hidden, ends)
        each = [pooler.add(s, x, 0) for s, x in zip(slots, hidden.split(lengths), strict=True)]
        assert found is not None and torch.equal(found, torch.stack([x for x in each if x is not None]))
        mixed = [PoolingSlot(PoolingParams(task="embed", dimensions=3), 3), *slots[1:]]
        assert pooler.together(mixed, hidden, ends) is None
    hidden[3] = float("inf")  # the second prompt
    assert pooler.together(slots, hidden, ends) is None


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((name, "float32") for name in (*CAUSAL, *ENCODERS)),
        *((name, "bfloat16") for name in ("llama", "modernbert", "mpnet")),
        ("bert", "float16"),
    ],
)
def test_bits_are_those_of_a_prompt_alone(model_type: str, dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, model_type, dtype=dtype)
    mean = PoolerConfig(pooling_type="MEAN")
    runner, _ = load_runner(folder, runner="pooling", pooler_config=mean, max_num_seqs=64, num_blocks=512)
    prompts = make_prompts(128, [*LENGTHS, *range(1, 59)] if model_type in ("llama", "bert") else LENGTHS)
    for task in (MEAN, TOKENS):
        crowd = pool(runner, prompts, task)
        for prompt, vector in list(zip(prompts, crowd, strict=True))[:5]:
            assert torch.equal(pool(runner, [prompt], task)[0], vector)
        if model_type in CAUSAL:
            chunked = pool(runner, prompts[:8], task, budget=7)
            assert all(map(torch.equal, chunked, crowd[:8]))


@pytest.mark.parametrize("model_type", [*CAUSAL, *ENCODERS])
def test_classifiers(model_type: str, tmp_path: Path) -> None:
    """Logits to 1e-4, and probabilities; prompts of a batch have the bits that they have alone, and in chunks."""
    folder = write(tmp_path, model_type, "AutoModelForSequenceClassification", num_labels=3, pad_token_id=0)
    prompts = make_prompts(128, LENGTHS)
    expected = torch.stack(hidden_states(folder, prompts, "AutoModelForSequenceClassification"))
    runner, ready = load_runner(folder)
    assert ready.pooling is not None and ready.pooling.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    raw, own = (
        PoolingParams(task="classify", activation=activation, all_tokens=True) for activation in (False, True)
    )
    logits = torch.stack(pool(runner, prompts, raw))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        torch.stack(pool(runner, prompts, own)), expected.softmax(1), atol=1e-4, rtol=0
    )
    assert torch.equal(pool(runner, prompts[2:3], raw)[0], logits[2])
    if model_type in CAUSAL:
        assert all(map(torch.equal, pool(runner, prompts, raw, budget=7), logits))


def reward_model(folder: Path, name: str, labels: int) -> tuple[Path, list[Tensor]]:
    """A Qwen2 with two linear layers for rewards behind it, and these layers' weights and biases."""
    import json

    write(folder, "qwen2")
    sizes = {"score.0": (64, 64), "score.2": (labels, 64)}
    head = {f"{layer}.weight": torch.randn(size) / 8 for layer, size in sizes.items()}
    head |= {f"{layer}.bias": torch.randn(size[0]) for layer, size in sizes.items()}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    return folder, [head[f"{layer}.{part}"] for layer in sizes for part in ("weight", "bias")]


def test_rewards_of_tokens_and_of_steps(tmp_path: Path) -> None:
    prompts = make_prompts(128, LENGTHS)
    rewards = PoolingParams(task="token_classify", activation=False, all_tokens=True)
    for name, labels in (("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)):
        folder, (up, up_bias, down, down_bias) = reward_model(tmp_path / name, name, labels)
        expected = [
            (hidden @ up.T + up_bias).relu() @ down.T + down_bias for hidden in hidden_states(folder, prompts)
        ]
        runner, ready = load_runner(folder)
        assert ready.pooling is not None and ready.pooling.tasks == ["token_classify"]
        for budget in (None, 16):
            for found, logits in zip(pool(runner, prompts, rewards, budget), expected, strict=True):
                torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)
    assert ready.pooling.rewards_activated
    tag = prompts[2][30]
    runner, _ = load_runner(folder, pooler_config=PoolerConfig(pooling_type="STEP", step_tag_id=tag))
    chances = PoolingParams(task="token_classify", all_tokens=True)
    for found, logits, prompt in zip(pool(runner, prompts, chances, 16), expected, prompts, strict=True):
        steps = logits[torch.tensor(prompt) == tag].softmax(1)
        torch.testing.assert_close(found, steps, atol=1e-4, rtol=0)


def test_classifiers_made_of_tokens(tmp_path: Path) -> None:
    """As Qwen3-Reranker's: the chance of "yes", not "no", as the next token; and of single tokens."""
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path, "qwen3", "AutoModelForCausalLM")
    write_tokenizer(folder)  # "cat" and "dog" are the tokens 6 and 7
    prompts = make_prompts(128, LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["cat", "dog"],
        "is_original_qwen3_reranker": True,
    }
    runner, ready = load_runner(folder, hf_overrides=overrides)
    assert ready.pooling is not None and ready.pooling.cross_encoder
    for budget in (None, 16):
        found = torch.stack(pool(runner, prompts, PoolingParams(task="classify"), budget))
        torch.testing.assert_close(found, logits[:, 6:8].softmax(1)[:, 1:], atol=1e-5, rtol=0)
    runner, _ = load_runner(folder, hf_overrides=overrides | {"is_original_qwen3_reranker": False})
    raw = torch.stack(pool(runner, prompts, PoolingParams(task="classify", activation=False)))
    torch.testing.assert_close(raw, logits[:, 6:8], atol=1e-4, rtol=0)
    settings = PoolerConfig(returned_token_ids=[7, 9], step_tag_id=prompts[0][-1])
    runner, _ = load_runner(folder, pooler_config=settings)
    (steps,) = pool(runner, prompts[:1], PoolingParams(task="token_classify", all_tokens=True))
    torch.testing.assert_close(steps[-1], logits[0, [7, 9]].softmax(0), atol=1e-5, rtol=0)


def test_pairs_have_token_types(tmp_path: Path) -> None:
    """A cross-encoder's score of a pair, whose second text has token type 1."""
    import transformers

    folder = write(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=1)
    prompts = make_prompts(128, LENGTHS)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    seconds = [0, 0, 30, 2, 16, 39]
    with torch.inference_mode():
        expected = [
            model(torch.tensor([ids]), token_type_ids=(torch.arange(len(ids)) >= (start or 99)).long()[None])
            for ids, start in zip(prompts, seconds, strict=True)
        ]
    runner, ready = load_runner(folder)
    assert ready.pooling is not None and ready.pooling.cross_encoder and ready.pooling.token_types
    tasks = [PoolingParams(task="classify", all_tokens=True, second_segment=start) for start in seconds]
    for score, output in zip(pool(runner, prompts, tasks), expected, strict=True):
        torch.testing.assert_close(score, output.logits[0].sigmoid(), atol=1e-5, rtol=0)


def test_classifier_of_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, "roberta", "AutoModelForTokenClassification", num_labels=5)
    prompts = make_prompts(128, LENGTHS)
    expected = hidden_states(folder, prompts, "AutoModelForTokenClassification")
    runner, ready = load_runner(folder)
    assert ready.pooling is not None and ready.pooling.tasks == ["token_classify"]
    raw = PoolingParams(task="token_classify", activation=False, all_tokens=True)
    for found, logits in zip(pool(runner, prompts, raw), expected, strict=True):
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


def test_dense_modules_and_dimensions(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert")
    sentence_transformer(folder, "mean_tokens", dense=24)
    prompts = make_prompts(128, LENGTHS)
    weights = load_file(folder / "2_Dense/model.safetensors")
    runner, ready = load_runner(folder, hf_overrides={"is_matryoshka": True})
    assert ready.pooling is not None and (ready.pooling.size, ready.pooling.matryoshka) == (24, True)
    short = PoolingParams(task="embed", dimensions=8, all_tokens=True)
    for whole, part, hidden in zip(
        pool(runner, prompts, MEAN), pool(runner, prompts, short), hidden_states(folder, prompts), strict=True
    ):
        expected = (weights["linear.weight"] @ hidden.mean(0) + weights["linear.bias"]).tanh()
        assert cosine(whole, expected) > 0.999999 and abs(whole.norm() - 1) < 1e-5
        assert cosine(part, expected[:8]) > 0.999999 and part.shape == (8,) and abs(part.norm() - 1) < 1e-5


def test_colbert_has_embeddings_of_tokens_only(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert")
    sentence_transformer(folder, "mean_tokens", dense=24, normalize=False)
    modules = (folder / "modules.json").read_text()
    import json

    kept = [entry for entry in json.loads(modules) if not entry["type"].endswith("Pooling")]
    (folder / "modules.json").write_text(json.dumps(kept))
    runner, ready = load_runner(folder)
    assert (
        ready.pooling is not None
        and ready.pooling.tasks == ["token_embed"]
        and ready.pooling.late_interaction
    )
    weights = load_file(folder / "2_Dense/model.safetensors")
    prompts = make_prompts(128, LENGTHS)
    for found, hidden in zip(pool(runner, prompts, TOKENS), hidden_states(folder, prompts), strict=True):
        assert cosine(found, (hidden @ weights["linear.weight"].T + weights["linear.bias"]).tanh()) > 0.999999


REFUSED = {
    "max": ("pooling_mode_max_tokens", "is not served"),
    "nothing": ("pooling_mode_nothing", "is not served"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_other_poolings(name: str, tmp_path: Path) -> None:
    field, text = REFUSED[name]
    folder = write(tmp_path, "bert")
    sentence_transformer(folder, "mean_tokens")
    (folder / "1_Pooling/config.json").write_text(f'{{"{field}": true}}')
    with pytest.raises(LoadError, match=text):
        load_runner(folder)


def test_refuses_by_name(tmp_path: Path) -> None:
    import json

    folder = write(tmp_path, "llama", "AutoModelForCausalLM")
    with pytest.raises(LoadError, match="runner='generate': convert"):
        load_runner(folder, runner="generate", convert="embed")
    with pytest.raises(LoadError, match="lacks 1 weights"):
        load_runner(folder, convert="classify")
    for tokens, text in (
        (["no", "yes"], "tokenizer.json is not there"),
        ("yes", "must be a list of tokens"),
        ([1, 2, 3], "a classifier of 3 tokens by the method"),
        ([1, 128], "none of id 128"),
        ([-1, 1], "none of id -1"),
    ):
        overrides = {"classifier_from_token": tokens, "method": "from_2_way_softmax"}
        with pytest.raises(LoadError, match=text):
            load_runner(folder, hf_overrides=overrides)
    write_tokenizer(folder)
    with pytest.raises(LoadError, match="has no token 'maybe'"):
        load_runner(folder, hf_overrides={"classifier_from_token": ["maybe"]})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForRewardModel"]}))
    with pytest.raises(LoadError, match="cannot pool"):
        load_runner(folder, runner="pooling")
    with pytest.raises(LoadError, match=r"lacks score\.0\.weight"):
        load_runner(folder, hf_overrides={"architectures": ["Qwen2ForRewardModel"]})
    with pytest.raises(LoadError, match="step_tag_id is for models that give each token"):
        load_runner(folder, convert="embed", pooler_config=PoolerConfig(step_tag_id=1))
    encoder = write(tmp_path / "encoder", "bert")
    with pytest.raises(LoadError, match="exceeds the model's limit of 128 positions"):
        load_runner(encoder, max_model_len=129)
    assert pooled.SIZES["max_position_embeddings"] == 128
