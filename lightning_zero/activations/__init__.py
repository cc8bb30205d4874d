"""Activation memory (ZeRO-R, SC 20 section 6): recomputing activations, and keeping them in host memory."""
