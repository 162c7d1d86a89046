"""The list of families in docs/models.md is that of docs/families.md."""

from __future__ import annotations

from tests.benchmarks.loading import load

families = load("families")
SOME = [
    families.ModelRow("bart", "BartForCausalLM", "refused", "it is the decoder of an encoder-decoder model"),
    families.ModelRow("big_bird", "BigBirdForCausalLM", "untested", "no tiny model: ValueError: a | b"),
    families.ModelRow("llama", "LlamaForCausalLM", "equal"),
    families.ModelRow("xlm-roberta", "XLMRobertaForCausalLM", "equal"),
]


def test_models_lists_the_families_of_the_table() -> None:
    page, table = families.MODELS.read_text(), families.read(families.PATH.read_text())
    assert len(table) > 200
    assert families.with_list(page, table) == page
    assert families.paragraph(table) in page


def test_a_table_is_read_as_it_was_written() -> None:
    text = families.document(SOME, [families.ModelRow("bert", "BertModel", "equal")], "5.0")
    assert "transformers 5.0" in text and "**2 equal, 1 refused, 1 untested**" in text
    assert "## Encoders\n\n**1 equal**" in text
    assert families.read(text)[::2] == SOME[::2]
    assert families.read(text)[1].why == "no tiny model: ValueError: a / b"
    assert families.paragraph(families.read(text)) == "**Served** (2 model types):\n`llama`, `xlm-roberta`."


def test_a_new_list_takes_the_place_of_the_old_one() -> None:
    page = "## Models\n\n**Served** (1 model types):\n`gpt2`.\n\n**Others**\n\nNo list.\n"
    made = families.with_list(page, SOME)
    assert made == page.replace("(1 model", "(2 model").replace("`gpt2`", "`llama`, `xlm-roberta`")


def test_the_last_sections_outlive_the_other_tables() -> None:
    text = families.document(SOME, SOME[:1], "5.0")
    matrix = families.with_section(text, families.MATRIX, "| llama | yes |\n")
    once = families.with_section(matrix, families.ROADS, "| llama | stack |\n")
    assert once.index("| llama | stack |") < once.index("| llama | yes |")
    assert families.with_section(once, families.ROADS, "| llama | stack |\n") == once
    assert families.with_section(once, families.MATRIX, "| llama | yes |\n") == once
    assert families.section(once, families.MATRIX).endswith(".\n\n| llama | yes |\n")
    assert families.document(SOME, SOME[:1], "5.0", families.last_sections(once)) == once
    assert families.read(once) == families.read(text)
