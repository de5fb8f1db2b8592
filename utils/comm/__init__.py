"""How gradients get from node to node, and what that costs."""
