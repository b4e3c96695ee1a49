# SPDX-License-Identifier: Apache-2.0
"""One module an operator: the configurations to compile and the cases to check and time."""
