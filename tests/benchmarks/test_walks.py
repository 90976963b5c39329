"""The walk of a call counts the package's own functions, and no others."""

from benchmarks.questions.walks import Walk, walk
from tpsample import SamplingParams, VocabShard


def test_calls_and_files_are_counted() -> None:
    assert walk(lambda: [sum([1]), VocabShard.even(10, 0, 2)]).files == 1
    both = walk(lambda: [VocabShard.even(10, 0, 2), SamplingParams(), VocabShard.even(10, 0, 2)])
    assert both.files > 1 and both.changes >= 2 and both.calls > both.files


def test_the_part_between_two_halves_is_not_counted() -> None:
    once = walk(lambda: VocabShard.even(10, 0, 2))
    halves = walk(lambda: VocabShard.even(10, 0, 2), between=SamplingParams)
    assert halves == Walk(2 * once.calls, once.files, once.changes)
