"""Low-rank adapters beside frozen linears, in exactly peft's parameterisation (LoRA, arXiv 2106.09685).

A linear y = W x becomes y + scale · B (A x). Every linear of the HF model has its own A and B, also where
several are one parameter here. Tensor-parallel ranks exchange A x and its gradient, `r` numbers a token, and
nothing else.
"""
