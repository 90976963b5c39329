"""A step in a file, to be sampled again offline: did this token come from these inputs?

A record is a safetensors file (the extra `hf` brings the library):

    tensors   hidden_states [B, D], positions, seeds, status [B], token_ids [B] or [B, S];
              lm_head_weight [V, D] and bias [V], unless the metadata name a model
    metadata  "tpsample": JSON of the format's version, the noise layout, the requests, the head

Reading it runs nothing that the file brings: tensors and JSON, every value checked like a caller's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsample import reference
from tpsample.noise import LAYOUT
from tpsample.output import SampleOutput
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.score import Head

VERSION = 1
NEAR_TIE = 4e-5
"""Scores this close may swap between a GPU and a CPU."""
_KEY = "tpsample"
_VOCAB_ROWS = 8192
"""Of the head at a time: the oracle multiplies in float64."""


@dataclass(frozen=True)
class RowVerdict:
    """What sampling a row again gave.

    Attributes:
        recorded, expected: token ids, one per sample, and the status behind them.
        gap: how far the recorded token's score is below the best, where near_tie is true.
        near_tie: every token that differs lies within NEAR_TIE of the best and is in the kept set.
    """

    recorded: tuple[list[int], int]
    expected: tuple[list[int], int]
    gap: float = 0.0
    near_tie: bool = False

    @property
    def confirmed(self) -> bool:
        return self.recorded == self.expected or self.near_tie


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
    **tokens_so_far: Any,
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
        tokens_so_far: `prompt_token_ids` and `output_token_ids`, as `SamplingBatch.from_params`
            took them.
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
    what = {
        "version": VERSION,
        "layout": LAYOUT,
        "params": [_changed(request) for request in requests],
        "head": asdict(Head(logit_scale, logit_softcap)),
        "philox_rounds": philox_rounds,
        "model": model,
        "tokens_so_far": tokens_so_far,
    }
    # A copy: safetensors refuses tensors that share memory, as a tied embedding's rows may.
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(copies, str(path), metadata={_KEY: json.dumps(what)})


def verify_record(path: str | Path) -> list[RowVerdict]:
    """Sample every row of a record again, by `tpsample.reference`, on the CPU.

    Raises:
        ValueError: not a record, or one that this version cannot repeat; says why.
        ModuleNotFoundError: safetensors is not installed, or what loading its model needs.
    """
    what, tensors = _read(path)
    weight, bias, head = _head(what, tensors)
    hidden_states, token_ids = tensors["hidden_states"].to(weight.dtype), tensors["token_ids"]
    logits = torch.cat(
        [
            reference.logits(
                hidden_states,
                weight[first : first + _VOCAB_ROWS],
                bias=None if bias is None else bias[first : first + _VOCAB_ROWS],
                **head,
            )
            for first in range(0, weight.shape[0], _VOCAB_ROWS)
        ],
        dim=1,
    )
    params = [
        replace(request, seed=seed, logprobs=None, logprob_token_ids=None)
        for request, seed in zip(what["params"], tensors["seeds"].tolist(), strict=True)
    ]
    batch = SamplingBatch.from_params(
        params, vocab_size=weight.shape[0], **what.get("tokens_so_far", {})
    )
    num_samples = token_ids.shape[1] if token_ids.ndim == 2 else None
    rounds = what["philox_rounds"]
    positions = tensors["positions"]
    again = reference.sample(
        logits, batch, positions, num_samples=num_samples, philox_rounds=rounds
    )
    kept = reference.kept_mask(logits, batch)

    def gap(row: int, sample: int, recorded: int, expected: int) -> float:
        """inf for a token that could not have been drawn."""
        if not 0 <= recorded < weight.shape[0] or expected < 0 or not kept[row, recorded]:
            return torch.inf
        scores = reference.scores(logits, batch, positions, sample=sample, philox_rounds=rounds)
        return float(scores[row, expected] - scores[row, recorded])

    verdicts = []
    for row in range(len(params)):
        recorded = token_ids[row].view(-1).tolist(), int(tensors["status"][row])
        expected = again.token_ids[row].view(-1).tolist(), int(again.status[row])
        pairs = enumerate(zip(recorded[0], expected[0], strict=True))
        gaps = [gap(row, sample, *pair) for sample, pair in pairs if pair[0] != pair[1]]
        apart = max(gaps, default=0.0)
        near = bool(gaps) and recorded[1] == expected[1] and apart < NEAR_TIE
        verdicts.append(RowVerdict(recorded, expected, apart, near))
    return verdicts


def _changed(request: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults, as JSON values."""
    default = SamplingParams()
    fields = {name: getattr(request, name) for name in SamplingParams.__dataclass_fields__}
    changed = {name: v for name, v in fields.items() if v != getattr(default, name)}
    if changed.get("logit_bias"):
        changed["logit_bias"] = {str(key): v for key, v in changed["logit_bias"].items()}
    return changed


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata, with the requests as SamplingParams, and tensors; both checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"record: {path} is not a safetensors file: {error}") from error
    try:
        what = json.loads(metadata[_KEY])
        version, layout = what["version"], what["layout"]
        if (version, layout) != (VERSION, LAYOUT):
            raise ValueError(
                f"record: {path} is of version {version!r} with noise {layout!r}; expected "
                f"{VERSION} with {LAYOUT!r}"
            )
        what["params"] = [_request(changed) for changed in what["params"]]
        what["head"] = asdict(Head(**what["head"]))
        rows = len(what["params"])
        _require_shapes(tensors, rows)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"record: {path} lacks or garbles {error}") from error
    return what, tensors


def _request(changed: dict[str, Any]) -> SamplingParams:
    if changed.get("logit_bias"):
        changed["logit_bias"] = {int(key): value for key, value in changed["logit_bias"].items()}
    return SamplingParams(**changed)


def _require_shapes(tensors: dict[str, Tensor], rows: int) -> None:
    for name, dtype, ndims in (
        ("positions", torch.int64, (1,)),
        ("seeds", torch.int64, (1,)),
        ("status", torch.int32, (1,)),
        ("token_ids", torch.int64, (1, 2)),
        ("hidden_states", None, (2,)),
    ):
        tensor = tensors[name]
        if tensor.ndim not in ndims or tensor.shape[0] != rows or dtype not in (None, tensor.dtype):
            raise ValueError(
                f"record: expected {name} of {rows} rows and {dtype or 'floats'}, got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )


def _head(
    what: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """All rows of the head, its bias, and the scale and soft-cap."""
    if what["model"] is not None:
        from tpsample.cli.model import load
        from tpsample.distributed import Job

        dtype = tensors["hidden_states"].dtype
        model = load(str(what["model"]), Job(), dtype)
        weight, bias, head = model.lm_head_weight, model.lm_head_bias, model.head
    elif "lm_head_weight" in tensors:
        weight, bias, head = tensors["lm_head_weight"], tensors.get("bias"), what["head"]
    else:
        raise ValueError("record: has neither lm_head_weight nor the name of a model")
    hidden_size = tensors["hidden_states"].shape[1]
    if weight.ndim != 2 or weight.shape[1] != hidden_size or not weight.is_floating_point():
        raise ValueError(
            f"record: expected lm_head_weight [V, {hidden_size}] of floats as hidden_states has, "
            f"got {weight.dtype} {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"record: expected bias [{weight.shape[0]}], got {tuple(bias.shape)}")
    return weight, bias, head
