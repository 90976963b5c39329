"""The parts of the backend in Numba; the others are those of plain PyTorch."""

from dataclasses import replace

from tpsample.backends.numba_.cuts import NativeCuts
from tpsample.backends.numba_.decode import decode_words
from tpsample.backends.numba_.drafts import draft_words
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.numba_.pairs import add_weighted_rows, pair_products
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.numba_.verification import NativeVerification
from tpsample.backends.torch_.room import ROOM as PLAIN

ROOM = replace(
    PLAIN,
    launch=NativeBackend,
    passes=NativeShardLogits,
    cuts=NativeCuts,
    verification=NativeVerification,
    draft_words=draft_words,
    decoder=lambda overlap=False: decode_words,
    pair_products=pair_products,
    add_weighted_rows=add_weighted_rows,
)
