# SPDX-License-Identifier: Apache-2.0
"""Measurements. Not part of the installed package."""
