"""The CPU engine: numba kernels over packed weights. Needs an x86-64 processor with AVX2, and no torch."""
