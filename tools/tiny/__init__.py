# SPDX-License-Identifier: Apache-2.0
"""How checkpoints/tiny is made: data generator, training twin, export and scores.

Not shipped with the package; nothing under src imports it.
"""
