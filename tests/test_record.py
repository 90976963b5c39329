"""`tpsample verify` confirms what was sampled, refutes what was not, and runs nothing."""

import json
import pickle
from dataclasses import replace

import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra hf")
from safetensors import safe_open
from safetensors.torch import save_file

from tests.cases import Case
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.record import verify_record, write_record

HEAD = {"logit_scale": 1.5, "logit_softcap": 20.0, "philox_rounds": 7}


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


def _rewritten(path, tensors=None, **what):
    """The record with some tensors and metadata replaced."""
    with safe_open(str(path), framework="pt") as file:
        metadata = json.loads(file.metadata()["tpsample"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    kept = {n: t for n, t in {**kept, **(tensors or {})}.items() if t is not None}
    save_file(kept, str(path), metadata={"tpsample": json.dumps({**metadata, **what})})
    return path


def _changes(path):
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("changed", ["token_ids", "status", "seeds", "positions", "lm_head_weight"])
def test_another_token_or_other_inputs_are_refuted(tmp_path, changed):
    _record(tmp_path / "step")
    tensor = _changes(tmp_path / "step")[changed]
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
    for token_id, near in ((1, True), (2, False), (7, False), (-1, False)):
        out.token_ids[0] = token_id
        write_record(tmp_path / "step", case.hidden_states, weight, case.params, 0, out)
        (verdict,) = verify_record(tmp_path / "step")
        assert verdict.near_tie == verdict.confirmed == near
    cold = replace(case.params[0], temperature=1e-4, top_k=1, seed=3)
    weight[1] = weight[0] - 2**-22  # 4e-3 below in units of T, and cut by top_k
    out.token_ids[0] = 1
    write_record(tmp_path / "step", case.hidden_states, weight, cold, 0, out)
    assert not verify_record(tmp_path / "step")[0].confirmed


@pytest.mark.parametrize(
    ("tensors", "what", "message"),
    [
        ({"seeds": None}, {}, "seeds"),
        ({"lm_head_weight": None}, {}, "neither lm_head_weight"),
        ({"lm_head_weight": torch.zeros(300, 15)}, {}, "lm_head_weight"),
        ({"bias": torch.zeros(3)}, {}, "bias"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, {}, "positions"),
        ({"token_ids": torch.zeros(6)}, {}, "token_ids"),
        ({}, {"version": 2}, "version 2"),
        ({}, {"layout": "other"}, "noise 'other'"),
        ({}, {"params": [{"temperature": -1}] * 6}, "temperature"),
        ({}, {"params": [{"__class__": "os.system"}] * 6}, "__class__"),
        ({}, {"params": 3}, "garbles"),
        ({}, {"head": {"scale": 1}}, "garbles"),
        ({}, {"philox_rounds": 9}, "philox_rounds|rounds"),
    ],
)
def test_a_garbled_record_says_what_is_wrong(tmp_path, tensors, what, message):
    _record(tmp_path / "step")
    with pytest.raises(ValueError, match=message):
        verify_record(_rewritten(tmp_path / "step", tensors, **what))


class _Bomb:
    def __reduce__(self):
        return (print, ("exploded",))


def test_a_pickle_is_not_loaded(tmp_path, capsys):
    (tmp_path / "step").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ValueError, match="not a safetensors file"):
        verify_record(tmp_path / "step")
    with pytest.raises(ValueError, match="not a safetensors file"):
        verify_record(tmp_path / "missing")
    assert "exploded" not in capsys.readouterr().out


def test_the_command(tmp_path):
    pytest.importorskip("rich", reason="needs the extra cli")
    from typer.testing import CliRunner

    from tpsample.cli.app import app

    _record(tmp_path / "good")
    _record(tmp_path / "bad")
    token_ids = _changes(tmp_path / "bad")["token_ids"] ^ 1
    _rewritten(tmp_path / "bad", {"token_ids": token_ids})
    runner = CliRunner()
    good = runner.invoke(app, ["verify", str(tmp_path / "good")])
    assert good.exit_code == 0 and good.stdout.count("confirmed: token") == 6
    assert "row 2: confirmed: token -1 (NAN)" in good.stdout
    bad = runner.invoke(app, ["verify", str(tmp_path / "good"), str(tmp_path / "bad")])
    assert bad.exit_code == 1 and bad.stdout.count("REFUTED: recorded token") == 6
    unusable = runner.invoke(app, ["verify", str(tmp_path / "none")])
    assert unusable.exit_code == 2 and "not a safetensors file" in unusable.output
