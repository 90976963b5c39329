"""A module around the sampler, for torch.compile."""

import torch

from tests.support.cases import Case
from tpsample import LMHeadSampler


class Model(torch.nn.Module):
    """One layer and the sampler."""

    def __init__(self, case: Case, backend: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.sampler = LMHeadSampler(case.weight, backend=backend)

    def forward(self, hidden_states, batch, positions, num_samples=None):
        hidden_states = (hidden_states.float() * self.scale).to(hidden_states.dtype)
        out = self.sampler(hidden_states, batch, positions, num_samples=num_samples)
        return out.token_ids + 0, out.status
