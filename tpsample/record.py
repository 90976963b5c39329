"""A step in a file, to be sampled again offline: did this token come from these inputs?

A record is a safetensors file (the extra `hf` brings the library):

    tensors   hidden_states [B, D], positions, seeds, status [B], token_ids [B] or [B, S];
              lm_head_weight [V, D] and bias [V], unless the metadata name a model
    metadata  "tpsample": JSON of the format's version, the noise layout, the requests, the head,
              the tokens so far

Reading it runs nothing that the file brings: tensors and JSON, every value checked like a caller's.
Nothing is downloaded unless the caller allows it. Memory stays within ten times the size of the
file and a constant (about 300 MB at V = 2^20), because rows are sampled again a few at a time.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tpsample import reference
from tpsample.core.score import Head
from tpsample.noise import LAYOUT
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.as_json import from_json, to_json
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams
from tpsample.sampler import LMHeadSampler

VERSION = 1
NEAR_TIE = 4e-5
"""Scores this close may swap between a GPU and a CPU."""
MAX_DRAWS = 2**14
"""Most rows × samples of a record."""
_KEY = "tpsample"
_MAX_METADATA = 2**24
"""Characters. JSON takes up to 24 times its size in memory."""
_ENTRIES = {"version", "layout", "params", "head", "philox_rounds", "model", "tokens_so_far"}
_TOKENS_SO_FAR = ("prompt_token_ids", "output_token_ids")
_TENSORS = {
    "positions": ((torch.int64,), (1,)),
    "seeds": ((torch.int64,), (1,)),
    "status": ((torch.int32,), (1,)),
    "token_ids": ((torch.int64,), (1, 2)),
    "hidden_states": ((torch.bfloat16, torch.float16, torch.float32), (2,)),
}
"""Dtypes and numbers of axes."""
WEIGHT_VALUES = 2**22
"""Of the head at a time: the oracle multiplies in float64."""
LOGITS = 2**24
"""As many at a time are computed, or D rows of them, which are no more than the head has values."""
SAMPLED_LOGITS = 2**20
"""As many at a time are sampled, which takes about 200 bytes for each."""


FullHead: TypeAlias = tuple[Tensor, Tensor | None, dict[str, Any]]
"""lm_head_weight [V, D], its bias, and the scale and soft-cap as `LMHeadSampler` takes them."""
LoadHead: TypeAlias = Callable[[str, torch.dtype], FullHead]
"""From the name of a model, and the dtype of the hidden states."""


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
        for name, lists in zip(_TOKENS_SO_FAR, (prompt_token_ids, output_token_ids), strict=True)
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
    _Record.of(text, copies)
    save_file(copies, str(path), metadata={_KEY: text})


def verify_record(path: str | Path, *, load_head: LoadHead | None = None) -> list[RowVerdict]:
    """Sample every row of a record again, by `tpsample.reference`, on the CPU.

    Args:
        load_head: loads the head of a model that a record may name in place of holding one.

    Raises:
        ValueError: not a record, or one that this version cannot repeat; says why.
        ImportError: safetensors is not installed, or what loading its model needs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever made the requests has been warned
            record = _read(path)
            return list(_verdicts(record, *record.head_of(load_head)))
    except ImportError:
        raise
    except Exception as error:  # whatever a file brings about, it is the file that is wrong
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"record: {kind}{error}") from error


def _read(path: str | Path) -> _Record:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            known = {*_TENSORS, "lm_head_weight", "bias"}
            if _KEY not in metadata or not names <= known:
                raise ValueError(
                    f"not a record: expected metadata {_KEY!r} and tensors among {sorted(known)}, "
                    f"got {sorted(metadata)} and {sorted(names)}"
                )
            # Before they are read: an empty tensor may have any shape.
            for name in names:
                if 0 in (shape := file.get_slice(name).get_shape()):
                    raise ValueError(f"{name}: expected values, got shape {shape}")
            return _Record.of(metadata[_KEY], {name: file.get_tensor(name) for name in names})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error


@dataclass(frozen=True)
class _Record:
    """A record whose values have been checked, all but the head.

    Attributes:
        params: requests with their seeds, without logprobs.
        tokens_so_far: arguments of `SamplingBatch.from_params`, a list per row.
    """

    tensors: dict[str, Tensor]
    params: list[SamplingParams]
    tokens_so_far: dict[str, list[list[int]]]
    head: dict[str, Any]
    philox_rounds: int
    model: str | None

    @staticmethod
    def of(text: str, tensors: dict[str, Tensor]) -> _Record:
        """From the metadata and the tensors."""
        if len(text) > _MAX_METADATA:
            raise ValueError(f"metadata: expected at most {_MAX_METADATA} characters of JSON")
        try:
            what = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"metadata: expected JSON, got {error}") from error
        if not isinstance(what, dict):
            raise ValueError(f"metadata: expected an object, got {what!r}")
        version, layout = what.get("version"), what.get("layout")
        if (version, layout) != (VERSION, LAYOUT):
            raise ValueError(
                f"is of version {version!r} with noise {layout!r}; expected {VERSION} with "
                f"{LAYOUT!r}"
            )
        if set(what) != _ENTRIES:
            raise ValueError(f"metadata: expected {sorted(_ENTRIES)}, got {sorted(what)}")
        requests, model, head = what["params"], what["model"], what["head"]
        if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_DRAWS:
            raise ValueError(f"params: expected a list of 1 to {MAX_DRAWS} requests")
        if not isinstance(head, dict) or set(head) != set(Head.__dataclass_fields__):
            raise ValueError(f"head: expected {sorted(Head.__dataclass_fields__)}, got {head!r}")
        if model is not None and not isinstance(model, str):
            raise ValueError(f"model: expected a name or null, got {model!r}")
        if (model is None) != ("lm_head_weight" in tensors):
            raise ValueError("expected lm_head_weight or the name of a model, and not both")
        _check_tensors(tensors, len(requests))
        params = []
        for row, (request, seed) in enumerate(
            zip(requests, tensors["seeds"].tolist(), strict=True)
        ):
            params.append(SamplingParams(**from_json(f"params[{row}]", request)))
            params[-1] = replace(params[-1], seed=seed, logprobs=None, logprob_token_ids=None)
        so_far = _tokens_so_far(what["tokens_so_far"], len(requests))
        return _Record(tensors, params, so_far, head, what["philox_rounds"], model)

    @property
    def num_samples(self) -> int | None:
        token_ids = self.tensors["token_ids"]
        return token_ids.shape[1] if token_ids.ndim == 2 else None

    def head_of(self, load_head: LoadHead | None) -> FullHead:
        """All rows of the head, its bias, and the scale and soft-cap."""
        if self.model is None:
            weight, bias, head = self.tensors["lm_head_weight"], self.tensors.get("bias"), self.head
        else:
            if load_head is None:
                raise ValueError(
                    f"names the model {self.model!r} in place of a head; use `tpsample verify`, "
                    "or pass load_head="
                )
            weight, bias, head = load_head(self.model, self.tensors["hidden_states"].dtype)
        # Checks the head as it does a caller's.
        LMHeadSampler(
            weight,
            group=Ranks(),
            bias=bias,
            max_rows=1,
            philox_rounds=self.philox_rounds,
            backend="torch",
            **head,
        ).close()
        hidden_states = self.tensors["hidden_states"]
        if (weight.dtype, weight.shape[1]) != (hidden_states.dtype, hidden_states.shape[1]):
            raise ValueError(
                f"lm_head_weight: expected {hidden_states.dtype} [V, {hidden_states.shape[1]}] as "
                f"hidden_states has, got {weight.dtype} {list(weight.shape)}"
            )
        return weight, bias, head

    def batch(self, rows: range, vocab_size: int) -> SamplingBatch:
        """Some of the rows."""
        part = slice(rows.start, rows.stop)
        return SamplingBatch.from_params(
            self.params[part],
            vocab_size=vocab_size,
            **{name: lists[part] for name, lists in self.tokens_so_far.items()},  # type: ignore[arg-type]
        )


def _check_tensors(tensors: dict[str, Tensor], rows: int) -> None:
    for name, (dtypes, axes) in _TENSORS.items():
        if name not in tensors:
            raise ValueError(f"{name}: expected a tensor of {rows} rows, got none")
        tensor = tensors[name]
        if tensor.dtype not in dtypes or tensor.ndim not in axes or tensor.shape[0] != rows:
            raise ValueError(
                f"{name}: expected {rows} rows, {' or '.join(map(str, axes))} axes and one of "
                f"{', '.join(map(str, dtypes))}, got {tensor.dtype} {list(tensor.shape)}"
            )
    if tensors["token_ids"].numel() > MAX_DRAWS:
        raise ValueError(f"token_ids: expected at most {MAX_DRAWS} rows × samples")
    if (lowest := int(tensors["positions"].min())) < 0:
        raise ValueError(f"positions: expected values >= 0, got {lowest}")


def _tokens_so_far(given: Any, rows: int) -> dict[str, list[list[int]]]:
    if not isinstance(given, dict) or not set(given) <= set(_TOKENS_SO_FAR):
        raise ValueError(f"tokens_so_far: expected lists by name, {_TOKENS_SO_FAR}, got {given!r}")
    for name, lists in given.items():
        if not isinstance(lists, list) or len(lists) != rows:
            raise ValueError(f"{name}: expected a list of {rows} lists, one per row")
        for row, ids in enumerate(lists):
            if not isinstance(ids, list) or any(type(token_id) is not int for token_id in ids):
                raise ValueError(f"{name}[{row}]: expected a list of token ids, got {ids!r}")
    return given


def _verdicts(
    record: _Record, weight: Tensor, bias: Tensor | None, head: dict[str, Any]
) -> Iterator[RowVerdict]:
    """Row by row; as many logits at a time as the memory allows."""
    vocab_size, hidden_size = weight.shape
    hidden_states = record.tensors["hidden_states"]
    for rows in _slices(range(len(hidden_states)), max(hidden_size, LOGITS // vocab_size)):
        logits = torch.empty(len(rows), vocab_size)
        for ids in _slices(range(vocab_size), WEIGHT_VALUES // hidden_size):
            part = slice(ids.start, ids.stop)
            logits[:, part] = reference.logits(
                hidden_states[rows.start : rows.stop],
                weight[part],
                bias=None if bias is None else bias[part],
                **head,
            )
        for some in _slices(rows, SAMPLED_LOGITS // vocab_size):
            first = some.start - rows.start
            yield from _sampled_again(record, some, logits[first : first + len(some)])


def _slices(whole: range, length: int) -> Iterator[range]:
    """Consecutive parts of a range, of at least one value."""
    length = max(1, length)
    for start in range(whole.start, whole.stop, length):
        yield range(start, min(start + length, whole.stop))


def _sampled_again(record: _Record, rows: range, logits: Tensor) -> Iterator[RowVerdict]:
    """Verdicts on rows whose raw logits these are."""
    batch = record.batch(rows, logits.shape[1])
    rounds, num_samples = record.philox_rounds, record.num_samples
    positions = record.tensors["positions"][rows.start : rows.stop]
    again = reference.sample(
        logits, batch, positions, num_samples=num_samples, philox_rounds=rounds
    )
    kept = reference.kept_mask(logits, batch)

    @lru_cache(maxsize=4)
    def scores(sample: int) -> Tensor:
        return reference.scores(logits, batch, positions, sample=sample, philox_rounds=rounds)

    def gap(row: int, sample: int, recorded: int, expected: int) -> float:
        """Returns inf for a token that could not have been drawn."""
        if not 0 <= recorded < logits.shape[1] or expected < 0 or not kept[row, recorded]:
            return torch.inf
        return float(scores(sample)[row, expected] - scores(sample)[row, recorded])

    for row in range(len(rows)):
        token_ids = record.tensors["token_ids"][rows[row]].view(-1).tolist()
        recorded = token_ids, int(record.tensors["status"][rows[row]])
        expected = again.token_ids[row].view(-1).tolist(), int(again.status[row])
        apart, near = 0.0, recorded[1] == expected[1]
        for sample, (one, other) in enumerate(zip(recorded[0], expected[0], strict=True)):
            if near and one != other:
                apart = max(apart, gap(row, sample, one, other))
                near = apart < NEAR_TIE
        yield RowVerdict(recorded, expected, apart, near and recorded[0] != expected[0])
