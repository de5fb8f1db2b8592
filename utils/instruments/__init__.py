"""What is measured beside training: parts of a step, GPU and CPU, a trace, the status file."""
