"""What a run leaves behind: its directory, TensorBoard curves, snapshots, copies in a store."""
