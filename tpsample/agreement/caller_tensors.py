"""The weight and the bias, which are the caller's and may change between two steps.

    in place                                       nothing to do, the memory is the same
    weight.data = other, weight.set_(other)        followed by the next step
    module.weight = other, load_state_dict(assign=True)
                                                   another tensor, which is followed if the sampler
                                                   has the module; else `refresh` has to be given it
                                                   (one warning if the old one is a Parameter)

Steps read aliases, which share memory with the caller's tensors. Each call checks that they still
do.

A DTensor as the weight brings shard and group with it, as it is distributed:

    placements (Replicate(), Shard(0)) on a mesh [dp, tp]
    → rows [start, stop) of this rank; the ranks of its tp axis; the whole tensor's rows are V
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpsample.agreement.caller_module import ATTRIBUTES, tensor_of, tensors_of
from tpsample.core.caller_warning import warn
from tpsample.core.checks import describe, is_dtensor, is_integer, require_memory
from tpsample.core.tensors import ordinary_tensors
from tpsample.core.vocab_shard import VocabShard
from tpsample.settings import Settings

_PLAIN = (Tensor, torch.nn.Parameter)


_held = (object(),)
_ONE_OWNER = sys.getrefcount(_held[0])
"""The count where nothing but a tuple refers to an object."""


class CallerTensors:
    """The caller's tensors by argument, and the aliases of them that steps read.

    Args:
        given: the caller's tensors by argument, which may be DTensors. None stands for no tensor,
            and a module for its weight and its bias.
        settings: the settings of the sampler, which hold the aliases.
        moved: called after an alias has moved in memory; its argument is the weight, or None for
            the bias.

    Attributes:
        warns: whether the next step warns if only the sampler refers to a Parameter. It is False
            after the first warning, and in a copied sampler, which owns its Parameters.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor | nn.Module | None],
        settings: Settings,
        moved: Callable[[Tensor | None], None],
    ) -> None:
        weight = given["lm_head_weight"]
        self._module = weight if isinstance(weight, nn.Module) else None
        if self._module is not None:
            given = {
                name: tensor_of(self._module, attribute) for name, attribute in ATTRIBUTES.items()
            }
        aliases = {"lm_head_weight": settings.weight, "bias": settings.bias}
        self._given: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in given.items():
            alias = aliases[name]
            if isinstance(tensor, Tensor) and alias is not None:
                self._given[name] = tensor, alias
        self._moved, self._moving = moved, False
        self.warns = self._module is None

    def given(self) -> dict[str, Any]:
        """Return the caller's latest tensors or module, by argument."""
        if self._module is not None:
            return {"lm_head_weight": self._module, "bias": None}
        return {"bias": None} | {name: given for name, (given, _) in self._given.items()}

    def rebind_aliases(self) -> None:
        """Let the aliases share the memory of the caller's tensors, wherever that is now.

        Raises:
            TypeError, ValueError: a tensor has another shape, dtype, device or layout than before,
                or no memory.
        """
        if self._module is not None:
            self._look_up(self._module)
        # This comes first, because a variable that holds a tensor would count as a reference.
        for name, held in self._given.items() if self.warns else ():
            if sys.getrefcount(held[0]) == _ONE_OWNER and isinstance(held[0], nn.Parameter):
                self._warn_of_orphan(name)
        for name, (given, alias) in self._given.items():
            tensor = given if type(given) in _PLAIN else _local(given)
            require_memory(name, tensor)
            moved = tensor.data_ptr() != alias.data_ptr() or tensor.stride() != alias.stride()
            moved = moved or tensor.shape != alias.shape or tensor.dtype != alias.dtype
            if moved or self._moving:
                _require_like(name, tensor, alias)
                self._take(name, tensor, alias)

    def replace(self, **given: Tensor | None) -> None:
        """Take other tensors of the caller; None leaves the old one. If one is wrong, take none.

        Raises:
            TypeError, ValueError: no tensor, one that the sampler did not have, or one of another
                shape, dtype, device or layout.
        """
        others = {name: tensor for name, tensor in given.items() if tensor is not None}
        if self._module is not None and others:
            name = next(iter(others))
            raise ValueError(
                f"{name}: the sampler reads {type(self._module).__name__}.{ATTRIBUTES[name]} "
                "in each step; assign that, and call refresh() without it"
            )
        self._replace(others)

    def _look_up(self, module: nn.Module) -> None:
        """Take the tensors that a module has now."""
        others = {}
        for name, attribute in ATTRIBUTES.items():
            tensor, known = tensor_of(module, attribute), self._given.get(name)
            if tensor is not (None if known is None else known[0]):
                others[name] = tensor
        if others:
            self._replace(others)

    def _warn_of_orphan(self, name: str) -> None:
        """Warn once that no module or optimizer has a Parameter any more that steps read.

        Assigning `module.weight`, or loading a state with assign=True, leaves the old one behind.
        """
        self.warns = False
        warn(
            f"{name}: nothing but this sampler has the Parameter that it reads, as after "
            f"module.{ATTRIBUTES[name]} = … or load_state_dict(assign=True); pass the "
            f"module in its place, or call sampler.refresh({name}=…) on every rank",
        )

    def _replace(self, others: Mapping[str, Any]) -> None:
        local = {}
        for name, tensor in others.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name}: expected a tensor, got {describe(tensor)}; give one like that of "
                    "before, or build a new LMHeadSampler"
                )
            if name not in self._given:
                raise ValueError(f"{name}: the sampler was built without; build a new one")
            local[name] = _local(tensor)
            _require_like(name, local[name], self._given[name][1])
        for name, tensor in others.items():
            alias = self._given[name][1]
            self._take(name, local[name], alias)
            self._given[name] = tensor, alias

    @ordinary_tensors
    def _take(self, name: str, new: Tensor, alias: Tensor) -> None:
        self._moving = True  # and it stays so if an interrupt comes before all is done
        alias.data = memory = new.detach()  # an alias has a count of changes of its own
        self._moved(memory if name == "lm_head_weight" else None)
        self._moving = False


def _require_like(name: str, new: Tensor, alias: Tensor) -> None:
    """Raise a ValueError unless a tensor can take the place of the one that steps read."""
    alike = (new.dtype, new.shape, new.device) == (alias.dtype, alias.shape, alias.device)
    if not alike or new.stride() != alias.stride():
        raise ValueError(
            f"{name}: expected {describe(alias)} with strides {alias.stride()}, as the sampler "
            f"was built over, got {describe(new)} with strides {new.stride()}; build a new "
            "LMHeadSampler over it"
        )
    require_memory(name, new)


def _local(given: Tensor) -> Tensor:
    """Return a tensor, or the part of a DTensor on this rank."""
    if not is_dtensor(given):
        return given
    with torch.no_grad():
        local: Tensor = given.to_local()  # type: ignore[attr-defined]
    return local


_EXPECTED = (
    "expected Shard(0) on one axis of the mesh and Replicate() on all others, so that each rank of "
    "that axis holds rows of its own"
)


def local_arguments(
    group: object, given: dict[str, Any]
) -> tuple[object, dict[str, Any], Exception | None]:
    """Return group and arguments of a sampler with plain tensors for modules and DTensors.

    The third result is an error of any kind, or None. It is returned, not raised, so that the ranks
    of the group can be told.

    Args:
        group: as `LMHeadSampler` takes it.
        given: the arguments that `checked_arguments` takes.
    """
    try:
        given = tensors_of(given)
    except Exception as wrong:
        return group, given, wrong
    weight = given["weight"]
    if not is_dtensor(weight):
        return group, given, None
    try:
        axis = _sharded_axis(weight)
    except Exception as wrong:
        return group, given, wrong
    of_mesh = weight.device_mesh.get_group(axis)
    try:
        _check_group(group, of_mesh, axis)
        shard = _shard(weight, axis, given["vocab_size"])
        if given["shard"] not in (None, shard):
            raise ValueError(
                f"shard: lm_head_weight is a DTensor whose rows on this rank are {shard}, got "
                f"{describe(given['shard'])}; leave shard= out"
            )
        bias = _local_bias(given["bias"], weight)
        local: Tensor = weight.detach().to_local()
    except Exception as wrong:
        return of_mesh, given, wrong
    rows = given["vocab_size"] if given["vocab_size"] is not None else weight.shape[0]
    plain = {"weight": local, "shard": shard, "vocab_size": rows, "bias": bias}
    return of_mesh, given | plain, None


def _sharded_axis(weight: Any) -> int:
    """Return the axis of the mesh over which the rows are sharded."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = weight.device_mesh, weight.placements
    if mesh.get_coordinate() is None:
        raise ValueError(f"lm_head_weight: this process is not in the DTensor's mesh {mesh}")
    if weight.ndim != 2:
        raise ValueError(
            f"lm_head_weight: expected a DTensor [V, D], got {weight.ndim} axes of size "
            f"{tuple(weight.shape)}"
        )
    axes = [axis for axis, placed in enumerate(placements) if not isinstance(placed, Replicate)]
    # Other kinds of shards are not of this type: theirs are no rows that follow one another.
    if len(axes) != 1 or type(placements[axes[0]]) is not Shard or placements[axes[0]].dim != 0:
        raise ValueError(
            f"lm_head_weight: {_EXPECTED}; got a DTensor placed {tuple(placements)}; redistribute "
            "it, or pass a plain tensor with shard= and group="
        )
    (axis,) = axes
    if mesh.get_coordinate()[axis] != mesh.get_local_rank(axis):
        raise ValueError(
            f"lm_head_weight: expected a mesh whose ranks ascend along axis {axis}, as those of "
            f"its group do, got {mesh}; redistribute it over such a mesh, or pass a plain tensor "
            "with shard= and group="
        )
    return axis


def _shard(weight: Any, axis: int, vocab_size: Any) -> VocabShard:
    """Return the ids of the rows of this rank; rows from `vocab_size` on are padding."""
    mesh, rows = weight.device_mesh, weight.shape[0]
    shard = VocabShard.even(rows, mesh.get_local_rank(axis), mesh.size(axis))
    end = int(vocab_size) if is_integer(vocab_size) else rows
    return VocabShard(min(shard.start, end), min(shard.stop, end))


def _check_group(group: object, of_mesh: dist.ProcessGroup, axis: int) -> None:
    ranks = dist.get_process_group_ranks(of_mesh)
    same = group is None or (
        isinstance(group, dist.ProcessGroup) and dist.get_process_group_ranks(group) == ranks
    )
    if not same:
        raise ValueError(
            f"group: lm_head_weight is a DTensor over ranks {ranks}, axis {axis} of its mesh, got "
            f"{describe(group)}; leave group= out"
        )


def _local_bias(bias: object, weight: Any) -> object:
    """Return the rows of a bias that is distributed as the weight is; another one unchanged."""
    if not is_dtensor(bias):
        return bias
    placed: Any = bias
    if placed.device_mesh != weight.device_mesh or placed.placements != weight.placements:
        raise ValueError(
            f"bias: expected a DTensor distributed as lm_head_weight is, {weight.placements}, got "
            f"{placed.placements}; or this rank's values as a plain tensor"
        )
    return placed.detach().to_local()
