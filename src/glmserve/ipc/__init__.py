# SPDX-License-Identifier: Apache-2.0
"""Processes on one machine: shared memory, waits that end, message rings, children. No torch."""
