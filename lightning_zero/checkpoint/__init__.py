"""Checkpoints: one file or a folder of shards, there whole or not at all."""
