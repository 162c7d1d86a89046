"""README's list of families is that of docs/families.md."""

from __future__ import annotations

from benchmarks.families import PATH, README, Family, document, paragraph, read, with_list

FAMILIES = [
    Family("bart", "BartForCausalLM", "refused", "it is the decoder of an encoder-decoder model"),
    Family("big_bird", "BigBirdForCausalLM", "untested", "no tiny model: ValueError: a | b"),
    Family("llama", "LlamaForCausalLM", "equal"),
    Family("xlm-roberta", "XLMRobertaForCausalLM", "equal"),
]


def test_readme_lists_the_families_of_the_table() -> None:
    readme, families = README.read_text(), read(PATH.read_text())
    assert len(families) > 200
    assert with_list(readme, families) == readme
    assert paragraph(families) in readme


def test_a_table_is_read_as_it_was_written() -> None:
    text = document(FAMILIES, "5.0")
    assert "transformers 5.0" in text and "**2 equal, 1 refused, 1 untested**" in text
    assert read(text)[::2] == FAMILIES[::2]
    assert read(text)[1].why == "no tiny model: ValueError: a / b"
    assert paragraph(read(text)) == "**Served** (2 model types):\n`llama`, `xlm-roberta`."


def test_a_new_list_takes_the_place_of_the_old_one() -> None:
    readme = "## Models\n\n**Served** (1 model types):\n`gpt2`.\n\n**Others**\n\nNo list.\n"
    made = with_list(readme, FAMILIES)
    assert made == readme.replace("(1 model", "(2 model").replace("`gpt2`", "`llama`, `xlm-roberta`")
