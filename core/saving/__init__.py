"""From a snapshot to a committed checkpoint, and which checkpoints a run keeps."""
