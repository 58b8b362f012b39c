"""Attention in PyTorch at FlashAttention-3/4 speed, with no change to the model."""
