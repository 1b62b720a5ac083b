"""Operations worth a kernel: each a definition in plain torch, kernels, and a proof that they agree."""
