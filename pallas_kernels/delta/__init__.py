"""The gated delta rule by chunks, forward and backward."""
