"""CUDA kernels written in Python: Numba compiles them, `launch` runs them on CuPy's current stream."""
