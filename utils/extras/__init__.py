"""What training does without: one file for each option or group of options; see README.md."""
