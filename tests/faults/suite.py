"""Faults of what the tests themselves stand on."""

from tests.faults.fault import Fault

INTERPRETER = [
    Fault(
        "operations count as in place before they are",
        "tests/support/interpreter.py",
        "self._in_place |= found",
        "self._in_place |= {tl, tl.core}",
        ("tests/test_interpreter.py",),
    ),
    Fault(
        "a constant of another type is taken for one that was made before",
        "tests/support/interpreter.py",
        "key = (repr(rhs), lhs.type.name, how, *named.items())",
        "key = (repr(rhs), how, *named.items())",
        ("tests/test_interpreter.py::test_a_kernel_computes_the_same_without_it",),
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
