"""What a plot of results says: speeds over this engine's median, and it says it of all results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks.loading import BENCHMARKS, load

plot = load("plot")


def test_bars_are_speeds_over_our_median() -> None:
    ours, peer = plot.bars("32 x 128/128 out/s", {"vllm": [50.0, 70.0], "pagewire": [100.0, 140.0]})
    assert ours == ("pagewire", 1.0, 100 / 120, 140 / 120, "120 tokens/s")
    assert peer == ("vllm", 0.5, 50 / 120, 70 / 120, "60 tokens/s")
    ours, peer = plot.bars("1 x 128/128 tpot", {"pagewire": [0.01], "vllm": [0.02]})
    assert (ours.value, peer.speed, peer.value) == ("10 ms a token", 0.5, "20 ms a token")
    with pytest.raises(ValueError, match="unit 'furlongs'"):
        plot.bars("1 x 1/1 furlongs", {"pagewire": [1.0]})


def test_each_kept_result_has_its_pictures() -> None:
    results = sorted((BENCHMARKS / "results").glob("compare-*.json"))
    assert len(results) >= 5
    for path in results:
        works = json.loads(path.read_text())["works"]
        labels = [bar.value for work, runs in works.items() for bar in plot.bars(work, runs)]
        for shade in plot.SHADES:
            picture = (plot.PLOTS / f"{path.stem.rpartition('-20')[0]}-{shade}.svg").read_text()
            texts = "".join(ElementTree.fromstring(picture).itertext())
            assert all(text in texts for text in [*works, *labels]), "run python -m benchmarks.plot"


def test_a_result_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in plot.write(next((BENCHMARKS / "results").glob("compare-llama-1b-*.json")), tmp_path):
        assert "tokens/s" in "".join(ElementTree.parse(path).getroot().itertext())
