"""What `utils/model/models.py` puts together, and optimisers: weights from files, blocks, Muon."""
