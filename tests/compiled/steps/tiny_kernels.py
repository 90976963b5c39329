"""The emulator beside PyTorch, on kernels of a few lines."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from tests.compiled.emulator.gpu import EmulatedGpu
from tests.compiled.emulator.report import Options


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), OUT)
    for first in range(0, K, BLOCK_K):
        kk = first + k
        a = tl.load(a_ptr + m[:, None] * K + kk[None, :], mask=kk[None, :] < K, other=0)
        b = tl.load(b_ptr + n[None, :] * K + kk[:, None], mask=kk[:, None] < K, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=OUT)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


@triton.jit
def logarithm_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    logarithm = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [tl.load(x_ptr + offs)], tl.float32, True, 1
    )
    tl.store(y_ptr + offs, logarithm)


@triton.jit
def math_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offs), tl.load(x_ptr + BLOCK - 1 - offs)
    tl.store(y_ptr + offs, tl.fma(x, y, x))
    tl.store(y_ptr + BLOCK + offs, tl.div_rn(x, y))
    tl.store(y_ptr + 2 * BLOCK + offs, tl.log2(tl.abs(x)) + tl.exp2(-tl.abs(y)))
    tl.store(y_ptr + 3 * BLOCK + offs, tl.floor(x) + x.to(tl.int32).to(tl.float32))
    halves = x.to(tl.bfloat16).to(tl.float32) + x.to(tl.float16).to(tl.float32)
    tl.store(y_ptr + 4 * BLOCK + offs, halves)


def dots() -> None:
    sizes = ((64, 16, 96, 32, 4), (128, 64, 130, 64, 4), (128, 32, 128, 64, 8))
    for dtype, (m, n, depth, block, warps) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32, torch.int8), sizes
    ):
        whole = dtype == torch.int8
        a, b = ((60 if whole else 3) * torch.randn(size, depth) for size in (m, n))
        a, b = a.to(dtype), b.to(dtype)
        c = torch.zeros(m, n, dtype=torch.int32 if whole else torch.float32)
        out, wanted = tl.int32 if whole else tl.float32, a.double() @ b.double().T
        named = {"M": m, "N": n, "BLOCK_K": block, "OUT": out, "num_warps": warps}
        dot_kernel[(1,)](a, b, c, depth, **named, num_stages=3)
        torch.testing.assert_close(c, wanted.to(c.dtype), rtol=1e-5, atol=2e-4)


def arithmetic() -> None:
    x, out = 30 * torch.randn(256), torch.zeros(5, 256)
    math_kernel[(1,)](x, out, BLOCK=256, enable_fp_fusion=False)
    y = x.flip(0)
    assert torch.equal(out[0], (x.double() * y.double() + x.double()).float())
    assert torch.equal(out[1], x / y)
    logarithm = x.abs().double().log2() + torch.exp2(-y.abs().double())
    torch.testing.assert_close(out[2], logarithm.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[3], x.floor() + x.trunc())
    assert torch.equal(out[4], x.bfloat16().float() + x.half().float())


def approximations(gpu: EmulatedGpu) -> None:
    """With errors, results lie within their bounds, and come near to them on both sides."""
    x, out = torch.rand(4096) * 3 + 1e-3, torch.zeros(5, 4096)
    exact = x.double().log2()
    ulp = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()
    bound = torch.where((x >= 0.5) & (x <= 2), 2.0**-22, 2.0 * ulp)
    for sign in (0, 1, -1):
        gpu.options = Options(noise=3, sign=sign)
        logarithm_kernel[(1,)](x, out, BLOCK=4096)
        error = (out[0].double() - exact) / (bound + ulp / 2)
        assert error.abs().max() <= 1, (
            f"a logarithm is {error.abs().max():.2f} times its bound away"
        )
        assert error.max() > 0.8 or sign < 0, error.max()
        assert error.min() < -0.8 or sign > 0, error.min()
    gpu.options = Options()


def check_emulator(gpu: EmulatedGpu) -> None:
    """Run all of them, asynchronous copies and products early and late."""
    torch.manual_seed(0)
    for late in (True, False):
        gpu.options = Options(late=late)
        dots()
        arithmetic()
    approximations(gpu)
