"""What the training scripts have in common. Imports point downward only; see README.md here."""
