# SPDX-License-Identifier: Apache-2.0
"""The engine: scheduling, the page pool and the process around them. Python and numpy, no torch."""
