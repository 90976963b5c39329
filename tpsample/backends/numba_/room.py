"""The parts of the backend in Numba."""

from tpsample.backends.numba_.decode import decoder
from tpsample.backends.numba_.drafts import draft_words
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.numba_.passes import NativeShardLogits
from tpsample.backends.numba_.verification import NativeVerification
from tpsample.backends.torch_.room import Room

ROOM = Room(NativeBackend, NativeShardLogits, NativeVerification, draft_words, decoder)
