# SPDX-License-Identifier: Apache-2.0
"""The Gluon forms of top-k; see `near` and `far`."""
