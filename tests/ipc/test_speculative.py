"""The options of speculation: both of their names, their defaults, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.engine_core.config.speculative_model import resolve_speculation
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.speculative import SpeculativeConfig, draft_method

TYPICAL_NGRAMS = {"method": "ngram", "acceptance_method": "typical_acceptance_sampler"}


def resolved(**options: Any) -> SpeculativeConfig | None:
    return EngineArgs.from_kwargs(options).resolved_speculation()


def test_nothing_is_proposed_by_default() -> None:
    assert (
        resolved() is None
        and resolved(speculative_config=None) is None
        and resolved(speculative_config={}) is None
    )


def test_the_documented_flags_and_the_dict_say_the_same() -> None:
    flags = resolved(
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
        speculative_disable_by_batch_size=8,
        speculative_max_model_len=100,
        speculative_draft_tensor_parallel_size=1,
        spec_decoding_acceptance_method="rejection_sampler",
    )
    values = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "disable_by_batch_size": 8,
        "max_model_len": 100,
        "draft_tensor_parallel_size": 1,
    }
    expected = SpeculativeConfig("ngram", None, 5, 2, 4, 8, 100, draft_tensor_parallel_size=1)
    assert flags == resolved(speculative_config=values) == expected
    assert flags is not None and flags.in_core


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "ngram"}, ("ngram", 16, 2, 5)),
        ({"method": "suffix"}, ("suffix", 32, 2, 5)),
        ({"model": "[suffix]"}, ("suffix", 32, 2, 5)),
        ({"method": "[ngram]", "prompt_lookup_max": 1}, ("ngram", 16, 1, 1)),
        ({"method": "NGRAM", "prompt_lookup_min": 9}, ("ngram", 16, 9, 9)),
        ({"method": "draft_model", "model": "a/b"}, ("draft_model", 5, 2, 5)),
        ({"model": "a/b"}, ("auto", 0, 2, 5)),
        ({"method": "mtp"}, ("mtp", 0, 2, 5)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, ("mtp", 1, 2, 5)),
        ({"method": "glm4_moe_mtp", "num_speculative_tokens": 3}, ("mtp", 3, 2, 5)),
        ({"method": "eagle3", "model": "a/b"}, ("eagle3", 5, 2, 5)),
    ],
)
def test_methods_and_their_defaults(values: dict[str, Any], expected: tuple[object, ...]) -> None:
    config = resolved(speculative_config=values)
    assert config is not None
    found = (config.method, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
    assert found == expected


def test_a_drafter_over_several_workers() -> None:
    for size in (1, 2):
        config = resolved(
            speculative_model="a/b", speculative_draft_tensor_parallel_size=size, tensor_parallel_size=2
        )
        assert config is not None and config.draft_tensor_parallel_size == size
    config = resolved(speculative_config={"method": "mtp"}, tensor_parallel_size=2)
    assert config is not None and config.draft_tensor_parallel_size is None


def test_typical_acceptance_and_its_thresholds() -> None:
    """The root of the threshold is the default of alpha."""
    values = [{}, {"posterior_threshold": 0.25}, {"posterior_alpha": 2}, {"posterior_threshold": 0}]
    configs = [resolved(speculative_config=TYPICAL_NGRAMS | each) for each in values]
    found = [(config.posterior_threshold, config.posterior_alpha) for config in configs if config is not None]
    assert found == [(0.09, pytest.approx(0.3)), (0.25, 0.5), (0.09, 2.0), (0.0, 0.0)]
    flags = resolved(
        speculative_model="[ngram]",
        spec_decoding_acceptance_method="typical_acceptance_sampler",
        typical_acceptance_sampler_posterior_threshold=0.25,
    )
    assert flags == configs[1] and flags is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(flags), type=SpeculativeConfig) == flags


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_speculative_tokens": 5}, "speculative_model is missing"),
        ({"speculative_config": {"method": "ngrams"}}, "did you mean 'ngram'"),
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "take an EAGLE-3 head"),
        ({"speculative_config": {"method": "medusa", "model": "x"}}, "Medusa heads are not read"),
        ({"speculative_config": {"methods": "ngram"}}, "did you mean 'method'"),
        ({"speculative_config": {"method": 3}}, "unknown speculative method 3"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "has no model: leave model out"),
        ({"speculative_config": {"method": "suffix", "prompt_lookup_max": 3}}, "belong to '.ngram.'"),
        (
            {"speculative_config": {"method": "mtp", "model": "x"}},
            "layers of the model that is served: leave model",
        ),
        ({"speculative_config": {"method": "draft_model"}}, "needs a model"),
        ({"speculative_config": {"method": "suffix", "model": "[ngram]"}}, "contradicts"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 1000}}, "<= 128"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": -1}}, ">= 0"),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": 0}, "must be at least 1"),
        ({"speculative_config": {"method": "ngram", "disable_by_batch_size": 0}}, ">= 1"),
        (
            {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 5, "ngram_prompt_lookup_max": 3},
            "is over",
        ),
        ({"speculative_model": "x", "speculative_config": {"model": "x"}}, "not both"),
        ({"speculative_model": "x", "speculative_model_quantization": "nothing"}, "unknown quantization"),
        (
            {"speculative_model": "x", "speculative_draft_tensor_parallel_size": 2},
            "give tensor_parallel_size, 1, or",
        ),
        (
            {
                "speculative_model": "x",
                "speculative_draft_tensor_parallel_size": 3,
                "tensor_parallel_size": 4,
            },
            "give tensor_parallel_size, 4, or 1, for the whole drafter in every worker",
        ),
        ({"speculative_model": "x", "speculative_draft_tensor_parallel_size": 0}, ">= 1"),
        ({"speculative_draft_tensor_parallel_size": 1}, "speculative_model is missing"),
        (
            {
                "speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 1},
                "tensor_parallel_size": 2,
            },
            "divided as the model is that they belong to",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 2},
                "tensor_parallel_size": 2,
            },
            "has no model: leave draft_tensor_parallel_size out",
        ),
        (
            {"speculative_model": "x", "pipeline_parallel_size": 2},
            "not supported yet with pipeline_parallel_size over 1, .* 'ngram' or 'suffix'",
        ),
        ({"speculative_model": "x", "enable_lora": True}, "'ngram' or 'suffix'"),
        (
            {"speculative_config": {"model": "x", "disable_logprobs": "all"}},
            "disable_logprobs='all' is not supported: drafts never change what a request",
        ),
        (
            {"speculative_model": "x", "typical_acceptance_sampler_posterior_alpha": 0.3},
            "posterior_alpha belongs to acceptance_method 'typical_acceptance_sampler', not to 'rejection",
        ),
        (
            {"speculative_config": {"model": "x", "posterior_threshold": 0.1}},
            "posterior_threshold belongs to",
        ),
        (
            {"speculative_config": TYPICAL_NGRAMS | {"posterior_threshold": 1.1}},
            "<= 1.0 - at `..posterior_thre",
        ),
        (
            {"speculative_config": TYPICAL_NGRAMS | {"posterior_threshold": -0.1}},
            ">= 0.0 - at `..posterior_thre",
        ),
        ({"speculative_config": TYPICAL_NGRAMS | {"posterior_alpha": -1}}, ">= 0.0 - at `..posterior_alpha"),
        (
            {"speculative_config": TYPICAL_NGRAMS | {"posterior_alpha": math.nan}},
            ">= 0.0 - at `..posterior_al",
        ),
        (
            {"speculative_config": TYPICAL_NGRAMS | {"posterior_alpha": "much"}},
            "got `str` - at `..posterior_al",
        ),
        ({"speculative_config": {"method": "ngram", "acceptance_method": "typical"}}, "acceptance_method"),
        ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, "speculative_model is missing"),
        ({"speculative_model": "x", "spec_decoding_acceptance_method": "other"}, "must be one of"),
    ],
)
def test_what_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineArgs.from_kwargs(options)


def test_a_value_of_a_wrong_type_names_its_option() -> None:
    with pytest.raises(TypeError, match="num_speculative_tokens"):
        EngineArgs.from_kwargs({"speculative_model": "x", "num_speculative_tokens": "5"})


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "draft_model"),
        (
            {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
            "mlp_speculator",
        ),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({}, "draft_model"),
    ],
)
def test_a_model_says_what_it_is(config: dict[str, Any], method: str) -> None:
    assert draft_method(config) == method


def model(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_is_found_and_says_how_many_tokens_it_proposes(tmp_path: Path) -> None:
    speculator = model(tmp_path / "mlp", model_type="mlp_speculator", n_predict=4)
    config = resolve_speculation(EngineArgs(speculative_model=speculator), {})
    assert config == SpeculativeConfig("mlp_speculator", speculator, 4)
    config = resolve_speculation(EngineArgs(speculative_model=speculator, num_speculative_tokens=2), {})
    assert config == SpeculativeConfig("mlp_speculator", speculator, 2)
    draft = model(tmp_path / "draft", model_type="llama")
    assert resolve_speculation(EngineArgs(speculative_model=draft), {}) == SpeculativeConfig(
        "draft_model", draft, 5
    )
    own = EngineArgs(speculative_config={"method": "mtp"})
    assert resolve_speculation(own, {"num_nextn_predict_layers": 1}) == SpeculativeConfig("mtp", None, 1)
    assert resolve_speculation(own, {"num_mtp_layers": 2}) == SpeculativeConfig("mtp", None, 2)
    with pytest.raises(ValueError, match="no num_nextn_predict_layers"):
        resolve_speculation(own, {})
    layers = model(tmp_path / "layers", model_type="deepseek_mtp")
    with pytest.raises(ValueError, match=r"layers alone.*without a model"):
        resolve_speculation(EngineArgs(speculative_model=layers), {})
    assert resolve_speculation(EngineArgs(), {}) is None
