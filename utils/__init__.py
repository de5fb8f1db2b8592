"""Code shared by the training scripts. Imports point downward only; see README.md here."""
