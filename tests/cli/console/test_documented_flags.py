"""Each flag of vLLM's server (its manual, 1.11.4 and 1.24): a value that works, is warned of, or is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagewire.cli.commands import build_parser
from pagewire.cli.commands.serve import take_server_options
from pagewire.cli.console.options import UsageError, engine_args
from pagewire.ipc import compatibility

WORKS: dict[str, tuple[list[str], dict[str, Any]]] = {  # flag: its values, and the fields that must be set
    "--allow-credentials": ([], {"allow_credentials": True}),
    "--allowed-headers": (['["a", "b"]'], {"allowed_headers": ["a", "b"]}),
    "--allowed-methods": (["GET"], {"allowed_methods": ["GET"]}),
    "--allowed-origins": (['["*"]'], {"allowed_origins": ["*"]}),
    "--api-key": (["k"], {"api_key": ["k"]}),
    "--block-size": (["32"], {"block_size": 32}),
    "--chat-template": (["{{ messages }}"], {"chat_template": "{{ messages }}"}),
    "--device": (["cpu"], {"device": "cpu"}),
    "--disable-custom-all-reduce": ([], {"disable_custom_all_reduce": True}),
    "--disable-log-requests": ([], {"disable_log_requests": True}),
    "--disable-log-stats": ([], {"disable_log_stats": True}),
    "--disable-sliding-window": ([], {"disable_sliding_window": True}),
    "--distributed-executor-backend": (["ray"], {"distributed_executor_backend": "ray"}),
    "--download-dir": (["d"], {"download_dir": "d"}),
    "--dtype": (["half"], {"dtype": "half"}),
    "--enable-lora": ([], {"enable_lora": True}),
    "--enable-prefix-caching": ([], {"enable_prefix_caching": True}),
    "--enable-prompt-adapter": ([], {"enable_prompt_adapter": True}),
    "--enforce-eager": ([], {"enforce_eager": True}),
    "--gpu-memory-utilization": (["0.8"], {"gpu_memory_utilization": 0.8}),
    "--host": (["127.0.0.2"], {"host": "127.0.0.2"}),
    "--ignore-patterns": (["original/**/*"], {"ignore_patterns": ["original/**/*"]}),
    "--kv-cache-dtype": (["fp8_e5m2"], {"kv_cache_dtype": "fp8_e5m2"}),
    "--limit-mm-per-prompt": (["image=2"], {"limit_mm_per_prompt": "image=2"}),
    "--mm-processor-kwargs": (['{"size": 336}'], {"mm_processor_kwargs": {"size": 336}}),
    "--load-format": (["pt"], {"load_format": "pt"}),
    "--lora-dtype": (["bfloat16", "--enable-lora"], {"lora_dtype": "bfloat16"}),
    "--lora-extra-vocab-size": (["8", "--enable-lora"], {"lora_extra_vocab_size": 8}),
    "--lora-modules": (["a=b", "c=d"], {"lora_modules": ["a=b", "c=d"]}),
    "--max-cpu-loras": (["3", "--enable-lora"], {"max_cpu_loras": 3}),
    "--max-log-len": (["9"], {"max_log_len": 9}),
    "--max-logprobs": (["5"], {"max_logprobs": 5}),
    "--max-lora-rank": (["8", "--enable-lora"], {"max_lora_rank": 8}),
    "--max-loras": (["2", "--enable-lora"], {"max_loras": 2}),
    "--max-model-len": (["64"], {"max_model_len": 64}),
    "--max-num-batched-tokens": (["64"], {"max_num_batched_tokens": 64}),
    "--max-num-seqs": (["2"], {"max_num_seqs": 2}),
    "--max-parallel-loading-workers": (["2"], {"max_parallel_loading_workers": 2}),
    "--max-prompt-adapter-token": (["8", "--enable-prompt-adapter"], {"max_prompt_adapter_token": 8}),
    "--max-prompt-adapters": (["2", "--enable-prompt-adapter"], {"max_prompt_adapters": 2}),
    "--middleware": (["a.b"], {"middleware": ["a.b"]}),
    "--model": (["m"], {"model": "m"}),
    "--ngram-prompt-lookup-max": (
        ["4", "--speculative-model", "[ngram]", "--num-speculative-tokens", "5"],
        {"ngram_prompt_lookup_max": 4},
    ),
    "--ngram-prompt-lookup-min": (
        ["1", "--speculative-model", "[ngram]", "--num-speculative-tokens", "5"],
        {"ngram_prompt_lookup_min": 1},
    ),
    "--num-gpu-blocks-override": (["9"], {"num_gpu_blocks_override": 9}),
    "--num-scheduler-steps": (["8"], {"num_scheduler_steps": 8}),
    "--num-speculative-tokens": (["5", "--speculative-model", "m"], {"num_speculative_tokens": 5}),
    "--otlp-traces-endpoint": (
        ["http://h:4318/v1/traces"],
        {"otlp_traces_endpoint": "http://h:4318/v1/traces"},
    ),
    "--pipeline-parallel-size": (["2"], {"pipeline_parallel_size": 2}),
    "-pp": (["2"], {"pipeline_parallel_size": 2}),
    "--port": (["80"], {"port": 80}),
    "--prompt-adapters": (["a=b"], {"prompt_adapters": ["a=b"]}),
    "--qlora-adapter-name-or-path": (
        ["a", "--enable-lora", "--load-format", "bitsandbytes"],
        {"qlora_adapter_name_or_path": "a"},
    ),
    "--quantization": (["gptq"], {"quantization": "gptq"}),
    "-q": (["awq"], {"quantization": "awq"}),
    "--quantization-param-path": (["f", "--kv-cache-dtype", "fp8"], {"quantization_param_path": "f"}),
    "--ray-workers-use-nsight": (["--worker-use-ray"], {"ray_workers_use_nsight": True}),
    "--response-role": (["bot"], {"response_role": "bot"}),
    "--return-tokens-as-token-ids": ([], {"return_tokens_as_token_ids": True}),
    "--revision": (["r"], {"revision": "r"}),
    "--root-path": (["/llm"], {"root_path": "/llm"}),
    "--rope-scaling": (
        ['{"type": "dynamic", "factor": 2.0}'],
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "--preemption-mode": (["swap"], {"preemption_mode": "swap"}),
    "--rope-theta": (["1e6"], {"rope_theta": 1e6}),
    "--seed": (["42"], {"seed": 42}),
    "--served-model-name": (["a", "b"], {"served_model_name": ["a", "b"]}),
    "--skip-tokenizer-init": ([], {"skip_tokenizer_init": True}),
    "--spec-decoding-acceptance-method": (
        ["typical_acceptance_sampler", "--speculative-model", "m"],
        {"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
    ),
    "--speculative-disable-by-batch-size": (
        ["8", "--speculative-model", "m"],
        {"speculative_disable_by_batch_size": 8},
    ),
    "--speculative-draft-tensor-parallel-size": (
        ["1", "--speculative-model", "m"],
        {"speculative_draft_tensor_parallel_size": 1},
    ),
    "-spec-draft-tp": (["1", "--speculative-model", "m"], {"speculative_draft_tensor_parallel_size": 1}),
    "--speculative-max-model-len": (["9", "--speculative-model", "m"], {"speculative_max_model_len": 9}),
    "--speculative-model": (["m"], {"speculative_model": "m"}),
    "--speculative-model-quantization": (
        ["gptq", "--speculative-model", "m"],
        {"speculative_model_quantization": "gptq"},
    ),
    "--ssl-ca-certs": (["f"], {"ssl_ca_certs": "f"}),
    "--ssl-cert-reqs": (["2"], {"ssl_cert_reqs": 2}),
    "--ssl-certfile": (["f", "--ssl-keyfile", "k"], {"ssl_certfile": "f"}),
    "--ssl-keyfile": (["k", "--ssl-certfile", "f"], {"ssl_keyfile": "k"}),
    "--swap-space": (["8"], {"swap_space": 8.0}),
    "--tensor-parallel-size": (["2"], {"tensor_parallel_size": 2}),
    "-tp": (["2"], {"tensor_parallel_size": 2}),
    "--tokenizer": (["t"], {"tokenizer": "t"}),
    "--tokenizer-mode": (["slow"], {"tokenizer_mode": "slow"}),
    "--tokenizer-revision": (["r"], {"tokenizer_revision": "r"}),
    "--tool-call-parser": (["hermes", "--enable-auto-tool-choice"], {"tool_call_parser": "hermes"}),
    "--trust-remote-code": ([], {"trust_remote_code": True}),
    "--typical-acceptance-sampler-posterior-alpha": (
        [
            "0.4",
            "--speculative-model",
            "m",
            "--spec-decoding-acceptance-method",
            "typical_acceptance_sampler",
        ],
        {"typical_acceptance_sampler_posterior_alpha": 0.4},
    ),
    "--typical-acceptance-sampler-posterior-threshold": (
        [
            "0.1",
            "--speculative-model",
            "m",
            "--spec-decoding-acceptance-method",
            "typical_acceptance_sampler",
        ],
        {"typical_acceptance_sampler_posterior_threshold": 0.1},
    ),
    "--uvicorn-log-level": (["info"], {"uvicorn_log_level": "info"}),
    "--worker-use-ray": ([], {"worker_use_ray": True}),
}
ACCEPTED: dict[str, list[str]] = {  # flag: values that ask for what happens anyway
    "--cpu-offload-gb": ["0"],
    "--enable-chunked-prefill": [],
    "--guided-decoding-backend": ["auto"],
    "--max-context-len-to-capture": ["8192"],
    "--max-seq-len-to-capture": ["8192"],
    "--num-lookahead-slots": ["0"],
    "--tokenizer-pool-size": ["0"],
    "--use-v2-block-manager": [],
}
WARNED: dict[str, list[str]] = {  # flag: values that change no output
    "--disable-async-output-proc": [],
    "--disable-frontend-multiprocessing": [],
    "--disable-logprobs-during-spec-decoding": [],
    "--enable-chunked-prefill": ["False"],
    "--engine-use-ray": [],
    "--guided-decoding-backend": ["outlines"],
    "--max-context-len-to-capture": ["512"],
    "--max-seq-len-to-capture": ["512"],
    "--num-lookahead-slots": ["5"],
    "--scheduler-delay-factor": ["0.5"],
    "--tokenizer-pool-extra-config": ['{"a": 1}'],
    "--tokenizer-pool-size": ["2"],
    "--tokenizer-pool-type": ["thread"],
    "--use-v2-block-manager": ["False"],
}
REFUSED: dict[str, list[str]] = {
    "--code-revision": ["main"],
    "--collect-detailed-traces": ["all"],
    "--cpu-offload-gb": ["4"],
    "--device": ["neuron"],
    "--fully-sharded-loras": [],
    "--load-format": ["tensorizer"],
    "--long-lora-scaling-factors": ["4.0"],
    "--model-loader-extra-config": ['{"a": 1}'],
    "--override-neuron-config": ['{"a": 1}'],
    "--quantization": ["deepspeedfp"],
    "--tokenizer-mode": ["mistral"],
}


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compatibility, "_warned", set())
    caplog.set_level(logging.WARNING)


PARSER = build_parser()


def fields(words: list[str]) -> dict[str, Any]:
    """All options of a server and its engine that this command line gives."""
    options = PARSER.parse_args(["serve", *([] if "--model" in words else ["demo"]), *words])
    server = take_server_options(options)
    return vars(engine_args(options)) | vars(server)


def test_flags_that_work(caplog: pytest.LogCaptureFixture) -> None:
    for name, (values, wanted) in WORKS.items():
        for spelling in dict.fromkeys((name, name[:2] + name[2:].replace("-", "_"))):
            if name.startswith("--") or spelling == name:
                got = fields([spelling, *values])
                assert {field: got[field] for field in wanted} == wanted, spelling
    assert not caplog.messages


def test_flags_that_need_nothing_done(caplog: pytest.LogCaptureFixture) -> None:
    usual = fields([])
    for name, values in ACCEPTED.items():
        assert fields([name, *values]) == usual, name
    assert not caplog.messages
    for name, values in WARNED.items():
        compatibility._warned.clear()
        assert fields([name, *values]) == usual, name
        (message,) = caplog.messages
        assert message.startswith(name[2:].replace("-", "_")) and " has no effect: " in message
        caplog.clear()


def test_flags_that_are_refused() -> None:
    for name, values in REFUSED.items():
        with pytest.raises(UsageError, match=r" is not supported( yet)?: .*; "):
            fields([name, *values])
