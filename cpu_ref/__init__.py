"""The CPU target: Numba `@njit` kernels over NumPy arrays."""
