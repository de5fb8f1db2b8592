"""The loop over the steps of an epoch, evaluation, and when and how a training ends."""
