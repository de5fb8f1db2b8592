"""How gradients are exchanged between processes, and what that costs."""
