"""Kernels of the engine; `reference` is the plain PyTorch oracle of each."""
