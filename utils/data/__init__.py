"""From image folders to batches on the device: file lists, decoding, crops, loader workers."""
