"""The check of wording finds what it is for, and leaves questions, code and quotes in peace."""

import pytest

from tests.english import findings, page_texts, python_texts


@pytest.mark.parametrize(
    "text",
    [
        "What a row asks for.",
        "Rows come first. Which of them wait is a tensor.",
        "Tensors by name, each of which is written anew.",
        "In place of those that left.",
    ],
)
def test_a_sentence_without_its_noun_is_found(text: str) -> None:
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "What is a row? It is one sequence.",
        "A row tells what it asks for, and which rows wait.",
        'The header is "What of which".',
        "The name `of which` is code.",
    ],
)
def test_other_sentences_pass(text: str) -> None:
    assert findings(text) == []


def test_every_kind_of_text_is_read() -> None:
    source = '"""One."""\n\nX = 1\n"""Two.\n\nThree."""\n# Four\n# five.\ny = 2  # six\n'
    assert [text for _, text in python_texts(source)][:3] == ["One.", "Two.", "Three."]
    assert [text for _, text in python_texts(source)][3:] == ["Four five.", "six"]
    page = "# One\n```\nWhat is code.\n```\n| two | three |\n"
    assert [text for _, text in page_texts(page) if text] == ["One", "two", "three"]
