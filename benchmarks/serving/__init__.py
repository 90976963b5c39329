"""A serving loop with the bundled model: tpsample and whole logits serve the same requests.

    python -m benchmarks.serving                       one rank; also `tpsample bench serving`
    torchrun --standalone --nproc-per-node 2 -m benchmarks.serving --slots 4,16
    python -m benchmarks.serving --tiny                seconds, with a random model

Requests arrive, wait for a slot, are prefilled, and are decoded together with whoever else is there
(continuous batching). Every rank runs the whole trunk and holds a shard of the LM head, so the
candidates differ in the step from hidden states to tokens, and in nothing else.

    trace       which requests arrive when, with lengths of a published trace
    slots       the trunk with one key-value cache per slot
    candidates  tpsample, and all-gather with a sampler of whole logits
    loop        who is admitted, decoded and done; the times of every token
    experiment  the benchmark: gates, rounds and rows of the result
    command     the options
"""
