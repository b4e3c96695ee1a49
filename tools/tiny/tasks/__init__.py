# SPDX-License-Identifier: Apache-2.0
"""The kinds of questions: each module makes `Turn`s or whole conversations from a `Source`."""
