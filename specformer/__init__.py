"""SpecFormer: non-autoregressive drafting for large-batch speculative decoding."""

__version__ = "0.1.0"
