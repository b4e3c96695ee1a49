# SPDX-License-Identifier: Apache-2.0
"""The product that absorption (`query_side`) and value-up (`value_up`) share; no operator."""
