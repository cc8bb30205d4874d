"""Runs that are killed at random moments, resumed from what they left, and compared with a run that was left alone."""
