"""The tokens that can still win, proved from a cheap product: the others are never scored exactly.

Noise belongs to token ids, so the winner of a row is one well-defined token. A bound on the error
of an approximate product tells which few ids can be it:

    |logit_v − approximate logit_v| <= slack_v      proved, see `bound`
    upper_v  = approximate score_v + slack_v        noise included, see `numba_.kernels.noise`
    best     = a score that some token really has
    candidates = { v : upper_v >= best }            contains the winner and every tie with it

A row whose filters can keep few tokens has a threshold of its own, which all that it can keep reach
(`bound`).

The candidates alone are scored as the definition says, so the word is the definition's, bit for
bit. There are two first passes: on a CPU a product in fp32 (`numba_.kernels.products`), and a
product with the 8-bit copy of the weights that `int8_copy` makes.
"""
