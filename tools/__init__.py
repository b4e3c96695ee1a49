# SPDX-License-Identifier: Apache-2.0
"""Programs of the developers; nothing under src imports them."""
