"""Other engines on this machine, the same weights and token ids, in one interleaved run."""
