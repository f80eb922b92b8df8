"""Triton-language kernels of one code2wav step. Import only where a GPU (or Triton's interpreter) runs them.

Shared conventions. Activations are channels-last, [batch, columns, channels], so that a convolution is a matrix product
whose inner dimension runs over taps and channels. What a convolution reads is padded in front: each row of the batch
begins with the ``head`` columns that its session's past left behind (``history.exchange`` puts them there), hence
[batch, head + columns, channels], and the product itself knows of no sessions. Operands are half precision, sums and
the residual stream float32. A row's arithmetic depends on the row alone, never on how many rows there are.
"""
