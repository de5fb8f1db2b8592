"""What `utils/models.py` and `utils/optim.py` put together: weights from files, blocks, Muon."""
