"""Calls of the compiled kernels with what they have to give, made by programs for other processors or with guards."""
