"""Parts that a plain request does not need, opened where it is first used: the one place that knows where it is.

A module on the way of a plain request imports none of these, but takes them as `wiring.NAME`. So whoever reads that
way need not read them, and a frontend that attaches does not load them.
"""

from __future__ import annotations

from pagewire.frontend import lazy_names

# Names by the module that defines them.
_HOMES = {
    # cores that are spawned here
    "frontend.core.spawned_cores": "SpawnedCores tokenizer_ahead tokenizer_source",
    "ipc.options.engine_args": "EngineArgs",
    # a span for each request
    "frontend.core.tracing": "Tracer",
    # pictures and sounds
    "frontend.media.intake": "media_intake",
    # conversations; jinja2 is slow to import
    "frontend.text.chat_template": "chat_prompts conversations_of render_chat template_source",
    # chat templates of requests
    "frontend.text.render_process": "NUM_PARALLEL NUM_RESERVED",
    # typed decisions
    "frontend.requests.decisions": "AskedQuestion decisions_of questions_of reads_of decision_variables",
    # adapters
    "frontend.requests.adapter_book": "AdapterBook",
    "frontend.requests.learned_prompts": "PromptAdapters",
    # other weights
    "frontend.core.weights": "send_weights",
    # models that pool
    "frontend.requests.pooling.inputs": "complete_pooling_params pooling_params_for prepare_pooling",
    "frontend.requests.pooling.scoring": "ScorePlan",
    "frontend.requests.pooling.state": "PooledState",
    # tokenizers in GGUF files, and as programs of transformers know them
    "frontend.text.engine_tokenizer": "for_programs from_programs",
    "ipc.gguf.tokenizer": "tokenizer_config tokenizer_json",
}

__getattr__, __dir__ = lazy_names(__name__, "pagewire", _HOMES)
