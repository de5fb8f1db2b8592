"""Models and their weights, optimisers, learning-rate schedules, averaged weights."""
