"""The public function: it checks this rank's arguments, lets the ranks compare them, and scores."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from tpsample.agreement.arguments import checked_head
from tpsample.agreement.caller_tensors import local_arguments
from tpsample.agreement.construction import default_backend
from tpsample.agreement.misplaced import collective
from tpsample.backends import room_of
from tpsample.backends.torch_.room import Room
from tpsample.core.checks import (
    check_current,
    check_tensor,
    describe,
    is_dtensor,
    real_number,
    require_memory,
    require_plain,
)
from tpsample.core.digest import digest_bits
from tpsample.core.row_noise import GREEDY_BELOW, HOTTEST
from tpsample.core.score import Head
from tpsample.core.tensors import outside_of_graphs
from tpsample.core.vocab_shard import VocabShard
from tpsample.ranks.process import group_among, process_group_of, require_own_connections
from tpsample.ranks.ranks import Ranks
from tpsample.settings import ChosenBackend
from tpsample.training.kept_tokens import KeptTokens
from tpsample.training.logprobs import KeptLogprobs, KeptLogprobsFunction, Scored
from tpsample.training.shards import HeadRanks, agreed
from tpsample.training.trainer_ranks import NAME, TrainerRanks


def _refuse(given: dict[str, Any], error: TypeError) -> None:
    """Raise an error on every rank that scores. The group is known from arguments, or default."""
    ranks, _, _ = _ranks_of(group_among(given), given.get("lm_head_weight"))
    with ranks.during(NAME):
        agreed(ranks, None, None, {}, error)


def _ranks_of(
    group: object, weight: object, **given: Any
) -> tuple[Ranks, dict[str, Any], Exception | None]:
    """Return the ranks, the arguments with plain tensors for DTensors, and what is wrong."""
    given = dict.fromkeys(("shard", "vocab_size", "bias")) | given
    given["weight"] = weight if isinstance(weight, Tensor) else None
    owners, given, error = local_arguments(group, given)
    try:
        of_ranks = process_group_of(owners)
    except TypeError as wrong:  # the default group is told of it
        of_ranks, error = process_group_of(None), error or wrong
    if of_ranks is None:
        return Ranks(), given, error
    require_own_connections(of_ranks)
    return TrainerRanks(of_ranks, _device_of(weight)), given, error


@outside_of_graphs
@collective(_refuse)
def kept_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    kept: KeptTokens,
    temperature: Tensor | float,
    *,
    group: dist.ProcessGroup | str | None = None,
    shard: VocabShard | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sparse: bool = False,
) -> KeptLogprobs:
    """Score drawn tokens over the sets that they were drawn from, with gradients. Collective.

        logprob = y_v - ln Σ e^(y_u),   y_u = (x_u - max x) / T,   u over the set of the row

    With equal hidden states and weights, values are bit for bit the `processed_logprobs` of the
    step that drew the tokens, on any number of ranks. That holds for a step without penalties,
    biases and masks. Time and memory grow with the listed ids, O(T · D). Rows that kept every id
    cost a product with the whole shard, forwards and backwards, a few rows at a time; GPUs sum that
    in fp32. The host waits for the device.

    Args:
        hidden_states: [N, D], those that the tokens were drawn from, whole on each rank. Where
            anything gets a gradient, neither they nor the weight may be of inference mode.
        lm_head_weight: [V_local, D], this rank's rows, of the dtype of hidden_states; or a DTensor
            with ``Shard(0)`` on one axis of its mesh, from which group and shard follow.
        token_ids: int64 [N], the drawn tokens.
        kept: the N sets.
        temperature: of each row, fp32 [N], or one number for all; from 1e-5 to 2^100.
        group: the ranks that hold the rows of the LM head, as `LMHeadSampler` takes it.
        shard: the ids of this rank's rows; needed on several ranks, unless the weight is a DTensor.
            Rows behind them are padding.
        logit_scale, logit_softcap: as `LMHeadSampler` takes them.
        sparse: give lm_head_weight a sparse gradient, of listed ids alone, as
            `torch.nn.functional.embedding` does. Not with rows that kept every id, nor a DTensor.

    Everything but the weight's rows must be equal on every rank, the loss too. The gradient of
    hidden_states is that of all ranks together, and equal on each. Backward is collective: every
    rank calls it in the same order, for the weight alone as well. There the gradients of the scores
    are compared, to a thousandth of the largest. Temperatures get no gradient, and nothing has
    second derivatives or tangents of forward mode.

    Returns:
        `KeptLogprobs`: ``logprobs`` and ``entropies``, float64 [N] each, the same on every rank.

    Raises:
        TypeError, ValueError: an argument is wrong, on one rank. A drawn token that is not in its
            set, an id that is listed twice, or one outside of the vocabulary.
        RankMismatch: an argument is wrong or differs on one of several ranks; all raise it. Or a
            call over this process group was left half done, such as by an interrupt. In backward,
            ranks are in backwards of different calls, or have different losses.
        PeerLost: on CPUs, ranks did not call within the timeout of the process group, or fell; it
            names them. Backward raises it as well. Afterwards the group is of no use here.
        RuntimeError: this process was forked by that of the group. In backward, create_graph=True.
            A transform of torch.func, such as vmap, is around the call.
    """
    head = Head(logit_scale, logit_softcap)
    ranks, given, error = _ranks_of(group, lm_head_weight, shard=shard, head=head)
    weight, room, same = None, None, {}
    with ranks.during(NAME):
        try:
            if error is not None:
                raise error
            _check_weight(lm_head_weight, given["shard"], ranks.world_size)
            weight = given["weight"]
            check_current("lm_head_weight", weight.device)
            require_plain("hidden_states", hidden_states)
            require_memory("lm_head_weight", weight)
            _check_no_tangents(
                hidden_states=hidden_states, lm_head_weight=weight, temperature=temperature
            )
            temperatures = _checked(hidden_states, weight, token_ids, kept, temperature)
            _check_sparse(sparse, kept, lm_head_weight)
            if _wanted(hidden_states) or _wanted(lm_head_weight):
                _check_kept_for_backward(hidden_states=hidden_states, lm_head_weight=weight)
            given["head"] = head = checked_head(given["head"])
            backend = default_backend(weight.device)
            room = _ready_room(backend, weight.dtype, weight.shape[1], weight.device)
            same = {
                "hidden_states": _compared(hidden_states),
                "token_ids": _compared(token_ids),
                "kept": {f.name: _compared(getattr(kept, f.name)) for f in fields(kept)},
                "temperature": _compared(temperatures),
                "logit_scale": head.logit_scale,
                "logit_softcap": head.logit_softcap,
                "sparse": sparse,
                "gradient of hidden_states": _wanted(hidden_states),
                "gradient of lm_head_weight": _wanted(lm_head_weight),
            }
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        of_head = agreed(ranks, given["shard"], weight, same, error)
        assert room is not None  # or there was an error, which every rank has raised
        scored = Scored(of_head, given["head"], token_ids, kept, temperatures, sparse, room)
        _check_sets(scored, of_head)
        local: Any = lm_head_weight
        if is_dtensor(local):
            local = local.to_local()
        return KeptLogprobs(*KeptLogprobsFunction.apply(hidden_states, local, scored))


@lru_cache(64)
def _ready_room(
    backend: ChosenBackend, dtype: torch.dtype, size: int, device: torch.device
) -> Room:
    """Return a backend whose kernels for rows of so many numbers are compiled.

    Compiling takes longer than other ranks may wait, so it comes before the ranks meet.
    """
    room, index = room_of(backend), torch.zeros(1, dtype=torch.int64, device=device)
    rows, ends = torch.zeros(1, size, dtype=dtype, device=device), torch.arange(2, device=device)
    sums = rows.double()
    room.pair_products(rows, index, rows, index)
    room.add_weighted_rows(sums, ends, sums[:, 0], rows, index)
    return room


def _compared(tensor: Tensor) -> dict[str, Any]:
    """Return the properties of a tensor that ranks compare, by their names in a message."""
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "numbers": f"digest {digest_bits(tensor) & (2**64 - 1):016x}",
    }


def _wanted(tensor: Tensor) -> bool:
    """Return whether a tensor gets a gradient in backward."""
    return torch.is_grad_enabled() and tensor.requires_grad


def _device_of(weight: object) -> torch.device:
    if isinstance(weight, Tensor) and not weight.is_meta:
        return weight.device
    return torch.device("cpu")


def _check_weight(weight: object, shard: VocabShard | None, world_size: int) -> None:
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise TypeError(
            "lm_head_weight: expected a floating tensor [V_local, D], got "
            f"{describe(weight)}; pass the parameter of the LM head"
        )
    if weight.is_meta:
        raise ValueError("lm_head_weight: is on the meta device, so it has no numbers")
    if not weight.shape[1]:
        raise ValueError(
            f"lm_head_weight: expected [V_local, D] with D > 0, got {describe(weight)}; pass the "
            "parameter of the LM head, and the hidden states that it multiplies"
        )
    if shard is None and world_size > 1:
        raise ValueError(
            "shard: expected a VocabShard on each of several ranks, got None; pass "
            "VocabShard.even(vocab_size, rank, world_size), or the rows that the rank has"
        )
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {describe(shard)}")


def _checked(
    hidden_states: object,
    weight: Tensor,
    token_ids: object,
    kept: object,
    temperature: Tensor | float,
) -> Tensor:
    """Check the arguments that have a value per row; return the temperatures, fp32 [N]."""
    device, size = weight.device, weight.shape[1]
    meaning = ", as lm_head_weight is"
    check_tensor("hidden_states", hidden_states, (weight.dtype,), ("N", size), device, meaning)
    assert isinstance(hidden_states, Tensor)
    rows = len(hidden_states)
    of_each = ", one of each row of hidden_states"
    check_tensor("token_ids", token_ids, (torch.int64,), (rows,), device, of_each)
    if not isinstance(kept, KeptTokens):
        raise TypeError(
            f"kept: expected KeptTokens, got {describe(kept)}; make them by KeptTokens.of_step or "
            "KeptTokens.from_lists"
        )
    check_tensor("kept.offsets", kept.offsets, (torch.int64,), (rows + 1,), device, of_each)
    if isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("temperature: it gets no gradient here; pass temperature.detach()")
    if isinstance(temperature, Tensor) and temperature.is_meta:
        raise ValueError("temperature: is on the meta device, so it has no numbers; pass a float")
    if isinstance(temperature, Tensor) and temperature.ndim:
        check_tensor("temperature", temperature, (torch.float32,), (rows,), device, of_each)
        given = temperature.detach()
    else:
        number = temperature.item() if isinstance(temperature, Tensor) else temperature
        if math.isnan(real_number(number)):
            raise ValueError(
                "temperature: expected a number, or a tensor of float32 with one of each row, got "
                f"{describe(temperature)}"
            )
        given = torch.full((rows,), real_number(number), dtype=torch.float32, device=device)
    wrong = (~((given >= GREEDY_BELOW) & (given <= HOTTEST))).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"temperature: expected {GREEDY_BELOW} to {HOTTEST:.3g}, got {float(given[wrong[0]])} "
            f"in row {wrong[0]}; a greedy token has no distribution, so leave its row out"
        )
    return given


def _check_no_tangents(**arguments: object) -> None:
    for name, given in arguments.items():
        if isinstance(given, Tensor) and unpack_dual(given).tangent is not None:
            raise ValueError(
                f"{name}: has a tangent of forward-mode AD, and scores have gradients of backward "
                f"alone; pass {name}.detach()"
            )


def _check_kept_for_backward(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.is_inference():
            raise ValueError(
                f"{name}: is a tensor of inference mode, which autograd cannot keep for backward; "
                f"pass {name}.clone(), made outside of inference mode"
            )


def _check_sparse(sparse: object, kept: KeptTokens, weight: object) -> None:
    if not isinstance(sparse, bool):
        raise TypeError(f"sparse: expected a bool, got {describe(sparse)}")
    if sparse and (bool(kept.whole.any()) or is_dtensor(weight)):
        what = "a DTensor" if is_dtensor(weight) else "a row that kept every id"
        raise ValueError(f"sparse: {what} has a dense gradient; pass sparse=False")


def _check_sets(scored: Scored, ranks: HeadRanks) -> None:
    """Check ids against the vocabulary, and each drawn token against its set.

    Raises:
        ValueError: on every rank, because all of them have the same ids.
    """
    vocab_size, kept, drawn = ranks.vocab_size, scored.kept, scored.token_ids
    for name, ids in (("token_ids", drawn), ("kept.token_ids", kept.token_ids)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise ValueError(
                f"{name}: expected ids in [0, {vocab_size}), got {int(outside[0])}; pass sets "
                "of this vocabulary, and leave rows without a token out"
            )
    row_of = scored.row_of()
    keys = (row_of * vocab_size + kept.token_ids).sort().values
    twice = keys[1:][keys[1:] == keys[:-1]]
    if len(twice):
        row, token_id = divmod(int(twice[0]), vocab_size)
        raise ValueError(f"kept: row {row} lists id {token_id} twice; list each id once")
    is_kept = kept.whole.clone()
    is_kept[row_of[kept.token_ids == drawn[row_of]]] = True
    missing = (~is_kept).nonzero().flatten().tolist()
    if missing:
        raise ValueError(
            f"token_ids: row {missing[0]} drew id {int(drawn[missing[0]])}, which is not in its "
            "set; pass token and set of the same step and row"
        )
