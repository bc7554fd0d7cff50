"""The target inside the training job: hidden states that never touch the disk."""
