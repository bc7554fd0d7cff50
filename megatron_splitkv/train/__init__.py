"""Training of drafters by Megatron's own ``pretrain()``."""
