"""Grammars for tokenizers without a tokenizer.json: transformers converts them, in a process of its own."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import pagewire.demo
from pagewire import LLM, SamplingParams
from pagewire.engine_core.grammar.compile import load_tokenizer
from pagewire.engine_core.grammar.convert import converted, needs_conversion
from pagewire.engine_core.grammar.prover import ConfinedProver
from pagewire.engine_core.schedule.attachments import GrammarError
from pagewire.ipc.wire.params import StructuredOutputsParams

VOCAB = 380
DEMO = Path(pagewire.demo.__path__[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a tokenizer.model of SentencePiece, and no tokenizer.json."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, folder)
    text = 'the quick brown fox jumps over lazy dogs 0123456789 {"a": 1, "b": [true]} : . red green blue'
    draw = random.Random(0)
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(" ".join(draw.choices(text.split(), k=12)) for _ in range(1000)),
            model_writer=file,
            vocab_size=VOCAB,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=1.0,
            minloglevel=2,
        )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_outputs_follow_a_grammar_with_a_tokenizer_model_alone(folder: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 99}},
    }
    schema |= {"required": ["a", "n"], "additionalProperties": False}
    params = SamplingParams(
        max_tokens=100, temperature=1.0, structured_outputs=StructuredOutputsParams(json=schema)
    )
    with LLM(model=str(folder), kv_cache_memory_bytes=64 << 20) as llm:
        for seed in range(3):
            params.seed = seed
            (output,) = llm.generate("the quick", params, use_tqdm=False)[0].outputs
            value = json.loads(output.text)
            assert output.finish_reason == "stop" and value["a"] in ("red", "blue") and value["n"] <= 99


def test_the_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    assert (
        needs_conversion(folder) and not needs_conversion(DEMO) and not needs_conversion(folder / "nothing")
    )
    path = converted(folder)
    tokenizer = load_tokenizer(path, [2])
    theirs = AutoTokenizer.from_pretrained(folder)
    text = 'red fox {"a": 1} \n\u00e9'
    ids = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode_str(ids).lstrip() == text and tokenizer.vocab_size == len(theirs)
    prover = ConfinedProver(path, [2], VOCAB)  # another process reads it, too
    assert prover.prove(StructuredOutputsParams(regex="red|blue"), 60.0, 20.0).num_bytes
    prover.close()


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(GrammarError, match=r"has none, and its tokenizer cannot be converted: \w+: "):
        converted(tmp_path)
