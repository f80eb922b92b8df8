"""Triton-language kernels of one talker step. Import only where a GPU (or Triton's interpreter) runs them.

Shared conventions. The residual stream is float32 [rows, hidden]; every kernel that writes it also writes partial
sums of its squares, so that the RMSNorm in front of the next matrix product costs one multiplication there and no pass
of its own. Weights are [out, in] as torch.nn.Linear keeps them. A row's arithmetic depends on the row alone: tiles and
the order of reduction are fixed by the shapes of the model, never by how many rows there are or what the others hold.
"""
