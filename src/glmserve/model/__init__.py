# SPDX-License-Identifier: Apache-2.0
"""The forward pass of one rank, made of `kernels` operators and `parallel` collectives."""
