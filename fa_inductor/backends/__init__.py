"""Ways to run one attention record: our kernels, PyTorch SDPA, plain torch; and the choice among them."""
