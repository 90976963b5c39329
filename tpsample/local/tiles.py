"""A tile, and the GPU that it is chosen for."""

from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Tile:
    """One launch configuration of `lm_head_kernel`."""

    block_v: int
    block_b: int
    block_d: int
    num_warps: int
    num_stages: int

    def fitting(self, gpu: "Gpu", stage_bytes: int) -> "Tile":
        """Return the tile with as many stages as a program's shared memory has room for.

        Before sm_90 Triton keeps one stage less in shared memory, because the operands of the
        product that runs are in registers.

        Args:
            stage_bytes: what one stage loads.
        """
        if not gpu.shared_bytes:
            return self
        room = gpu.shared_bytes // stage_bytes + (gpu.arch < 90)
        return replace(self, num_stages=max(1, min(self.num_stages, room)))

    def block_e(self, many_samples: bool, masks: bool = False, edits: bool = False) -> int:
        """Batch columns that the epilogue works on at a time.

        Ahead of time for sm_80, sm_90 and sm_100 no entry of the table spills with 32; with all
        columns at once 64 accumulators per thread often spill and 128 always. 64 in one go save 3
        instructions per logit, but not with a loop over samples, which keeps the logits alive.
        Penalties and biases (`edits`) load per element, by 64-bit addresses: 16 columns; so do
        masks, which only a loop over samples on top makes too much.
        """
        if edits or (masks and many_samples):
            return min(self.block_b, 16)
        return min(self.block_b, 32 if many_samples or self.block_b > 64 else 64)


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as the choice of a tile depends on it; all 0 is no GPU.

    Attributes:
        name: as torch has it.
        arch: 90 for compute capability 9.0.
        shared_bytes: what one program may have of shared memory; 0 if unknown.
    """

    name: str = ""
    arch: int = 0
    num_sms: int = 0
    shared_bytes: int = field(default=0, compare=False)

    @staticmethod
    def of(device: torch.device) -> "Gpu":
        if device.type != "cuda":
            return Gpu()
        of = torch.cuda.get_device_properties(device)
        shared_bytes = getattr(of, "shared_memory_per_block_optin", 0)  # without an annotation
        return Gpu(of.name, 10 * of.major + of.minor, of.multi_processor_count, shared_bytes)
