"""A module in place of the weight: its tensors are looked up in each call, whatever they are then.

    load_state_dict(assign=True), module.weight = other, tie_weights, fully_shard, module.to(…)
        put another tensor in the place of the one before, which the next call reads

A module is taken if its logits are the product with its weight plus its bias. A module with other
parameters, such as those of LoRA, is refused, because they would have no effect here. So is a
linear layer with a forward of its own, as of a quantised one. Forward hooks are warned of, because
some only look on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tpsample.core.caller_warning import warn

ATTRIBUTES = {"lm_head_weight": "weight", "bias": "bias"}
"""Arguments of a sampler, and the attributes of a module that take their place."""

_WAY_OUT = "pass its logits to sample_logits of a sampler over torch.empty(V_local, 0)"
_FLAT = "build the sampler, and call it, inside FSDP's summon_full_params"
_WRAPPED = {
    "_orig_mod": "torch.compile wraps the head; pass its ._orig_mod",
    "_fsdp_wrapped_module": f"FSDP wraps the head; pass its .module, and {_FLAT}",
    "_flat_param": f"FSDP keeps its weight in a flat one; {_FLAT}",
}
"""By the name of what a wrapper of torch has in place of a weight, the way to the head."""


def tensor_of(module: nn.Module, attribute: str) -> Tensor | None:
    """Return what a module has under a name now."""
    parameter = module._parameters.get(attribute)  # ten times as fast as the module's own look-up
    return getattr(module, attribute, None) if parameter is None else parameter


def tensors_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a sampler with the tensors of a module in place of the module.

    Args:
        given: the arguments that `checked_arguments` takes.

    Raises:
        TypeError, ValueError: the module is more than a product, or `bias` was given beside it.
    """
    module = given["weight"]
    if not isinstance(module, nn.Module) or not isinstance(tensor_of(module, "weight"), Tensor):
        return given
    kind = type(module).__name__
    own = (*ATTRIBUTES.values(), "parametrizations")
    more = [name for name, _ in module.named_parameters() if name.split(".")[0] not in own]
    if more:
        way_out = _WRAPPED.get(more[0].split(".")[0], _WAY_OUT)
        raise TypeError(
            f"lm_head_weight: {kind} has parameters beside weight and bias, {', '.join(more[:4])}; "
            + way_out
        )
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        raise TypeError(
            f"lm_head_weight: {kind} has a forward of its own, which no step calls; {_WAY_OUT}, or "
            "its weight and bias= to this one if the plain product is meant"
        )
    if given["bias"] is not None:
        raise ValueError(f"bias: {kind} brings its own; leave bias= out")
    bias, head = tensor_of(module, "bias"), given["head"]
    if bias is not None and (head.logit_scale != 1 or head.logit_softcap is not None):
        raise ValueError(
            f"lm_head_weight: {kind} adds its bias before logit_scale and logit_softcap, and the "
            "sampler after them; pass its logits to sample_logits"
        )
    _warn_of_hooks(module)
    return given | {"weight": tensor_of(module, "weight"), "bias": bias}


def _warn_of_hooks(module: nn.Module) -> None:
    """Warn of hooks that no step calls, and of a forward that was assigned to the module.

    Those of torch itself, or around torch's own forward, move the weight or make it.
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks += [value for name, value in vars(module).items() if name == "forward"]
    names = [
        getattr(hook, "__qualname__", type(hook).__name__)
        for hook in hooks
        if not (getattr(hook, "__module__", None) or "").startswith("torch.")
    ]
    if names:
        warn(
            f"lm_head_weight: {type(module).__name__} has forward hooks, {', '.join(names[:4])}, "
            f"which no step calls; {_WAY_OUT} if they change logits, or pass its weight and bias= "
            "if they only look on",
        )
