"""The weight and the bias, which are the caller's and may change between two steps.

    in place                                       nothing to do, the memory is the same
    weight.data = other, weight.set_(other)        followed by the next step
    module.weight = other, load_state_dict(assign=True)
                                                   another tensor, which `refresh` has to be given

Steps read aliases, which share memory with the caller's tensors. Each call looks whether they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tpsample.agreement.dtensor import is_dtensor
from tpsample.core.checks import describe
from tpsample.core.tensors import ordinary_tensors

_PLAIN = (Tensor, torch.nn.Parameter)


class CallerTensors:
    """The caller's tensors by argument, and their aliases.

    Args:
        given: the caller's tensors by argument, which may be DTensors; None leaves an argument out.
        aliases: their aliases by argument.
        moved: is called after an alias lies elsewhere in memory.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor | None],
        aliases: Mapping[str, Tensor | None],
        moved: Callable[[], None],
    ) -> None:
        self._given: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in given.items():
            alias = aliases[name]
            if tensor is not None and alias is not None:
                self._given[name] = tensor, alias
        self._moved = moved

    def follow(self) -> None:
        """Let the aliases share the memory of the caller's tensors, wherever that is now.

        Raises:
            ValueError: a tensor has another shape, dtype, device or layout than before.
        """
        for name, (given, alias) in self._given.items():
            its = given if type(given) in _PLAIN else _local(given)
            if its.data_ptr() != alias.data_ptr() or its.stride() != alias.stride():
                self._take(name, its, alias)

    def replace(self, **given: Tensor | None) -> None:
        """Take other tensors of the caller; None leaves the old one.

        Raises:
            TypeError, ValueError: no tensor, one that the sampler did not have, or one of another
                shape, dtype, device or layout.
        """
        for name, tensor in given.items():
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
            if name not in self._given:
                raise ValueError(f"{name}: the sampler was built without; build a new one")
            alias = self._given[name][1]
            self._take(name, _local(tensor), alias)
            self._given[name] = tensor, alias

    @ordinary_tensors
    def _take(self, name: str, its: Tensor, alias: Tensor) -> None:
        alike = (its.dtype, its.shape, its.device) == (alias.dtype, alias.shape, alias.device)
        if not alike or its.stride() != alias.stride():
            raise ValueError(
                f"{name}: expected {describe(alias)} with strides {alias.stride()}, as the sampler "
                f"was built over, got {describe(its)} with strides {its.stride()}; build a new "
                "LMHeadSampler over it"
            )
        alias.data = its.detach()
        self._moved()


def _local(given: Tensor) -> Tensor:
    """Return a tensor, or the part of a DTensor on this rank."""
    if not is_dtensor(given):
        return given
    with torch.no_grad():
        local: Tensor = given.to_local()  # type: ignore[attr-defined]
    return local
