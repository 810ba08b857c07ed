"""Our Triton kernels: attention on tensors and numbers, free of selection and registration.

Nothing here is imported before a call needs it: importing the modules below imports Triton.

    attend.py        the forward
    differentiate.py the backward
    pieces.py        what both are made of
    configs.py       block shapes, by GPU, head_dim and dtype
    launch.py        launching without the JIT's cost a call
"""
