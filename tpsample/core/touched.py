"""Blocks of ids of which the controls of a request know something."""

TOUCHED_BLOCK = 64
"""Ids per entry of `tpsample.request.controls.token_state.TokenState.touched`; kernel tiles are
powers of two."""

HAS_HISTORY, HAS_BIAS = 1, 2
"""The bits of an entry."""
