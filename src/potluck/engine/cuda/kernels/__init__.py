"""Triton kernels. Each works on device pointers; `triton_operations` chooses among them and knows the shapes."""
