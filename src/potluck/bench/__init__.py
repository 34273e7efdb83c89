"""What our engine achieves on this machine, and beside llama.cpp: measurements only. Nothing below `cli` may import this."""
