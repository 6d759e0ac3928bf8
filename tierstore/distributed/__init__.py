"""Stores in partitions, and their use by several ranks of torch.distributed."""
