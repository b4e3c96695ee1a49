# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: what tensors there are, reading a rank's share, writing small ones."""
