"""A model whose weights, gradients and optimiser state are divided among the processes (FSDP2)."""
