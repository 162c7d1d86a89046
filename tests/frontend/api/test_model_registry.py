"""Models of one's own by name, and the plugins of installed packages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import ModelRegistry
from pagewire.engine_core.config.config import EngineConfig
from pagewire.ipc.models import plugins, registrations
from pagewire.ipc.models.plugins import ALLOWED, GROUP, load_allowed_plugins, load_plugins
from pagewire.ipc.models.registrations import Registrations, adopt, all_registrations
from pagewire.ipc.options.engine_args import EngineArgs
from tests.own_package import entry_point

ACME = """
from pagewire import ModelRegistry

def register():
    ModelRegistry.register_model("AcmeForCausalLM", "acme_plugin:Model")

class Model:
    class Inner:
        pass

def made():
    class Local:
        pass
    return Local

def fail():
    raise RuntimeError("no luck")
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with two plugins; what is registered and loaded is forgotten afterwards."""
    monkeypatch.setattr(registrations, "_models", {})
    monkeypatch.setattr(registrations, "_families", {})
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.delenv(ALLOWED, raising=False)
    (tmp_path / "acme_plugin.py").write_text(ACME)
    entry_point(tmp_path, "acme_good", GROUP, "good = acme_plugin:register")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_plugin", None)


def test_all_plugins_are_loaded_once_and_one_that_fails_is_named(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry_point(site, "acme_bad", GROUP, "bad = acme_plugin:fail")
    with caplog.at_level(logging.INFO, "pagewire"):
        assert load_allowed_plugins() == load_allowed_plugins() == ("good",)
    assert all_registrations() == Registrations({"AcmeForCausalLM": "acme_plugin:Model"})
    assert caplog.text.count("loaded the plugin good (acme_plugin:register)") == 1
    assert (
        "the plugin 'bad' ('acme_plugin:fail') fails: RuntimeError: no luck; the engine goes on"
        in caplog.text
    )


def test_the_variable_says_which_plugins_are_loaded(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them must be there and succeed, or the engine does not start."""
    entry_point(site, "acme_bad", GROUP, "bad = acme_plugin:fail")
    monkeypatch.setenv(ALLOWED, "")
    assert load_allowed_plugins() == () and not all_registrations().models
    monkeypatch.setenv(ALLOWED, " good, ")
    assert EngineConfig.resolve(EngineArgs("demo")).worker_config().registrations == Registrations(
        {"AcmeForCausalLM": "acme_plugin:Model"}, plugins=("good",)
    )
    for name, reason in {
        "bad": "the plugin 'bad' .* fails: RuntimeError: no luck",
        "other": "the plugin 'other' is not installed here; installed: bad, good",
    }.items():
        monkeypatch.setenv(ALLOWED, f"good,{name}")
        with pytest.raises(ValueError, match=reason):
            EngineConfig.resolve(EngineArgs("demo"))
        with pytest.raises(ValueError, match=reason):
            load_plugins(["good", name])


def test_only_names_travel() -> None:
    import acme_plugin  # type: ignore[import-not-found, unused-ignore]

    ModelRegistry.register_model("A", acme_plugin.Model)
    ModelRegistry.register_model("B", acme_plugin.Model.Inner)
    ModelRegistry.register_model("C", "not.imported:Yet")
    ModelRegistry.register_family("not.imported:TABLE")
    sent = all_registrations()
    assert sent.models == {"A": "acme_plugin:Model", "B": "acme_plugin:Model.Inner", "C": "not.imported:Yet"}
    assert sent.families == ("not.imported:TABLE",)
    registrations._models.clear()
    adopt(sent)
    assert all_registrations() == sent


def test_a_class_that_no_other_process_finds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import acme_plugin

    with pytest.raises(
        ValueError, match=r"no other process finds 'acme_plugin:made.<locals>.Local': put it into"
    ):
        ModelRegistry.register_model("A", acme_plugin.made())
    monkeypatch.setattr(acme_plugin.Model, "__module__", "__main__")
    with pytest.raises(ValueError, match="'Model' is a class of the program that runs: put it into a module"):
        ModelRegistry.register_model("A", acme_plugin.Model)
    for path in ("acme", "acme:", ":Model", "acme plugin:Model", "acme:Model()", "a" * 1000 + ":B"):
        with pytest.raises(ValueError, match=r"an import path is of the form 'package.module:Name'"):
            ModelRegistry.register_model("A", path)
    with pytest.raises(ValueError, match=r"an architecture is a name as in config\.json, got 'a b'"):
        ModelRegistry.register_model("a b", "acme:Model")
    with pytest.raises(TypeError, match="a class or its import path"):
        ModelRegistry.register_model("A", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the import path of a table, got Model"):
        ModelRegistry.register_family(acme_plugin.Model())
    assert all_registrations() == Registrations()


def test_another_class_for_the_same_architecture_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for path in ("a:A", "a:A", "b:B"):
        ModelRegistry.register_model("A", path)
    assert all_registrations().models == {"A": "b:B"}
    assert [record.message for record in caplog.records] == ["A is now the model b:B, no longer a:A"]


def test_questions() -> None:
    """They know what plugins have registered."""
    supported = ModelRegistry.get_supported_archs()
    assert {"LlamaForCausalLM", "BertModel", "BaichuanForCausalLM", "AcmeForCausalLM"} <= set(supported)
    assert "ArcticForCausalLM" not in supported and supported == ModelRegistry.get_supported_models()
    assert "acme_plugin" in sys.modules  # the plugin's module, which has the class as well
    answers = {
        "LlamaForCausalLM": ("generate", None),
        "AquilaModel": ("generate", None),  # a language model, whatever its name says
        "BertModel": ("pooling", "embed"),
        "MarianMTModel": ("generate", None),
        "Qwen2VLForConditionalGeneration": ("generate", None),
        "WhisperForConditionalGeneration": ("generate", None),
        "LlamaForSequenceClassification": ("pooling", "classify"),
        "Qwen2ForRewardModel": ("pooling", "token_classify"),
        "AcmeForCausalLM": ("generate", None),
    }
    for name, (runner, convert) in answers.items():
        info = ModelRegistry.get_model_info(name)
        assert (info["runner"], info["convert"]) == (runner, convert)
        assert ModelRegistry.is_text_generation_model(name) is (runner == "generate")
        assert ModelRegistry.is_pooling_model(name) is (runner == "pooling")
        assert ModelRegistry.is_embedding_model(name) is (convert == "embed")
        assert ModelRegistry.is_multimodal_model(name) is name.startswith(("Qwen2VL", "Whisper"))
    assert ModelRegistry.get_model_info("AcmeForCausalLM")["model_cls"] == "acme_plugin:Model"
    with pytest.raises(
        ValueError, match="unknown architecture 'LlamaForCausalM'; did you mean 'LlamaForCausalLM'"
    ):
        ModelRegistry.is_multimodal_model("LlamaForCausalM")
