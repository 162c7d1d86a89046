"""What a checkpoint says about pooling: its architecture, and the files of sentence-transformers beside it.

    modules.json                            the modules behind the transformer, in order
    1_Pooling/config.json                   which hidden states make the embedding
    2_Dense/config.json, ...                linear layers behind it
    sentence_bert_config.json               maximum length, lower case
    config_sentence_transformers.json       prompts

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagewire.ipc.files.hub import read_json
from pagewire.ipc.gguf.file import is_gguf
from pagewire.ipc.models import architectures
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.pooling import PoolerConfig
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import LoadError
from pagewire.workers.network.pooling_spec import PoolingSpec, TokenHead

ENCODERS = {
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "nomic_bert",
    "gte",
    "modernbert",
    "mpnet",
    "deberta-v2",
    "albert",
    "convbert",
    "data2vec-text",
    "electra",
    "ernie",
    "eurobert",
    "jina_embeddings_v3",
    "megatron-bert",
    "rembert",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
}
"""Model types whose tokens attend to later ones, too."""
POOLING_MODES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
}
"""The names of pooling types in sentence-transformers' files that are served; older ones and newer ones."""
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
RENAMED = {"new": "gte"}
"""Model types of repositories' own code that transformers has under another name."""
REWARD_HEADS: dict[str, tuple[tuple[str, str], ...]] = {
    "Qwen2ForRewardModel": (("score.0", "ReLU"), ("score.2", "Identity")),
    "Qwen2ForProcessRewardModel": (("score.0", "ReLU"), ("score.2", "Identity")),
}
"""The linear layers of reward models that transformers has no class for, and the function behind each."""


def pools(config: WorkerConfig, values: dict[str, Any]) -> bool:
    """True if the model of these settings is to pool. values: its config.json, with overrides.

    Raises:
        LoadError: the options contradict each other.
    """
    if config.runner == "generate":
        if config.convert != "auto" or (config.pooler_config or PoolerConfig()) != PoolerConfig():
            raise LoadError("runner='generate': convert and pooler_config are for models that pool")
        return False
    if config.runner == "pooling":
        return True
    if config.convert not in ("auto", "none") or config.pooler_config not in (None, PoolerConfig()):
        return True
    if not is_gguf(config.model_path) and (Path(config.model_path) / "modules.json").is_file():
        return True
    if values.get("is_encoder_decoder"):
        return False  # refused where models that generate are loaded
    return bool(values.get("classifier_from_token")) or architectures.pools(architecture(values))


def read_spec(config: WorkerConfig, values: dict[str, Any]) -> PoolingSpec:
    """The pooling of a model, with the options' changes. values: its config.json, with overrides.

    Raises:
        LoadError, ValueError: it is not served, or a file is broken; the text says why.
    """
    name = architecture(values)
    if (native := RENAMED.get(str(values.get("model_type")))) is not None and not config.trust_remote_code:
        raise LoadError(
            f"the model type {values['model_type']!r} runs the code of its repository; hf_overrides="
            f"{{'model_type': {native!r}}} loads it as transformers' own {native!r}"
        )
    encoder = values.get("model_type") in ENCODERS
    if (special := special_head(values, name, config)) is not None:
        if encoder:
            raise LoadError("rewards of tokens, and classifiers made of tokens, are those of causal models")
        return changed(special, config.pooler_config)
    kind = architectures.kind_of(name)
    if config.convert == "embed":
        kind = "embed"
    elif config.convert in ("classify", "reward") and kind != "token_classify":
        kind = "classify"
    if kind is None:
        raise LoadError(
            f"{name or values.get('model_type')} cannot pool: of reward models those are served whose architecture "
            f"ends with ForSequenceClassification or ForTokenClassification, and {', '.join(REWARD_HEADS)}; "
            "convert='embed' makes embeddings of any"
        )
    if kind != "embed":
        default = "CLS" if encoder else "LAST"
        if values.get("model_type") == "modernbert" and values.get("classifier_pooling") == "mean":
            default = "MEAN"
        normalize = config.convert != "reward"
        spec = PoolingSpec(kind, default, encoder, False, activation=activation_of(values, kind))
        return (
            changed(spec, config.pooler_config)
            if normalize
            else changed(spec, PoolerConfig(activation=False))
        )
    spec = PoolingSpec(kind, "CLS" if encoder else "LAST", encoder)
    if not is_gguf(config.model_path):
        spec = with_modules(spec, Path(config.model_path))
    return changed(spec, config.pooler_config)


def special_head(values: dict[str, Any], name: str, config: WorkerConfig) -> PoolingSpec | None:
    """The pooling of a model whose head transformers has no class for; None for others.

    Raises:
        LoadError: its settings are no list of tokens.
    """
    settings = config.pooler_config or PoolerConfig()
    if settings.returned_token_ids is not None:
        head = TokenHead(tuple(settings.returned_token_ids))
        return PoolingSpec("token_classify", "LAST", False, False, token_head=head, rewards_activated=True)
    if (tokens := values.get("classifier_from_token")) is not None:
        if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str | int) for t in tokens):
            raise LoadError(f"classifier_from_token must be a list of tokens, got {quoted(tokens)}")
        method = values.get("method")
        two_way = bool(values.get("is_original_qwen3_reranker")) or method == "from_2_way_softmax"
        if method not in (None, "from_2_way_softmax", "no_post_processing") or (two_way and len(tokens) != 2):
            raise LoadError(
                f"a classifier of {len(tokens)} tokens by the method {quoted(method)} is not served: there are "
                "from_2_way_softmax, of two tokens, and no_post_processing"
            )
        activation = "sigmoid" if two_way or len(tokens) == 1 else "softmax"
        head = TokenHead(tuple(tokens), two_way)
        return PoolingSpec("classify", "LAST", False, False, activation=activation, token_head=head)
    if name in REWARD_HEADS and config.convert != "embed":
        of_steps = name.endswith("ProcessRewardModel")
        return PoolingSpec(
            "token_classify",
            "LAST",
            False,
            False,
            activation="softmax" if of_steps else "identity",
            head=REWARD_HEADS[name],
            rewards_activated=of_steps,
        )
    return None


def changed(spec: PoolingSpec, settings: PoolerConfig | None) -> PoolingSpec:
    """The pooling with the settings of `pooler_config` that concern the worker."""
    settings = settings or PoolerConfig()
    changes: dict[str, Any] = {}
    if settings.step_tag_id is not None:
        if spec.kind != "token_classify":
            raise LoadError("step_tag_id is for models that give each token a reward or a class")
        changes["step_tag_id"] = settings.step_tag_id
    if settings.pooling_type is not None and settings.pooling_type.upper() != "STEP":
        if spec.kind != "embed":
            raise LoadError("pooling_type is for embeddings: a classifier pools as it was trained")
        changes["pooling_type"] = settings.pooling_type.upper()
    if settings.normalize is not None:
        changes["normalize"] = settings.normalize
    return PoolingSpec(**{**vars(spec), **changes})


def architecture(values: dict[str, Any]) -> str:
    """The name of the model's class; empty if config.json gives none."""
    return str((values.get("architectures") or [""])[0])


def activation_of(values: dict[str, Any], kind: str) -> str:
    """What makes scores of a classifier's logits: "sigmoid", "softmax" or "identity".

    Raises:
        LoadError: sentence-transformers' file names a function that is not served.
    """
    named = (values.get("sentence_transformers") or {}).get("activation_fn") or values.get(
        "sbert_ce_default_activation_function"
    )
    if named is not None:
        function = str(named).rpartition(".")[2]
        if function not in ACTIVATIONS:
            raise LoadError(
                f"the cross-encoder's activation {named} is not served: {', '.join(ACTIVATIONS)} are"
            )
        return ACTIVATIONS[function]
    if values.get("problem_type") in PROBLEMS:
        return PROBLEMS[values["problem_type"]]
    labels = values.get("id2label")
    num_labels = len(labels) if labels else values.get("num_labels", 2)
    return "sigmoid" if num_labels == 1 and kind == "classify" else "softmax"


# ---------------------------------------------------------------- sentence-transformers


def with_modules(spec: PoolingSpec, folder: Path) -> PoolingSpec:
    """The pooling of an embedding model that sentence-transformers wrote; `spec` where there is no modules.json.

    Raises:
        LoadError: a module is not served.
    """
    modules = read_modules(folder)
    if not modules:
        return spec
    pooling_type, dense, normalize = None, [], False
    for index, (kind, path) in enumerate(modules):
        if kind == "Transformer":
            if index or path != folder:
                raise LoadError(
                    f"modules.json: a transformer in {path}, not in the model's folder, is not served"
                )
        elif kind == "Pooling":
            pooling_type = read_pooling_type(path)
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            normalize = True
        else:
            raise LoadError(
                f"modules.json: the module {kind} is not served; Transformer, Pooling, Dense and Normalize are"
            )
    if dense and normalize and modules[-1][0] != "Normalize":
        raise LoadError("modules.json: a Dense module behind Normalize is not served")
    bert = read_json(folder / "sentence_bert_config.json")
    prompts = read_json(folder / "config_sentence_transformers.json")
    per_token = pooling_type is None
    return PoolingSpec(
        kind=spec.kind,
        pooling_type=pooling_type or spec.pooling_type,
        encoder=spec.encoder,
        normalize=normalize or per_token,
        dense=tuple(dense),
        per_token=per_token,
        max_length=bert.get("max_seq_length"),
        lower_case=bool(bert.get("do_lower_case")),
        prompts={str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()},
        default_prompt_name=prompts.get("default_prompt_name"),
    )


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each module in modules.json; empty if there is no such file.

    Raises:
        LoadError: the file does not list modules.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    import json

    from pagewire.ipc.files.hub import read_file

    try:
        entries = sorted(json.loads(read_file(path)), key=lambda entry: entry["idx"])
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{path} does not list the modules of a sentence-transformers model: {error}"
        ) from error
    if any(Path(name).is_absolute() or ".." in Path(name).parts for _, name in found):
        raise LoadError(f"{path} names a folder outside of the model's")
    return [(kind, folder / name if name else folder) for kind, name in found]


def read_pooling_type(folder: Path) -> str:
    """ "LAST", "MEAN" or "CLS", as the configuration of a Pooling module says.

    Raises:
        LoadError: another type, several at once, or prompts that are left out of a mean.
    """
    values = read_json(folder / "config.json")
    mode = values.get("pooling_mode")
    chosen = [mode] if isinstance(mode, str) else list(mode or [])
    chosen += [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLING_MODES:
        raise LoadError(
            f"{folder.name}: pooling by {' and '.join(chosen) or 'nothing'} is not served; by the first token, the "
            "last token, or the mean of all tokens it is"
        )
    if values.get("include_prompt") is False:
        raise LoadError(
            f"{folder.name}: include_prompt=false, a mean without the prompt's tokens, is not served"
        )
    return POOLING_MODES[chosen[0]]
