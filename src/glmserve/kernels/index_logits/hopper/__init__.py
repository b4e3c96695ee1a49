# SPDX-License-Identifier: Apache-2.0
"""The Gluon form of index scores for 32 heads over fp8 pages; see `kernel`."""
