"""Checks without a card: the kernels interpreted, compiled for a chip, and run natively on a CPU."""
