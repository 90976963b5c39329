"""Faults of what the tests themselves stand on."""

from tests.faults.fault import faults

FAULTS = faults(r"""
tests/support/interpreter.py tests/test_interpreter.py
    operations count as in place before they are
    - self._in_place |= found
    + self._in_place |= {tl, tl.core}
    a constant of another type is taken for one that was made before
    - key = (repr(rhs), lhs.type.name, how, *named.items())
    + key = (repr(rhs), how, *named.items())
    > test_a_kernel_computes_the_same_without_it
    a shape of a tensor is taken for another of as many elements
    - found = known.get(sizes)
    + found = known.get(sizes[::-1])
    > test_a_kernel_computes_the_same_without_it
    a number of the interpreter has the type of the first
    - found = known.get(element.name)
    + found = next(iter(known.values()), None)
    > test_a_kernel_computes_the_same_without_it
tpsample/record/verify.py tests/test_interface.py
    a public class is not sealed
    - @dataclass(frozen=True)
    + @dataclass
    > test_an_attribute_that_an_object_does_not_have_is_refused
tpsample/request/selection.py tests/messages/test_advice.py
    a message advises what nobody tried
    - of {out.rows}"
    + of {out.rows}; leave it out"
    > test_every_advice_is_followed_by_a_test_or_needs_a_gpu
""")
