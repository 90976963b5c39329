"""Gumbel noise as a pure function of (seed, position, sample, token id): layout ``tps-philox-v1``.

    row stream   (r0, r1, r2, _) = Philox4x32-10(key = seed, counter = (position, sample, domain))
    quad words   (w0, w1, w2, w3) = Philox4x32-10(key = constant, counter = (id >> 2, r0, r1, r2))
    word         w = w[id & 3]
    uniform      u = fma(float(w), 2^-32 (1 - 2^-24), low)
                 low = ((w0^w1^w2^w3^w) & 0xFFFF) 2^-48 + 2^-49
    exponential  e = -log2(1 - u),  a polynomial below u = 1/4
    noise        L = log2(e);  the Gumbel noise is -L in base 2, -L ln 2 + const in natural units

Winners have u close to 0, where a float has full relative precision, so no token is too rare to be
drawn: P(e < x) is right down to x = 2^-46, while that of fp32 -log(-log(rand)) ends at 2^-24.

This is the definition, and `triton_.kernels.noise` is its jitted twin. Here every fp32 operation
is computed in float64 and rounded once, as a fused multiply-add does.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for Philox.
"""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Integral

import torch
from torch import Tensor

LAYOUT = "tps-philox-v1"

DOMAIN_TOKEN = 0x7470536D
"""The counter word of token noise. Other uses of the generator have domain words of their own:
seeds in `tpsample.core.row_noise`, verification in `tpsample.speculative.acceptance`."""

ROUNDS = 10
"""Of Philox."""

ELEMENT_KEY = (0x1BD11BDA, 0xA9FC1A22)
U_SCALE = 2.0**-32 * (1.0 - 2.0**-24)
LOW_SCALE, LOW_HALF = 2.0**-48, 2.0**-49
POLYNOMIAL = (
    1.4426958560943604,
    0.7211766839027405,
    0.4861740469932556,
    0.30503642559051514,
    0.5137483477592468,
)
"""-log2(1 - u) / u on [0, 1/4] in ascending powers of u, exact fp32 values. The relative error is
at most 7.4e-7."""

_MASK32 = 0xFFFFFFFF

_BITS = {"seed": 64, "position": 64, "token_ids": 34, "sample": 32}
"""Of each argument of `words`."""


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],
    key: tuple[Tensor | int, Tensor | int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply Philox4x32 to unsigned 32-bit words: int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Signed 64-bit products wrap modulo 2^64, so both halves are right after masking. The low
        # halves, c1 and c3, keep the rest of their products until somebody looks at them.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ (c1 ^ k0)) & _MASK32,
            p1,
            ((p0 >> 32) ^ (c3 ^ k1)) & _MASK32,
            p0,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def row_stream(
    seed: Tensor, position: Tensor, sample: Tensor | int = 0, *, domain: int = DOMAIN_TOKEN
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words that name the random stream of a row at a position.

    Args:
        seed, position: int64 tensors read as 64 unsigned bits; they broadcast.
        sample: index of an independent draw for the same row, 32 bits.
        domain: the use of the stream.
    """
    if not isinstance(sample, Tensor):
        # Filled on the device: a number copied from the host cannot be captured in a CUDA graph.
        sample = torch.full((), sample, dtype=torch.int64, device=seed.device)
    counter = (
        position & _MASK32,
        (position >> 32) & _MASK32,
        sample & _MASK32,
        torch.full_like(sample, domain),
    )
    return philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))


def quad_words(stream: tuple[Tensor, ...], quad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of the four token ids 4 quad … 4 quad + 3 of a row."""
    r0, r1, r2, *_ = stream
    return philox4x32((quad, r0, r1, r2), ELEMENT_KEY)


def log2_exponential(word: Tensor, quad_xor: Tensor) -> Tensor:
    """Return L = log2(e) in fp32, from a token's word and the XOR of its quad's four words."""
    low = ((quad_xor ^ word) & 0xFFFF).double() * LOW_SCALE + LOW_HALF
    u = _round32(word.float().double() * U_SCALE + low)
    p = torch.full_like(u, POLYNOMIAL[4])
    for coefficient in POLYNOMIAL[3::-1]:
        p = _round32(p * u + coefficient)
    tail = -_round32(torch.log2(_round32(1.0 - u)))
    e = torch.where(u < 0.25, _round32(u * p), tail)
    return torch.log2(e).float()


def tile_noise(stream: tuple[Tensor, ...], first_id: int, num_ids: int) -> Tensor:
    """Return L of `num_ids` ids from `first_id` on, fp32 [..., num_ids]. Four share a Philox call.

    Args:
        stream: row stream, tensors of shape [..., 1].
    """
    first_quad, last_quad = first_id >> 2, (first_id + num_ids - 1) >> 2
    quad = torch.arange(first_quad, last_quad + 1, dtype=torch.int64, device=stream[0].device)
    words = torch.stack(quad_words(stream, quad), dim=-1)
    quad_xor = words[..., 0] ^ words[..., 1] ^ words[..., 2] ^ words[..., 3]
    noise = log2_exponential(words, quad_xor.unsqueeze(-1)).flatten(-2)
    return noise.narrow(-1, first_id - 4 * first_quad, num_ids)


def token_noise(stream: tuple[Tensor, ...], token_ids: Tensor) -> Tensor:
    """Return L, fp32 [..., n], of any token ids, int64 [..., n]; `stream` as for `tile_noise`."""
    word, quad_xor = _token_words(stream, token_ids)
    return log2_exponential(word, quad_xor)


def words(
    seed: Tensor | int,
    position: Tensor | int,
    token_ids: Tensor | int,
    *,
    sample: Tensor | int = 0,
) -> Tensor:
    """Return the 32 random bits of each (seed, position, sample, token id).

    All arguments are ints or int64 tensors that broadcast against each other: ``seed[:, None]``
    with ``token_ids[None, :]`` makes a [B, V] table. Only numbers on a CPU are checked, because a
    GPU would have to be waited for.

    Args:
        seed: 64 bits; an int may be signed or unsigned.
        position: absolute position of the token being generated, 0 <= position < 2^64.
        token_ids: global token ids, 0 <= id < 2^34.
        sample: index of an independent draw, 0 <= sample < 2^32.

    Returns:
        int64, each 0 <= word < 2^32; a pure function of the arguments, the same on every device.

    Raises:
        TypeError: an argument is neither an int nor a tensor of ints.
        ValueError: a number is out of range.
    """
    return _words_and_xor(seed, position, token_ids, sample)[0]


def gumbel(
    seed: Tensor | int,
    position: Tensor | int,
    token_ids: Tensor | int,
    *,
    sample: Tensor | int = 0,
) -> Tensor:
    """Return the Gumbel noise of each (seed, position, sample, token id), in natural units.

        G = -ln(-ln(1 - u)),  u from the word as the module's docstring says

    The token of a row is the argmax of logit / temperature + G (the Gumbel-max trick). Arguments
    are those of `words`.

    Returns:
        fp32; devices may differ in its last bits.
    """
    word, quad_xor = _words_and_xor(seed, position, token_ids, sample)
    # e is in units of log2, so E = e ln 2 and -ln E = -(L + log2(ln 2)) ln 2.
    natural = -(log2_exponential(word, quad_xor).double() + math.log2(math.log(2.0)))
    return (natural * math.log(2.0)).float()


def _words_and_xor(
    seed: Tensor | int,
    position: Tensor | int,
    token_ids: Tensor | int,
    sample: Tensor | int,
) -> tuple[Tensor, Tensor]:
    given = {"seed": seed, "position": position, "token_ids": token_ids, "sample": sample}
    device = next((x.device for x in given.values() if isinstance(x, Tensor)), None)
    seeds, positions, ids, samples = (_as_int64(name, x, device) for name, x in given.items())
    stream = row_stream(*torch.broadcast_tensors(seeds, positions, samples))
    return _token_words(stream, ids)


def _token_words(stream: tuple[Tensor, ...], token_ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, *stream_of_id = torch.broadcast_tensors(token_ids, *stream)
    quad = quad_words(tuple(stream_of_id), ids >> 2)
    word = torch.stack(quad).gather(0, (ids & 3).unsqueeze(0)).squeeze(0)
    return word, quad[0] ^ quad[1] ^ quad[2] ^ quad[3]


def _as_int64(name: str, x: object, device: torch.device | None) -> Tensor:
    if isinstance(x, Tensor):
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            way_out = ".long()"
            if x.dtype == torch.bool:
                way_out = ".nonzero().flatten(), the ids of a mask"
            raise TypeError(
                f"{name}: expected an int or a tensor of int64, got {x.dtype} {tuple(x.shape)}; "
                f"pass {name}{way_out}"
            )
        x = x.to(torch.int64)
        for end in _ends(x):
            _check_range(name, end)
        return x
    if isinstance(x, bool) or not isinstance(x, Integral):
        convert = "torch.tensor" if hasattr(x, "__len__") and not isinstance(x, str) else "int"
        raise TypeError(
            f"{name}: expected an int or a tensor of int64, got a {type(x).__name__}; pass "
            f"{convert}({name})"
        )
    _check_range(name, int(x))
    return torch.tensor(signed64(int(x)), device=device)


def _check_range(name: str, number: int) -> None:
    low, bits = (-(2**63) if name == "seed" else 0), _BITS[name]
    if not low <= number < 2**bits:
        got = number if number.bit_length() <= 128 else f"an int of {number.bit_length()} bits"
        raise ValueError(
            f"{name}: expected {'-2^63' if low else 0} <= {name} < 2^{bits}, got {got}; numbers "
            "beyond it have no noise"
        )


def _ends(x: Tensor) -> list[int]:
    """Return the least and the largest number of a tensor, if they can be read without waiting."""
    if x.is_cpu and x.numel() and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        with suppress(RuntimeError):  # a transform such as vmap has no numbers
            return [int(end) for end in x.aminmax()]
    return []


def signed64(bits: int) -> int:
    """Return 64 bits, given as a signed or unsigned int, as int64 holds them."""
    bits &= 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits


def _round32(x: Tensor) -> Tensor:
    return x.float().double()
