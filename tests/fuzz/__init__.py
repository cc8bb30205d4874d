"""Random modules, settings and user code, trained at every stage against DDP."""
