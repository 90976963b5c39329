"""Numbers that kernels have when they are compiled, and numbers that they are given."""

import triton.language as tl


class Constant(tl.constexpr):
    """A global number of kernels that Triton compares fast.

    In each launch Triton compares the globals of a kernel, up to 25, with those that it was
    compiled with. `tl.constexpr` answers with an object, which takes 0.6 µs; this answers with a
    bool.
    """

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return bool(self.value != getattr(other, "value", other))


STEP_NUMBERS = [
    *("num_rows", "num_samples", "num_sources", "num_groups", "num_words", "num_slots"),
    *("num_tokens", "num_pairs", "num_filtered"),
    *("count", "counts", "blocks", "blocks_each", "groups", "number"),
    # of logprobs and verifications
    *("num_ids", "num_own", "num_drawn", "num_top", "num_chosen", "stride_first", "vocab_size"),
    *("num_positions", "num_drafts", "num_places", "sample"),
    # of kept sets
    *("is_last", "keeps_greedy", "stride_bins", "stride_limit", "stride_total", "shares", "place"),
    *("has_digit", "shift", "searches", "stride_cut", "num_marks", "cap"),
    *("stride_source", "stride_row", "stride_number"),
    # of controls
    *("max_drafts", "num_stop", "num_bad", "bad_length", "num_recent", "idle_slot", "shard_start"),
    *("shard_stop", "stride_grammar_b", "stride_token_b", "stride_token_n", "first_id"),
    # of the LM head and the exchange
    *("num_stored", "stride_words", "stride_words_s", "first_tile", "num_tiles", "num_chunks"),
    *("rank", "world_size", "max_rows", "timeout_ms", "room"),
]
"""Arguments whose numbers differ between steps or ranks, and make no other kernel."""
