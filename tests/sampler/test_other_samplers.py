"""Kept sets beside other samplers': equal where the rules agree, and each place where they part.

The rules of others are their own code where it can be imported (transformers), else written anew
in float64 from what their documentation says.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.filtered import V, kinds_of_logits
from tpsample import SamplingBatch, SamplingParams, reference

KINDS = kinds_of_logits()
WITHOUT_TIES = ("zipf", "normal", "ramp-in-shards")


def kept(logits: torch.Tensor, **changes: object) -> torch.Tensor:
    """bool [B, V], ours."""
    params = SamplingParams(seed=0, **changes)
    batch = SamplingBatch.from_params(params, vocab_size=logits.shape[1])
    return reference.kept_mask(logits, batch)


def kept_ids(probabilities: list[float], **changes: object) -> set[int]:
    return _ids(kept(torch.tensor([probabilities]).double().log().float(), **changes))


def _ids(mask: torch.Tensor) -> set[int]:
    return set(mask[0].nonzero().flatten().tolist())


def by_transformers(logits: torch.Tensor, **changes: float) -> torch.Tensor:
    """bool [B, V]: temperature, top_k, top_p, min_p, the order in which `generate` applies them."""
    warpers = pytest.importorskip("transformers", reason="needs the extra hf").generation
    scores = logits.double()
    for name, warper in (
        ("temperature", warpers.TemperatureLogitsWarper),
        ("top_k", warpers.TopKLogitsWarper),
        ("top_p", warpers.TopPLogitsWarper),
        ("min_p", warpers.MinPLogitsWarper),
    ):
        if name in changes:
            scores = warper(changes[name])(None, scores)
    return scores > -math.inf


def by_mass_of_greater(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """bool [B, V]: FlashInfer's joint rule, by pivots of probability, so ties go together.

    A token stays iff fewer than k tokens are more likely, and their mass is below p.
    """
    probabilities = logits.double().softmax(dim=1)
    greater = probabilities.unsqueeze(1) > probabilities.unsqueeze(2)  # [B, token, other]
    mass = (greater * probabilities.unsqueeze(1)).sum(dim=2)
    return (greater.sum(dim=2) < top_k) & (mass < top_p)


class TestWhereTheRulesAgree:
    @pytest.mark.parametrize("name", WITHOUT_TIES)
    @pytest.mark.parametrize(
        "changes",
        [
            {"top_k": 1},
            {"top_k": 50},
            {"top_p": 0.1},
            {"top_p": 0.9},
            {"top_p": 0.99, "temperature": 0.6},
            {"min_p": 0.05},
            {"min_p": 0.5, "temperature": 1.5},
            {"top_k": 50, "top_p": 0.9},
            {"top_k": 256, "top_p": 0.95, "temperature": 3.0},
            {"top_k": 1000, "top_p": 0.3},
        ],
        ids=str,
    )
    def test_transformers(self, name, changes):
        logits = torch.stack([KINDS[name], KINDS[name].flip(0), KINDS[name] / 3])
        assert torch.equal(kept(logits, **changes), by_transformers(logits, **changes))

    @pytest.mark.parametrize("name", WITHOUT_TIES)
    @pytest.mark.parametrize(
        "changes",
        [
            {"min_p": 0.5, "top_p": 0.62},
            {"min_p": 0.02, "top_k": 20, "top_p": 0.8},
            {"min_p": 0.1, "top_k": 300, "top_p": 0.95, "temperature": 1.5},
            {"min_p": 0.7, "top_k": 2, "top_p": 0.4, "temperature": 3.0},
        ],
        ids=str,
    )
    def test_transformers_with_min_p_last(self, name, changes):
        logits = torch.stack([KINDS[name], KINDS[name].flip(0), KINDS[name] / 3])
        ours = kept(logits, **changes, filter_order="min_p_last")
        assert torch.equal(ours, by_transformers(logits, **changes))

    @pytest.mark.parametrize("name", ["two-valued", "all-equal", "bf16", "spike"])
    @pytest.mark.parametrize(
        "changes", [{"top_k": 5}, {"top_k": 256, "temperature": 0.6}, {"min_p": 0.3}], ids=str
    )
    def test_transformers_with_ties(self, name, changes):
        """top_k keeps what ties with the k-th there: ties="keep" here."""
        logits = KINDS[name].unsqueeze(0)
        assert torch.equal(kept(logits, **changes, ties="keep"), by_transformers(logits, **changes))

    @pytest.mark.long
    @pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}], ids=str)
    def test_transformers_on_real_logits(self, real_logits, changes):
        assert torch.equal(kept(real_logits, **changes), by_transformers(real_logits, **changes))

    @pytest.mark.parametrize("name", WITHOUT_TIES)
    @pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (20, 0.999), (V, 0.5), (3, 1.0)])
    def test_flashinfer_joint(self, name, top_k, top_p):
        logits = KINDS[name].unsqueeze(0)
        ours = kept(logits, top_k=top_k, top_p=top_p, filter_order="joint")
        assert torch.equal(ours, by_mass_of_greater(logits, top_k, top_p))

    @pytest.mark.parametrize("name", ["two-valued", "all-equal", "bf16", "spike"])
    @pytest.mark.parametrize(("top_k", "top_p"), [(V, 0.3), (50, 0.9), (700, 0.05), (3, 1.0)])
    def test_flashinfer_with_ties(self, name, top_k, top_p):
        logits = KINDS[name].unsqueeze(0) / 4
        ours = kept(logits, top_k=top_k, top_p=top_p, filter_order="joint", ties="keep")
        assert torch.equal(ours, by_mass_of_greater(logits, top_k, top_p))

    @pytest.mark.parametrize(
        ("changes", "size"),
        [
            ({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_k": 4}, 4), ({"top_k": 0}, 4),
            ({"top_p": 1e-6}, 1), ({"top_p": 0.7}, 2), ({"top_p": 0.8}, 3), ({"top_p": 1.0}, 4),
            ({"min_p": 0.0}, 4), ({"min_p": 0.24}, 4), ({"min_p": 0.26}, 3), ({"min_p": 0.49}, 3),
            ({"min_p": 0.51}, 2), ({"min_p": 0.74}, 2), ({"min_p": 0.76}, 1), ({"min_p": 1.0}, 1),
        ],
        ids=str,
    )  # fmt: skip
    def test_llama_cpp_vectors(self, changes, size):
        """The vectors of tests/test-sampling.cpp over (0.1, 0.2, 0.3, 0.4): how many stay.

        Its top_p of 0 keeps one token; 0 is not a top_p here, so the smallest stands for it.
        """
        assert kept_ids([0.1, 0.2, 0.3, 0.4], **changes) == {3, 2, 1, 0} - set(range(4 - size))


class TestWhereTheyPart:
    def test_top_k_is_exactly_k_and_ties_go_by_id(self):
        """transformers, vLLM's PyTorch path and FlashInfer keep every token equal to the k-th."""
        probabilities = [0.2, 0.4, 0.2, 0.2]
        logits = torch.tensor([probabilities]).log()
        assert _ids(by_transformers(logits, top_k=2)) == {0, 1, 2, 3}
        assert kept_ids(probabilities, top_k=2) == {1, 0}
        assert kept_ids(probabilities, top_k=2, ties="keep") == {0, 1, 2, 3}

    def test_top_p_cuts_through_ties(self):
        """FlashInfer keeps what ties with the last token of top_p, as ties="keep" does. Four equal
        tokens, half the mass: by mass alone two stay, by pivots all, since none is more likely."""
        logits = torch.full((1, 4), 0.25).log()
        assert _ids(by_mass_of_greater(logits, 4, 0.5)) == {0, 1, 2, 3}
        assert kept_ids([0.25] * 4, top_p=0.5) == {0, 1}
        assert kept_ids([0.25] * 4, top_p=0.5, ties="keep") == {0, 1, 2, 3}

    def test_which_tie_top_p_keeps_is_the_lowest_id(self):
        """transformers sorts upwards, and keeps the last ids of a tie."""
        logits = torch.full((1, 4), 0.25).log()
        theirs = _ids(by_transformers(logits, top_p=0.5))
        assert len(theirs) == 2 and theirs != {0, 1}

    def test_min_p_comes_before_top_p_not_after(self):
        """Of 0.5, 0.3, 0.2 min_p = 0.5 leaves two. The first holds 0.625 of their mass: over
        top_p = 0.62. Taken last, as transformers, SGLang and llama.cpp do, it finds two tokens
        (0 before the first, 0.5 before the second) and takes none of them away."""
        probabilities = [0.5, 0.3, 0.2]
        theirs = by_transformers(torch.tensor([probabilities]).log(), min_p=0.5, top_p=0.62)
        assert _ids(theirs) == {0, 1}
        assert kept_ids(probabilities, min_p=0.5, top_p=0.62) == {0}
        last = kept_ids(probabilities, min_p=0.5, top_p=0.62, filter_order="min_p_last")
        assert last == {0, 1}

    def test_min_p_before_top_k_makes_no_difference(self):
        """Both keep a prefix of the same order, and neither renormalises."""
        for min_p, top_k in ((0.3, 2), (0.3, 50), (0.01, 20)):
            logits = KINDS["normal"].unsqueeze(0)
            theirs = by_transformers(logits, min_p=min_p, top_k=top_k)
            assert torch.equal(kept(logits, min_p=min_p, top_k=top_k), theirs)

    def test_mass_before_equal_to_p_is_too_much(self):
        """Samplers that remove what has more than p before it, such as the first published top_p
        code, keep a token with exactly p before it. Equal logits have equal masses, so the third
        of four has exactly half of it before it."""
        before = [0.0, 0.25, 0.5, 0.75]
        assert {i for i, mass in enumerate(before) if mass <= 0.5} == {0, 1, 2}
        assert kept_ids([0.25] * 4, top_p=0.5) == {0, 1}
        assert kept_ids([0.25] * 4, top_p=math.nextafter(0.5, 1)) == {0, 1, 2}
        assert by_transformers(torch.full((1, 4), 0.25).log(), top_p=0.5).sum() == 2

    def test_sequential_renormalises_after_top_k_and_joint_does_not(self):
        """0.4 of 0.7 is over top_p = 0.5: vLLM and transformers stop there. 0.4 alone is under it:
        FlashInfer and SGLang go on."""
        probabilities = [0.4, 0.3, 0.2, 0.1]
        logits = torch.tensor([probabilities]).log()
        assert _ids(by_transformers(logits, top_k=2, top_p=0.5)) == {0}
        assert kept_ids(probabilities, top_k=2, top_p=0.5) == {0}
        assert _ids(by_mass_of_greater(logits, 2, 0.5)) == {0, 1}
        assert kept_ids(probabilities, top_k=2, top_p=0.5, filter_order="joint") == {0, 1}

    def test_a_greedy_request_has_no_filters(self):
        """Others filter before they take the maximum; the token is the same."""
        assert kept_ids([0.4, 0.3, 0.3], temperature=0.0, top_k=1) == {0, 1, 2}
