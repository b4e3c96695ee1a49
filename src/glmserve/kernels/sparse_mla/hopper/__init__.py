# SPDX-License-Identifier: Apache-2.0
"""The Gluon form of sparse MLA for eight heads over fp8 rows; see `kernel`."""
