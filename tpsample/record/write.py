"""Write what a step was given and what it returned. See `tpsample.record.format`."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from tpsample.core.score import Head
from tpsample.noise import LAYOUT
from tpsample.output import SampleOutput
from tpsample.record.format import KEY, TOKENS_SO_FAR, VERSION, Record
from tpsample.request.as_json import to_json
from tpsample.request.params import SamplingParams


def write_record(
    path: str | Path,
    hidden_states: Tensor,
    lm_head_weight: Tensor | str,
    params: SamplingParams | Sequence[SamplingParams],
    positions: Tensor | int,
    output: SampleOutput,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    philox_rounds: int = 10,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    output_token_ids: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write what a step was given and what it returned.

    Args:
        hidden_states: [B, D].
        lm_head_weight: [V, D], the rows of all ranks; or a model, as `tpsample generate` takes it.
        params: one request per row, or one for all.
        positions: int64 [B] or one int.
        output: what the step returned; its `seeds` are the rows' seeds.
        bias, logit_scale, logit_softcap, philox_rounds: as `LMHeadSampler` has them. A model
            brings its own bias, scale and soft-cap.
        prompt_token_ids, output_token_ids: tokens so far per row, as `SamplingBatch.from_params`
            took them.

    Raises:
        TypeError, ValueError: what could not be read again, such as a position below 0.
    """
    from safetensors.torch import save_file

    rows = hidden_states.shape[0]
    requests = [params] * rows if isinstance(params, SamplingParams) else list(params)
    if len(requests) != rows or output.token_ids.shape[0] != rows:
        raise ValueError(
            f"params, output: expected {rows} rows as hidden_states has, got {len(requests)} and "
            f"{output.token_ids.shape[0]}"
        )
    if isinstance(positions, int):
        positions = torch.full((rows,), positions)
    tensors = {
        "hidden_states": hidden_states,
        "positions": positions,
        "seeds": output.seeds,
        "status": output.status,
        "token_ids": output.token_ids,
    }
    model = None
    if isinstance(lm_head_weight, str):
        model = lm_head_weight
    else:
        tensors["lm_head_weight"] = lm_head_weight
        if bias is not None:
            tensors["bias"] = bias
    tokens_so_far = {
        name: [[operator.index(token_id) for token_id in row] for row in lists]
        for name, lists in zip(TOKENS_SO_FAR, (prompt_token_ids, output_token_ids), strict=True)
        if lists is not None
    }
    what = {
        "version": VERSION,
        "layout": LAYOUT,
        "params": [to_json(request) for request in requests],
        "head": asdict(Head(logit_scale, logit_softcap)),
        "philox_rounds": philox_rounds,
        "model": model,
        "tokens_so_far": tokens_so_far,
    }
    text = json.dumps(what)
    # Copies: safetensors refuses tensors with gaps, or that share memory as a tied embedding's do.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    Record.of(text, copies)
    save_file(copies, str(path), metadata={KEY: text})
