"""`tpsample verify` confirms what was sampled, refutes what was not, and runs nothing."""

import json
import math
import os
import pickle
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra hf")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.cases import Case
from tests.support.commands import invoke
from tpsample import (
    LMHeadSampler,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    TopKTrace,
    VerifyOutput,
    noise,
    reference,
)
from tpsample.record import verify as record_module
from tpsample.record import verify_record, write_record
from tpsample.record.format import read

HEAD = {"logit_scale": 1.5, "logit_softcap": 20.0}


def _record(path, num_samples=None, **how):
    """A step of mixed rows: filtered, greedy, unseeded, one with a NaN."""
    case = Case.make(300, 6)
    params = [*case.params[:4], SamplingParams(top_k=5, top_p=0.8), SamplingParams()]
    case.hidden_states[2] = float("nan")
    bias = torch.randn(300, generator=torch.Generator().manual_seed(1))
    sampler = LMHeadSampler(case.weight, bias=bias, backend="torch", **HEAD)
    batch = SamplingBatch.from_params(params, vocab_size=300)
    out = sampler(case.hidden_states, batch, case.positions, num_samples=num_samples)
    how = {"bias": bias, **HEAD, **how}
    write_record(path, case.hidden_states, case.weight, params, case.positions, out, **how)
    return out


@pytest.mark.parametrize("num_samples", [None, 3])
def test_what_was_sampled_is_confirmed(tmp_path, num_samples):
    out = _record(tmp_path / "step", num_samples)
    verdicts = verify_record(tmp_path / "step")
    assert [v.recorded == v.expected and v.confirmed for v in verdicts] == [True] * 6
    assert [v.recorded[0] for v in verdicts] == out.token_ids.view(6, -1).tolist()
    assert verdicts[2].recorded[1] == 1


def test_a_record_of_a_batch_has_the_temperatures_that_were_written(tmp_path):
    case = Case.make(300, 6)
    params = [SamplingParams(seed=row, top_k=50) for row in range(6)]
    batch = SamplingBatch.from_params(params, vocab_size=300)
    nothing = torch.nan
    batch.temperature[:] = torch.tensor([0.3, 0.0, -1.0, nothing, 1e-7, torch.inf])
    out = LMHeadSampler(case.weight, backend="torch")(case.hidden_states, batch, 7)
    step = case.hidden_states, case.weight
    write_record(tmp_path / "requests", *step, params, 7, out)
    assert not all(v.confirmed for v in verify_record(tmp_path / "requests"))
    write_record(tmp_path / "batch", *step, batch, 7, out)
    assert all(v.confirmed for v in verify_record(tmp_path / "batch"))


def test_a_head_that_is_not_the_whole_one_is_refused(tmp_path):
    """A rank's own rows, or padding behind the vocabulary, would refute tokens that are right."""
    case = Case.make(300, 6)
    params = [SamplingParams(seed=row) for row in range(6)]
    batch = SamplingBatch.from_params(params, vocab_size=300)
    out = LMHeadSampler(case.weight, backend="torch")(case.hidden_states, batch, 7)
    for weight in (case.weight[:150], torch.cat([case.weight, case.weight[:20]])):
        with pytest.raises(ValueError, match=r"^lm_head_weight: expected 300 rows, one for each"):
            write_record(tmp_path / "step", case.hidden_states, weight, batch, 7, out)
    assert not (tmp_path / "step").exists()


def test_filters_that_only_the_device_knows_are_not_left_out(tmp_path):
    """As of a GPU's tensors: tokens that are right would be refuted."""
    case = Case.make(300, 6)
    top_p, temperature = torch.full((6,), 0.2), torch.full((6,), 5.0)
    tensors = {"temperature": temperature, "seed": torch.arange(6), "top_p": top_p}
    for host in (None, {"top_p": top_p}):
        with patch("tpsample.core.tensors.READ_ON", ()):
            batch = SamplingBatch.from_tensors(vocab_size=300, host=host, **tensors)
            out = LMHeadSampler(case.weight, backend="torch")(case.hidden_states, batch, 7)
        step = tmp_path / "step", case.hidden_states, case.weight, batch, 7, out
        if host is None:
            with pytest.raises(ValueError, match="pass host= to"):
                write_record(*step)
        else:
            write_record(*step)
            assert all(v.confirmed for v in verify_record(step[0]))


def test_the_rows_of_several_steps_fit_one_record(tmp_path):
    case = Case.make(300, 6)
    params = [SamplingParams(seed=row, top_k=50) for row in range(6)]
    batch = SamplingBatch.from_params(params, vocab_size=300)
    sampler = LMHeadSampler(case.weight, backend="torch")
    outs = [sampler(case.hidden_states, batch, position) for position in (7, 8)]
    columns = zip(*((out.token_ids, out.status, out.seeds) for out in outs), strict=True)
    together = SampleOutput(*map(torch.cat, columns))
    positions = torch.tensor([7, 8]).repeat_interleave(6)
    states = case.hidden_states.repeat(2, 1)
    write_record(tmp_path / "steps", states, case.weight, params * 2, positions, together)
    assert [v.confirmed for v in verify_record(tmp_path / "steps")] == [True] * 12


def test_a_batch_that_no_record_can_repeat_is_refused(tmp_path):
    case = Case.make(300, 2)
    greedy = [SamplingParams(seed=row, top_k=5, temperature=0) for row in range(2)]
    batch = SamplingBatch.from_params(greedy, vocab_size=300)
    sampler, step = LMHeadSampler(case.weight, backend="torch"), (case.hidden_states, case.weight)
    batch.temperature[1] = 1.0
    out = sampler(case.hidden_states, batch, 7)
    with pytest.raises(ValueError, match="params: row 1 is random by what was written"):
        write_record(tmp_path / "step", *step, batch, 7, out)
    batch.temperature[1] = 0.0
    batch.forced_token_ids = torch.tensor([3, -1])
    out = sampler(case.hidden_states, batch, 8)
    with pytest.raises(ValueError, match="forced_token_ids: a record has no masks"):
        write_record(tmp_path / "step", *step, batch, 8, out)


def test_another_default_device_changes_no_record(tmp_path):
    case = Case.make(300, 3)
    batch = SamplingBatch.from_params(case.params, vocab_size=300)
    out = LMHeadSampler(case.weight, backend="torch")(case.hidden_states, batch, 7)
    with torch.device("meta"):
        write_record(tmp_path / "step", case.hidden_states, case.weight, case.params, 7, out)
        assert all(v.confirmed for v in verify_record(tmp_path / "step"))


def test_a_row_that_failed_has_no_token_whatever_names_it(tmp_path):
    case = Case.make(300, 3)
    case.hidden_states[1] = float("nan")
    sampler = LMHeadSampler(case.weight, backend="torch", on_failed=2)
    batch = SamplingBatch.from_params(case.params, vocab_size=300)
    out = sampler(case.hidden_states, batch, case.positions)
    write_record(
        tmp_path / "step", case.hidden_states, case.weight, case.params, case.positions, out
    )
    assert out.token_ids[1] == 2 and all(v.confirmed for v in verify_record(tmp_path / "step"))


def test_another_token_of_an_infinite_score_is_refuted(tmp_path):
    """Of several, the lowest id is drawn."""
    weight, hidden, params = torch.zeros(4, 1), torch.ones(1, 1), [SamplingParams(seed=1)]
    bias = torch.tensor([0.0, torch.inf, torch.inf, 0.0])
    sampler = LMHeadSampler(weight, bias=bias, backend="torch")
    out = sampler(hidden, SamplingBatch.from_params(params, vocab_size=4), 0)
    for token in (1, 2):
        out.token_ids.fill_(token)
        write_record(tmp_path / "step", hidden, weight, params, 0, out, bias=bias)
        (verdict,) = verify_record(tmp_path / "step")
        assert verdict.confirmed is (token == 1) and verdict.near_tie is False


def _rewritten(path, tensors=None, **what):
    """The record with some tensors and metadata replaced."""
    with safe_open(str(path), framework="pt") as file:
        metadata = json.loads(file.metadata()["tpsample"])
    kept = {n: t for n, t in (load_file(path) | (tensors or {})).items() if t is not None}
    save_file(kept, str(path), metadata={"tpsample": json.dumps({**metadata, **what})})
    return path


@pytest.mark.parametrize("changed", ["token_ids", "status", "seeds", "positions", "lm_head_weight"])
def test_another_token_or_other_inputs_are_refuted(tmp_path, changed):
    _record(tmp_path / "step")
    tensor = load_file(tmp_path / "step")[changed]
    if changed == "lm_head_weight":
        tensor = tensor.flip(0).contiguous()
    else:
        tensor[3] = tensor[3] + 1
    verdicts = verify_record(_rewritten(tmp_path / "step", {changed: tensor}))
    assert not verdicts[3].confirmed
    if changed != "lm_head_weight":
        assert all(verdict.confirmed for row, verdict in enumerate(verdicts) if row != 3)


def test_a_near_tie_is_confirmed_and_called_one_and_a_filtered_token_is_not(tmp_path):
    weight = torch.tensor([[1.0], [1.0 - 2**-16], [0.0]])
    case = Case(torch.ones(1, 1), weight, [SamplingParams(temperature=0)], torch.zeros(1).long())
    out = case.oracle()
    assert out.token_ids.tolist() == [0]
    for token_id, near in ((1, True), (2, False), (7, False), (-2, False)):
        out.token_ids[0] = token_id
        write_record(tmp_path / "step", case.hidden_states, weight, case.params, 0, out)
        (verdict,) = verify_record(tmp_path / "step")
        assert verdict.near_tie == verdict.confirmed == near
        logits = reference.logits(case.hidden_states, weight)
        exact = record_module.sampled_again(read(tmp_path / "step"), range(1), logits, exact=True)
        assert not next(exact).confirmed
    cold = replace(case.params[0], temperature=1e-4, top_k=1, seed=3)
    weight[1] = weight[0] - 2**-22  # 4e-3 below in units of T: the best score, and cut by top_k
    batch = SamplingBatch.from_params([cold], vocab_size=3)
    scores = reference.scores(reference.logits(case.hidden_states, weight), batch, 0)
    assert scores.argmax() == 1 and reference.kept_mask(weight.T, batch).tolist() == [[1, 0, 0]]
    out.token_ids[0], out.seeds[0] = 1, 3
    write_record(tmp_path / "step", case.hidden_states, weight, [cold], 0, out)
    assert not verify_record(tmp_path / "step")[0].confirmed


def test_the_scores_of_a_sample_do_not_wait_for_those_before_it():
    """Or a record with many wrong samples would keep a verifier busy for days."""
    batch = SamplingBatch.from_params(
        [SamplingParams(seed=1), SamplingParams(seed=2)], vocab_size=8
    )
    logits, last = torch.arange(16).view(2, 8) / 8, 2**20 - 1
    scores = reference.scores(logits, batch, torch.tensor([3, 4]), sample=last)
    for row, seed in enumerate((1, 2)):
        gumbel = noise.gumbel(seed, 3 + row, torch.arange(8), sample=last)
        expected = (logits[row] + gumbel) / math.log(2) + math.log2(math.log(2))
        torch.testing.assert_close(scores[row], expected.float())


def test_a_near_tie_allows_for_the_sum_of_a_logit(tmp_path):
    """4096 terms and a logit of 16: a GPU's fp32 sum may be 2.4e-4 from the exact one."""
    hidden_states, weight = torch.ones(1, 4096), torch.zeros(3, 4096)
    weight[0], weight[1], weight[2] = 2.0**-8, 2.0**-8, 2.0**-8
    weight[1, 0] -= 2e-4
    weight[2, 0] -= 4e-4
    params = [SamplingParams(temperature=0)]
    out = Case(hidden_states, weight, params, torch.zeros(1).long()).oracle()
    for token_id, near in ((0, False), (1, True), (2, False)):
        out.token_ids[0] = token_id
        write_record(tmp_path / "step", hidden_states, weight, params, 0, out)
        (verdict,) = verify_record(tmp_path / "step")
        assert verdict.near_tie == near and verdict.confirmed == (token_id < 2)


def test_the_bound_of_a_near_tie_is_its_formula():
    logits = torch.tensor([[8.0, -1e9], [0.5, -3.0], [torch.nan, 0.0], [1.0, 4.0]])
    temperature = torch.tensor([0.5, 1.0, 0.0, 0.01])
    found = reference.near_tie(logits, temperature, 1024)
    scale = torch.tensor([8 * 2.8853901, 1.4426950, 1.0, 4 * 14.426950])
    torch.testing.assert_close(found, reference.NEAR_TIE + scale * 2.0**-18)
    assert (reference.near_tie(logits, temperature, 0) == reference.NEAR_TIE).all()


@pytest.mark.parametrize(
    ("tensors", "what", "message"),
    [
        ({"seeds": None}, {}, "seeds: expected a tensor .6. of int64 on cpu, got None"),
        ({"lm_head_weight": None}, {}, "expected lm_head_weight or the name of a model"),
        ({}, {"model": "x"}, "expected lm_head_weight or the name of a model, and not both"),
        ({"lm_head_weight": torch.zeros(300, 15)}, {}, r"lm_head_weight: expected .*\[V, 16\]"),
        ({"lm_head_weight": torch.zeros(300, 16).to(torch.float8_e5m2)}, {}, "lm_head_weight"),
        (
            {"lm_head_weight": torch.zeros(2**20 + 1, 1), "bias": None},
            {},
            "vocab_size: expected 1 to 1048576",
        ),
        ({"lm_head_weight": torch.zeros(2**40, 0)}, {}, "lm_head_weight: expected values"),
        ({"bias": torch.zeros(3)}, {}, "bias"),
        ({"x": torch.zeros(3)}, {}, "expected metadata 'tpsample' and tensors among"),
        (
            {"positions": torch.zeros(5, dtype=torch.int64)},
            {},
            "positions: expected a tensor .6. of int64",
        ),
        ({"positions": torch.full((6,), -1)}, {}, "positions: expected values >= 0, got -1"),
        ({"token_ids": torch.zeros(6)}, {}, "token_ids"),
        ({"token_ids": torch.zeros(6, 0, dtype=torch.int64)}, {}, "token_ids: expected values"),
        ({"token_ids": torch.zeros(6, 2731, dtype=torch.int64)}, {}, "token_ids: expected at most"),
        ({}, {"version": 2}, "version: expected 1, got 2"),
        ({}, {"version": True}, "version: expected 1, got True"),
        ({}, {"version": 1.0}, "version: expected 1, got 1.0"),
        ({}, {"layout": "other"}, "layout: expected tps-philox-v1, got 'other'"),
        ({}, {"params": [{"temperature": -1}] * 6}, r"params\[0\]: temperature"),
        ({}, {"params": [{"__class__": "os.system"}] * 6}, "__class__: not a field"),
        ({}, {"params": [{}, {"bad_words": 5}] * 3}, r"params\[1\]: bad_words: expected a list"),
        ({}, {"params": 3}, "params: expected a list of 1 to 16384 requests"),
        ({}, {"head": {"scale": 1}}, "head: expected"),
        ({}, {"head": {"logit_scale": "x", "logit_softcap": None}}, "logit_scale: expected"),
        ({}, {"tokens_so_far": {"max_rows": 2**31}}, "tokens_so_far: expected lists by name"),
        (
            {},
            {"tokens_so_far": {"prompt_token_ids": None}},
            "tokens_so_far: expected lists by name",
        ),
        ({}, {"model": ""}, "model: expected a name of 1 to 4096 characters, or null, got ''"),
        ({}, {"tokens_so_far": {"prompt_token_ids": 5}}, "prompt_token_ids: expected one list"),
        ({}, {"tokens_so_far": {"prompt_token_ids": [["a"]] * 6}}, r"prompt_token_ids\[0\]"),
        ({}, {"more": 1}, "metadata: expected"),
    ],
)
def test_a_garbled_record_says_what_is_wrong(tmp_path, tensors, what, message):
    _record(tmp_path / "step")
    with pytest.raises(ValueError, match=message):
        verify_record(_rewritten(tmp_path / "step", tensors, **what))


def test_a_name_that_comes_twice_in_one_object_is_refused(tmp_path):
    """Of two temperatures a reader may show one, and the sampler take the other."""
    _record(tmp_path / "step")
    record = read(tmp_path / "step")
    text = """{"version": 1, "params": [{"temperature": 0.5, "temperature": 1}]}"""
    with pytest.raises(ValueError, match="expected JSON, got 'temperature' twice in one object"):
        record.of(text, record.tensors)


def test_requests_with_tokens_so_far_are_repeated_a_slice_at_a_time(tmp_path, monkeypatch):
    """Penalties and bad_words see each row's own tokens, wherever the slices are cut."""
    case = Case.make(300, 7)
    params = [
        SamplingParams(repetition_penalty=9.0, presence_penalty=2.0, bad_words=[[4]], seed=row)
        for row in range(7)
    ]
    prompts = [list(range(row * 40, row * 40 + 40)) for row in range(7)]
    outputs = [[row, 299] for row in range(7)]
    so_far = {"prompt_token_ids": prompts, "output_token_ids": outputs}
    batch = SamplingBatch.from_params(params, vocab_size=300, **so_far)
    out = reference.sample(reference.logits(case.hidden_states, case.weight), batch, case.positions)
    states = case.hidden_states.T.contiguous().T  # not contiguous
    write_record(tmp_path / "step", states, case.weight, params, case.positions, out, **so_far)
    for logits, sampled in ((2**24, 2**20), (900, 300), (1, 1)):
        monkeypatch.setattr(record_module, "LOGITS", logits)
        monkeypatch.setattr(record_module, "SAMPLED_LOGITS", sampled)
        again = verify_record(tmp_path / "step")
        assert [v.recorded == v.expected for v in again] == [True] * 7
    bare = tmp_path / "bare", states, case.weight, params, case.positions, out
    with pytest.raises(ValueError, match=r"^output_token_ids: expected the tokens so far of each"):
        write_record(*bare)
    with pytest.raises(ValueError, match="because row 0 has a field that looks at them, got None"):
        write_record(*bare[:3], batch, *bare[4:], prompt_token_ids=prompts)
    write_record(*bare, output_token_ids=[[]] * 7)
    assert not all(verdict.confirmed for verdict in verify_record(tmp_path / "bare"))


def test_tokens_that_no_request_looks_at_are_left_out(tmp_path):
    """A prompt of 10,000 ids beside each of 2,000 tokens would not fit the file."""
    case, params = Case.make(300, 2), [SamplingParams(seed=1), SamplingParams(bad_words=[[4]])]
    so_far = {"prompt_token_ids": [[5] * 10_000] * 2, "output_token_ids": [[6], [7]]}
    batch = SamplingBatch.from_params(params, vocab_size=300, **so_far)
    out = reference.sample(reference.logits(case.hidden_states, case.weight), batch, 3)
    write_record(tmp_path / "step", case.hidden_states, case.weight, params, 3, out, **so_far)
    kept = read(tmp_path / "step").tokens_so_far
    assert kept == {"prompt_token_ids": [[], [5] * 10_000], "output_token_ids": [[], [7]]}


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    case = Case.make(300, 2)
    step = (tmp_path / "step", case.hidden_states, case.weight, case.params)
    with pytest.raises(ValueError, match="positions: expected 0 <= position < 2\\^63, got -1"):
        write_record(*step, -1, case.oracle())
    with pytest.raises(ValueError, match=r"prompt_token_ids: expected one list per row \(2\)"):
        write_record(*step, 0, case.oracle(), prompt_token_ids=[[1]])
    with pytest.raises(TypeError, match=r"^params\[1\]: expected SamplingParams, got int"):
        write_record(*step[:3], [SamplingParams(), 1], 0, case.oracle())
    with pytest.raises(ValueError, match=r"^params: expected one per row of output, 2, got 1"):
        write_record(*step[:3], [SamplingParams()], 0, case.oracle())
    with pytest.raises(TypeError, match=r"output_token_ids\[0\]: expected token ids, got 1\.5"):
        write_record(*step, 0, case.oracle(), output_token_ids=[[1.5], []])
    with pytest.raises(TypeError, match=r"^output: expected the SampleOutput .* got VerifyOutput"):
        write_record(*step, 0, VerifyOutput(*torch.zeros(4, 2).long()))  # type: ignore
    rows = SamplingBatch.of_slots(2, vocab_size=300).select(torch.tensor([0, 1]))
    told = r"^params: .* got a selection; pass the requests of its slots, \[batch\.requests\["
    with pytest.raises(TypeError, match=told):
        write_record(*step[:3], rows, 0, case.oracle())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^bias: expected a tensor, got \[0\]"):
        write_record(*step, 0, case.oracle(), bias=[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^lm_head_weight: expected torch\.bfloat16 \[V, 15\]"):
        write_record(step[0], step[1][:, :15], *step[2:], 0, case.oracle())
    with pytest.raises(ValueError, match=r"^bias: expected fp32, bf16 or fp16 \[300\]"):
        write_record(*step, 0, case.oracle(), bias=torch.zeros(3))
    for own in ({"bias": torch.zeros(300)}, {"logit_scale": 2.0}, {"logit_softcap": 3.0}):
        with pytest.raises(ValueError, match=r"^lm_head_weight: the model 'm' brings its own bias"):
            write_record(*step[:2], "m", case.params, 0, case.oracle(), **own)
    sampler = LMHeadSampler(case.weight, backend="torch")
    batch = SamplingBatch.from_params(case.params, vocab_size=300)
    with pytest.raises(ValueError, match=r"^lm_head_weight: expected 300 rows"):
        write_record(*step[:2], case.weight[:150], batch, 0, case.oracle())
    for undrawn, samples in ((-1, None), (-1, 2), (9, None), (0, 2)):
        rows = batch.select(torch.tensor([0, undrawn]))
        out = sampler(case.hidden_states, rows, 0, num_samples=samples)
        with pytest.raises(ValueError, match=r"^output: row 1 was not drawn, .* leave such rows"):
            write_record(*step, 0, out)
    assert not (tmp_path / "step").exists()
    with pytest.raises(ValueError, match=r"^path: cannot be written: .* is a folder"):
        write_record(tmp_path, *step[1:], 0, case.oracle())


def test_a_file_takes_the_place_of_files_alone(tmp_path):
    """safetensors renames its file over the name, and /dev/null would be a file from then on."""
    case, pipe, link = Case.make(300, 2), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    step = (case.hidden_states, case.weight, case.params, 0, case.oracle())
    for path, told in (
        (pipe, "is a device, pipe or socket"),
        (tmp_path / "no" / "step", "cannot be written in .*/no': No such file or directory"),
        (pipe / "step", "cannot be written in .*/pipe': Not a directory"),
        (tmp_path / ("a" * 300), "cannot be written in .*: File name too long"),
        ("a\0b", r"in UTF-8 and without a zero byte, got 'a\\x00b'"),
        ("a\udcff", r"in UTF-8 and without a zero byte, got 'a\\udcff'"),
    ):
        for write in (lambda path: write_record(path, *step), TopKTrace(1, 2, 1).save):
            with pytest.raises(ValueError, match=rf"^path: .*{told}"):
                write(path)
            with pytest.raises(TypeError, match=r"^path: expected the path of a file, got 5$"):
                write(5)
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match=r"^record: path: cannot be read: .* is a "):
            verify_record(path)
    assert pipe.is_fifo()
    link.symlink_to(tmp_path / "step")
    write_record(link, *step)
    assert link.is_symlink() and all(v.confirmed for v in verify_record(tmp_path / "step"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "pipe", "step"]


def test_a_model_is_not_downloaded_unless_that_is_allowed(tmp_path, monkeypatch):
    """The hub is asked only with --allow-download; a folder and the bundled model need no hub."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from tpsample.cli import model as model_module

    case = Case.make(300, 2)
    record = (tmp_path / "step", case.hidden_states, "some/model", case.params, 0, case.oracle())
    write_record(*record)
    asked = []

    def from_pretrained(source, **options):
        asked.append((source, options["local_files_only"]))
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(model_module, "hub_fault", lambda: None)
    with pytest.raises(ValueError, match="downloads are not allowed; see --allow-download"):
        verify_record(tmp_path / "step", load_head=model_module.head_loader(False))
    with pytest.raises(ValueError, match="not here"):
        verify_record(tmp_path / "step", load_head=model_module.head_loader(True))
    monkeypatch.setattr(model_module, "hub_fault", lambda: "no network")
    with pytest.raises(ValueError, match=r"does not answer \(no network\)"):
        verify_record(tmp_path / "step", load_head=model_module.head_loader(True))
    assert asked == [("some/model", True), ("some/model", False), ("some/model", True)]
    with pytest.raises(
        ValueError, match=r"^model: cannot load '': the folder does not hold a model"
    ):
        model_module.head_loader(True)("", torch.float32)  # no name is not the bundled model's
    monkeypatch.setattr(model_module, "bundled_folder", lambda: tmp_path)
    write_record(*record[:2], model_module.BUNDLED, *record[3:])
    with pytest.raises(ValueError, match="the folder does not hold a model"):
        verify_record(tmp_path / "step", load_head=model_module.head_loader(False))
    with pytest.raises(ValueError, match=r"names the model .* use `tpsample verify`"):
        verify_record(tmp_path / "step")
    assert asked[-1] == (str(tmp_path), True)


class _Bomb:
    def __reduce__(self):
        return (print, ("exploded",))


def test_a_pickle_is_not_loaded(tmp_path, capsys):
    (tmp_path / "step").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        verify_record(tmp_path / "step")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        verify_record(tmp_path / "missing")
    assert "exploded" not in capsys.readouterr().out


def test_the_command(tmp_path):
    pytest.importorskip("rich", reason="needs typer and rich")
    _record(tmp_path / "good")
    _record(tmp_path / "bad")
    token_ids = load_file(tmp_path / "bad")["token_ids"] ^ 1
    _rewritten(tmp_path / "bad", {"token_ids": token_ids})
    good = invoke("verify", tmp_path / "good")
    assert good.exit_code == 0 and good.stdout.count("confirmed: token") == 6
    assert good.stdout.endswith("\n6 rows: 6 confirmed, 0 refuted\n")
    assert "row 2: confirmed: token -1 (NAN)" in good.stdout
    bad = invoke("verify", tmp_path / "good", tmp_path / "bad")
    assert bad.exit_code == 1 and bad.stdout.count("REFUTED: recorded token") == 6
    unusable = invoke("verify", tmp_path / "none")
    assert unusable.exit_code == 2 and "cannot be read: No such file" in unusable.output
