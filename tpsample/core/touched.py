"""Blocks of ids, and bits that say whether a request's controls know something of them."""

TOUCHED_BLOCK = 64
"""Ids per entry of `tpsample.request.controls.token_state.TokenState.touched`; kernel tiles are
powers of two."""

HAS_HISTORY, HAS_BIAS = 1, 2
"""The bits of an entry."""
