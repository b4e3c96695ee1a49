# SPDX-License-Identifier: Apache-2.0
"""What runs inside a rank process: row state, the step, the sampler and the main loop."""
