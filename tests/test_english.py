"""The check of wording finds what it is for, and leaves questions, code and quotes in peace."""

import pytest

from tests.english import LONGEST, findings, page_texts, paragraphs, python_texts

LONG = "It has" + " more" * (LONGEST - 1)
"""One word too many for a sentence."""
HALF = " ".join(["more"] * (LONGEST // 2 + 1))


@pytest.mark.parametrize(
    "text",
    [
        "What a row asks for.",
        "Rows come first. Which of them wait is a tensor.",
        "Tensors by name, each of which is written anew.",
        "In place of those that left.",
        f"A short one. {LONG}.",
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
        f"{LONG.removesuffix(' more')}.",
        f"It has {HALF}: it has {HALF}; it has {HALF}.",
        f"(It has {HALF}.) It has {HALF}.",
        "It takes " + "`a`, " * LONGEST + "and `b`.",
        f"a table    {LONG}",
    ],
)
def test_other_sentences_pass(text: str) -> None:
    assert findings(text) == []


def test_every_kind_of_text_is_read() -> None:
    source = '"""One."""\n\nX = 1\n"""Two.\n\nThree."""\n# Four\n# five.\ny = 2  # six\n'
    assert [text for _, text in python_texts(source)][:3] == ["One.", "Two.", "Three."]
    assert [text for _, text in python_texts(source)][3:] == ["Four\nfive.", "six"]
    page = "# One\n```\nWhat is code.\n```\n| two | three |\n"
    assert [text for _, text in page_texts(page) if text] == ["One", "two", "three"]


@pytest.mark.parametrize(
    "lines",
    [
        (f"It has {HALF}", HALF),
        (f"- It has {HALF}", f"  {HALF}"),
        (f"a: it has {HALF}", f"   {HALF}"),
    ],
)
def test_a_sentence_is_counted_over_its_lines(lines: tuple[str, str]) -> None:
    docstring, comment = "\n    ".join(lines), "\n# ".join(lines)
    for texts in (
        page_texts("\n".join(lines)),
        python_texts(f'class A:\n    """{docstring}"""'),
        python_texts(f"# {comment}\nx = 1\n"),
    ):
        assert len([finding for _, text in texts for finding in findings(text)]) == 1


@pytest.mark.parametrize(
    "lines",
    [
        (HALF, f"- {HALF}"),
        (HALF, f"    {HALF}"),
        (f"a: {HALF}", f"b: {HALF}"),
        (f"| {HALF} | {HALF} |",),
        (HALF, "| |", HALF),
    ],
    ids=["list", "formula", "arguments", "cells", "table"],
)
def test_entries_formulas_and_cells_are_counted_apart(lines: tuple[str, ...]) -> None:
    texts = [text for _, text in paragraphs("\n".join(lines)) if text]
    assert len(texts) == 2 and not any(map(findings, texts))


def test_a_finding_has_the_line_of_its_paragraph() -> None:
    text = f"One.\n\nTwo.\n{LONG}.\n"
    lines = (python_texts(f'x = 1\n"""{text}"""\n'), page_texts(f"\n{text}"))
    for texts in lines:
        assert [line for line, found in texts if findings(found)] == [4]
