"""The file of a recorded step, with which its tokens can be sampled again offline.

A record is a safetensors file (the extra `hf` brings the library):

    tensors   hidden_states [B, D], positions, seeds, status [B], token_ids [B] or [B, S];
              lm_head_weight [V, D] and bias [V], unless the metadata name a model
    metadata  "tpsample": JSON of the format's version, the noise layout, the requests, the head,
              the tokens so far

Reading it runs nothing that the file brings: it holds tensors and JSON, and every value of the
JSON is checked like a caller's. Memory stays within ten times the size of the file and a constant
(about 300 MB at V = 2^20). Rows are sampled again a few at a time.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tpsample.agreement.arguments import checked_head
from tpsample.core import word
from tpsample.core.checks import (
    check_tensor,
    describe,
    is_text,
    positions_tensor,
    require_memory,
    shorten,
)
from tpsample.core.row_noise import GREEDY_BELOW, HOTTEST
from tpsample.core.score import Head
from tpsample.core.weight_format import FORMATS
from tpsample.noise import LAYOUT
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.as_json import from_json, once, to_json
from tpsample.request.batch import SamplingBatch
from tpsample.request.batch_checks import check_requests, request_list, token_lists
from tpsample.request.entries import UNKNOWN
from tpsample.request.params import SamplingParams
from tpsample.request.selection import Selection
from tpsample.sampler import LMHeadSampler

VERSION = 1
MAX_DRAWS = 2**14
"""Most rows × samples of a record."""
KEY = "tpsample"
_MAX_METADATA = 2**24
"""Characters. JSON takes up to 24 times its size in memory."""
_MAX_NAME = 4096
"""Characters of a model's name, which may be a path."""
TOKENS_SO_FAR = ("prompt_token_ids", "output_token_ids")
_HEAD = set(Head.__dataclass_fields__)
_ENTRIES: dict[str, tuple[Callable[[Any], bool], object]] = {
    "version": (lambda version: type(version) is int and version == VERSION, VERSION),
    "layout": (lambda layout: layout == LAYOUT, LAYOUT),
    "params": (
        lambda requests: isinstance(requests, list) and 1 <= len(requests) <= MAX_DRAWS,
        f"a list of 1 to {MAX_DRAWS} requests",
    ),
    "head": (lambda head: isinstance(head, dict) and set(head) == _HEAD, sorted(_HEAD)),
    "model": (
        lambda model: model is None or (isinstance(model, str) and 1 <= len(model) <= _MAX_NAME),
        f"a name of 1 to {_MAX_NAME} characters, or null",
    ),
    "tokens_so_far": (
        lambda given: (
            isinstance(given, dict)
            and set(given) <= set(TOKENS_SO_FAR)
            and None not in given.values()
        ),
        f"lists by name, {TOKENS_SO_FAR}",
    ),
}
"""The metadata: which values are right, and in words."""
_TENSORS: dict[str, tuple[tuple[torch.dtype, ...], tuple[str, ...]]] = {
    "positions": ((torch.int64,), ()),
    "seeds": ((torch.int64,), ()),
    "status": ((torch.int32,), ()),
    "token_ids": ((torch.int64,), ()),
    "hidden_states": (tuple(FORMATS), ("D",)),
}
"""Dtypes, and axes behind that of the rows; `token_ids` may have one of samples."""

FullHead: TypeAlias = tuple[Tensor, Tensor | None, dict[str, Any]]
"""lm_head_weight [V, D], its bias, and the scale and soft-cap as `LMHeadSampler` takes them."""
LoadHead: TypeAlias = Callable[[str, torch.dtype], FullHead]
"""From the name of a model, and the dtype of the hidden states."""


def _path_of_a_file(name: str, verb: str, path: str | Path) -> Path:
    """Return a path, at which there is a file or nothing.

    Raises:
        TypeError: no path.
        ValueError: no file can have that name, or something else than a file has it.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name}: expected the path of a file, got {describe(path)}")
    if not is_text(str(path)) or "\0" in str(path):
        raise ValueError(
            f"{name}: expected the path of a file, in UTF-8 and without a zero byte, got "
            f"{describe(str(path))}"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder; name a file in it" if os.path.isdir(path) else "a device, pipe or socket"
        raise ValueError(f"{name}: cannot be {verb}: {str(path)!r} is {what}")
    return Path(path)


def writable_file(name: str, path: str | Path) -> Path:
    """Return the file behind links, which safetensors may create or replace.

    Args:
        name: of the argument, for messages.

    Raises:
        TypeError: no path.
        ValueError: its folder takes no file, or something else than a file has that name. A file
            would take the place of a device, such as /dev/null, too.
    """
    file = Path(os.path.realpath(_path_of_a_file(name, "written", path)))
    try:
        tempfile.TemporaryFile(dir=file.parent).close()
        with suppress(FileNotFoundError):
            file.stat()  # which tells of a name too long
    except OSError as error:
        folder = describe(str(file.parent))
        raise ValueError(f"{name}: cannot be written in {folder}: {error.strerror}") from error
    return file


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None
) -> None:
    """Write contiguous tensors and texts by name as a safetensors file.

    Raises:
        TypeError, ValueError: as `writable_file`; metadata that are no texts; a file that cannot be
            written.
    """
    from safetensors import SafetensorError  # needs the extra hf
    from safetensors.torch import save_file

    texts = {} if metadata is None else metadata
    if not isinstance(texts, Mapping) or not all(map(is_text, (*texts, *texts.values()))):
        raise TypeError(
            'metadata: expected texts of UTF-8 by name, such as {"steps": "8"}, got '
            f"{describe(metadata)}; write numbers as str(…)"
        )
    try:
        save_file(tensors, str(writable_file("path", path)), metadata=dict(texts))
    except SafetensorError as error:
        raise ValueError(f"path: cannot be written: {error}") from error


def write_record(
    path: str | Path,
    hidden_states: Tensor,
    lm_head_weight: Tensor | str,
    params: Sequence[SamplingParams] | SamplingBatch,
    positions: Tensor | int,
    output: SampleOutput,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    output_token_ids: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write what a step was given and what it returned.

    The rows of several steps fit one record, and then one head: concatenate all arguments, and
    make ``SampleOutput(token_ids, status, seeds)`` of the outputs.

    Args:
        hidden_states: [B, D].
        lm_head_weight: [V, D], the rows of all ranks, without padding; or a model, as `tpsample
            generate` takes it.
        params: one request per row; or the batch, whose temperatures are taken as they are now, so
            written ones, too. Of requests alone nobody knows what was written to their batch.
        positions: int64 [B] or one int.
        output: what the step returned; its `seeds` are the rows' seeds. Rows of a selection that
            were not drawn are left out of all arguments.
        bias, logit_scale, logit_softcap: as `LMHeadSampler` has them. A model brings its own.
        prompt_token_ids, output_token_ids: tokens so far per row, as `SamplingBatch.from_params`
            took them, and what was appended since. A batch cannot tell them.

    Raises:
        TypeError, ValueError: what could not be read again, such as a position below 0; or sampled
            again, such as a batch with a mask, penalties without `output_token_ids`, or the rows of
            one rank alone.
    """
    if isinstance(params, Selection):
        raise TypeError(
            "params: expected a list of SamplingParams, one per row, got a selection; pass the "
            "requests of its slots, [batch.requests[slot] for slot in slots]"
        )
    if not isinstance(output, SampleOutput):
        raise TypeError(f"output: expected the SampleOutput of a step, got {type(output).__name__}")
    rows = len(output.status)
    ids, failed = output.token_ids, output.status != word.Status.OK
    failed = failed.view(-1, *[1] * (ids.ndim - 1))
    undrawn = (output.status > word.Status.EMPTY).nonzero().flatten().tolist()
    undrawn += ((ids == word.NO_TOKEN) & ~failed).nonzero()[:, 0].tolist()
    if undrawn:
        raise ValueError(
            f"output: row {min(undrawn)} was not drawn, because it is padding, its slot is bad or "
            "a rank was lost; leave such rows out of every argument"
        )
    tensors = {
        "hidden_states": hidden_states,
        "positions": positions_tensor(positions, rows, output.status.device),
        "seeds": output.seeds,
        "status": output.status,
        # The token that `on_failed` names was not drawn.
        "token_ids": ids.masked_fill(failed, word.NO_TOKEN),
    }
    model = None
    if isinstance(lm_head_weight, str):
        model = lm_head_weight
        if bias is not None or (logit_scale, logit_softcap) != (1.0, None):
            raise ValueError(
                f"lm_head_weight: the model {describe(model)} brings its own bias, logit_scale and "
                "logit_softcap; leave these out"
            )
    else:
        tensors["lm_head_weight"] = lm_head_weight
        if bias is not None:
            tensors["bias"] = bias
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
        require_memory(name, tensor)
    if isinstance(params, SamplingBatch) and "lm_head_weight" in tensors:
        _check_vocab(tensors["lm_head_weight"], params.vocab_size)
    tokens_so_far = {
        name: list(map(list, token_lists(name, lists, rows)))
        for name, lists in zip(TOKENS_SO_FAR, (prompt_token_ids, output_token_ids), strict=True)
        if lists is not None
    }
    head = asdict(checked_head(Head(logit_scale, logit_softcap)))
    requests = _as_drawn(params) if isinstance(params, SamplingBatch) else request_list(params)
    if len(requests) != rows:
        raise ValueError(f"params: expected one per row of output, {rows}, got {len(requests)}")
    reading = [row for row, request in enumerate(requests) if request.reads_output]
    if reading and output_token_ids is None:
        raise ValueError(
            f"output_token_ids: expected the tokens so far of each row, because row {reading[0]} "
            "has a field that looks at them, got None; pass one list per row, [] for none"
        )
    Record(tensors, requests, tokens_so_far, head, model).save(path)


def _check_vocab(lm_head_weight: Tensor, vocab_size: int) -> None:
    """Raise a ValueError for a head that is not the whole one, such as a rank's own rows."""
    if lm_head_weight.ndim and len(lm_head_weight) != vocab_size:
        raise ValueError(
            f"lm_head_weight: expected {vocab_size} rows, one for each id of the batch, got "
            f"{len(lm_head_weight)}; pass the rows of all ranks in order, without padding"
        )


def _as_drawn(batch: SamplingBatch) -> list[SamplingParams]:
    """Return the requests of a batch with the temperatures that it has now.

    Raises:
        ValueError: its rows are drawn by more than requests can say.
    """
    for name in ("grammar_bitmask", "forced_token_ids"):
        if getattr(batch, name) is not None:
            raise ValueError(
                f"{name}: a record has no masks, so the tokens of this batch could not be sampled "
                "again; record a step without them"
            )
    if batch._table.flagged(UNKNOWN):
        raise ValueError(
            "params: the filters of this batch are on the device alone, so a record would be "
            "without them; pass host= to SamplingBatch.from_tensors, or a list of SamplingParams"
        )
    now = batch.temperature.nan_to_num(nan=0.0).clamp(0, HOTTEST).tolist()
    for row, (request, temperature) in enumerate(zip(batch.requests, now, strict=True)):
        if request.greedy and request.filtered and temperature >= GREEDY_BELOW:
            raise ValueError(
                f"params: row {row} is random by what was written, and its request has temperature "
                "0, with which filters are off; call batch.update with the request that is meant"
            )
    return [
        replace(request, temperature=temperature)
        for request, temperature in zip(batch.requests, now, strict=True)
    ]


def read(path: str | Path) -> Record:
    """Read a file, and check every value of it but the head.

    Raises:
        ValueError: it is no record, or has a wrong value.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_path_of_a_file("path", "read", path), framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            known = {*_TENSORS, "lm_head_weight", "bias"}
            if KEY not in metadata or not names <= known:
                raise ValueError(
                    f"not a record: expected metadata '{KEY}' and tensors among {sorted(known)}, "
                    f"got {describe(sorted(metadata))} and {describe(sorted(names))}"
                )
            # Before they are read: an empty tensor may have any shape.
            for name in names:
                if 0 in (shape := file.get_slice(name).get_shape()):
                    raise ValueError(f"{name}: expected values, got shape {shape}")
            return Record.of(metadata[KEY], {name: file.get_tensor(name) for name in names})
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {shorten(str(error))}") from error


@dataclass(frozen=True)
class Record:
    """The tokens of a step, and all that they were drawn from.

    A record that was read from a file has been checked, except for its head.

    Attributes:
        tensors: the tensors by the names in the file, on one device.
        params: the requests. From a file they have seeds, and ask for no logprobs.
        tokens_so_far: arguments of `SamplingBatch.from_params`, a list per row.
        head: scale and soft-cap, as `LMHeadSampler` takes them.
    """

    tensors: dict[str, Tensor]
    params: list[SamplingParams]
    tokens_so_far: dict[str, list[list[int]]]
    head: dict[str, Any]
    model: str | None = None

    def save(self, path: str | Path) -> None:
        """Write the file, if it can be read again, without tokens that no request looks at."""
        so_far = {
            name: [
                ids if row.reads_output else ()
                for row, ids in zip(self.params, of_rows, strict=True)
            ]
            for name, of_rows in self.tokens_so_far.items()
        }
        what = {
            "version": VERSION,
            "layout": LAYOUT,
            "params": [to_json(request) for request in self.params],
            "head": self.head,
            "model": self.model,
            "tokens_so_far": so_far,
        }
        text = json.dumps(what)
        # Copies: safetensors refuses tensors with gaps, or that share memory as a tied embedding's.
        copies = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.tensors.items()
        }
        record = Record.of(text, copies)
        if self.model is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the sampler that drew them was told already
                record.head_of(None)
        write_tensors(path, copies, {KEY: text})

    @staticmethod
    def of(text: str, tensors: dict[str, Tensor]) -> Record:
        """Check metadata and tensors, and make a record of them."""
        if len(text) > _MAX_METADATA:
            raise ValueError(
                f"metadata: expected at most {_MAX_METADATA} characters of JSON, got {len(text)}; "
                "record fewer rows, or shorter texts"
            )
        try:
            what = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"metadata: expected JSON, got {error}") from error
        if not isinstance(what, dict):
            raise ValueError(f"metadata: expected an object, got {describe(what)}")
        for name, (right, expected) in _ENTRIES.items():
            if name not in what or not right(what[name]):
                raise ValueError(f"{name}: expected {expected}, got {describe(what.get(name))}")
        if len(what) > len(_ENTRIES):
            raise ValueError(f"metadata: expected {sorted(_ENTRIES)}, got {describe(sorted(what))}")
        requests, model, head = what["params"], what["model"], what["head"]
        if (model is None) != ("lm_head_weight" in tensors):
            raise ValueError("expected lm_head_weight or the name of a model, and not both")
        _check_tensors(tensors, len(requests))
        params = []
        seeds = tensors["seeds"].tolist()
        for row, (request, seed) in enumerate(zip(requests, seeds, strict=True)):
            fields = from_json(f"params[{row}]", request)
            fields |= {"seed": seed, "logprobs": None, "logprob_token_ids": None}
            params.append(SamplingParams(**fields))
        so_far = what["tokens_so_far"]
        prompts, outputs = map(so_far.get, TOKENS_SO_FAR)
        check_requests(0, params, prompts, outputs, word.MAX_VOCAB_SIZE)
        return Record(tensors, params, so_far, head, model)

    @property
    def num_samples(self) -> int | None:
        token_ids = self.tensors["token_ids"]
        return token_ids.shape[1] if token_ids.ndim == 2 else None

    def head_of(self, load_head: LoadHead | None) -> FullHead:
        """Return all rows of the head, its bias, and the scale and soft-cap."""
        if self.model is None:
            weight, bias, head = self.tensors["lm_head_weight"], self.tensors.get("bias"), self.head
        else:
            if load_head is None:
                raise ValueError(
                    f"names the model {describe(self.model)} in place of a head; "
                    "use `tpsample verify`, or pass load_head="
                )
            weight, bias, head = load_head(self.model, self.tensors["hidden_states"].dtype)
        # Checks the head as it does a caller's.
        LMHeadSampler(weight, group=Ranks(), bias=bias, max_rows=1, backend="torch", **head).close()
        hidden_states = self.tensors["hidden_states"]
        if (weight.dtype, weight.shape[1]) != (hidden_states.dtype, hidden_states.shape[1]):
            raise ValueError(
                f"lm_head_weight: expected {hidden_states.dtype} [V, {hidden_states.shape[1]}] as "
                f"hidden_states has, got {weight.dtype} {list(weight.shape)}"
            )
        return weight, bias, head

    def part(self, rows: range) -> dict[str, Tensor]:
        """Return the tensors of some of the rows."""
        return {name: self.tensors[name][rows.start : rows.stop] for name in _TENSORS}

    def batch(self, rows: range, vocab_size: int) -> SamplingBatch:
        """Return a batch of some of the rows."""
        part = slice(rows.start, rows.stop)
        return SamplingBatch.from_params(
            self.params[part],
            vocab_size=vocab_size,
            device=self.tensors["hidden_states"].device,
            **{name: lists[part] for name, lists in self.tokens_so_far.items()},  # type: ignore[arg-type]
        )


def _check_tensors(tensors: dict[str, Tensor], rows: int) -> None:
    for name, (dtypes, axes) in _TENSORS.items():
        tensor = tensors.get(name)
        if name == "token_ids" and tensor is not None and tensor.ndim == 2:
            axes = ("S",)
        check_tensor(name, tensor, dtypes, (rows, *axes), torch.device("cpu"))
    if tensors["token_ids"].numel() > MAX_DRAWS:
        raise ValueError(f"token_ids: expected at most {MAX_DRAWS} rows × samples")
    if (lowest := int(tensors["positions"].min())) < 0:
        raise ValueError(f"positions: expected values >= 0, got {lowest}")
