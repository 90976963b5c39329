"""The LM head of a transformers model: its sampler, and the hidden states it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tpsample.agreement.caller_tensors import local_arguments
from tpsample.core.checks import describe, is_dtensor
from tpsample.core.score import Head, head_logits
from tpsample.core.sealed import Sealed
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import UnsupportedParameter
from tpsample.ranks.process import ALONE, ranks_of
from tpsample.ranks.ranks import gather_or_raise, require_equal
from tpsample.sampler import LMHeadSampler
from tpsample.settings import require_sampler

_LOCKS: WeakKeyDictionary[torch.nn.Module, RLock] = WeakKeyDictionary()
"""A lock per LM head, because the threads of a process share its forward."""
_PROBE = (-55.0, -7.0, -1.0, -0.125, 0.0, 0.5, 3.0, 31.0)


class TransformersHead(Sealed):
    """The LM head of one model.

    Attributes:
        weight: [V, D], all rows; a DTensor of them where the model is tensor-parallel.
        bias: [V] or None, likewise.
        options: its scale and soft-cap, as `LMHeadSampler` takes them.
        hidden_states: [B, T, D], as the layer was given them last in `aside`.

    Raises:
        UnsupportedParameter: the logits are not softcap(scale · h Wᵀ) + bias of a plain linear
            layer, as far as a forward pass of one token shows.
    """

    def __init__(self, model: Any) -> None:
        self._lm_head = lm_head = _linear(model)
        with torch.inference_mode(False):  # which makes no view of a DTensor from outside of it
            self.weight: Tensor = lm_head.weight.detach()
            self.bias: Tensor | None = None if lm_head.bias is None else lm_head.bias.detach()
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        scale = float(scale or 1 / (getattr(config, "logits_scaling", None) or 1))
        softcap = getattr(config, "final_logit_softcapping", None)
        self.options: dict[str, Any] = {"logit_scale": scale, "logit_softcap": softcap}
        self.hidden_states = self.weight.new_empty(0)
        self._probe(model)

    def sampler(self, *, rank: int = 0, world_size: int = 1, **options: Any) -> LMHeadSampler:
        """Return a sampler over this rank's rows of the head. Collective.

        Args:
            rank, world_size: of ranks that share a whole head evenly. A head that is sharded by
                tensor parallelism brings its own rows and group.
            options: of `LMHeadSampler`.
        """
        weight, bias, vocab_size = self.weight, self.bias, len(self.weight)
        if not is_dtensor(weight):
            weight, bias = _rows(VocabShard.even(vocab_size, rank, world_size), weight, bias)
            options["group"] = "alone" if world_size == 1 else None
        return LMHeadSampler(weight, vocab_size=vocab_size, bias=bias, **self.options, **options)

    @contextmanager
    def agreed(self, sampler: object = None, **given: Any) -> Iterator[None]:
        """Raise what the body raises on every rank of a tensor-parallel model. Collective.

        Args:
            sampler: the caller's, if any. Its ranks share a head that each of them has as a whole.
            given: numbers and texts that the ranks must have alike, by name.
        """
        error = None
        try:
            yield
        except Exception as wrong:  # of whatever kind: the other ranks must hear of it
            error = wrong
        group: object = ALONE
        if is_dtensor(self.weight):
            arguments = {"weight": self.weight, "bias": None, "shard": None, "vocab_size": None}
            group, *_ = local_arguments(None, arguments)
        elif isinstance(sampler, LMHeadSampler):
            group = sampler.ranks.group or ALONE
        given["sampler"] = "left out" if sampler is None else "given"
        ranks = ranks_of(group)
        with ranks.during("generate"):
            require_equal(gather_or_raise(ranks, given, error))

    def check_sampler(self, sampler: Any) -> None:
        """Check a sampler for several calls.

        Raises:
            UnsupportedParameter: it is of a head of another kind or size.
            TypeError: it is none.
            RuntimeError: it was closed.
        """
        require_sampler(sampler, "one of sampler_of(model)")
        sampler.checks.ready()
        own = sampler.settings
        other = Head(**self.options) != own.head or (self.bias is None) != (own.bias is None)
        if other or any(
            (part.shape, part.dtype, part.device) != (alias.shape, alias.dtype, alias.device)
            for part, alias in self._parts(sampler)
        ):
            raise UnsupportedParameter(
                "sampler: has another size, dtype, scale, soft-cap or bias than the model's head; "
                "pass one of sampler_of(model), or leave sampler out"
            )

    def rebind_sampler(self, sampler: LMHeadSampler) -> LMHeadSampler:
        """Let a sampler that was checked read this head, whose weight may be another by now."""
        if any(part.data_ptr() != alias.data_ptr() for part, alias in self._parts(sampler)):
            sampler.refresh(*self._rows_of(sampler))
        return sampler

    def _parts(self, sampler: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weight and bias on this rank, beside those that a sampler reads."""
        rows: Any = self._rows_of(sampler)
        aliases = sampler.settings.weight, sampler.settings.bias
        for part, alias in zip(rows, aliases, strict=True):
            if part is not None:
                yield part.to_local() if is_dtensor(part) else part, alias

    def _rows_of(self, sampler: LMHeadSampler) -> tuple[Tensor, Tensor | None]:
        if is_dtensor(self.weight) or len(self.weight) != sampler.vocab_size:
            return self.weight, self.bias
        return _rows(sampler.shard, self.weight, self.bias)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the model hand its hidden states to `hidden_states`, and compute no logits.

        In place of logits it returns [B, T, 0], which nobody can take for logits. A forward that
        the layer had before, as tensor parallelism gives it one, is put back.
        """

        def keep(hidden_states: Tensor) -> Tensor:
            self.hidden_states = hidden_states
            return hidden_states.new_empty(*hidden_states.shape[:-1], 0)

        with self._forward(keep):
            yield

    @contextmanager
    def _forward(self, function: Any) -> Iterator[None]:
        """Let the layer call a function; another thread waits until its forward is back."""
        own = self._lm_head.__dict__
        with _LOCKS.setdefault(self._lm_head, RLock()):
            was = own.get("forward")
            self._lm_head.forward = function
            try:
                yield
            finally:
                del self._lm_head.forward
                if was is not None:
                    self._lm_head.forward = was

    @torch.no_grad()
    def _probe(self, model: Any) -> None:
        """See what the model does to known logits behind its LM head."""
        logits: Tensor | None = None

        def known(hidden_states: Tensor) -> Tensor:
            nonlocal logits
            logits = torch.tensor(_PROBE, dtype=hidden_states.dtype, device=hidden_states.device)
            return logits.expand(*hidden_states.shape[:-1], -1).clone()

        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with self._forward(known):
            try:
                returned = model(input_ids=token, use_cache=False).logits[0, -1].float()
            except (IndexError, RuntimeError) as error:
                raise _unknown(model, str(error)) from error
        if logits is None:
            raise _unknown(model, "it does not call the layer")
        expected = head_logits(logits.float(), None, Head(**self.options))
        near = returned.shape == expected.shape and torch.allclose(returned, expected, 0.02, 0.02)
        if not near:
            raise _unknown(model, f"{logits.tolist()} become {returned.tolist()}")


def _rows(shard: VocabShard, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    own = slice(shard.start, shard.stop)
    return weight[own], None if bias is None else bias[own]


def _linear(model: Any) -> Any:
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model: expected a model of transformers, got {describe(model)}")
    lm_head = model.get_output_embeddings()
    if type(lm_head) is not torch.nn.Linear:
        raise UnsupportedParameter(
            f"model: expected a torch.nn.Linear as LM head, {type(model).__name__} has "
            f"{type(lm_head).__name__}; a quantised head or one with LoRA makes its own logits, "
            "see LMHeadSampler.sample_logits"
        )
    if hasattr(lm_head, "_hf_hook") or lm_head.weight.is_meta:
        raise UnsupportedParameter("model: its LM head is offloaded; load it onto one device")
    return lm_head


def _unknown(model: Any, what: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"model: {type(model).__name__} changes what its LM head returns in a way not known here; "
        f"scale and soft-cap of the configuration are: {what}"
    )
