"""Mistakes with samplers and steps: each call, and the whole message that must come."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.mistakes import (
    HIDDEN,
    SHARDED,
    WEIGHT,
    B,
    D,
    Mesh,
    Model,
    V,
    batch_of,
    closed,
    request,
    sampler_over,
)
from tpsample import LMHeadSampler, VocabShard, sample, sample_draft, verify, verify_logits
from tpsample.agreement import construction

STRIDED = torch.ones(D, B).T
"""Hidden states whose last axis is not contiguous."""


def changed() -> object:
    """Take a step of a screened sampler whose weight was made greater."""
    weight = WEIGHT.clone()
    sampler = LMHeadSampler(weight, screening="int8", max_rows=4)
    weight.mul_(3)
    return sampler(HIDDEN, batch_of(), 0)


def on_a_cpu_alone() -> object:
    """Ask for kernels in a process without the interpreter of Triton."""
    with mock.patch.object(construction, "interpreted", return_value=False):
        return sampler_over(backend="triton")


def step_of(sampler: LMHeadSampler) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step as a function of the hidden states."""
    return lambda hidden_states: sampler(hidden_states, batch_of(), 0).token_ids


def traced() -> object:
    """Trace a step as TorchScript does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(step_of(sampler_over()), HIDDEN)


def made_up() -> object:
    """Build a sampler where tensors have shapes alone."""
    with FakeTensorMode():
        return LMHeadSampler(torch.ones(V, D))


DRAWS_NUMBERS = (
    ", and a token is drawn of numbers; call the sampler outside of it, or inside torch.compile or "
    "torch.export"
)

SAMPLERS: dict[str, tuple[Callable[[], object], str]] = {
    "a module without a weight": (
        lambda: LMHeadSampler(torch.nn.ReLU()),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "ReLU()",
    ),
    "a model for a weight": (
        lambda: LMHeadSampler(Model()),
        "lm_head_weight: expected a tensor [V_local, D], or a module with one as its weight, got "
        "Model; pass its "
        ".lm_head.weight, and bias=its .lm_head.bias",
    ),
    "a transposed weight": (
        lambda: LMHeadSampler(WEIGHT.T),
        "lm_head_weight: expected [V_local, D] with a contiguous last axis, got (4, 20) with "
        "strides (1, 4); call .contiguous(), or pass .T of it if it is [D, V_local]",
    ),
    "a weight [D, V]": (
        lambda: LMHeadSampler(WEIGHT.T.contiguous())(HIDDEN, batch_of(), 0),
        "hidden_states: expected D = 20 columns as lm_head_weight has, got torch.float32 (2, 4) on "
        "cpu; logits go to sample_logits; or lm_head_weight is [D, V_local]: build the sampler of "
        "lm_head_weight.T.contiguous()",
    ),
    "one process with too few rows": (
        lambda: LMHeadSampler(WEIGHT, vocab_size=V + 1),
        "lm_head_weight: rank 0 needs 21 rows for its shard VocabShard(start=0, stop=21), got 20; "
        "name the rows that it has by shard=, or pass .T.contiguous() of it if it is [D, V_local]",
    ),
    "a weight without numbers": (
        lambda: LMHeadSampler(torch.nn.Linear(D, V, device="meta")),
        "lm_head_weight: is on the meta device, so it has no numbers; build the sampler after the "
        "weights are loaded",
    ),
    "rows that are mapped": (
        lambda: torch.vmap(step_of(sampler_over()), out_dims=None)(HIDDEN.unsqueeze(0)),
        "hidden_states: has no numbers of its own inside a transform of torch.func, such as vmap"
        + DRAWS_NUMBERS,
    ),
    "a call that torch records": (
        lambda: make_fx(step_of(sampler_over()))(HIDDEN),
        "hidden_states: has no numbers of its own inside make_fx" + DRAWS_NUMBERS,
    ),
    "a call that an older torch records": (
        traced,
        "hidden_states: has no numbers of its own inside torch.jit.trace" + DRAWS_NUMBERS,
    ),
    "tensors that are made up": (
        lambda: sampler_over()(FakeTensorMode().from_tensor(HIDDEN), batch_of(), 0),
        "hidden_states: has no numbers of its own inside FakeTensorMode" + DRAWS_NUMBERS,
    ),
    "a weight that is made up": (
        made_up,
        "lm_head_weight: has no numbers of its own inside FakeTensorMode" + DRAWS_NUMBERS,
    ),
    "a scale in a tensor": (
        lambda: LMHeadSampler(WEIGHT, logit_scale=torch.tensor(2.0)),  # type: ignore[arg-type]
        "logit_scale: expected a finite number > 0, got torch.float32 () on cpu; give float(…) of "
        "it",
    ),
    "a soft-cap by another name": (
        lambda: LMHeadSampler(WEIGHT, softcap=30.0),  # type: ignore[call-arg]
        "softcap: not an argument of LMHeadSampler; did you mean logit_softcap?",
    ),
    "a generator": (
        lambda: LMHeadSampler(WEIGHT, generator=torch.Generator()),  # type: ignore[call-arg]
        "generator: not an argument of LMHeadSampler; give each request seed=, an int of 64 bits",
    ),
    "a group by another name": (
        lambda: LMHeadSampler(WEIGHT, process_group=None),  # type: ignore[call-arg]
        "process_group: not an argument of LMHeadSampler; did you mean group?",
    ),
    "a generator for a step": (
        lambda: sampler_over()(HIDDEN, batch_of(), 0, generator=torch.Generator()),
        "generator: not an argument of LMHeadSampler.__call__; give each request seed=, an int of "
        "64 bits",
    ),
    "a temperature for a step": (
        lambda: sampler_over()(HIDDEN, temperature=0.7),
        "temperature: not an argument of LMHeadSampler.__call__; give it to each request, "
        "SamplingParams(temperature=…)",
    ),
    "a share for logits": (
        lambda: sampler_over().sample_logits(HIDDEN @ WEIGHT.T, top_p=0.9),
        "top_p: not an argument of LMHeadSampler.sample_logits; give it to each request, "
        "SamplingParams(top_p=…)",
    ),
    "a seed for a verification": (
        lambda: verify(sampler_over(), HIDDEN.unsqueeze(1), torch.empty(B, 0), seed=3),
        "seed: not an argument of verify; give it to each request, SamplingParams(seed=…)",
    ),
    "probabilities of drafts": (
        lambda: verify(sampler_over(), HIDDEN, HIDDEN, batch_of(), 0, draft_probs=HIDDEN),
        "draft_probs: not an argument of verify; pass draft_logits=, the drafter's logits before "
        "temperature",
    ),
    "a position by another name": (
        lambda: verify_logits(sampler_over(), HIDDEN, HIDDEN, batch_of(), position=3),
        "position: not an argument of verify_logits; did you mean positions?",
    ),
    "a temperature for a draft": (
        lambda: sample_draft(sampler_over(), HIDDEN, batch_of(), 0, 0, temperature=0.0),
        "temperature: not an argument of sample_draft; give it to each request, "
        "SamplingParams(temperature=…)",
    ),
    "a seed for a step of a script": (
        lambda: sample(HIDDEN, WEIGHT, [request()] * B, positions=0, seed=3),
        "seed: not an argument of sample; give it to each request, SamplingParams(seed=…)",
    ),
    "a step without a batch": (
        lambda: sampler_over()(HIDDEN),
        "batch: expected a SamplingBatch, got NoneType; see SamplingBatch.from_params",
    ),
    "a sampler for a module": (
        lambda: sampler_over().forward(HIDDEN, batch_of(), 0),  # type: ignore[attr-defined]
        "LMHeadSampler has no forward; call it as sampler(hidden_states, batch, positions)",
    ),
    "a method of a module": (
        lambda: sampler_over().eval(),  # type: ignore[attr-defined]
        "LMHeadSampler has no eval; it is no module, and follows the weight that it was given",
    ),
    "an exchange of another name": (
        lambda: LMHeadSampler(WEIGHT, exchange="nccl"),
        "exchange: expected one of auto, collective, p2p, peer, two_level, got 'nccl'",
    ),
    "a mesh for a group": (
        lambda: LMHeadSampler(WEIGHT, group=Mesh()),
        'group: expected a torch process group, None or "alone", got Mesh; pass its group, '
        ".get_group()",
    ),
    "a weight of another dtype": (
        lambda: LMHeadSampler(WEIGHT.double()),
        "lm_head_weight: expected one of torch.bfloat16, torch.float16, torch.float32, got "
        "torch.float64; convert it once with .to(torch.float32)",
    ),
    "a quantised weight": (
        lambda: LMHeadSampler(WEIGHT.to(torch.float8_e4m3fn)),
        "lm_head_weight: expected one of torch.bfloat16, torch.float16, torch.float32, got "
        "torch.float8_e4m3fn; a quantised head makes its logits itself: pass them to sample_logits "
        "of a sampler over torch.empty(V_local, 0)",
    ),
    "a vocabulary that is no number": (
        lambda: VocabShard.even("20", 0, 1),
        "vocab_size: expected an int, got '20'",
    ),
    "half an id": (lambda: VocabShard(0, 2.5), "VocabShard.stop: expected an int, got 2.5"),
    "a sampler that was closed": (
        closed,
        "sampler: closed; build a new LMHeadSampler",
    ),
    # --- steps
    "hidden states as a DTensor": (
        lambda: sampler_over()(SHARDED, batch_of(), 0),
        "hidden_states: got a DTensor; pass the whole of it, the same on every rank, "
        "hidden_states.full_tensor()",
    ),
    "a weight as a DTensor": (
        lambda: LMHeadSampler(SHARDED),
        "lm_head_weight: got a DTensor; pass its part on this rank, lm_head_weight.to_local()",
    ),
    "drafted logits as a DTensor": (
        lambda: sample_draft(sampler_over(), SHARDED, batch_of(), 0, 0),
        "draft_logits: got a DTensor; pass its part on this rank, draft_logits.to_local()",
    ),
    "hidden states of NumPy": (
        lambda: sampler_over()(np.ones((B, 100)), batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got ndarray array([[1., 1., 1., 1., 1., 1., 1., "
        "1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., …",
    ),
    "hidden states of another dtype": (
        lambda: sampler_over()(HIDDEN.bfloat16(), batch_of(), 0),
        "hidden_states: expected torch.float32 on cpu like lm_head_weight, got torch.bfloat16 "
        "(2, 4) on cpu; convert with .to(lm_head_weight)",
    ),
    "hidden states of whole sequences": (
        lambda: sampler_over()(torch.ones(B, 3, D), batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (2, 3, 4) on cpu; pass those "
        "of the last position, hidden_states[:, -1]",
    ),
    "hidden states of one row": (
        lambda: sampler_over()(HIDDEN[0], batch_of(), 0),
        "hidden_states: expected a tensor [B, 4], got torch.float32 (4,) on cpu; one row is "
        "hidden_states.unsqueeze(0)",
    ),
    "no positions": (
        lambda: sampler_over()(HIDDEN, batch_of()),
        "positions: expected an int or an int64 tensor [2] on cpu, got None; a position is "
        "the index, in its sequence, of the token being generated: the number of tokens before it",
    ),
    "an output under another name": (
        lambda: getattr(sampler_over()(HIDDEN, batch_of(), 0), "tokens"),  # noqa: B009
        "SampleOutput has no 'tokens'; it has token_ids, status, seeds, logprobs, kept",
    ),
    "a draft of coupled verification": (
        lambda: verify(
            sampler_over(),
            torch.ones(B, 2, D),
            torch.zeros(B, 1, dtype=torch.int64),
            batch_of(),
            0,
            draft_logits=torch.zeros(B, 1, V),
        ),
        'draft_logits: method="coupled" looks at no draft probabilities; leave it out, or choose '
        '"rejection" or "block"',
    ),
    "a typing error of an attribute": (
        lambda: setattr(batch_of(), "forced_tokens_ids", torch.tensor([3, 9])),
        "forced_tokens_ids: not an attribute of SamplingBatch; did you mean forced_token_ids?",
    ),
    "an 8-bit copy of no weight": (
        lambda: LMHeadSampler(torch.empty(V, 0), screening="int8"),
        'screening: "int8" copies a weight, and lm_head_weight has no column; leave it out',
    ),
    "an 8-bit copy without a kernel": (
        lambda: LMHeadSampler(WEIGHT, screening="int8", backend="torch"),
        'screening: "int8" needs backend "triton" or "numba", got "torch": use backend="auto"',
    ),
    "an 8-bit copy of another weight": (
        changed,
        "lm_head_weight: changed after the sampler had made its 8-bit copy of it, so screened "
        "tokens could be wrong; call sampler.refresh() on every rank",
    ),
    "kernels without a GPU": (
        on_a_cpu_alone,
        'backend: "triton" needs a GPU, lm_head_weight is on cpu; use backend="auto", or set '
        "TRITON_INTERPRET=1 before Python starts",
    ),
    "a bias that came later": (
        lambda: LMHeadSampler(WEIGHT).refresh(bias=torch.zeros(V)),
        "bias: the sampler was built without; build a new one",
    ),
    "another kind of weight": (
        lambda: LMHeadSampler(WEIGHT).refresh(WEIGHT.bfloat16()),
        "lm_head_weight: expected torch.float32 (20, 4) on cpu with strides (4, 1), as the sampler "
        "was built over, got torch.bfloat16 (20, 4) on cpu with strides (4, 1); build a new "
        "LMHeadSampler over it",
    ),
    "hidden states for no weight": (
        lambda: sampler_over(torch.empty(V, 0))(HIDDEN, batch_of(), 0),
        "hidden_states: this sampler has no weight, lm_head_weight is [20, 0]; call sample_logits, "
        "or build it over the LM head",
    ),
    "strided hidden states": (
        lambda: sampler_over()(STRIDED, batch_of(), 0),
        "hidden_states: expected a contiguous last axis, got strides (1, 2); call .contiguous()",
    ),
    "strided logits": (
        lambda: sampler_over().sample_logits((WEIGHT @ HIDDEN.T).T, batch_of(), 0),
        "local_logits: expected a contiguous last axis, got strides (1, 2); call .contiguous()",
    ),
    "a prompt without its next token": (
        lambda: sampler_over().prompt_logprobs(HIDDEN, torch.tensor([1, -1])),
        "next_token_ids: expected ids in [0, 20), got -1; leave out the positions whose next "
        "token is not known",
    ),
    "more drafts than there is room for": (
        lambda: verify(
            sampler_over(), torch.ones(B, 3, D), torch.zeros(B, 2).long(), batch_of(), 0
        ),
        "hidden_states: 2 rows × 3 positions exceed max_rows=4; build the sampler with a larger "
        "max_rows",
    ),
}
