"""Faults of what the tests themselves stand on."""

from tests.faults.fault import Fault

INTERPRETER = [
    Fault(
        "the operations of a launch count as in place behind it",
        "tests/support/interpreter.py",
        "in_place.clear()",
        "pass",
        ("tests/test_interpreter.py",),
    ),
    Fault(
        "a shape of a tensor is taken for another of as many elements",
        "tests/support/interpreter.py",
        "found = known.get(sizes)",
        "found = known.get(sizes[::-1])",
        ("tests/test_interpreter.py::test_a_kernel_computes_the_same_without_it",),
    ),
    Fault(
        "a number of the interpreter has the type of the first",
        "tests/support/interpreter.py",
        "found = known.get(element.name)",
        "found = next(iter(known.values()), None)",
        ("tests/test_interpreter.py::test_a_kernel_computes_the_same_without_it",),
    ),
]
