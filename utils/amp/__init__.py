"""Mixed precision: native autocast, and the opt levels of NVIDIA Apex, by Apex or in PyTorch."""
