"""The screen's kernels: the bound holds, the words are those of the whole product, and the sampler
returns the same tokens with it as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import Case, uneven_shards
from tests.support.screening import (
    DTYPES,
    HEADS,
    assert_same_words,
    problem,
    random_steps,
    requests,
    words,
)
from tests.support.settings import settings_of
from tests.support.tiers import long
from tests.support.virtual import assert_all_equal, step, virtual
from tpsample import (
    LMHeadSampler,
    SamplingBatch,
    SamplingParams,
    VocabShard,
)
from tpsample.backends.triton_.kernels.head import GROUP
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.screen_launches import MAX_SLOTS, Screen
from tpsample.core import word
from tpsample.core.score import logits_tile, score_tile


def compare(case, batch=None, *, start=0, num_samples=1, parts=1) -> Screen:
    """Compare the words of a step, over all its parts, with those of the whole product.

    Then check the bound itself: no score is above its group's top, and the best score of a row is
    not below its lower end.
    """
    v, b = case.weight.shape[0], case.hidden_states.shape[0]
    if batch is None:
        batch = SamplingBatch.from_params(requests(b), vocab_size=start + v + 3)
    shard = VocabShard(start, start + v)
    batch.prepare(shard)
    settings = settings_of(case.weight, shard, bias=case.bias, head=case.head, max_rows=64)
    plain = TritonBackend(settings)
    screened = TritonBackend(replace(settings, screening="int8"))
    screen = screened.screen
    assert screen is not None
    positions = 40 + torch.arange(b)
    step = case.hidden_states, batch, positions, num_samples, parts
    (found, _), (expected, _) = words(screened, *step), words(plain, *step)
    # Of a row whose ids are all masked, any word stands for none.
    found, expected = (torch.stack(each).amax(0) for each in (found, expected))
    none = word.KEY_MINUS_INF
    found, expected = (each * (word.key_of(each) > none) for each in (found, expected))
    assert_same_words([found], [expected], "screened")

    begun = plain.prepare(case.hidden_states, batch._view_of(b), positions, num_samples)
    logits = logits_tile(case.hidden_states.double(), case.weight, case.bias, case.head)
    if begun.controls is not None:
        logits = begun.controls.apply(logits, start)
    for sample in range(num_samples):
        scores = score_tile(logits, start, begun.noise, sample)
        behind = screen.num_groups * GROUP - start % 4 - v
        padded = torch.nn.functional.pad(scores, (start % 4, behind), value=-torch.inf)
        of_groups = padded.view(b, -1, GROUP).amax(dim=2)
        slots = slice(sample * b, (sample + 1) * b)
        group_upper, row_lower = (
            screen.group_upper[: screen.num_groups, slots].T,
            screen.row_lower[slots],
        )
        # The noise of the definition and of the kernel may differ in the last places.
        slack = 1e-6 * (1 + of_groups.abs().nan_to_num(0, 0, 0))
        above = of_groups > group_upper + slack
        assert not above.any(), f"{int(above.sum())} groups have a score above their top"
        best = of_groups.amax(dim=1)
        below = best + slack.amax(dim=1) < row_lower
        assert not below.any(), (
            f"rows {below.nonzero().squeeze(1).tolist()} are below their lower end"
        )
    return screen


def listed(screen: Screen) -> float:
    """The share of the groups that the screen listed."""
    return int(screen.num_listed_ptr) / screen.num_groups


@pytest.mark.parametrize("name", HEADS)
def test_screens_of_hard_heads_leave_the_same_words(name):
    for number, (v, b, d) in enumerate([(1531, 10, 128), (257, 3, 33), (64, 2, 7)]):
        dtype = DTYPES[(list(HEADS).index(name) + number) % len(DTYPES)]
        screen = compare(problem(name, v, b, d).to(dtype), start=5 + number)
        if name in ("normal", "zipf", "twins") and v > 1000:
            assert 0 < listed(screen) < 0.3


@pytest.mark.parametrize(("start", "size"), list(enumerate([64, 3, 15, 17, 1, 131])))
def test_screens_of_odd_shards_leave_the_same_words(size, start):
    compare(problem("normal", size, 4, 16), start=start, parts=3, num_samples=2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["weight", "hidden", "bias", "both"])
def test_what_is_not_a_number_goes_the_whole_way(where, bad):
    case = problem("normal", 300, 5, 16)
    weight, hidden = case.weight.clone(), case.hidden_states.clone()
    bias = torch.zeros(300)
    if where in ("weight", "both"):
        weight[77, 3] = bad
    if where in ("hidden", "both"):
        hidden[2, 5] = bad
    if where == "bias":
        bias[9] = bad
    compare(replace(case, weight=weight, hidden_states=hidden, bias=bias))


def test_the_bound_is_used_up():
    """Hidden states along a row's residual: the product is off by all that the bound allows.

    Those rows, one of a group, are lifted above the others.
    """
    v, d = 128, 256
    bias = torch.zeros(v)
    bias[3::GROUP] = 64.0
    case = replace(problem("normal", v, 8, d), bias=bias)
    screen = Screen(settings_of(case.weight, VocabShard(0, v), head=case.head))
    copy = screen.copy.quantised[:, :d].double() * screen.copy.scale.double().unsqueeze(1)
    residual = case.weight.double() - copy
    hidden = (residual[3::GROUP] / residual[3::GROUP].norm(dim=1, keepdim=True)).float()
    toward = replace(case, hidden_states=hidden)
    greedy = SamplingBatch.from_params([SamplingParams(temperature=0)] * 8, vocab_size=v + 3)
    compare(toward, greedy)


def test_what_the_limbs_lose_counts():
    """Rows without a residual of their own, so that all of the error is that of the limbs."""
    v, d = 64, 512
    steps = torch.randint(-127, 128, (v, d), generator=torch.Generator().manual_seed(1))
    steps[:, 0] = 127
    hidden = torch.full((4, d), 0.49)
    hidden[:, 0] = 127 * 256
    hidden[:, 1:] *= torch.sign(steps[[3, 17, 30, 60], 1:].float())
    case = problem("normal", v, 4, d)
    case = replace(case, weight=steps.float(), hidden_states=hidden)
    greedy = SamplingBatch.from_params([SamplingParams(temperature=0)] * 4, vocab_size=v + 3)
    compare(case, greedy)


@pytest.mark.parametrize("rows", [1, 16, 17, 40, 64])
def test_a_screen_forgets_the_step_before_at_any_batch_size(rows):
    case = Case.make(900, rows, 32)
    sampler = LMHeadSampler(case.weight, backend="triton", screening="int8")
    sampler(case.hidden_states * 64, case.batch, case.positions)  # its lower ends must not stay
    out = sampler(case.hidden_states, case.batch, case.positions)
    assert_all_equal([out], case.oracle())


def test_a_step_that_needs_every_logit_is_not_screened():
    """Rows that store their logits, more rows than fit, and a step that only stores."""
    case = Case.make(600, 6, 16)
    sampler = LMHeadSampler(case.weight, backend="triton", screening="int8", max_rows=256)
    local = sampler.local
    assert isinstance(local, TritonBackend) and local.screen is not None
    asked = []
    takes = local.screen.takes
    local.screen.takes = lambda begun: asked.append(takes(begun)) or asked[-1]
    for params in ({"top_p": 0.5}, {"top_k": 3}, {"logprobs": 2}, {}):
        rows = [replace(each, **params) for each in case.params]
        changed = replace(case, params=rows)
        out = sampler(case.hidden_states, changed.batch, case.positions)
        assert out.token_ids.tolist() == changed.oracle().token_ids.tolist()
    samples = MAX_SLOTS // 6 + 1
    out = sampler(case.hidden_states, case.batch, case.positions, num_samples=samples)
    assert torch.equal(out.token_ids, case.oracle(samples).token_ids)
    sampler.prompt_logprobs(case.hidden_states, torch.arange(6))
    assert asked == [False, False, False, True, False, False]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_that_push(world_size):
    """Every rank screens its own shard; words travel as ever, in any number of chunks."""
    case = Case.make(1501, 5, 32)
    shards = uneven_shards(1501, world_size)
    world, samplers = virtual(case, shards, None, screening="int8", chunks=3)
    assert_all_equal(step(world, samplers, case), case.oracle())
    assert_all_equal(step(world, samplers, case, num_samples=3), case.oracle(3))


def test_ranks_need_not_agree_on_it():
    case = Case.make(1000, 5, 32)
    shards = uneven_shards(1000, 2)
    world, samplers = virtual(case, shards, None)
    _, screened = virtual(case, shards, None, screening="int8")
    samplers[1].local = screened[1].local
    assert_all_equal(step(world, samplers, case), case.oracle())


@pytest.mark.parametrize(
    ("num_rows", "first_seed"), [(150, 0), *long((5000, 1000))], ids=["few", "many"]
)
def test_screens_of_random_steps_leave_the_same_words(num_rows, first_seed):
    sizes, batches = (97, 513, 1531), (1, 5, 12, 20)
    for _, case, batch, others in random_steps(num_rows, first_seed, sizes, batches):
        compare(case, batch, **others)
