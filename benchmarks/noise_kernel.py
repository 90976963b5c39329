"""The sampler's noise of chosen words, outside the sampler."""

import triton
import triton.language as tl

from tpsample.kernels.noise import log2_exponential, low_base

BLOCK = 4096


@triton.jit
def noise_kernel(
    word_ptr,  # [num_words] int64, 32 bits each
    low_ptr,  # [num_words] int64, the 16 low bits that the quad's XOR would give
    value_ptr,  # [num_words] fp32: L
    num_words,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_words
    word = tl.load(word_ptr + offs, mask=mask, other=1).to(tl.uint32)
    low = tl.load(low_ptr + offs, mask=mask, other=0).to(tl.uint32)
    none = word ^ word
    base = low_base(word, low, none, none)
    tl.store(value_ptr + offs, log2_exponential(word, base), mask=mask)
