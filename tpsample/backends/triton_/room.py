"""The parts of the backend in Triton."""

from tpsample.backends.torch_.room import Room
from tpsample.backends.triton_.cuts import TritonCuts
from tpsample.backends.triton_.decode import decoder
from tpsample.backends.triton_.drafts import draft_words
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.pairs import add_weighted_rows, pair_products
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.backends.triton_.verification import (
    TritonVerification,
    coupled_output,
    drafted_rows,
)

ROOM = Room(
    launch=TritonBackend,
    passes=TritonShardLogits,
    cuts=TritonCuts,
    verification=TritonVerification,
    drafted_rows=drafted_rows,
    coupled_output=coupled_output,
    draft_words=draft_words,
    decoder=decoder,
    pair_products=pair_products,
    add_weighted_rows=add_weighted_rows,
)
