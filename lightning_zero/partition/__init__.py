"""The ZeRO engine: who owns which bytes, when they are unsharded and resharded."""
