"""One kernel a file, each with a reference in plain PyTorch; the choice of attention backend; Triton's and numba's
compilers.

Nothing here knows about graphs, programs or ranks.
"""
